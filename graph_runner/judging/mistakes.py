"""Mistakes that any kernel may make, each as the node with which a right kernel would give the wrong result; those of
one op are defined with the op (`@its_op.mistakes`).

A stride that is ignored is a node whose source has another stride; a mask that is ignored is a node without it. Nothing
is computed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from math import prod

import numpy as np

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ir import Dims
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.movers import copy
from ggml_backend_npu.registry.checks import Mistake
from ggml_backend_npu.registry.mistakes import LARGEST, altered, following, made, with_stride
from graph_runner.judging.blocks import swapped

_BITS = range(12, 25)  # that a kernel may keep the offset of a row in
_SOURCE = re.compile(r"\{src(\d)\}")  # in the text of a mistake


def role(node: Node, index: int) -> str:
    """A source in words: "src1 (the mask)"."""
    own = OWN.get(node.op)
    meaning = own.roles.get(own.sources[index]) if own is not None and index < own.n_src else None
    return f"src{index} ({meaning})" if meaning else f"src{index}"


def inside(tensor: Tensor) -> bool:
    """Whether all of a tensor lies in its memory."""
    return min(tensor.nb) >= 0 <= tensor.offset and tensor.offset + tensor.nbytes <= tensor.memory.size


def mistakes(node: Node) -> Iterator[Mistake]:
    """Yields the possible mistakes with a node, the more specific ones first; none if a source does not lie in its
    memory."""
    if not all(source is None or inside(source) for source in node.src):
        return
    for family in _FAMILIES:
        try:
            for mistake in family(node):
                yield replace(mistake, text=_SOURCE.sub(lambda found: role(node, int(found[1])), mistake.text))
        except (ValueError, IndexError, TypeError, OverflowError, MemoryError):  # a node not as ggml makes them
            continue


def _single_strides(node: Node) -> Iterator[Mistake]:
    for index, tensor in _sources(node):
        for text, nb in _one_stride(tensor):
            yield Mistake(f"ignores {text.format(role(node, index))}", altered(node, index, replace(tensor, nb=nb)))


def _other_strides(node: Node) -> Iterator[Mistake]:
    for index, tensor in _sources(node):
        for text, nb in _more_strides(tensor):
            yield Mistake(text.format(role(node, index)), altered(node, index, replace(tensor, nb=nb)))


def _sources(node: Node) -> list[tuple[int, Tensor]]:
    """Returns the sources that the op's definition reads."""
    read = node.src[: OWN[node.op].n_src] if node.op in OWN else node.src
    return [(index, source) for index, source in enumerate(read) if source is not None]


# strides and offsets


def _one_stride(tensor: Tensor) -> Iterator[tuple[str, Dims]]:
    """Yields one stride as it would be without gaps, with the others unchanged."""
    for k in (3, 2, 1):
        if tensor.ne[k] == 1:
            continue
        dense = tensor.codec.block_bytes * tensor.n_blocks * prod(tensor.ne[1:k])
        for stride in dict.fromkeys((following(tensor, k)[k], dense)):
            if stride != tensor.nb[k]:
                text = f"nb[{k}] of {{}}: with {stride} in place of {tensor.nb[k]}"
                yield text, with_stride(tensor.nb, k, stride)


def _several_strides(tensor: Tensor) -> Iterator[tuple[str, Dims]]:
    """Yields the strides from one dimension on as they would be without gaps."""
    for k in (2, 1, 0):
        nb = following(tensor, k)
        if nb != tensor.nb:
            which = "all strides" if k == 0 else f"the strides from nb[{k}] on"
            yield f"ignores {which} of {{}}: with nb {nb} in place of {tensor.nb}", nb


def _more_strides(tensor: Tensor) -> Iterator[tuple[str, Dims]]:
    yield from _several_strides(tensor)
    for k in (3, 2, 1, 0):
        n = tensor.n_blocks if k == 0 else tensor.ne[k]
        if n > 1 and tensor.nb[k]:
            text = f"takes index 0 of dimension {k} of {{}} for all: with nb[{k}] 0 in place of {tensor.nb[k]}"
            yield text, with_stride(tensor.nb, k, 0)


