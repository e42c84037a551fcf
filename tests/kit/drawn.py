"""Random nodes of every op: those that its makers give, of other sizes, with other parameters and fewer sources, laid
out otherwise, in place, and with NaN, infinities and denormals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from math import lcm, prod

import numpy as np
from kit.bases import Rng, base, size
from kit.nodes import dims

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.checks import Make, Types
from ggml_backend_npu.registry.params import Params

_TRIES = 6
_MOST_BYTES, _MOST_OPERATIONS = 1 << 19, 1 << 22
_GAP = 0xA5
_FLOATS, _INDICES = ("f32", "f16", "bf16"), ("i32", "i64")
_ORDERS = ("ARGSORT", "TOP_K")  # std::sort, to which NaN may do anything
_SPECIAL = (
    *(np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-40, 6e-8, -6e-5, 65504.0, 65520.0, -65520.0),
    *(3.4e38, -3.4e38, 1e30, 127.5, -0.5, 1.0),
)

# ops that ggml's allocator computes in place where it can (ggml_op_can_inplace), besides functions of UNARY
_IN_PLACE = (
    *("SCALE", "DIAG_MASK_INF", "DIAG_MASK_ZERO", "ADD", "ADD_ID", "ADD1", "SUB", "MUL", "DIV", "SQR", "SQRT", "LOG"),
    *("ROPE", "ROPE_BACK", "SILU_BACK", "RMS_NORM", "RMS_NORM_BACK", "SOFT_MAX", "SOFT_MAX_BACK", "SIN", "COS"),
)


# sources that ggml asserts are contiguous when it makes the node, or its CPU when it computes it
_WHOLE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        ("GATED_DELTA_NET", "GATED_LINEAR_ATTN", "RWKV_WKV6", "RWKV_WKV7", "SSM_SCAN", "SSM_CONV"), (*range(8),)
    ),
    "SOFT_MAX": (1, 2), "ARGSORT": (0,), "TOP_K": (0,), "SUM_ROWS": (0,),
    "CLAMP": (0,),  # whose CPU goes from row to row by nb1 alone
}  # fmt: skip


def drawn(rng: Rng, op: str, *, special: bool = False) -> Node:
    """A node of the op that this backend takes.

    special  with values that are not finite, or denormal
    """
    found = _made(rng, op)
    for change in (_with_other_params, _with_fewer_sources, _laid_out, _in_place):
        found = change(rng, found)
    return _spoilt(rng, found) if special else found


def makers(op: str) -> list[tuple[Make, Types | None]]:
    """The makers of an op's nodes, each with the types that it makes them of; None: any that the op takes."""
    own = OWN[op]
    probes = () if own.measured is None else own.measured()
    return [*((make, None) for make in own.makes), *((make, probe.types) for probe in probes for make in probe.makes)]


def _made(rng: Rng, op: str) -> Node:
    own, known = OWN[op], makers(op)
    if not known:
        return next(filter(_takes, iter(lambda: base(rng, op), None)))
    for _ in range(_TRIES):
        make, types = known[int(rng.integers(0, len(known)))]
        if types is None:
            taken = sorted(own.types or ())
            types = (*taken[int(rng.integers(0, len(taken)))], *("f32",) * 8)
        found = make(rng, types)
        if _takes(found):
            return _resized(rng, found)
    make, types = next(each for each in known)
    return make(rng, types or ("f32",) * 8)


def _takes(node: Node) -> bool:
    op = OWN[node.op]
    tensors = {id(x): x for x in (node.dst, *node.src) if x is not None}.values()
    if sum(x.nbytes for x in tensors) > _MOST_BYTES or op.lacks_sources(node) or op.refusal(node) is not None:
        return False
    arguments, keywords = op.arguments(node)
    return op.cost is None or op.cost(*arguments, **keywords).operations <= _MOST_OPERATIONS


