"""Parts of mistakes: the node that a correct kernel would have to be given to make one. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Dims, Node, Tensor
from ggml_backend_npu.registry.checks import Mistake

LARGEST = 1 << 22  # elements of a source that is copied in another order

Ids = NDArray[np.int64]


def source_in_words(index: int) -> str:
    """A source in the text of a mistake; who prints the text says what it is for."""
    return f"{{src{index}}}"


def altered(node: Node, index: int, source: Tensor | None) -> Node:
    """The node with another source at an index."""
    return replace(node, src=(*node.src[:index], source, *node.src[index + 1 :]))


def made(like: Tensor, array: NDArray[Any]) -> Tensor:
    """A contiguous tensor of these values, laid out as its view has them."""
    data = np.ascontiguousarray(array)
    if like.codec.is_quantized:
        data = data.reshape(*data.shape[:-2], -1)
    return Tensor.of(data, like.type, like.name)


def following(tensor: Tensor, begin: int) -> Dims:
    """nb with dimensions from `begin` on contiguous after those before."""
    nb = list(tensor.nb)
    for k in range(begin, 4):
        n = tensor.n_blocks if k == 1 else tensor.ne[k - 1]
        nb[k] = tensor.codec.block_bytes if k == 0 else nb[k - 1] * n
    return nb[0], nb[1], nb[2], nb[3]


def with_stride(nb: Dims, k: int, stride: int) -> Dims:
    """nb with another stride in dimension k."""
    changed = [*nb]
    changed[k] = stride
    return changed[0], changed[1], changed[2], changed[3]


def of_swapped_operands(node: Node, a: Tensor, b: Tensor | None) -> Iterator[Mistake]:
    """Two sources, each in place of the other."""
    if b is not None and a.type == b.type:
        yield Mistake("swaps src0 and src1", replace(node, src=(b, a, *node.src[2:])))


def of_ids(
    node: Node,
    index: int,
    n_rows: int,
    verb: str = "takes",
    inside: Callable[[str, Ids, NDArray[np.bool_]], Iterator[Mistake]] | None = None,
) -> Iterator[Mistake]:
    """Mistakes with a source of ids that name n_rows rows. inside: yields the mistakes that leave out ids which name no
    row, given a text, the ids and which of them those are."""
    ids = node.src[index]
    if ids is None:
        return
    who, rows = source_in_words(index), ids.view()
    for step in (1, -1):
        moved = rows.astype(np.int64) + step
        outside = (moved < 0) | (moved >= n_rows)
        text = f"{verb} row id {'+-'[step < 0]} 1 in place of row id, for each id of {who}"
        ends = {"": moved, ", where there is one": moved.clip(0, n_rows - 1), ", in a circle": moved % max(1, n_rows)}
        for end, values in ends.items():
            if end == "" or outside.any():
                yield Mistake(text + end, altered(node, index, made(ids, values.astype(rows.dtype))))
        if inside is not None and outside.any() and not outside.all():
            yield from inside(text, moved, outside)
    in_order = np.broadcast_to(np.arange(ids.ne[0], dtype=rows.dtype) % max(1, n_rows), rows.shape)
    yield Mistake(f"ignores {who}: row i is taken for the i-th id", altered(node, index, made(ids, in_order)))
    for k in (1, 2):
        for step in (1, -1):
            if ids.ne[k] > 1:
                rolled = np.roll(rows, -step, axis=3 - k)
                text = f"takes {who} of another batch: index i{k} {'+-'[step < 0]} 1 of dimension {k}"
                yield Mistake(text, altered(node, index, made(ids, rolled)))
    if ids.type == "i64":
        words = replace(ids, type="i32", nb=with_stride(ids.nb, 0, 4))
        yield Mistake(f"reads {who} as 32-bit integers, 4 bytes apart", altered(node, index, words))


def of_repeated(node: Node, index: int, target: Dims, *, in_dst: bool = False) -> Iterator[Mistake]:
    """Mistakes with a source that is repeated to a size. in_dst: the size is that of dst and of the other source."""
    source = node.src[index]
    if source is None or source.ne == target or source.codec.is_quantized:
        return
    who, view = source_in_words(index), source.view()
    if any(n % m for n, m in zip(target, source.ne, strict=True)) or prod(target) > LARGEST:
        return
    for k in range(4):
        if 1 < source.ne[k] < target[k]:
            each = np.repeat(view, target[k] // source.ne[k], axis=3 - k)
            text = f"repeats {who} element by element along dimension {k}, not as a whole"
            yield Mistake(text, altered(node, index, made(source, each)))
    if in_dst:
        yield from _of_a_part(node, index, source, target)
    flat = np.resize(view.reshape(-1), target[::-1])
    yield Mistake(f"repeats {who} by the flat index, not by dimension", altered(node, index, made(source, flat)))
    on = replace(source, ne=target)
    on = replace(on, nb=following(on, 1))
    yield Mistake(f"reads past the end of {who} in place of repeating it", altered(node, index, on))
    nothing = np.zeros(target[::-1], view.dtype)
    nothing[tuple(slice(n) for n in view.shape)] = view
    yield Mistake(f"does not repeat {who}: takes 0 where it ends", altered(node, index, made(source, nothing)))


def _of_a_part(node: Node, index: int, source: Tensor, target: Dims) -> Iterator[Mistake]:
    """Only the part of dst that the source covers without being repeated."""
    wider = [k for k in range(4) if source.ne[k] < target[k]]
    for chosen in [[k] for k in wider] + ([wider] if len(wider) > 1 else []):
        ne = [*target]
        for k in chosen:
            ne[k] = source.ne[k]
        part = (ne[0], ne[1], ne[2], ne[3])
        src = node.src
        if index and src[0] is not None:
            src = (replace(src[0], ne=part), *src[1:])
        dims = " and ".join(map(str, chosen))
        text = f"does not repeat {source_in_words(index)} along dimension {dims}: of dst only ne {part} is written"
        yield Mistake(text, replace(node, dst=replace(node.dst, ne=part), src=src))