def _offsets(node: Node) -> Iterator[Mistake]:
    for index, tensor in _sources(node):
        if tensor.offset:
            where = f"of {role(node, index)}: it reads from byte {{}} of the root in place of byte {tensor.offset}"
            yield Mistake(
                f"ignores the offset {where.format(0)}", altered(node, index, replace(tensor, offset=0))
            )  # fmt: skip
            twice = 2 * tensor.offset
            yield Mistake(
                f"adds the offset {where.format(twice)}", altered(node, index, replace(tensor, offset=twice))
            )  # fmt: skip
    if node.dst.offset:
        text = f"ignores the offset of dst: it writes from byte 0 of the root in place of byte {node.dst.offset}"
        yield Mistake(text, replace(node, dst=replace(node.dst, offset=0)))


def _destination(node: Node) -> Iterator[Mistake]:
    for text, nb in _one_stride(node.dst):
        yield Mistake(f"ignores {text.format('dst')}", replace(node, dst=replace(node.dst, nb=nb)))
    for text, nb in _several_strides(node.dst):
        yield Mistake(text.format("dst"), replace(node, dst=replace(node.dst, nb=nb)))


def _strides_of_others(node: Node) -> Iterator[Mistake]:
    tensors = [*((f"src{index}", tensor) for index, tensor in _sources(node)), ("dst", node.dst)]
    for index, tensor in _sources(node):
        for name, other in tensors:
            if other.ne == tensor.ne and other.type == tensor.type and other.nb != tensor.nb:
                text = f"reads src{index} with the strides of {name}: nb {other.nb} in place of {tensor.nb}"
                yield Mistake(text, altered(node, index, replace(tensor, nb=other.nb)))


def _wrapped(node: Node) -> Iterator[Mistake]:
    """Offsets of rows that are kept in too few bits."""
    for index, tensor in _sources(node):
        size, (_, n1, n2, n3) = tensor.codec.block_bytes * tensor.n_blocks, tensor.ne
        if not tensor.has_contiguous_rows() or not 0 < tensor.n_elements <= LARGEST:
            continue
        i3, i2, i1 = np.ogrid[:n3, :n2, :n1]
        offsets = i1 * tensor.nb[1] + i2 * tensor.nb[2] + i3 * tensor.nb[3]
        raw = tensor.memory.bytes()[tensor.offset :]
        for bits in _BITS:
            wrapped = offsets % (1 << bits)
            if offsets.max() < 1 << bits or wrapped.max() + size > raw.size:
                continue
            rows = Memory.of(raw[wrapped[..., None] + np.arange(size)])
            nb = (tensor.nb[0], size, size * n1, size * n1 * n2)
            first = tuple(np.argwhere(wrapped != offsets)[0])
            reads = f"byte {wrapped[first]} in place of byte {offsets[first]}"
            text = f"keeps the offset of a row of {role(node, index)} in {bits} bits: it reads {reads}, and so on"
            yield Mistake(text, altered(node, index, replace(tensor, memory=rows, offset=0, nb=nb)))


def _exchanged(dims: Dims, i: int, j: int) -> Dims:
    changed = [*dims]
    changed[i], changed[j] = changed[j], changed[i]
    return changed[0], changed[1], changed[2], changed[3]


def _swapped_dims(node: Node) -> Iterator[Mistake]:
    for index, tensor in _sources(node):
        for i, j in combinations(range(4), 2):
            if tensor.ne[i] == tensor.ne[j] == 1 or (i == 0 and tensor.codec.is_quantized):
                continue
            nb = _exchanged(tensor.nb, i, j)
            transposed = f"reads {role(node, index)} transposed: " if (i, j) == (0, 1) else ""
            exchanged = replace(tensor, ne=_exchanged(tensor.ne, i, j), nb=nb)
            text = f"{transposed or 'swaps '}dimensions {i} and {j}{' swapped' if transposed else ''}"
            text += "" if transposed else f" of {role(node, index)}"
            yield Mistake(text, altered(node, index, exchanged))
            if tensor.ne[i] != tensor.ne[j] and nb != tensor.nb:
                text = f"swaps nb[{i}] and nb[{j}] of {role(node, index)}: {nb[i]} and {nb[j]}"
                yield Mistake(text, altered(node, index, replace(tensor, nb=nb)))