def _first_taken(rng: Rng, of: Node, change: Callable[[Rng, Node], Node]) -> Node:
    return next((found for found in (change(rng, of) for _ in range(_TRIES)) if _takes(found)), of)


def _with_tensors(of: Node, change: Callable[[Tensor], Tensor]) -> Node:
    """The node over other tensors; one that is used twice is changed once."""
    made = {id(x): change(x) for x in (of.dst, *of.src) if x is not None}
    return replace(of, dst=made[id(of.dst)], src=tuple(None if x is None else made[id(x)] for x in of.src))


# sizes


def _resized(rng: Rng, of: Node) -> Node:
    """Of other sizes: each size that occurs in the node becomes another one, wherever it stands."""
    return _first_taken(rng, of, _of_other_sizes)


def _of_other_sizes(rng: Rng, of: Node) -> Node:
    tensors = [x for x in (of.dst, *of.src) if x is not None]
    least = 1 if not any(x.type in _INDICES for x in of.src if x is not None) else 0  # else indices are in range
    to = {}
    for n in sorted({n for x in tensors for n in x.ne if n > 1}):
        block = lcm(*(x.codec.block_size for x in tensors if x.ne[0] == n))
        new = block * size(rng, 8) if block > 1 else size(rng) if rng.random() < 0.7 else n * int(rng.integers(1, 4))
        to[n] = n if rng.random() < 0.4 or (new < n and not least) else new
    last = int(rng.integers(2, 4)) if all(x.ne[3] == 1 for x in tensors) and rng.random() < 0.2 else 1

    def sized(x: Tensor) -> Tensor:
        ne = tuple(to.get(n, n) for n in x.ne)
        return _grown(rng, x, (*ne[:3], ne[3] * last))

    if sum(prod(to.get(n, n) for n in x.ne) for x in tensors) * last * 4 > 2 * _MOST_BYTES:
        return of
    return _with_tensors(of, sized)


