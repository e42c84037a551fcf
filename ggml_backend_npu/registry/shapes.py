"""Why an op does not take tensors of some shapes, in a few words: what ggml's CPU backend asserts about them."""

from __future__ import annotations

from ggml_backend_npu.ir import Tensor


def other_ne(**tensors: Tensor) -> str | None:
    """Names tensors that do not all have one ne; None if they do."""
    if len({tensor.ne for tensor in tensors.values()}) == 1:
        return None
    return ", ".join(f"{role} of ne {tensor.ne}" for role, tensor in tensors.items())


def gaps_in_rows(**tensors: Tensor) -> str | None:
    """Names a tensor whose elements of a row are not adjacent; None if there is none."""
    for role, tensor in tensors.items():
        if not tensor.has_contiguous_rows():
            return f"{role} rows have gaps: nb0 is {tensor.nb[0]}"
    return None


def gaps_in_matrices(**tensors: Tensor) -> str | None:
    """Names a tensor that is not ggml_is_contiguous_1: its rows have gaps, or are not all equally far apart."""
    for role, tensor in tensors.items():
        (_, n1, n2, n3), (_, nb1, nb2, nb3) = tensor.ne, tensor.nb
        if (n2 != 1 and nb2 != n1 * nb1) or (n3 != 1 and nb3 != n2 * n1 * nb1):
            return f"{role} rows are not evenly apart: nb {tensor.nb}"
    return gaps_in_rows(**tensors)


def apart(tensor: Tensor) -> int:
    """Returns the bytes from a row to the next one, of a tensor whose rows are evenly apart. That is nb1 unless a
    matrix has one row, since its nb1 may be anything."""
    return next((nb for n, nb in zip(tensor.ne[1:], tensor.nb[1:], strict=True) if n != 1), tensor.nb[1])


def gaps(**tensors: Tensor) -> str | None:
    """Names a tensor that is not contiguous; None if there is none."""
    for role, tensor in tensors.items():
        if not tensor.is_contiguous():
            return f"{role} is not contiguous: nb {tensor.nb}"
    return None
