"""What computes each op: a function that gives the elements of its output, or writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from openvino import opset15 as op

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN

from .built import Built
from .numbers import HALVES, ROUNDED, WITH_MINIMA, Value, divided, integers, reshaped, scalar

Kernel = Callable[[Built, Node], None]

_NORMAL, _NEOX = 0, 2
_MANY = 64  # queries that ggml's CPU does not round


def _params(node: Node) -> Any:
    record: Any = OWN[node.op].params
    return record and record.of(node.params)


def _at(node: Node, index: int) -> Any:
    """Returns a source; None if it is left out."""
    return node.src[index] if len(node.src) > index else None


def _shape(x: Value) -> list[int]:
    return list(x.get_output_shape(0))


def _repeated(x: Value, *shape: int) -> Value:
    """Returns x repeated as a whole to a shape; what is broadcast anyway stays 1."""
    repeats = [1 if m == 1 else n // m for n, m in zip(shape, _shape(x), strict=True)]
    return op.tile(x, integers(repeats)) if any(n > 1 for n in repeats) else x


# movers


def _copy(at: Built, node: Node) -> None:
    source = _at(node, 0)
    at.write(node.dst, at.moved(source) if source.type == node.dst.type else at.read(source))


def _get_rows(at: Built, node: Node) -> None:
    x, ids = _at(node, 0), at.read(_at(node, 1))
    are_bytes = x.codec.dtype is None and at.calls
    rows = at.moved(x) if are_bytes else at.read(x)
    n3, n2, n1, width = _shape(rows)
    third, second = np.ogrid[: _shape(ids)[1], : _shape(ids)[2]]
    places = op.add(ids, integers(((third * n2 + second) * n1)[None, :, :, None]))
    found = op.gather(reshaped(rows, n3 * n2 * n1, width), reshaped(places, -1), integers(0))
    at.write(node.dst, at.decoded(found, x.type) if are_bytes else found)


def _set_rows(at: Built, node: Node) -> None:
    rows, ids = at.read(_at(node, 0)), at.read(_at(node, 1))
    n3, n2, n, _ = _shape(rows)
    ids = op.broadcast(_repeated(reshaped(ids, *_shape(ids)[1:]), n3, n2, n), integers([n3, n2, n]))
    at.write_rows(node.dst, rows, ids)


# element by element


def _of_two(function: Callable[[Value, Value], Value]) -> Kernel:
    def kernel(at: Built, node: Node) -> None:
        a, b = at.read(_at(node, 0)), at.read(_at(node, 1))
        at.write(node.dst, function(a, _repeated(b, *_shape(a))))

    return kernel


def _of_one(function: Callable[[Value, Any], Value]) -> Kernel:
    """Of a tensor and the node's parameters."""

    def kernel(at: Built, node: Node) -> None:
        at.write(node.dst, function(at.read(_at(node, 0)), _params(node)))

    return kernel


def _glu(function: Callable[[Value], Value]) -> Kernel:
    def kernel(at: Built, node: Node) -> None:
        if _at(node, 1) is not None:
            gate, up = at.read(_at(node, 0)), at.read(_at(node, 1))
        else:
            n, rest = divmod(_at(node, 0).ne[0], 2)
            halves = op.variadic_split(at.read(_at(node, 0)), integers(3), integers([n, n, rest])).outputs()[:2]
            gate, up = halves[::-1] if _params(node).swapped else halves
        at.write(node.dst, op.multiply(function(gate), up))

    return kernel


# rows


def _mean(x: Value) -> Value:
    return op.reduce_mean(x, integers([-1]), keep_dims=True)


def _over_root(x: Value, p: Any) -> Value:
    """Returns rows divided by the root of their mean square."""
    return op.divide(x, op.sqrt(op.add(_mean(op.multiply(x, x)), scalar(p.eps))))


def _argsort(x: Value, p: Any) -> Value:
    found = op.topk(x, integers(_shape(x)[-1]), -1, "max" if p.order else "min", "value", "i32", stable=True)
    return op.convert(found.output(1), "i32")  # a node, as others give


def _softmax(scores: Value, at: Built, mask: Tensor | None) -> Value:
    """Returns the softmax of scores, (ne3, heads, rows, cells), with a mask added."""
    if mask is None:
        return op.softmax(scores, -1)
    n3, n_head, rows, cells = _shape(scores)
    found = op.slice(at.read(mask), *map(integers, ([0, 0], [rows, cells], [1, 1], [2, 3])))
    return op.softmax(op.add(scores, _repeated(found, n3, n_head, rows, cells)), -1)


