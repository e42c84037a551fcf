"""Nodes of the ops that have no makers of their own (`Op.makes`), of random sizes: movers, and what computes without
rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from math import lcm

import numpy as np
from kit.support import Kind, values
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ir import PARAMS_BYTES
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.im2col import Im2col, Im2col3d
from ggml_backend_npu.ops.movers import Concat
from ggml_backend_npu.ops.patches import Pad, PadReflect, SetPart
from ggml_backend_npu.ops.vision import WinPart, WinUnpart
from ggml_backend_npu.registry.checks import Types
from ggml_backend_npu.registry.params import Params
from quant import codec

Rng = np.random.Generator
Ne = tuple[int, ...]
Base = Callable[[Rng, str, Types], Node]

_ENDS = (8, 64, 600)  # of ranges of sizes: each is as likely


def size(rng: Rng, most: int = _ENDS[-1]) -> int:
    """A size from 1 on: often a few, sometimes hundreds."""
    return int(rng.integers(1, min(most, int(rng.choice(_ENDS, p=(0.5, 0.35, 0.15)))) + 1))


def tensor(rng: Rng, type: str, ne: Ne, kind: Kind = "plain") -> Tensor:
    """A contiguous tensor of random values: finite ones."""
    kind_of, ne = codec(type), (*ne, *[1] * (4 - len(ne)))
    data = values(type, int(np.prod(ne)), rng, kind)
    if kind_of.dtype is not None:
        return Tensor.of(np.ascontiguousarray(data).view(kind_of.dtype).reshape(ne[::-1]))
    return Tensor.of(data.reshape(*ne[:0:-1], ne[0] // kind_of.block_size * kind_of.block_bytes), type)


def _ids(x: NDArray[np.integer], type: str) -> Tensor:
    return Tensor.of(np.ascontiguousarray(x.astype(codec(type).dtype)))


def _ne(rng: Rng, *types: str) -> Ne:
    block = lcm(*(codec(type).block_size for type in types))
    row = block * (int(rng.integers(1, 4)) if block > 1 else size(rng))
    return (row, *(int(n) for n in rng.integers(1, 5, 3)))


def _node(op: str, dst: Tensor, *src: Tensor | None, params: Params | None = None) -> Node:
    return Node(op, dst, src, bytes(PARAMS_BYTES) if params is None else params.packed)


def _drawn_params(rng: Rng, op: str) -> bytes:
    """Small parameters: 0 or 1, and floats from -2 to 2, ascending."""
    kind = OWN[op].params
    if kind is None:
        return bytes(PARAMS_BYTES)
    floats = iter(sorted(rng.uniform(-2, 2, len(fields(kind))).tolist()))
    drawn = (next(floats) if letter == "f" else int(rng.integers(0, 2)) for letter in kind.kinds())
    return kind(*drawn).packed


def _same(rng: Rng, op: str, types: Types) -> Node:
    ne = _ne(rng, *types[:2])
    return Node(op, tensor(rng, types[0], ne), (tensor(rng, types[1], ne),), _drawn_params(rng, op))


def _square(rng: Rng, op: str, types: Types) -> Node:
    ne = (n := size(rng, 40), n, *(int(m) for m in rng.integers(1, 4, 2)))
    return Node(op, tensor(rng, types[0], ne), (tensor(rng, types[1], ne),), _drawn_params(rng, op))


def _copy(rng: Rng, op: str, types: Types) -> Node:
    ne = _ne(rng, *types)
    to = ne
    if not codec(types[0]).is_quantized and rng.random() < 0.3:  # reshaped
        ne, to = (ne[0], ne[1], ne[2] * ne[3], 1), (ne[0] * ne[1], ne[2], ne[3], 1)
    dst = tensor(rng, types[0], to)
    return _node(op, dst, tensor(rng, types[1], ne, "dense" if types[0] == "iq4_nl" else "plain"), dst)


def _get_rows(rng: Rng, op: str, types: Types) -> Node:
    ne, n = _ne(rng, types[1]), size(rng, 60)
    rows = _ids(rng.integers(0, ne[1], (1, ne[3], ne[2], n)), types[2])
    return _node(op, tensor(rng, types[0], (ne[0], n, ne[2], ne[3])), tensor(rng, types[1], ne), rows)


def _set_rows(rng: Rng, op: str, types: Types) -> Node:
    ne, rows = _ne(rng, *types[:2]), size(rng, 60)
    n, apart = int(rng.integers(1, rows + 1)), rng.integers(1, 3, 2)
    ids = np.stack([rng.permutation(rows)[:n] for _ in range(ne[2] * ne[3])]).reshape(1, ne[3], ne[2], n)
    src = tensor(rng, types[1], (ne[0], n, ne[2] * apart[0], ne[3] * apart[1]), "dense")
    dst = tensor(rng, types[0], (ne[0], rows, ne[2] * apart[0], ne[3] * apart[1]))
    return _node(op, dst, src, _ids(ids, types[2]), dst)


def _repeat(rng: Rng, op: str, types: Types) -> Node:
    ne, times = _ne(rng, types[1]), rng.integers(1, 4, 4)
    return _node(op, tensor(rng, types[0], tuple(ne * times)), tensor(rng, types[1], ne))


def _concat(rng: Rng, op: str, types: Types) -> Node:
    a, dim = _ne(rng, types[1]), int(rng.integers(0, 4))
    more = a[0] if dim == 0 else int(rng.integers(1, 5))
    b, whole = (tuple(n if i == dim else m for i, m in enumerate(a)) for n in (more, a[dim] + more))
    return _node(
        op, tensor(rng, types[0], whole), *(tensor(rng, types[1], each) for each in (a, b)), params=Concat(dim)
    )


def _binary(rng: Rng, op: str, types: Types) -> Node:
    a = _ne(rng, *types)
    b = tuple(1 if rng.random() < 0.3 else n for n in a)
    if any(codec(type).is_quantized for type in types):
        b = a
    elif rng.random() < 0.3:
        a = tuple(n * int(times) for n, times in zip(a, rng.integers(1, 3, 4), strict=True))
    return _node(op, tensor(rng, types[0], a), tensor(rng, types[1], a), tensor(rng, types[2], b))


def _add1(rng: Rng, op: str, types: Types) -> Node:
    ne = _ne(rng, *types[:2])
    return _node(op, tensor(rng, types[0], ne), tensor(rng, types[1], ne), tensor(rng, types[2], (1,)))


def _add_id(rng: Rng, op: str, types: Types) -> Node:
    ne, experts = _ne(rng, "f32"), size(rng, 20)
    ids = _ids(rng.integers(0, experts, (1, 1, ne[2], ne[1])), "i32")
    return _node(op, tensor(rng, "f32", ne), tensor(rng, "f32", ne), tensor(rng, "f32", (ne[0], experts)), ids)


def _of_rows(rng: Rng, op: str, types: Types) -> Node:
    """ARGMAX, TOP_K."""
    ne = _ne(rng, "f32")
    to = (int(rng.integers(1, ne[0] + 1)), *ne[1:])
    if op == "ARGMAX":
        ne, to = ne[:2], ne[1:2]
    x = Tensor.of(np.argsort(rng.random(ne[::-1]), axis=-1).astype(np.float32))  # no two are equal
    return _node(op, tensor(rng, "i32", to), x)


def _argsort(rng: Rng, op: str, types: Types) -> Node:
    ne = _ne(rng, "f32")
    x = Tensor.of(np.argsort(rng.random(ne[::-1]), axis=-1).astype(np.float32))
    return Node(op, tensor(rng, "i32", ne), (x,), _drawn_params(rng, op))


def _diag(rng: Rng, op: str, types: Types) -> Node:
    n, n2, n3 = size(rng, 40), *(int(n) for n in rng.integers(1, 4, 2))
    return _node(op, tensor(rng, "f32", (n, n, n2, n3)), tensor(rng, "f32", (n, 1, n2, n3)))


def _glu(rng: Rng, op: str, types: Types) -> Node:
    ne = _ne(rng, *types[:2])
    whole, params = (2 * ne[0], *ne[1:]), _drawn_params(rng, op)
    halves = (tensor(rng, types[1], ne), tensor(rng, types[1], ne))
    src = halves if rng.random() < 0.5 else (tensor(rng, types[1], whole),)
    return Node(op, tensor(rng, types[0], ne), src, params)


def _set(rng: Rng, op: str, types: Types) -> Node:
    """A part of src0, which begins anywhere in it; or in place."""
    ne = _ne(rng, types[1])
    part = tuple(int(rng.integers(1, n + 1)) for n in ne)
    at = [int(rng.integers(0, n - m + 1)) for n, m in zip(ne, part, strict=True)]
    a, inplace = tensor(rng, types[1], ne), bool(rng.integers(0, 2))
    params = SetPart(*a.nb[1:], sum(n * nb for n, nb in zip(at, a.nb, strict=True)), inplace)
    return _node(op, a if inplace else tensor(rng, types[0], ne), a, tensor(rng, types[2], part), params=params)


def _pad(rng: Rng, op: str, types: Types) -> Node:
    ne = _ne(rng, "f32")
    ends = np.minimum(rng.integers(0, 4, (4, 2)), np.array(ne)[:, None])  # ggml's CPU comes around once
    to = tuple(int(n) for n in ne + ends.sum(axis=1))
    params = Pad(*(int(n) for n in (*ends.reshape(-1), rng.integers(0, 2))))
    return _node(op, tensor(rng, "f32", to), tensor(rng, "f32", ne), params=params)


def _reflect(rng: Rng, op: str, types: Types) -> Node:
    ne = _ne(rng, "f32")
    p0, p1 = (int(n) for n in rng.integers(0, ne[0], 2))
    dst = tensor(rng, "f32", (ne[0] + p0 + p1, *ne[1:]))
    return _node(op, dst, tensor(rng, "f32", ne), params=PadReflect(p0, p1))


def _moves(rng: Rng, n: int) -> tuple[list[int], list[int], list[int], list[int], list[int], list[int]]:
    """Sizes of images and of kernels, strides, paddings, dilations and places, in n dimensions."""
    k, s, d = ([int(i) for i in rng.integers(1, 4, n)] for _ in range(3))
    p = [int(i) for i in rng.integers(0, 3, n)]
    reach = [(b - 1) * c + 1 for b, c in zip(k, d, strict=True)]
    x = [max(1, r - 2 * q) + int(rng.integers(0, 10)) for r, q in zip(reach, p, strict=True)]
    places = [(a + 2 * q - r) // t + 1 for a, q, r, t in zip(x, p, reach, s, strict=True)]
    return x, k, s, p, d, places


def _im2col(rng: Rng, op: str, types: Types) -> Node:
    flat = bool(rng.integers(0, 2))
    x, k, s, p, d, places = _moves(rng, 1 if flat else 2)
    channels, images = (int(n) for n in rng.integers(1, 5, 2))
    kernel, image = tensor(rng, "f16", (*k, channels, 2)), tensor(rng, types[2], (*x, channels, images))
    dst = tensor(rng, types[0], (int(np.prod(k)) * channels, *places, images))
    rest = (0,) if flat else ()
    params = Im2col(*[*s, *rest, *p, *rest, *d, *rest, not flat])
    return _node(op, dst, kernel, image, params=params)


def _im2col_3d(rng: Rng, op: str, types: Types) -> Node:
    x, k, s, p, d, places = _moves(rng, 3)
    channels, images = (int(n) for n in rng.integers(1, 4, 2))
    kernel, image = tensor(rng, "f16", (*k, 2 * channels)), tensor(rng, types[2], (*x, channels * images))
    dst = tensor(rng, types[0], (int(np.prod(k)) * channels, *places[:2], places[2] * images))
    return _node(op, dst, kernel, image, params=Im2col3d(*[*s, *p, *d, channels]))


def _windows(rng: Rng, op: str, types: Types) -> Node:
    n, width, height, w = size(rng, 40), size(rng, 20), size(rng, 20), int(rng.integers(1, 8))
    nep0, nep1 = -(-width // w), -(-height // w)
    image, windows = tensor(rng, "f32", (n, width, height)), tensor(rng, "f32", (n, w, w, nep0 * nep1))
    if op == "WIN_PART":
        return _node(op, windows, image, params=WinPart(nep0, nep1, w))
    return _node(op, image, windows, params=WinUnpart(w))


def _rel_pos(rng: Rng, op: str, types: Types) -> Node:
    n, places = size(rng, 60), size(rng, 20)
    return _node(op, tensor(rng, types[0], (n, places, places)), tensor(rng, types[1], (n, 2 * places - 1)))


_BASES: dict[str, Base] = {
    "CPY": _copy, "GET_ROWS": _get_rows, "SET_ROWS": _set_rows, "REPEAT": _repeat, "CONCAT": _concat,
    **dict.fromkeys(("ADD", "SUB", "MUL", "DIV"), _binary), "ADD1": _add1, "ADD_ID": _add_id,
    "ARGMAX": _of_rows, "TOP_K": _of_rows, "ARGSORT": _argsort, "TRI": _square, "DIAG": _diag, "REGLU": _glu,
    "SET": _set, "ACC": _set, "PAD": _pad, "PAD_REFLECT_1D": _reflect, "IM2COL": _im2col, "IM2COL_3D": _im2col_3d,
    "WIN_PART": _windows, "WIN_UNPART": _windows, "GET_REL_POS": _rel_pos,
}  # fmt: skip


def base(rng: Rng, op: str) -> Node:
    """A node of an op without makers, of any of its types."""
    types = sorted(OWN[op].types or ())
    return _BASES.get(op, _same)(rng, op, types[int(rng.integers(0, len(types)))])