def _grown(rng: Rng, x: Tensor, ne: tuple[int, ...]) -> Tensor:
    """The values again and again, floats up to half as large, blocks in any order."""
    found = x.view()
    units = (ne[0] // x.codec.block_size, *ne[1:])
    for axis, n in enumerate(units[::-1]):
        whole = np.arange(n) % found.shape[axis]
        found = np.take(found, whole if x.codec.dtype is not None else rng.permutation(whole), axis=axis)
    if x.type in _FLOATS:
        with np.errstate(all="ignore"):
            found = (found.astype(np.float32) * rng.uniform(0.5, 1, found.shape)).astype(found.dtype)
    if x.codec.dtype is None:
        return Tensor.of(np.ascontiguousarray(found).reshape(*found.shape[:3], -1), x.type)
    return Tensor.of(np.ascontiguousarray(found), x.type)


# parameters, sources


def _with_other_params(rng: Rng, of: Node) -> Node:
    kind = OWN[of.op].params
    if kind is None:
        return of

    def other(rng: Rng, of: Node) -> Node:
        record, kinds = kind.of(of.params), kind.kinds()
        changed = {
            field.name: _other_value(rng, record, field.name)
            for field, letter in zip(fields(record), kinds, strict=True)
            if rng.random() < 0.5 and (letter == "f" or field.name in kind.others())
        }
        return replace(of, params=replace(record, **changed).packed)

    return _first_taken(rng, of, other)


def _other_value(rng: Rng, record: Params, name: str) -> float:
    known = record.others()[name].values if name in record.others() else ()
    if known and rng.random() < 0.5:
        return known[int(rng.integers(0, len(known)))]
    value = getattr(record, name)
    return value * float(rng.uniform(0.25, 2)) if isinstance(value, float) else value


def _with_fewer_sources(rng: Rng, of: Node) -> Node:
    least = OWN[of.op].n_required
    src = tuple(None if i >= least and rng.random() < 0.2 else x for i, x in enumerate(of.src))
    found = replace(of, src=src)
    return found if of.dst not in of.src and _takes(found) else of


# memory


def _laid_out(rng: Rng, of: Node) -> Node:
    """Its sources one by one as views with gaps, of permuted dimensions, at an offset, where the op takes them so; dst
    as well if it is one of them: ggml makes any other contiguous."""
    whole = _WHOLE.get(of.op, ())
    for place, x in enumerate(of.src):
        if x is None or place in whole or rng.random() < 0.5 or any(x is y for y in of.src[:place]):
            continue
        of = _first_taken(rng, of, partial(_with_view, x))
    return of


def _with_view(x: Tensor, rng: Rng, of: Node) -> Node:
    """The node with a view in place of one of its tensors."""
    # ggml's CPU aborts at a CONCAT of these types whose rows have gaps
    in_rows = of.op == "CONCAT" and x.codec.dtype is not None and x.codec.dtype.itemsize == 8
    return _with_tensors(of, lambda tensor: _view(rng, x, in_rows) if tensor is x else tensor)


def _view(rng: Rng, x: Tensor, in_rows: bool = False) -> Tensor:
    """The tensor as a view into a larger one; blocks of a row, and what is a row of its own, lie side by side.

    in_rows  whether the elements of a row do too
    """
    in_rows |= x.codec.dtype is None or x.ne[0] == 1
    order = [0, *(1 + rng.permutation(3))] if in_rows or rng.random() < 0.6 else [*rng.permutation(4)]
    if rng.random() < 0.5:
        order = [0, 1, 2, 3]
    units = (x.n_blocks, *x.ne[1:])
    steps, before, after = (rng.integers(0, 2, 4) * (rng.random() < 0.5) for _ in range(3))
    steps[0] *= not in_rows and rng.random() < 0.3
    nb, stride, offset = [0] * 4, x.codec.block_bytes, 0
    for axis in map(int, order):
        nb[axis] = stride * int(1 + steps[axis])
        offset += stride * int(before[axis])
        stride *= int(before[axis] + units[axis] * (1 + steps[axis]) + after[axis])
    made = replace(x, nb=dims(nb), memory=Memory.of(np.full(stride, _GAP, np.uint8)), offset=offset)
    if made.is_contiguous():  # where a dimension has one element, ggml's CPU may still go from row to row by its nb
        made = replace(made, nb=x.nb)
    made.view()[...] = x.view()
    return made


def _in_place(rng: Rng, of: Node) -> Node:
    """dst is the first source, where ggml does so."""
    first = of.src[0] if of.src else None
    may = of.op in _IN_PLACE or "ggml_unary_inplace" in OWN[of.op].functions
    if not may or first is None or rng.random() < 0.75 or (first.type, first.ne) != (of.dst.type, of.dst.ne):
        return of
    found = replace(of, dst=first)
    return found if first.nb[0] == first.codec.block_bytes and _takes(found) else of


# values


def _spoilt(rng: Rng, of: Node) -> Node:
    """Some of its floats are not finite, or denormal, or large; some of its blocks have any bits."""
    sources = {id(x): x for x in of.src if x is not None and x.n_elements}
    for x in sources.values():
        share = float(rng.choice([0, 0, 0.01, 0.2]))
        flags = rng.random(x.view().shape[:4]) < share
        if share and not flags.any():
            flags.reshape(-1)[int(rng.integers(0, flags.size))] = True
        if x.type in _FLOATS:
            known = np.array([each for each in _SPECIAL if of.op not in _ORDERS or not np.isnan(each)])
            with np.errstate(all="ignore"):
                x.view()[flags] = rng.choice(known, int(flags.sum())).astype(x.view().dtype)
        elif x.codec.is_quantized and rng.random() < 0.5:
            x.view()[flags] = rng.integers(0, 256, (int(flags.sum()), x.codec.block_bytes), dtype=np.uint8)
    return of