def _soft_max(at: Built, node: Node) -> None:
    scores = op.multiply(at.read(_at(node, 0)), scalar(_params(node).scale))
    at.write(node.dst, _softmax(scores, at, _at(node, 1)))


def _turns(at: Built, node: Node) -> tuple[Value, Value]:
    """Returns cos and sin, (1, tokens, 1, n): angles are products one after the other, as in ggml."""
    p, n = _params(node), _params(node).n_dims // 2
    theta = [reshaped(op.convert(at.read(_at(node, 1)), "f32"), 1, -1, 1, 1)]
    while len(theta) < n:
        theta.append(op.multiply(theta[-1], scalar(p.step)))
    angle = op.concat(theta, -1)
    if _at(node, 2) is not None:
        angle = divided(angle, at.read(replace(_at(node, 2), ne=(n, 1, 1, 1))))
    angle = op.multiply(angle, scalar(p.freq_scale))
    return op.multiply(op.cos(angle), scalar(p.scale)), op.multiply(op.sin(angle), scalar(p.scale))


def _rope(at: Built, node: Node) -> None:
    p, x = _params(node), at.read(_at(node, 0))
    n, axis = p.n_dims // 2, integers(3)
    factors = _at(node, 2)
    how = "rope", p.packed, None if factors is None else (at.graph.root_of(factors), factors.offset)
    cos, sin = at.once(how, _at(node, 1), lambda: _turns(at, node))
    pairs = np.arange(2 * n).reshape(n, 2).T.reshape(-1) if p.mode == _NORMAL else np.arange(2 * n)
    order = np.concatenate([pairs, np.arange(2 * n, x.get_output_shape(0)[3])])
    split = op.variadic_split(op.gather(x, integers(order), axis), axis, integers([n, n, len(order) - 2 * n]))
    u, v, rest = split.outputs()
    found = [
        op.subtract(op.multiply(u, cos), op.multiply(v, sin)),
        op.add(op.multiply(u, sin), op.multiply(v, cos)),
        *([rest] if len(order) > 2 * n else []),
    ]
    at.write(node.dst, op.gather(op.concat(found, -1), integers(np.argsort(order)), axis))


# products