# types, sources, parameters


def _nibbles(node: Node) -> Iterator[Mistake]:
    for index, tensor in _sources(node):
        if tensor.type != "q4_0" or tensor.n_elements > LARGEST:
            continue
        blocks = tensor.view()
        who = role(node, index)
        yield Mistake(
            f"swaps the two nibbles of each byte of the q4_0 blocks of {who}",
            altered(node, index, made(tensor, swapped(blocks))),
        )
        quants = np.stack([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
        neighbours = quants[..., :16] | (quants[..., 16:] << 4)
        yield Mistake(
            f"takes the nibbles of a byte of {who} for neighbours: elements 2j and 2j + 1, not j and j + 16",
            altered(node, index, made(tensor, np.concatenate([blocks[..., :2], neighbours], axis=-1))),
        )


def _left_out(node: Node) -> Iterator[Mistake]:
    own = OWN.get(node.op)
    present = [index for index, _ in _sources(node) if own is not None and index >= own.n_required]
    for index in present:
        yield Mistake(f"leaves out {role(node, index)}", altered(node, index, None))
    if len(present) > 1:
        roles = " and ".join(role(node, index) for index in present)
        left = (source if index not in present else None for index, source in enumerate(node.src))
        yield Mistake(f"leaves out {roles}", replace(node, src=tuple(left)))


def _first_as_it_is(node: Node) -> Iterator[Mistake]:
    a, b = (*node.src, None, None)[:2]
    if a is not None and a.ne == node.dst.ne and not {a.type, node.dst.type} & {"i32", "i64"}:
        others = f": {role(node, 1)} has no effect" if b is not None else ""

        def compute(dst: Tensor) -> None:
            copy(dst, a)

        yield Mistake(f"gives src0 as it is{others}", node, compute)


def _params(node: Node) -> Iterator[Mistake]:
    """Yields other values of the parameters that are marked for this."""
    record = OWN[node.op].params if node.op in OWN else None
    if record is None:
        return
    params = record.of(node.params)
    for field, kind in zip(record.names(), record.kinds(), strict=True):
        if field not in record.others():
            continue
        name, others = record.others()[field]
        value = getattr(params, field)
        for other in (float(np.float32(each)) if kind == "f" else each for each in others):
            if other == value:
                continue
            if kind == "i":
                text = f"takes {name} {other} in place of {value}"
            elif other == others[0]:
                text = f"ignores the {name} {value:g}: with {other:g} in its place"
            else:
                text = f"takes {other:g} for the {name}: with {other:g}, not {value:g},"
            yield Mistake(text, replace(node, params=replace(params, **{field: other}).packed))


def ignored(node: Node) -> Iterator[tuple[str, Node]]:
    """Yields what a kernel may ignore, in words, and the node without it: each source that is there but need not be,
    and each parameter that is marked, with the first of its other values."""
    own = OWN.get(node.op)
    if own is None or own.lacks_sources(node):
        return
    for index, _ in _sources(node):
        if index >= own.n_required:
            yield own.sources[index], altered(node, index, None)
    if own.params is None:
        return
    params = own.params.of(node.params)
    for field, (name, others) in own.params.others().items():
        other = next((each for each in others if each != getattr(params, field)), None)
        if other is not None:
            yield name, replace(node, params=replace(params, **{field: other}).packed)


def _own(node: Node) -> Iterator[Mistake]:
    own = OWN.get(node.op)
    if own is not None and own.mistaken is not None and not own.lacks_sources(node):
        (_, *sources), _ = own.arguments(node)
        yield from own.mistaken(node, *sources)


_FAMILIES: tuple[Callable[[Node], Iterator[Mistake]], ...] = (
    _nibbles,
    _left_out,
    _params,
    _single_strides,
    _offsets,
    _destination,
    _own,
    _other_strides,
    _swapped_dims,
    _wrapped,
    _strides_of_others,
    _first_as_it_is,
)
