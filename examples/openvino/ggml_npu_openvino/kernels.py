"""What computes each op: a function that gives the elements of its output, or writes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from openvino import opset15 as op

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN

from .built import Built
from .numbers import DECODERS, ROUNDED, Value, decoded, divided, integers, reshaped, scalar, select

Kernel = Callable[[Built, Node], None]

_NEOX = 2
_MANY = 64  # queries that ggml's CPU does not round
_LAST = -1


def _params(node: Node) -> Any:
    record = OWN[node.op].params
    assert record is not None
    return record.of(node.params)


def _at(node: Node, index: int) -> Tensor:
    found = node.src[index]
    assert found is not None
    return found


def _has(node: Node, index: int) -> bool:
    return len(node.src) > index and node.src[index] is not None


def _shape(x: Value) -> list[int]:
    return list(x.get_output_shape(0))


def _repeated(x: Value, *shape: int) -> Value:
    """Returns x repeated as a whole to a shape; what is broadcast anyway stays 1."""
    repeats = [1 if m == 1 else n // m for n, m in zip(shape, _shape(x), strict=True)]
    return op.tile(x, integers(repeats)) if any(n > 1 for n in repeats) else x


# movers


def _copy(at: Built, node: Node) -> None:
    source, dst = _at(node, 0), node.dst
    if source.type == dst.type:
        bits, value = at.bits(source)
        at.write(dst, value, bits)
    else:
        at.write(dst, at.read(source))


def _get_rows(at: Built, node: Node) -> None:
    x, ids = _at(node, 0), at.read(_at(node, 1))
    found = at.rows(x)
    in_blocks = found is not None
    if found is None:
        found = at.read(x) if x.type in ("f32", "i32", *DECODERS) else at.weights(x, apart=False)
    n3, n2, n1, width = _shape(found)
    third, second = np.ogrid[: _shape(ids)[1], : _shape(ids)[2]]
    places = op.add(ids, integers(((third * n2 + second) * n1)[None, :, :, None]))
    rows = op.gather(reshaped(found, n3 * n2 * n1, width), reshaped(places, -1), integers(0))
    at.write(node.dst, decoded(rows, x.type) if in_blocks else rows)


def _set_rows(at: Built, node: Node) -> None:
    rows, ids = at.read(_at(node, 0)), at.read(_at(node, 1))
    n3, n2, n, _ = _shape(rows)
    at.write_rows(
        node.dst, rows, op.broadcast(_repeated(reshaped(ids, *_shape(ids)[1:]), n3, n2, n), integers([n3, n2, n]))
    )


# element by element


def _of_two(function: Callable[[Value, Value], Value]) -> Kernel:
    def kernel(at: Built, node: Node) -> None:
        a, b = at.read(_at(node, 0)), at.read(_at(node, 1))
        at.write(node.dst, function(a, _repeated(b, *_shape(a))))

    return kernel


def _of_one(function: Callable[[Value], Value]) -> Kernel:
    return lambda at, node: at.write(node.dst, function(at.read(_at(node, 0))))


def _scale(at: Built, node: Node) -> None:
    p = _params(node)
    found = op.multiply(at.read(_at(node, 0)), scalar(p.scale))
    at.write(node.dst, op.add(found, scalar(p.bias)) if p.bias else found)


def _swiglu(at: Built, node: Node) -> None:
    a = _at(node, 0)
    if _has(node, 1):
        gate, up = a, _at(node, 1)
    else:
        half = replace(a, ne=(a.ne[0] // 2, *a.ne[1:]))
        gate, up = half, replace(half, offset=a.offset + half.ne[0] * a.nb[0])
        if _params(node).swapped:
            gate, up = up, gate
    at.write(node.dst, op.multiply(_silu(at.read(gate)), at.read(up)))


def _silu(x: Value) -> Value:
    return divided(x, op.add(scalar(1), op.exp(op.negative(x))))


# rows


def _rms_norm(at: Built, node: Node) -> None:
    x = at.read(_at(node, 0))
    mean = op.reduce_mean(op.multiply(x, x), integers([_LAST]), keep_dims=True)
    at.write(node.dst, op.divide(x, op.sqrt(op.add(mean, scalar(_params(node).eps)))))


def _masked(scores: Value, at: Built, mask: Tensor, max_bias: float) -> Value:
    """Returns scores, (ne3, heads, rows, cells), with the mask added; each head may have a factor of it (ALiBi)."""
    n3, n_head, rows, cells = _shape(scores)
    found = op.slice(at.read(mask), *(integers(each) for each in ([0, 0], [rows, cells], [1, 1], [2, 3])))
    found = _repeated(found, n3, n_head, rows, cells)
    if max_bias:
        n = 1 << int(math.log2(n_head))
        first, second = 2 ** (-max_bias / n), 2 ** (-max_bias / 2 / n)
        slopes = [first ** (h + 1) if h < n else second ** (2 * (h - n) + 1) for h in range(n_head)]
        found = op.multiply(found, op.constant(np.array(slopes, np.float32).reshape(-1, 1, 1)))
    return op.add(scores, found)


def _softmax(scores: Value, at: Built, sinks: Tensor | None) -> Value:
    """Returns the softmax of each row. A sink is one more score of its head, of which the share is left out."""
    if sinks is None:
        return op.softmax(scores, _LAST)
    n3, n_head, rows, cells = _shape(scores)
    one = op.broadcast(reshaped(at.read(sinks), 1, n_head, 1, 1), integers([n3, n_head, rows, 1]))
    found = op.softmax(op.concat([scores, one], _LAST), _LAST)
    return op.slice(found, *(integers([each]) for each in (0, cells, 1, 3)))


def _soft_max(at: Built, node: Node) -> None:
    p = _params(node)
    scores = op.multiply(at.read(_at(node, 0)), scalar(p.scale))
    if _has(node, 1):
        scores = _masked(scores, at, _at(node, 1), p.max_bias)
    at.write(node.dst, _softmax(scores, at, _at(node, 2) if _has(node, 2) else None))


def _turns(at: Built, node: Node) -> tuple[Value, Value]:
    """Returns cos and sin, (tokens, 1, n): angles are products one after the other, as in ggml."""
    p, n = _params(node), _params(node).n_dims // 2
    theta = [reshaped(op.convert(at.read(_at(node, 1)), "f32"), -1, 1, 1)]
    while len(theta) < n:
        theta.append(op.multiply(theta[-1], scalar(p.step)))
    angle = op.concat(theta, _LAST)
    if _has(node, 2):
        factors = at.read(replace(_at(node, 2), ne=(n, 1, 1, 1)))
        angle = divided(angle, reshaped(factors, 1, 1, n))
    angle = op.multiply(angle, scalar(p.freq_scale))
    return op.multiply(op.cos(angle), scalar(p.scale)), op.multiply(op.sin(angle), scalar(p.scale))


def _rope(at: Built, node: Node) -> None:
    p, x = _params(node), at.read(_at(node, 0))
    n, shape = p.n_dims // 2, _shape(x)
    factors = _at(node, 2) if _has(node, 2) else None
    how = "rope", p.packed, factors and (at.graph.root_of(factors), factors.offset)
    cos, sin = at.once(how, _at(node, 1), lambda: _turns(at, node))
    parts = op.variadic_split(x, integers(_LAST), integers([2 * n, shape[3] - 2 * n]))
    is_neox = p.mode == _NEOX
    pairs = reshaped(parts.output(0), *shape[:3], *((2, n) if is_neox else (n, 2)))
    axis = 3 if is_neox else 4
    u, v = (op.squeeze(each, integers([axis])) for each in op.split(pairs, integers(axis), 2).outputs())
    turned = (
        op.subtract(op.multiply(u, cos), op.multiply(v, sin)),
        op.add(op.multiply(u, sin), op.multiply(v, cos)),
    )
    found = reshaped(op.concat([op.unsqueeze(each, integers([axis])) for each in turned], axis), *shape[:3], 2 * n)
    at.write(node.dst, op.concat([found, parts.output(1)], _LAST) if shape[3] > 2 * n else found)


# products


def _product(x: Value, w: Value, transposed: bool) -> Value:
    """Returns x, (n3, n2, rows, k), times w, (m3, m2, ...), where dimensions 3 and 2 of w repeat one by one."""
    (n3, n2, rows, k), (m3, m2, *_) = _shape(x), _shape(w)
    if n3 != m3:
        x, w = reshaped(x, m3, n3 // m3, m2, n2 // m2 * rows, k), op.unsqueeze(w, integers([1]))
    else:
        x = reshaped(x, m3, m2, n2 // m2 * rows, k)
    found = op.matmul(x, w, False, transposed)
    return reshaped(found, n3, n2, rows, _shape(found)[_LAST])


def _mul_mat(at: Built, node: Node) -> None:
    weights = _at(node, 0)
    at.write(node.dst, _product(at.rounded(_at(node, 1), weights.type), at.weights(weights), True))


def _flash_attn_ext(at: Built, node: Node) -> None:
    q, k, v, p = _at(node, 0), _at(node, 1), _at(node, 2), _params(node)
    rounds = q.ne[1] < _MANY or k.type != v.type or k.type not in ("f32", "f16")
    x = at.rounded(q, k.type) if rounds and k.type != "q4_1" else at.read(q)
    scores = op.multiply(_product(x, at.read(k), True), scalar(p.scale / (p.logit_softcap or 1)))
    if p.logit_softcap:
        scores = op.multiply(op.tanh(scores), scalar(p.logit_softcap))
    if _has(node, 3):
        scores = _masked(scores, at, _at(node, 3), p.max_bias)
    shares = _softmax(scores, at, _at(node, 4) if _has(node, 4) else None)
    if _has(node, 3):  # of a row that sees nothing
        shares = select(op.is_nan(shares), scalar(0), shares)
    at.write(node.dst, op.transpose(_product(shares, at.read(v), False), integers([0, 2, 1, 3])))


FLOATS, IDS = ("f32", "f16", "bf16"), ("i32", "i64")
_SINGLE, _READ, _WEIGHTS = ("f32",), ("f32", *DECODERS), tuple(ROUNDED)
_MOVED = (*_READ, "i32")

# op -> its kernel, and the types of its output, then of its sources
KERNELS: dict[str, tuple[Kernel, tuple[tuple[str, ...], ...]]] = {
    **dict.fromkeys(("CPY", "DUP", "CONT"), (_copy, (_MOVED, _MOVED, _MOVED))),
    "GET_ROWS": (_get_rows, (("f32", "i32"), (*_WEIGHTS, "i32"), IDS)),
    "SET_ROWS": (_set_rows, (FLOATS, _SINGLE, IDS, FLOATS)),
    "ADD": (_of_two(op.add), (FLOATS, FLOATS, FLOATS)),
    "SUB": (_of_two(op.subtract), (FLOATS, FLOATS, FLOATS)),
    "MUL": (_of_two(op.multiply), (FLOATS, FLOATS, FLOATS)),
    "DIV": (_of_two(divided), (FLOATS, FLOATS, FLOATS)),
    "SILU": (_of_one(_silu), (FLOATS, FLOATS)),
    "SCALE": (_scale, (_SINGLE, _SINGLE)),
    "SWIGLU": (_swiglu, (FLOATS, FLOATS, FLOATS)),
    "RMS_NORM": (_rms_norm, (_SINGLE, _SINGLE)),
    "SOFT_MAX": (_soft_max, (_SINGLE, _SINGLE, FLOATS, _SINGLE)),
    "ROPE": (_rope, (FLOATS, FLOATS, ("i32",), _SINGLE)),
    "MUL_MAT": (_mul_mat, (_SINGLE, _WEIGHTS, _SINGLE)),
    "FLASH_ATTN_EXT": (_flash_attn_ext, (_SINGLE, _SINGLE, _READ, _READ, FLOATS, _SINGLE)),
}


def refusal(node: Node) -> str | None:
    """Returns why a node is not taken: what ggml's CPU does not take either, types, strides, parameters."""
    reason = OWN[node.op].refusal(node)
    if reason is not None:
        return reason
    types = KERNELS[node.op][1]
    if len(node.src) >= len(types):
        return f"{len(node.src)} sources"
    for tensor, taken in zip((node.dst, *node.src), types, strict=False):
        if tensor is None:
            continue
        if tensor.type not in taken:
            return f"type {tensor.type}"
        size = tensor.codec.block_bytes
        if (
            any(n > 1 and nb % size for n, nb in zip(tensor.ne, tensor.nb, strict=True))
            if tensor.codec.dtype
            else (not tensor.has_contiguous_rows())
        ):
            return f"strides {tensor.nb}"
    return _of_params(node)


def _of_params(node: Node) -> str | None:
    types = {tensor.type for tensor in (node.dst, _at(node, 0))}
    if node.op in ("CPY", "DUP", "CONT") and len(types) > 1 and (node.dst.type not in FLOATS or "i32" in types):
        return f"{_at(node, 0).type} to {node.dst.type}"
    if node.op == "ROPE":
        p = _params(node)
        return (
            f"mode {p.mode}, ext_factor {p.ext_factor}"
            if p.mode not in (0, _NEOX) or p.ext_factor or p.n_offs
            else None
        )
    if node.op == "MUL_MAT" and _params(node).hint:
        return "a Hadamard matrix"
    if node.op == "FLASH_ATTN_EXT" and not _at(node, 0).ne[3] == _at(node, 1).ne[3] == _at(node, 2).ne[3]:
        return "sequences share keys"
    return None
