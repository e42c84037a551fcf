"""The usual mistakes of a kernel, each as the node that a right kernel would have to get to make it.

A stride that is not looked at is a node whose source has another stride; a mask that is left out is a node without it.
Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.abi import codecs
from ggml_backend_npu.ir import Dims
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.glu import Glu
from ggml_backend_npu.ops.movers import convert, copy, raw
from ggml_backend_npu.params import Params
from graph_runner.blocks import swapped

_LARGEST = 1 << 22  # elements of a source that is copied in another order

_GLU = ("SWIGLU", "GEGLU", "REGLU", "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU_OAI")
_BINARY = ("ADD", "SUB", "MUL", "DIV")
_IDS = {"GET_ROWS": 1, "SET_ROWS": 1, "MUL_MAT_ID": 2}  # which source names rows
_MEANING = {
    ("SOFT_MAX", 1): "the mask",
    ("SOFT_MAX", 2): "the sinks",
    ("ROPE", 1): "the positions",
    ("ROPE", 2): "the frequency factors",
    ("GET_ROWS", 1): "the row ids",
    ("SET_ROWS", 1): "the row ids",
    ("MUL_MAT_ID", 2): "the expert ids",
    ("FLASH_ATTN_EXT", 3): "the mask",
    ("FLASH_ATTN_EXT", 4): "the sinks",
}
_OPTIONAL = {"SOFT_MAX": (1, 2), "ROPE": (2,), "FLASH_ATTN_EXT": (3, 4)}


@dataclass(frozen=True)
class Mistake:
    """What a kernel may do wrong.

    text     what it does, as a sentence about the op: "ignores nb[2] of src0: with 256 in place of 512"
    node     the altered node. Its dst may have another ne, nb and offset than the original's
    compute  what fills dst in place of the op's definition
    unknown  rows of dst that this says nothing about, (ne3, ne2, ne1)
    """

    text: str
    node: Node
    compute: Callable[[Tensor], None] | None = None
    unknown: NDArray[np.bool_] | None = None


def inside(tensor: Tensor) -> bool:
    """Whether all of a tensor lies in its memory."""
    return min(tensor.nb) >= 0 <= tensor.offset and tensor.offset + tensor.nbytes <= tensor.memory.size


def mistakes(node: Node) -> Iterator[Mistake]:
    """The mistakes that may be made with a node, the more particular ones first; none where a source is cut short."""
    if not all(source is None or inside(source) for source in node.src):
        return
    for family in _FAMILIES:
        try:
            yield from family(node)
        except (ValueError, IndexError, TypeError, OverflowError, MemoryError):  # a node not as ggml makes them
            continue


def _single_strides(node: Node) -> Iterator[Mistake]:
    for index, tensor in _sources(node):
        for text, nb in _one_stride(tensor):
            yield Mistake(f"ignores {text.format(_role(node, index))}", _with(node, index, replace(tensor, nb=nb)))


def _other_strides(node: Node) -> Iterator[Mistake]:
    for index, tensor in _sources(node):
        for text, nb in _more_strides(tensor):
            yield Mistake(text.format(_role(node, index)), _with(node, index, replace(tensor, nb=nb)))


def _sources(node: Node) -> list[tuple[int, Tensor]]:
    """The sources that the op's definition reads."""
    read = node.src[: OWN[node.op].n_src] if node.op in OWN else node.src
    return [(index, source) for index, source in enumerate(read) if source is not None]


def _role(node: Node, index: int) -> str:
    meaning = _MEANING.get((node.op, index))
    return f"src{index} ({meaning})" if meaning else f"src{index}"


def _with(node: Node, index: int, source: Tensor | None) -> Node:
    return replace(node, src=(*node.src[:index], source, *node.src[index + 1 :]))


def _made(like: Tensor, array: NDArray[Any]) -> Tensor:
    """A contiguous tensor of these values, as `raw` gives them."""
    data = np.ascontiguousarray(array)
    if like.codec.is_quantized:
        data = data.reshape(*data.shape[:-2], -1)
    return Tensor.of(data, like.type, like.name)


# strides and offsets


def _following(tensor: Tensor, begin: int) -> Dims:
    """nb with dimensions from `begin` on contiguous behind those before."""
    nb = list(tensor.nb)
    for k in range(begin, 4):
        n = tensor.n_blocks if k == 1 else tensor.ne[k - 1]
        nb[k] = tensor.codec.block_bytes if k == 0 else nb[k - 1] * n
    return nb[0], nb[1], nb[2], nb[3]


