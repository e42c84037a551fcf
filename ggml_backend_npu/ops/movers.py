"""Data movement: GET_ROWS, SET_ROWS, CPY, DUP, CONT, REPEAT, CONCAT. Byte for byte what ggml's CPU backend writes.

Each is defined in NumPy on views of its tensors; the compiled mover of `strided` does the same for the types that this
project has compiled runs for. The types that ggml's CPU takes are those of ggml_compute_forward_{get_rows,set_rows,dup}
in ggml-cpu/ops.cpp, followed here case by case; what ggml aborts on or leaves undefined is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ggml.numerics import PLAIN, Numerics
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops import undefined
from ggml_backend_npu.ops.kernels import strided
from ggml_backend_npu.registry import cases
from ggml_backend_npu.registry.checks import Cost, Mistake
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.mistakes import Ids, altered, made, of_ids, of_repeated, of_swapped_operands
from ggml_backend_npu.registry.params import Instead, Params, i32
from quant import codec, type_names
from quant.kernels.threads import Job
from quant.scalars import without_payload

_CHUNK = 1 << 15  # elements converted at a time by the definitions, so that no temporary grows with the tensor

_FLOATS = ("f32", "f16", "bf16")
_SCALARS = tuple(name for name in type_names() if not codec(name).is_quantized)
_QUANTIZED = tuple(name for name in type_names() if codec(name).is_quantized)
DECODED = tuple(name for name in _QUANTIZED if name not in ("q8_1", "q8_K"))
ENCODED = tuple(
    name for name in _QUANTIZED if not name.startswith(("iq1", "iq2", "iq3"))
)  # ggml's CPU has no from_float for those: they need an importance matrix


def convert(
    values: NDArray[Any], src: str, dst: str, *, rows: bool = False, numerics: Numerics = PLAIN
) -> NDArray[Any]:
    """Converts values, as `Tensor.view` returns them, from type src to type dst: (..., n) elements or (..., blocks,
    bytes).

    rows      f16 as ggml_cpu_fp32_to_fp16 converts a row: on x86 a NaN in whole fours keeps its payload. Elsewhere no
              NaN does.
    numerics  whose codecs and rounding are used
    """
    if src == dst:
        return values
    source, target = numerics.codec(src), numerics.codec(dst)
    lead = values.shape[:-2] if source.is_quantized else values.shape[:-1]
    n = values.shape[-2] * source.block_size if source.is_quantized else values.shape[-1]
    decoded = source.decode(np.ascontiguousarray(values).view(np.uint8).reshape(-1, source.block_bytes))
    if dst == "f16":
        kept = n // 4 * 4 if rows else 0
        elements = decoded.reshape(*lead, n)
        decoded = np.concatenate([elements[..., :kept], without_payload(elements[..., kept:])], axis=-1)
    encoded = target.encode(decoded.reshape(-1, target.block_size), numerics.rounding)
    if target.dtype is None:
        return encoded.reshape(*lead, n // target.block_size, target.block_bytes)
    return encoded.view(target.dtype).reshape(*lead, n)


def tiled(view: NDArray[Any], ne: tuple[int, ...]) -> NDArray[Any]:
    """A view of a tensor that repeats a tensor of size ne, as (repeats in dimension 3, ne3, repeats in 2, ne2, ...)."""
    shape = [part for n, m in zip(view.shape, ne[::-1], strict=True) for part in (n // max(1, m), m)]
    strides = [part for stride, m in zip(view.strides, ne[::-1], strict=True) for part in (m * stride, stride)]
    return np.lib.stride_tricks.as_strided(view, shape, strides)


def _rows_per_chunk(tensor: Tensor) -> int:
    return max(1, _CHUNK // max(1, tensor.ne[0]))


def checked_ids(ids: Tensor, n_rows: int) -> NDArray[np.int64]:
    """Row ids, (ne2, ne1, ne0). Raises KernelError for the first one that does not name one of n_rows rows."""
    rows: NDArray[np.int64] = ids.view()[0].astype(np.int64)
    bad = (rows < 0) | (rows >= n_rows)
    if bad.any():
        raise strided.bad_id(ids, int(bad.argmax()), n_rows)
    return rows


_ROLES = {"ids": "the row ids"}


def _refuse_get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> str | None:
    if (src.ne[2], src.ne[3], 1) != ids.ne[1:]:
        return f"ids of ne {ids.ne} do not fit src of ne {src.ne}"
    if dst.ne != (src.ne[0], *ids.ne[:3]):
        return f"dst of ne {dst.ne} does not fit src of ne {src.ne} and ids of ne {ids.ne}"
    return _gap_in_rows(src=src, dst=dst)


def _gap_in_rows(**tensors: Tensor) -> str | None:
    for role, tensor in tensors.items():
        if tensor.ne[0] > tensor.codec.block_size and tensor.nb[0] != tensor.codec.block_bytes:
            return f"{role} rows have gaps: nb0 is {tensor.nb[0]}, a {tensor.type} has {tensor.codec.block_bytes} bytes"
    return _no_whole_blocks(**tensors)


def _no_whole_blocks(**tensors: Tensor) -> str | None:
    for role, tensor in tensors.items():
        if tensor.ne[0] % tensor.codec.block_size:
            return f"{role} rows of {tensor.ne[0]} elements are no whole {tensor.type} blocks"
    return None


@op(
    "GET_ROWS",
    types=[("f32", src, "i32") for src in (*_FLOATS, *DECODED)] + [("i32", "i32", "i32")],
    refuse=_refuse_get_rows,
    default=True,
    roles=_ROLES,
)
def get_rows(dst: Tensor, src: Tensor, ids: Tensor, numerics: Numerics = PLAIN) -> None:
    """dst[i3, i2, i1, :] = src[i3, i2, ids[i3, i2, i1], :] as float32; i32 stays i32.

    src (n, rows, ne2, ne3), ids (m, ne2, ne3), dst (n, m, ne2, ne3). Equals ggml_compute_forward_get_rows. Raises
    KernelError, before anything is written, for an id outside src's rows.
    """
    rows = checked_ids(ids, src.ne[1])
    step = _rows_per_chunk(src)
    for i3, i2 in np.ndindex(rows.shape[:2]):
        for i1 in range(0, rows.shape[2], step):
            chunk = src.view()[i3, i2, rows[i3, i2, i1 : i1 + step]]
            dst.view()[i3, i2, i1 : i1 + step] = convert(chunk, src.type, dst.type, numerics=numerics)


@get_rows.compiled
def _get_rows(dst: Tensor, src: Tensor, ids: Tensor, numerics: Numerics) -> Call | None:
    return strided.bind_move(dst, src, src_ids=ids, numerics=numerics)


@get_rows.mistakes
def _mistaken_get_rows(node: Node, src: Tensor, ids: Tensor) -> Iterator[Mistake]:
    def inside(text: str, moved: Ids, outside: NDArray[np.bool_]) -> Iterator[Mistake]:
        rows = made(ids, moved.clip(0, src.ne[1] - 1).astype(ids.view().dtype))
        yield Mistake(text, altered(node, 1, rows), unknown=outside[0])

    yield from of_ids(node, 1, src.ne[1], inside=inside)


@get_rows.cases
def _nearest_get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> list[str]:
    return [
        cases.has("type", src.type),
        "be1=1" if src.ne[2] == 1 else f"be1={cases.MORE_THAN_ONE}",
        cases.has("v", not ids.is_contiguous()),
        cases.has("vs0", not src.is_contiguous()),
    ]


@get_rows.costs
def _cost_of_get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> Cost:
    return Cost(dst.n_elements, touched={1: min(1.0, dst.n_elements / max(1, src.n_elements))})


def _refuse_set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> str | None:
    if (dst.ne[0], *dst.ne[2:]) != (src.ne[0], *src.ne[2:]) or ids.ne[0] != src.ne[1] or ids.ne[3] != 1:
        return f"src of ne {src.ne}, ids of ne {ids.ne} do not fit dst of ne {dst.ne}"
    if 0 in ids.ne or src.ne[2] % ids.ne[1] or src.ne[3] % ids.ne[2]:
        return f"ids of ne {ids.ne} do not divide src of ne {src.ne}" if src.n_elements else None
    return _gap_in_rows(src=src, dst=dst)


@op(
    "SET_ROWS",
    types=[(dst, src, ids) for src in ("f32", "f16") for dst in (*_FLOATS, "i32", *ENCODED) for ids in ("i64", "i32")],
    refuse=_refuse_set_rows,
    default=True,
    keeps=True,
    roles=_ROLES,
    built_by={"ggml_set_rows": "cttt"},
)
def set_rows(dst: Tensor, src: Tensor, ids: Tensor, numerics: Numerics = PLAIN) -> None:
    """dst[i3, i2, ids[i3 % n, i2 % m, i1], :] = src[i3, i2, i1, :], quantised if dst is; other rows of dst stay.

    src (ne0, k, ne2, ne3), ids (k, m, n), where m and n divide ne2 and ne3, dst (ne0, rows, ne2, ne3). Equals
    ggml_compute_forward_set_rows; if an id occurs twice, the last row counts. Raises KernelError, before anything is
    written, for an id outside dst's rows.
    """
    if src.n_elements == 0:
        return
    rows = checked_ids(ids, dst.ne[1])
    step = _rows_per_chunk(src)
    for i3, i2 in np.ndindex(src.ne[3], src.ne[2]):
        ids_row = rows[i3 % ids.ne[2], i2 % ids.ne[1]]
        for i1 in range(0, src.ne[1], step):
            chunk = src.view()[i3, i2, i1 : i1 + step]
            dst.view()[i3, i2, ids_row[i1 : i1 + step]] = convert(
                chunk, src.type, dst.type, rows=True, numerics=numerics
            )


@set_rows.compiled
def _set_rows(dst: Tensor, src: Tensor, ids: Tensor, numerics: Numerics) -> Call | None:
    return strided.bind_move(dst, src, dst_ids=ids, numerics=numerics)


@set_rows.mistakes
def _mistaken_set_rows(node: Node, src: Tensor, ids: Tensor) -> Iterator[Mistake]:
    def inside(text: str, moved: Ids, outside: NDArray[np.bool_]) -> Iterator[Mistake]:
        def compute(dst: Tensor) -> None:
            for i3, i2 in np.ndindex(src.ne[3], src.ne[2]):
                batch = (0, i3 % ids.ne[2], i2 % ids.ne[1])
                kept = ~outside[batch]
                dst.view()[i3, i2, moved[batch][kept]] = convert(
                    src.view()[i3, i2, kept], src.type, dst.type, rows=True, numerics=codecs.bound()
                )

        yield Mistake(text, node, compute)

    yield from of_ids(node, 1, node.dst.ne[1], "writes", inside)
    yield from of_repeated(node, 1, (ids.ne[0], *src.ne[2:], 1))


@set_rows.cases
def _nearest_set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> list[str]:
    types = [cases.has("type_src", src.type), cases.has("type_dst", dst.type), cases.has("type_idx", ids.type)]
    view = not (src.is_contiguous() and ids.is_contiguous()) and ids.type == "i64"
    return [*types, cases.has("v", view)]


@set_rows.costs
def _cost_of_set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> Cost:
    """The last of its three sources is dst as it was."""
    return Cost(src.n_elements, touched={0: src.n_elements / max(1, dst.n_elements), 3: 0.0})


def _refuse_copy(dst: Tensor, src: Tensor) -> str | None:
    if dst.n_elements != src.n_elements:
        return f"src of ne {src.ne} has {src.n_elements} elements, dst of ne {dst.ne} has {dst.n_elements}"
    if src.type == dst.type:
        return _no_whole_blocks(src=src, dst=dst)
    source, target = src.codec, dst.codec
    if target.is_quantized:
        if src.ne[0] % target.block_size:
            return f"src rows of {src.ne[0]} elements are no whole {dst.type} blocks of {target.block_size}"
        if not dst.is_contiguous():
            return f"{src.type} -> {dst.type} into a dst that is not contiguous: nb {dst.nb}"
        return _gap_in_rows(src=src)
    if source.is_quantized:
        if dst.ne[0] % source.block_size and not dst.is_contiguous():
            return f"{src.type} -> f32 into rows of {dst.ne[0]} elements with gaps: nb {dst.nb}"
        return _gap_in_rows(src=src, dst=dst)
    return None


_SAME = [(name, name) for name in (*_SCALARS, *_QUANTIZED)]
_COPIES = [
    *_SAME,
    *((dst, src) for src in _FLOATS for dst in (*_FLOATS, *ENCODED) if src != dst),
    ("i32", "f32"),
    ("f32", "i32"),
    *(("f32", src) for src in DECODED),
]


@op("CPY", types=_COPIES, refuse=_refuse_copy, default=True, built_by={"ggml_cpy": "ctt", "ggml_cast": "cti"})
def cpy(dst: Tensor, src: Tensor, numerics: Numerics = PLAIN) -> None:
    """dst = src, converted, element by element in logical order; ne may differ if the element counts agree.

    Equals ggml_compute_forward_dup. f32 -> i32 truncates; float -> quantised needs a contiguous dst and rows without
    gaps in src; quantised -> f32 needs dst rows without gaps; nothing else is converted.
    """
    copy(dst, src, numerics)


def copy(dst: Tensor, src: Tensor, numerics: Numerics = PLAIN) -> None:
    """What CPY does, in NumPy; also for rows with gaps."""
    if src.n_elements == 0:
        return
    source, target = src.view(), dst.view()
    if src.codec.is_quantized or dst.codec.is_quantized:
        unit = max(src.codec.block_size, dst.codec.block_size)
        source, target = _in_units(source, src, unit), _in_units(target, dst, unit)
        n_units, step = src.n_elements // unit, max(1, _CHUNK // unit)
    else:
        source, target = source[..., None], target[..., None]
        n_units, step = src.n_elements, _CHUNK
    for begin in range(0, n_units, step):
        take = np.unravel_index(np.arange(begin, min(begin + step, n_units)), source.shape[:4])
        put = np.unravel_index(np.arange(begin, min(begin + step, n_units)), target.shape[:4])
        target[put] = convert(source[take], src.type, dst.type, numerics=numerics).reshape(target[put].shape)


def _in_units(view: NDArray[Any], tensor: Tensor, unit: int) -> NDArray[Any]:
    """A view as (i3, i2, i1, unit, parts of a unit): a block stays whole, elements of a block stay together."""
    if tensor.codec.is_quantized:
        return view
    if tensor.ne[0] % unit:
        return view.reshape(1, 1, 1, -1, unit)
    return np.lib.stride_tricks.as_strided(
        view,
        (*view.shape[:3], tensor.ne[0] // unit, unit),
        (*view.strides[:3], view.strides[3] * unit, view.strides[3]),
    )


@op("DUP", types=_SAME, refuse=_refuse_copy, default=True)
def dup(dst: Tensor, src: Tensor) -> None:
    """dst = src, of the same type; ne may differ if the element counts agree. Equals ggml_compute_forward_dup."""
    copy(dst, src)


@op("CONT", types=_SAME, refuse=_refuse_copy, default=True)
def cont(dst: Tensor, src: Tensor) -> None:
    """dst = src made contiguous, of the same type; ne may differ as in DUP. Equals ggml_compute_forward_cont."""
    copy(dst, src)


@cpy.compiled
def _cpy(dst: Tensor, src: Tensor, numerics: Numerics) -> Call | None:
    return strided.bind_move(dst, src, numerics=numerics)


@dup.compiled
@cont.compiled
def _copy(dst: Tensor, src: Tensor) -> Call | None:
    return strided.bind_move(dst, src)


@cpy.cases
def _nearest_cpy(dst: Tensor, src: Tensor) -> list[str]:
    types = [cases.has("type_src", src.type), cases.has("type_dst", dst.type)]
    if "i32" in (src.type, dst.type):
        return types
    if cases.is_permuted(src):
        return [*types, r"permute_src=\[(0,[1-3]|[1-3],\d),\d,\d\]"]
    if src.ne != dst.ne and src.type == dst.type and src.type in ("f32", "f16", "q4_0"):
        return [*types, r"ne_dst=\[\d+,\d+,\d+,\d+\]"]
    return [*types, r"permute_src=\[0,0,0,0\]", "_src_transpose=0"]


@cont.cases
def _nearest_cont(dst: Tensor, src: Tensor) -> list[str]:
    sliced = not cases.is_permuted(src) and src.type in ("f32", "i32")
    return [cases.has("type", src.type), cases.has("use_view_slice", sliced)]


@dup.cases
def _nearest_dup(dst: Tensor, src: Tensor) -> list[str]:
    permuted = cases.is_permuted(src) and src.type in ("f32", "f16", "i16")
    return [cases.has("type", src.type), *([r"permute=\[\d,\d,\d,\d\]"] if permuted else [])]


def _refuse_repeat(dst: Tensor, src: Tensor) -> str | None:
    if src.n_elements == 0 or any(n % m for n, m in zip(dst.ne, src.ne, strict=True)):
        return f"src of ne {src.ne} does not repeat to dst of ne {dst.ne}"
    return _gap_in_rows(src=src, dst=dst)


@op(
    "REPEAT",
    types=[(name, name) for name in ("f32", "i32", "f16", "bf16", "i16")],
    refuse=_refuse_repeat,
    built_by={"ggml_repeat": "ctt"},
)
def repeat(dst: Tensor, src: Tensor) -> None:
    """dst = src, repeated in each dimension; every ne of src divides that of dst. Equals
    ggml_compute_forward_repeat."""
    tiled(dst.view(), src.ne)[...] = tiled(src.view(), src.ne)


@repeat.compiled
def _repeat(dst: Tensor, src: Tensor) -> Call | None:
    return None if _gap_in_rows(src=src, dst=dst) else strided.bind_repeat(dst, src)


@repeat.mistakes
def _mistaken_repeat(node: Node, src: Tensor) -> Iterator[Mistake]:
    yield from of_repeated(node, 0, node.dst.ne, in_dst=True)


# which dimensions repeat in ggml's cases
_REPEATS = {
    "f32": ["1111", "n111", "1n11", "11n1", "111n"],
    "f16": ["n111"],
    "i32": ["n111"],
    "i16": ["111n"],
    "bf16": ["n111"],
}


@repeat.cases
def _nearest_repeat(dst: Tensor, src: Tensor) -> list[str]:
    repeats = cases.repeats(src.ne, dst.ne)
    return [cases.has("type", src.type), *([cases.nr(repeats)] if repeats in _REPEATS.get(src.type, []) else [])]


@dataclass(frozen=True)
class Concat(Params):
    """op_params of CONCAT: ggml_concat."""

    dim: Annotated[i32, Instead("dimension", (0, 1, 2, 3))]


def _refuse_concat(dst: Tensor, a: Tensor, b: Tensor, params: Concat) -> str | None:
    dim = params.dim
    if not 0 <= dim < 4:
        return f"dimension {dim}"
    ne = [a.ne[i] + b.ne[i] if i == dim else a.ne[i] for i in range(4)]
    if list(dst.ne) != ne or any(b.ne[i] != n for i, n in enumerate(ne) if i != dim):
        return f"src0 of ne {a.ne}, src1 of ne {b.ne} along dimension {dim} do not fit dst of ne {dst.ne}"
    return _no_whole_blocks(src0=a, src1=b)


@op("CONCAT", types=[(name, name, name) for name, _ in _SAME], refuse=_refuse_concat, params=Concat)
def concat(dst: Tensor, a: Tensor, b: Tensor, params: Concat) -> None:
    """dst = a, followed by b along dimension dim; ne of a and b agree in the others. Equals
    ggml_compute_forward_concat."""
    dim = params.dim
    first = _units(a, dim)
    whole = np.moveaxis(dst.view(), 3 - dim, 0)
    for part, tensor in ((whole[:first], a), (whole[first:], b)):
        part[...] = np.moveaxis(tensor.view(), 3 - dim, 0)


def _units(tensor: Tensor, dim: int) -> int:
    """How many steps of nb a tensor has in a dimension: elements or blocks, rows, ..."""
    return tensor.n_blocks if dim == 0 else tensor.ne[dim]


@concat.compiled
def _concat(dst: Tensor, a: Tensor, b: Tensor, params: Concat) -> Call | None:
    if any(tensor.packed is not None for tensor in (dst, a, b)):
        return None
    dim = params.dim
    behind = dst.offset + _units(a, dim) * dst.nb[dim]
    parts = (replace(dst, ne=a.ne), a), (replace(dst, ne=b.ne, offset=behind), b)
    moves = [strided.bind_move(part, tensor) for part, tensor in parts]
    return Job(*(work for move in moves if move is not None for work in move.works))


@concat.mistakes
def _mistaken_concat(node: Node, a: Tensor, b: Tensor) -> Iterator[Mistake]:
    yield from of_swapped_operands(node, a, b)


@concat.cases
def _nearest_concat(dst: Tensor, a: Tensor, b: Tensor, params: Concat) -> list[str]:
    bits = (4, 8) if a.codec.is_quantized else (1, 2)
    views = sum(bit for bit, tensor in zip(bits, (a, b), strict=True) if not tensor.is_contiguous())
    return [cases.has("type", a.type), cases.has("dim", params.dim), cases.has("v", views)]


@set_rows.undefined
def _undefined_rows(dst: Tensor, src: Tensor, ids: Tensor) -> undefined.Flags:
    return undefined.blocks(dst, src, ids)


@cpy.undefined
def _undefined(dst: Tensor, src: Tensor) -> undefined.Flags:
    return undefined.blocks(dst, src)