def _product(x: Value, parts: list[Value], transposed: bool) -> Value:
    """Returns x, (n3, n2, rows, k), times parts of w, (m3, m2, ...), side by side; dimensions 3 and 2 of w repeat one
    by one."""
    (n3, n2, rows, k), (m3, m2, *_) = _shape(x), _shape(parts[0])
    outer = (m3, m2) if n3 == m3 else (m3, n3 // m3, m2)
    x = reshaped(x, *outer, n2 // m2 * rows, k)
    parts = parts if n3 == m3 else [op.unsqueeze(w, integers([1])) for w in parts]
    found = op.concat([op.matmul(x, w, False, transposed) for w in parts], -1)
    return reshaped(found, n3, n2, rows, _shape(found)[-1])


def _mul_mat(at: Built, node: Node) -> None:
    at.write(node.dst, _product(at.rounded(_at(node, 1), _at(node, 0).type), at.weights(_at(node, 0)), True))


def _mul_mat_id(at: Built, node: Node) -> None:
    """Multiplies all columns with all experts, and takes what is wanted."""
    w, x, ids = at.weights(_at(node, 0)), at.rounded(_at(node, 1), _at(node, 0).type), at.read(_at(node, 2))
    n, n_experts, (_, tokens, each, k) = node.dst.ne[0], _at(node, 0).ne[2], _shape(x)
    found = op.concat([op.matmul(reshaped(x, 1, 1, tokens * each, k), rows, False, True) for rows in w], -1)
    token, place = np.ogrid[:tokens, : node.dst.ne[1]]
    places = op.add(op.multiply(ids, integers(tokens * each)), integers(token * each + place % each))
    at.write(node.dst, op.gather(reshaped(found, n_experts * tokens * each, n), reshaped(places, -1), integers(0)))


def _flash_attn_ext(at: Built, node: Node) -> None:
    q, k, v = _at(node, 0), _at(node, 1), _at(node, 2)
    is_rounded = q.ne[1] < _MANY or k.type != v.type or k.type not in ("f32", "f16")
    x = at.rounded(q, k.type) if is_rounded and k.type not in WITH_MINIMA else at.read(q)
    scores = op.multiply(_product(x, [at.read(k)], True), scalar(_params(node).scale))
    shares = _softmax(scores, at, _at(node, 3))
    shares = op.select(op.is_nan(shares), scalar(0), shares)  # of a row that sees nothing
    at.write(node.dst, op.transpose(_product(shares, [at.read(v)], False), integers([0, 2, 1, 3])))


FLOATS, IDS = ("f32", *HALVES), ("i32", "i64")
_SINGLE, _READ, _WEIGHTS = ("f32",), (*FLOATS, "q8_0", "q4_0", "q4_1"), tuple(ROUNDED)
_MOVED = (*_READ, "i32")

# op -> its kernel, and the types of its output, then of its sources
KERNELS: dict[str, tuple[Kernel, tuple[tuple[str, ...], ...]]] = {
    **dict.fromkeys(("CPY", "DUP", "CONT"), (_copy, (_MOVED, _MOVED, _MOVED))),
    "GET_ROWS": (_get_rows, (("f32", "i32"), (*_WEIGHTS, "i32"), IDS)),
    "SET_ROWS": (_set_rows, (FLOATS, _SINGLE, IDS, FLOATS)),
    "ADD": (_of_two(op.add), (FLOATS, FLOATS, FLOATS)),
    "MUL": (_of_two(op.multiply), (FLOATS, FLOATS, FLOATS)),
    "DIV": (_of_two(divided), (FLOATS, FLOATS, FLOATS)),
    "SCALE": (_of_one(lambda x, p: op.add(op.multiply(x, scalar(p.scale)), scalar(p.bias))), (_SINGLE, _SINGLE)),
    "CLAMP": (_of_one(lambda x, p: op.clamp(x, p.min, p.max)), (_SINGLE, _SINGLE)),
    "GELU": (_of_one(lambda x, _: op.gelu(x, "tanh")), (FLOATS, FLOATS)),
    "GEGLU": (_glu(lambda x: op.gelu(x, "tanh")), (FLOATS, FLOATS, FLOATS)),
    "SWIGLU": (_glu(lambda x: divided(x, op.add(scalar(1), op.exp(op.negative(x))))), (FLOATS, FLOATS, FLOATS)),
    "RMS_NORM": (_of_one(_over_root), (_SINGLE, _SINGLE)),
    "NORM": (_of_one(lambda x, p: _over_root(op.subtract(x, _mean(x)), p)), (_SINGLE, _SINGLE)),
    "SUM_ROWS": (_of_one(lambda x, _: op.reduce_sum(x, integers([-1]), keep_dims=True)), (_SINGLE, _SINGLE)),
    "ARGSORT": (_of_one(_argsort), (("i32",), _SINGLE)),
    "SOFT_MAX": (_soft_max, (_SINGLE, _SINGLE, FLOATS)),
    "ROPE": (_rope, (FLOATS, FLOATS, ("i32",), _SINGLE)),
    "MUL_MAT": (_mul_mat, (_SINGLE, _WEIGHTS, _SINGLE)),
    "MUL_MAT_ID": (_mul_mat_id, (_SINGLE, _WEIGHTS, _SINGLE, ("i32",))),
    "FLASH_ATTN_EXT": (_flash_attn_ext, (_SINGLE, _SINGLE, _READ, _READ, FLOATS)),
}


def refusal(node: Node) -> str | None:
    """Returns why a node is not taken: what ggml's CPU does not take either, types, strides, parameters."""
    if (reason := OWN[node.op].refusal(node)) is not None:
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
        whole = all(n == 1 or nb % size == 0 for n, nb in zip(tensor.ne, tensor.nb, strict=True))
        if not (whole if tensor.codec.dtype else tensor.has_contiguous_rows()):
            return f"strides {tensor.nb}"
    return _of_params(node)


def _of_params(node: Node) -> str | None:
    source, p = _at(node, 0), _params(node)
    if node.op in ("CPY", "DUP", "CONT") and source.type != node.dst.type:
        return None if node.dst.type in FLOATS and source.type in _READ else f"{source.type} to {node.dst.type}"
    if node.op == "ARGSORT" and source.ne[0] > 4096:  # OpenVINO's time grows with its square
        return f"rows of {source.ne[0]}"
    if node.op == "ROPE" and (p.mode not in (_NORMAL, _NEOX) or p.ext_factor or p.n_offs):
        return f"mode {p.mode}, ext_factor {p.ext_factor}"
    if node.op in ("SOFT_MAX", "FLASH_ATTN_EXT") and p.max_bias:
        return "ALiBi"
    if node.op == "FLASH_ATTN_EXT" and (p.logit_softcap or len({x.ne[3] for x in node.src[:3]}) > 1):
        return f"logit_softcap {p.logit_softcap}, sequences {node.src[1].ne[3]}"
    return "a Hadamard matrix" if node.op == "MUL_MAT" and p.hint else None