def _replaced(nb: Dims, k: int, stride: int) -> Dims:
    changed = [*nb]
    changed[k] = stride
    return changed[0], changed[1], changed[2], changed[3]


def _one_stride(tensor: Tensor) -> Iterator[tuple[str, Dims]]:
    """One stride as it would be without gaps, the others as they are."""
    for k in (3, 2, 1):
        if tensor.ne[k] == 1:
            continue
        dense = tensor.codec.block_bytes * tensor.n_blocks * prod(tensor.ne[1:k])
        for stride in dict.fromkeys((_following(tensor, k)[k], dense)):
            if stride != tensor.nb[k]:
                text = f"nb[{k}] of {{}}: with {stride} in place of {tensor.nb[k]}"
                yield text, _replaced(tensor.nb, k, stride)


def _several_strides(tensor: Tensor) -> Iterator[tuple[str, Dims]]:
    """The strides from one on as they would be without gaps."""
    for k in (2, 1, 0):
        nb = _following(tensor, k)
        if nb != tensor.nb:
            which = "all strides" if k == 0 else f"the strides from nb[{k}] on"
            yield f"ignores {which} of {{}}: with nb {nb} in place of {tensor.nb}", nb


def _more_strides(tensor: Tensor) -> Iterator[tuple[str, Dims]]:
    yield from _several_strides(tensor)
    for k in (3, 2, 1, 0):
        n = tensor.n_blocks if k == 0 else tensor.ne[k]
        if n > 1 and tensor.nb[k]:
            text = f"takes index 0 of dimension {k} of {{}} for all: with nb[{k}] 0 in place of {tensor.nb[k]}"
            yield text, _replaced(tensor.nb, k, 0)


def _offsets(node: Node) -> Iterator[Mistake]:
    for index, tensor in _sources(node):
        if tensor.offset:
            where = f"of {_role(node, index)}: it reads from byte {{}} of the root in place of byte {tensor.offset}"
            yield Mistake(
                f"ignores the offset {where.format(0)}", _with(node, index, replace(tensor, offset=0))
            )  # fmt: skip
            twice = 2 * tensor.offset
            yield Mistake(
                f"adds the offset {where.format(twice)}", _with(node, index, replace(tensor, offset=twice))
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
                yield Mistake(text, _with(node, index, replace(tensor, nb=other.nb)))


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
            transposed = f"reads {_role(node, index)} transposed: " if (i, j) == (0, 1) else ""
            exchanged = replace(tensor, ne=_exchanged(tensor.ne, i, j), nb=nb)
            text = f"{transposed or 'swaps '}dimensions {i} and {j}{' swapped' if transposed else ''}"
            text += "" if transposed else f" of {_role(node, index)}"
            yield Mistake(text, _with(node, index, exchanged))
            if tensor.ne[i] != tensor.ne[j] and nb != tensor.nb:
                text = f"swaps nb[{i}] and nb[{j}] of {_role(node, index)}: {nb[i]} and {nb[j]}"
                yield Mistake(text, _with(node, index, replace(tensor, nb=nb)))


# row ids and positions


def _ids(node: Node) -> Iterator[Mistake]:
    if node.op == "ROPE":
        yield from _positions(node)
    index = _IDS.get(node.op)
    if index is None or len(node.src) <= index:
        return
    ids, table = node.src[index], node.dst if node.op == "SET_ROWS" else node.src[0]
    if ids is None or table is None:
        return
    role, rows = _role(node, index), ids.view()
    n_rows = table.ne[2] if node.op == "MUL_MAT_ID" else table.ne[1]
    for step in (1, -1):
        yield from _off_by(node, index, rows, n_rows, step)
    in_order = np.broadcast_to(np.arange(ids.ne[0], dtype=rows.dtype) % max(1, n_rows), rows.shape)
    yield Mistake(f"ignores {role}: row i is taken for the i-th id", _with(node, index, _made(ids, in_order)))
    for k in (1, 2):
        for step in (1, -1):
            if ids.ne[k] > 1:
                rolled = np.roll(rows, -step, axis=3 - k)
                text = f"takes {role} of another batch: index i{k} {'+-'[step < 0]} 1 of dimension {k}"
                yield Mistake(text, _with(node, index, _made(ids, rolled)))
    if ids.type == "i64":
        words = replace(ids, type="i32")
        yield Mistake(
            f"reads {role} as 32-bit integers, 4 bytes apart",
            _with(node, index, replace(words, nb=_replaced(words.nb, 0, 4))),
        )


def _off_by(node: Node, index: int, rows: NDArray[Any], n_rows: int, step: int) -> Iterator[Mistake]:
    ids = node.src[index]
    assert ids is not None
    moved = rows.astype(np.int64) + step
    outside = (moved < 0) | (moved >= n_rows)
    verb = "writes" if node.op == "SET_ROWS" else "takes"
    text = f"{verb} row id {'+-'[step < 0]} 1 in place of row id, for each id of {_role(node, index)}"
    ends = {"": moved, ", where there is one": moved.clip(0, n_rows - 1), ", in a circle": moved % max(1, n_rows)}
    for end, values in ends.items():
        if end == "" or outside.any():
            yield Mistake(text + end, _with(node, index, _made(ids, values.astype(rows.dtype))))
    if not outside.any() or outside.all():
        return
    if node.op == "GET_ROWS":
        inside = moved.clip(0, n_rows - 1).astype(rows.dtype)
        yield Mistake(text, _with(node, index, _made(ids, inside)), unknown=outside[0])
    elif node.op == "SET_ROWS":
        src = node.src[0]
        assert src is not None

        def compute(dst: Tensor) -> None:
            for i3, i2 in np.ndindex(src.ne[3], src.ne[2]):
                batch = (0, i3 % ids.ne[2], i2 % ids.ne[1])
                kept = ~outside[batch]
                raw(dst)[i3, i2, moved[batch][kept]] = convert(
                    raw(src)[i3, i2, kept], src.type, dst.type, rows=True, numerics=codecs.bound()
                )

        yield Mistake(text, node, compute)


def _positions(node: Node) -> Iterator[Mistake]:
    positions = node.src[1] if len(node.src) > 1 else None
    if positions is None:
        return
    rows, role = positions.view(), _role(node, 1)
    others = {
        f"takes position + 1 for each of {role}": rows + 1,
        f"takes position - 1 for each of {role}": rows - 1,
        f"ignores {role}: all are 0": np.zeros_like(rows),
        f"ignores {role}: the i-th is i": np.broadcast_to(np.arange(rows.shape[-1], dtype=rows.dtype), rows.shape),
    }
    for text, values in others.items():
        yield Mistake(text, _with(node, 1, _made(positions, values.astype(rows.dtype))))


# broadcast


def _repeated(node: Node) -> Iterator[tuple[int, Tensor, Dims]]:
    """Sources that are repeated, and to which ne."""
    index, target = 1, node.dst.ne
    if node.op == "REPEAT":
        index = 0
    elif node.op == "SOFT_MAX" and len(node.src) > 1 and node.src[1] is not None:
        target = (*node.src[1].ne[:2], *node.dst.ne[2:])
    elif node.op == "SET_ROWS" and node.src[0] is not None and node.src[1] is not None:
        target = (node.src[1].ne[0], *node.src[0].ne[2:], 1)
    elif node.op not in _BINARY:
        return
    source = node.src[index] if len(node.src) > index else None
    if source is not None and source.ne != target and not source.codec.is_quantized:
        yield index, source, target


def _broadcast(node: Node) -> Iterator[Mistake]:
    if node.op == "MUL_MAT":
        yield from _broadcast_weights(node)
    for index, source, target in _repeated(node):
        role, view = _role(node, index), raw(source)
        if any(n % m for n, m in zip(target, source.ne, strict=True)) or prod(target) > _LARGEST:
            continue
        for k in range(4):
            if 1 < source.ne[k] < target[k]:
                each = np.repeat(view, target[k] // source.ne[k], axis=3 - k)
                text = f"repeats {role} element by element along dimension {k}, not as a whole"
                yield Mistake(text, _with(node, index, _made(source, each)))
        yield from _not_repeated(node, index, source, target)
        flat = np.resize(view.reshape(-1), target[::-1])
        yield Mistake(f"repeats {role} by the flat index, not by dimension", _with(node, index, _made(source, flat)))
        on = replace(source, ne=target)
        on = replace(on, nb=_following(on, 1))
        yield Mistake(f"reads past the end of {role} in place of repeating it", _with(node, index, on))
        nothing = np.zeros(target[::-1], view.dtype)
        nothing[tuple(slice(n) for n in view.shape)] = view
        text = f"does not repeat {role}: takes 0 where it ends"
        yield Mistake(text, _with(node, index, _made(source, nothing)))


def _not_repeated(node: Node, index: int, source: Tensor, target: Dims) -> Iterator[Mistake]:
    """Only the part of dst that the source reaches without being repeated."""
    if node.op not in (*_BINARY, "REPEAT"):
        return
    wider = [k for k in range(4) if source.ne[k] < target[k]]
    for chosen in [[k] for k in wider] + ([wider] if len(wider) > 1 else []):
        ne = [*target]
        for k in chosen:
            ne[k] = source.ne[k]
        part = (ne[0], ne[1], ne[2], ne[3])
        first = node.src[0]
        assert first is not None
        src = (replace(first, ne=part), *node.src[1:]) if node.op != "REPEAT" else node.src
        dims = " and ".join(map(str, chosen))
        text = f"does not repeat {_role(node, index)} along dimension {dims}: of dst only ne {part} is written"
        yield Mistake(text, replace(node, dst=replace(node.dst, ne=part), src=src))


def _broadcast_weights(node: Node) -> Iterator[Mistake]:
    weights, b = (*node.src, None, None)[:2]
    if weights is None or b is None or weights.n_elements > _LARGEST:
        return
    for k in (2, 3):
        if 1 < weights.ne[k] < b.ne[k] and b.ne[k] % weights.ne[k] == 0:
            whole = np.concatenate([raw(weights)] * (b.ne[k] // weights.ne[k]), axis=3 - k)
            text = f"repeats src0 as a whole along dimension {k}, not matrix by matrix"
            yield Mistake(text, _with(node, 0, _made(weights, whole)))


def _heads(node: Node) -> Iterator[Mistake]:
    """Of attention: which head of k and v a head of q meets."""
    q, k, v = (*node.src, None, None, None)[:3]
    if node.op != "FLASH_ATTN_EXT" or q is None or k is None or v is None:
        return
    n_kv, n = k.ne[2], q.ne[2] // max(1, k.ne[2])
    if n_kv == 1 or q.ne[2] * max(k.n_elements, v.n_elements) > _LARGEST * n_kv:
        return
    if n > 1:
        tiled = (_made(each, np.concatenate([raw(each)] * n, axis=1)) for each in (k, v))
        text = f"has head h of src0 meet head h % {n_kv} of src1 and src2, not h // {n}"
        yield Mistake(text, replace(node, src=(q, *tiled, *node.src[3:])))
    first = (replace(each, nb=_replaced(each.nb, 2, 0)) for each in (k, v))
    yield Mistake("has each head of src0 meet head 0 of src1 and src2", replace(node, src=(q, *first, *node.src[3:])))


# types, operands, parameters


def _nibbles(node: Node) -> Iterator[Mistake]:
    for index, tensor in _sources(node):
        if tensor.type != "q4_0" or tensor.n_elements > _LARGEST:
            continue
        blocks = raw(tensor)
        role = _role(node, index)
        yield Mistake(
            f"swaps the two nibbles of each byte of the q4_0 blocks of {role}",
            _with(node, index, _made(tensor, swapped(blocks))),
        )
        quants = np.stack([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
        neighbours = quants[..., :16] | (quants[..., 16:] << 4)
        yield Mistake(
            f"takes the nibbles of a byte of {role} for neighbours: elements 2j and 2j + 1, not j and j + 16",
            _with(node, index, _made(tensor, np.concatenate([blocks[..., :2], neighbours], axis=-1))),
        )


def _left_out(node: Node) -> Iterator[Mistake]:
    present = [k for k in _OPTIONAL.get(node.op, ()) if k < len(node.src) and node.src[k] is not None]
    for index in present:
        yield Mistake(f"leaves out {_role(node, index)}", _with(node, index, None))
    if len(present) > 1:
        roles = " and ".join(_role(node, index) for index in present)
        yield Mistake(f"leaves out {roles}", replace(node, src=node.src[:1]))


def _operands(node: Node) -> Iterator[Mistake]:
    a, b = (*node.src, None, None)[:2]
    if a is None:
        return
    if node.op in ("SUB", "DIV", "CONCAT", *_GLU) and b is not None and a.type == b.type:
        text = "swaps src0 and src1"
        if a.ne == b.ne or node.op == "CONCAT":
            yield Mistake(text, replace(node, src=(b, a, *node.src[2:])))
    if a.ne == node.dst.ne and not {a.type, node.dst.type} & {"i32", "i64"}:
        others = f": {_role(node, 1)} has no effect" if b is not None else ""

        def compute(dst: Tensor) -> None:
            copy(dst, a)

        yield Mistake(f"gives src0 as it is{others}", node, compute)


def _float(field: str, name: str, neutral: float, *others: float) -> Callable[[Node], Iterator[Mistake]]:
    """The mistake of taking a float32 of params to be its neutral value, or another one that is usual."""

    def find(node: Node) -> Iterator[Mistake]:
        value = getattr(_params_of(node), field)
        for other in (neutral, *others):
            as_float32 = np.float32(other)
            if as_float32 != value:
                ignores = f"ignores the {name} {value:g}: with {other:g} in its place"
                text = (
                    ignores if other == neutral else f"takes {other:g} for the {name}: with {other:g}, not {value:g},"
                )
                yield Mistake(text, _with_param(node, field, float(as_float32)))

    return find


def _int(field: str, name: str, *others: int) -> Callable[[Node], Iterator[Mistake]]:
    """The mistake of taking another int32 of params."""

    def find(node: Node) -> Iterator[Mistake]:
        value = getattr(_params_of(node), field)
        for other in others:
            if other != value:
                text = f"takes {name} {other} in place of {value}"
                yield Mistake(text, _with_param(node, field, other))

    return find


def _params_of(node: Node) -> Params:
    record = OWN[node.op].params
    assert record is not None
    return record.of(node.params)


def _with_param(node: Node, field: str, value: float) -> Node:
    return replace(node, params=replace(_params_of(node), **{field: value}).packed)


_EPS = (_float("eps", "eps", 0.0, 1e-3, 1e-5, 1e-6, 1e-8, 1e-12),)


def _halves(node: Node) -> Iterator[Mistake]:
    """The halves of a row of the one source of a GLU."""
    if len(node.src) < 2 or node.src[1] is None:
        swapped = Glu.of(node.params).swapped != 0
        which = ("second", "first")[swapped]
        text = f"takes the {which} half of a row of src0 for the one that the function is of"
        yield Mistake(text, _with_param(node, "swapped", not swapped))


_PARAMS: dict[str, tuple[Callable[[Node], Iterator[Mistake]], ...]] = {
    "SCALE": (_float("scale", "scale", 1.0), _float("bias", "bias", 0.0)),
    "CLAMP": (_float("min", "minimum", -inf), _float("max", "maximum", inf)),
    "SOFT_MAX": (_float("scale", "scale", 1.0), _float("max_bias", "ALiBi bias", 0.0)),
    "ARGSORT": (_int("order", "order", 0, 1),),
    "CONCAT": (_int("dim", "dimension", 0, 1, 2, 3),),
    "ROPE": (
        _int("mode", "mode (0 normal, 2 neox)", 0, 2),
        _float("freq_base", "frequency base", 10000.0, 500_000.0, 1_000_000.0),
        _float("freq_scale", "frequency scale", 1.0, 0.5, 2.0),
        _float("ext_factor", "extrapolation factor", 0.0),
        _float("attn_factor", "attention factor", 1.0),
        _int("n_offs", "the first rotated element", 0),
    ),
    **dict.fromkeys(("RMS_NORM", "NORM", "L2_NORM"), _EPS),
    "FLASH_ATTN_EXT": (
        _float("scale", "scale", 1.0),
        _float("max_bias", "ALiBi bias", 0.0),
        _float("logit_softcap", "soft cap of the logits", 0.0),
    ),
    **dict.fromkeys(_GLU, (_halves,)),
}


def _params(node: Node) -> Iterator[Mistake]:
    for find in _PARAMS.get(node.op, ()):
        yield from find(node)


_FAMILIES: tuple[Callable[[Node], Iterator[Mistake]], ...] = (
    _nibbles,
    _left_out,
    _params,
    _single_strides,
    _offsets,
    _destination,
    _ids,
    _broadcast,
    _heads,
    _other_strides,
    _swapped_dims,
    _strides_of_others,
    _operands,
)
