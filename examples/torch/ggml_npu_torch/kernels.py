"""What computes each op: a function that binds a node to a call of torch on views of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor as Array
from torch.nn import functional

from ggml_backend_npu import Backend, Node, Options, Tensor
from ggml_backend_npu.ops import OWN

from .blocks import DECODERS, ENCODERS, ROUNDED
from .memory import DTYPES, FLOATS, Bound, Value, decoded, encoded, params, view

Call = Callable[[], object]
Bind = Callable[[Bound, Node], Call]

F32 = torch.float32
_NORMAL, _NEOX = 0, 2
_MANY = 64  # queries that ggml's CPU does not round


def _at(node: Node, index: int) -> Tensor:
    found = node.src[index]
    assert found is not None
    return found


def _has(node: Node, index: int) -> bool:
    return len(node.src) > index and node.src[index] is not None


def _floats(tensor: Tensor) -> Value:
    """A tensor as float32."""
    found, type = view(tensor), tensor.type
    return (lambda: found) if type == "f32" else lambda: decoded(found, type)


# movers


def _copy(of: Bound, node: Node) -> Call:
    x, out, source, target = view(_at(node, 0)), view(node.dst), _at(node, 0).type, node.dst.type
    if source == target or (source in DTYPES and target in DTYPES):
        return lambda: out.copy_(x.reshape(out.shape))
    if target in DTYPES:
        return lambda: out.copy_(decoded(x, source).reshape(out.shape))
    return lambda: out.copy_(encoded(decoded(x, source), target).reshape(out.shape))


def _places(shape: tuple[int, int], device: torch.device) -> tuple[Array, Array]:
    """The indices of dimensions 3 and 2, to be broadcast with ids (ne3, ne2, n)."""
    n3, n2 = shape
    return torch.arange(n3, device=device)[:, None, None], torch.arange(n2, device=device)[:, None]


def _get_rows(of: Bound, node: Node) -> Call:
    x, ids, out = view(_at(node, 0)), view(_at(node, 1))[0], view(node.dst)
    type, to_float = _at(node, 0).type, node.dst.type == "f32"
    third, second = _places(x.shape[:2], x.device)

    def run() -> None:
        rows = x[0, 0].index_select(0, ids[0, 0]) if ids.shape[:2] == (1, 1) else x[third, second, ids.long()]
        out.copy_((decoded(rows, type) if to_float else rows).reshape(out.shape))

    return run


def _set_rows(of: Bound, node: Node) -> Call:
    x, ids, out, type = view(_at(node, 0)), view(_at(node, 1))[0], view(node.dst), node.dst.type
    third, second = _places(x.shape[:2], x.device)
    repeats = (x.shape[0] // ids.shape[0], x.shape[1] // ids.shape[1], 1)

    def run() -> None:
        rows = encoded(x, type)
        if x.shape[:2] == (1, 1):
            out[0, 0].index_copy_(0, ids[0, 0].long(), rows[0, 0])
        else:
            out[third, second, ids.long().repeat(repeats)] = rows

    return run


def _repeat(of: Bound, node: Node) -> Call:
    x, out = view(_at(node, 0)), view(node.dst)
    repeats = [n // m for n, m in zip(out.shape, x.shape, strict=True)]
    return lambda: out.copy_(x.repeat(repeats))


def _concat(of: Bound, node: Node) -> Call:
    parts, out, dim = [view(_at(node, 0)), view(_at(node, 1))], view(node.dst), 3 - params(node).dim
    return lambda: out.copy_(torch.cat(parts, dim))


# element by element


def _of_two(function: Callable[..., Array]) -> Bind:
    def bind(of: Bound, node: Node) -> Call:
        a, b, out = view(_at(node, 0)), view(_at(node, 1)), view(node.dst)
        repeats = [n // m for n, m in zip(a.shape, b.shape, strict=True)]
        if all(r == 1 or m == 1 for r, m in zip(repeats, b.shape, strict=True)):
            return lambda: function(a, b, out=out)
        return lambda: function(a, b.repeat(repeats), out=out)

    return bind


def _of_one(function: Callable[[Array], Array]) -> Bind:
    def bind(of: Bound, node: Node) -> Call:
        x, out = _floats(_at(node, 0)), view(node.dst)
        return lambda: out.copy_(function(x()))

    return bind


def _scale(of: Bound, node: Node) -> Call:
    x, out, p = view(_at(node, 0)), view(node.dst), params(node)
    if not p.bias:
        return lambda: torch.mul(x, p.scale, out=out)
    return lambda: out.copy_(x * p.scale + p.bias)


def _clamp(of: Bound, node: Node) -> Call:
    x, out, p = view(_at(node, 0)), view(node.dst), params(node)
    return lambda: torch.clamp_min(x.clamp_max(p.max), p.min, out=out)


def _add_id(of: Bound, node: Node) -> Call:
    a, b, ids, out = view(_at(node, 0)), view(_at(node, 1))[0, 0], view(_at(node, 2))[0, 0], view(node.dst)
    return lambda: torch.add(a, b[ids.long()], out=out)


@cache
def _table(name: str, device: torch.device) -> Array:
    """An op of all float16 numbers, as float32."""
    x = Tensor.of(np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32))
    dst = Tensor.of(np.empty(1 << 16, np.float32))
    Backend("table", options=Options(ops="all")).compute(Node(name, dst, (x,)))
    return torch.from_numpy(dst.view().reshape(-1)).to(device)


def _looked_up(name: str, limit: float = math.inf) -> Callable[[Array], Array]:
    """A function that ggml's CPU looks up by float16; beyond the limit it is x, or 0."""

    def function(x: Array) -> Array:
        y = _table(name, x.device)[x.half().view(torch.int16).to(torch.int32) & 0xFFFF]
        return y.masked_fill(x <= -limit, 0).where(x < limit, x)

    return function


_gelu, _gelu_quick = _looked_up("GELU", 10), _looked_up("GELU_QUICK")


def _glu(function: Callable[[Array], Array]) -> Bind:
    def bind(of: Bound, node: Node) -> Call:
        gate, up = map(_floats, _gate_and_up(node))
        out = view(node.dst)
        return lambda: torch.mul(function(gate()), up(), out=out)

    return bind


def _gate_and_up(node: Node) -> tuple[Tensor, Tensor]:
    a, p = _at(node, 0), params(node)
    if _has(node, 1):
        return a, _at(node, 1)
    first = replace(a, ne=(a.ne[0] // 2, *a.ne[1:]))
    second = replace(first, offset=a.offset + first.ne[0] * a.nb[0])
    return (second, first) if p.swapped else (first, second)


def _swiglu_oai(of: Bound, node: Node) -> Call:
    gate, up = map(_floats, _gate_and_up(node))
    out, p = view(node.dst), params(node)

    def run() -> None:
        x = gate().clamp(max=p.limit)
        torch.mul(x * torch.sigmoid(p.alpha * x), up().clamp(-p.limit, p.limit) + 1, out=out)

    return run


# rows


def _rms_norm(of: Bound, node: Node) -> Call:
    x, out, eps = view(_at(node, 0)), view(node.dst), params(node).eps
    return lambda: torch.mul(x, torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), out=out)


def _norm(of: Bound, node: Node) -> Call:
    x, out, eps = view(_at(node, 0)), view(node.dst), params(node).eps
    return lambda: out.copy_(functional.layer_norm(x, x.shape[-1:], eps=eps))


def _l2_norm(of: Bound, node: Node) -> Call:
    x, out, eps = view(_at(node, 0)), view(node.dst), params(node).eps
    return lambda: torch.div(x, torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=eps), out=out)


def _sum_rows(of: Bound, node: Node) -> Call:
    x, out = view(_at(node, 0)), view(node.dst)
    return lambda: torch.sum(x, -1, keepdim=True, out=out)


def _mean(of: Bound, node: Node) -> Call:
    x, out = view(_at(node, 0)), view(node.dst)
    return lambda: torch.mean(x, -1, keepdim=True, out=out)


def _argsort(of: Bound, node: Node) -> Call:
    x, out, order = view(_at(node, 0)), view(node.dst), params(node).order
    return lambda: out.copy_(torch.argsort(x, dim=-1, descending=order != 0, stable=True))


def _slopes(max_bias: float, n_head: int, device: torch.device) -> Array | None:
    """ALiBi's factors of the mask, one per head, (n_head, 1, 1)."""
    if not max_bias:
        return None
    n = 1 << int(math.log2(n_head))
    first, second = 2 ** (-max_bias / n), 2 ** (-max_bias / 2 / n)
    slopes = [first ** (h + 1) if h < n else second ** (2 * (h - n) + 1) for h in range(n_head)]
    return torch.tensor(slopes, dtype=F32, device=device)[:, None, None]


def _mask(of: Bound, tensor: Tensor, rows: int, n_head: int, max_bias: float) -> Value:
    """A mask as float32, (1 or ne3, 1 or heads, rows, cells), once for all nodes that use it."""
    found = view(tensor)[:, :, :rows]
    slopes = _slopes(max_bias, n_head, found.device)

    def make() -> Array:
        mask = found.to(F32)
        if mask.shape[1] not in (1, n_head):
            mask = mask.repeat(1, n_head // mask.shape[1], 1, 1)
        return mask if slopes is None else mask * slopes

    return of.shared(("mask", tensor.start), tensor, (rows, n_head, max_bias), make)


def _masked(scores: Array, mask: Array | None) -> Array:
    """Scores and the mask, whose dimension 3 repeats."""
    if mask is None:
        return scores
    return scores + (mask if len(mask) in (1, len(scores)) else mask.repeat(len(scores) // len(mask), 1, 1, 1))


def _softmax(scores: Array, sinks: Array | None) -> Array:
    """With sinks (heads): each is one more score of its head, of which the share is left out."""
    if sinks is None:
        return torch.softmax(scores, -1)
    one = sinks[:, None, None].expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, one], -1), -1)[..., :-1]


def _soft_max(of: Bound, node: Node) -> Call:
    x, out, p = view(_at(node, 0)), view(node.dst), params(node)
    mask = _mask(of, _at(node, 1), x.shape[2], x.shape[1], p.max_bias) if _has(node, 1) else lambda: None
    sinks = view(_at(node, 2)).reshape(-1) if _has(node, 2) else None
    return lambda: out.copy_(_softmax(_masked(x * p.scale, mask()), sinks))


def _ramp(p, n: int, device: torch.device) -> Array | None:  # type: ignore[no-untyped-def]
    """YaRN: how much of each angle stays as it is."""
    if not p.ext_factor:
        return None

    rotations = torch.tensor((p.beta_fast, p.beta_slow), dtype=torch.float64)
    dims = p.n_dims * torch.log(p.n_ctx_orig / (rotations * 2 * math.pi)) / (2 * math.log(p.freq_base))  # of 0: -inf
    low, high = max(0, dims[0].floor().item()), min(p.n_dims - 1, dims[1].ceil().item())
    pairs = torch.arange(n, dtype=F32, device=device)
    return (1 - ((pairs - low) / max(0.001, high - low)).clamp(0, 1)) * p.ext_factor


def _rope(of: Bound, node: Node) -> Call:
    x, out, positions, p = _floats(_at(node, 0)), view(node.dst), view(_at(node, 1)).reshape(-1), params(node)
    n = p.n_dims // 2
    factors = view(_at(node, 2)).reshape(-1)[:n] if _has(node, 2) else None
    ramp, step, scale = _ramp(p, n, out.device), p.step, float(p.scale)

    def turns() -> Array:
        """cos and sin, (2, tokens, 1, n): angles are products one after the other, as in ggml."""
        theta = [positions.to(F32)]
        while len(theta) < n:
            theta.append(theta[-1] * float(step))
        angle = torch.stack(theta, -1)
        if factors is not None:
            angle = angle / factors
        mixed = angle * p.freq_scale
        if ramp is not None:
            mixed = mixed * (1 - ramp) + angle * ramp
        return torch.stack([mixed.cos(), mixed.sin()])[:, :, None] * scale

    factors_at = None if factors is None else _at(node, 2).start
    how = (p.packed, n, factors_at)
    turned = of.shared(("rope", how), _at(node, 1), how, turns)
    pairs = (slice(0, n), slice(n, 2 * n)) if p.mode == _NEOX else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    first, second = (out[..., each] for each in pairs)
    rest = None if out.shape[-1] == 2 * n or node.dst.address == _at(node, 0).address else out[..., 2 * n :]

    def run() -> None:
        (cos, sin), given = turned(), x()
        u, v = (given[..., each] for each in pairs)
        a, b = u * cos - v * sin, u * sin + v * cos
        first.copy_(a)
        second.copy_(b)
        if rest is not None:
            rest.copy_(given[..., 2 * n :])

    return run


# products


def _mul_mat(of: Bound, node: Node) -> Call:
    weights, out = _at(node, 0), view(node.dst)
    (w, floats, rows), x = of.weights(weights), of.rounded(_at(node, 1), weights.type)
    n3, n2 = weights.ne[3], weights.ne[2]
    if n3 == n2 == 1:
        columns, is_flat = math.prod(out.shape[:-1]), node.dst.is_contiguous()
        parts = list(zip(w[0, 0].split(rows), out.view(columns, -1).split(rows, 1), strict=True)) if is_flat else []

        def flat() -> None:
            given = x().reshape(columns, -1)
            for part, found in parts:
                torch.mm(given, floats(part).t(), out=found)

        return flat if is_flat else lambda: out.copy_(torch.matmul(x(), floats(w[0, 0]).t()))
    r3, r2 = out.shape[0] // n3, out.shape[1] // n2

    def run() -> None:
        columns = x()
        columns = columns.reshape(n3, r3, n2, r2 * columns.shape[2], columns.shape[3])
        out.copy_(torch.matmul(columns, floats(w).transpose(2, 3)[:, None]).reshape(out.shape))

    return run


def _mul_mat_id(of: Bound, node: Node) -> Call:
    weights, ids, out = _at(node, 0), view(_at(node, 2))[0, 0], view(node.dst)[0]  # (tokens, used, n)
    (w, floats, _), x = of.weights(weights), of.rounded(_at(node, 1), weights.type)
    experts, used = w[0], out.shape[1]
    if ids.numel() <= len(experts):

        def few() -> None:
            columns = x()[0]
            chosen = floats(experts.index_select(0, ids.reshape(-1))).unflatten(0, ids.shape)  # (tokens, used, n, k)
            out.copy_((chosen @ columns.repeat(1, used // columns.shape[1], 1)[..., None])[..., 0])

        return few

    def run() -> None:
        columns = x()[0]
        for number, expert in enumerate(experts):  # all of them, so that nobody waits for the ids
            found = torch.matmul(columns, floats(expert).t())
            found = found.repeat(1, used // found.shape[1], 1)
            out.copy_(torch.where((ids == number)[..., None], found, out))

    return run


def _flash_attn_ext(of: Bound, node: Node) -> Call:
    q, k, v = _at(node, 0), _at(node, 1), _at(node, 2)
    out, p = view(node.dst), params(node)
    exact = q.ne[1] >= _MANY and k.type == v.type and k.type in ("f32", "f16")
    rounds = ROUNDED["f32" if exact or k.type in ("q4_1", "q5_1") else k.type]
    mask = _mask(of, _at(node, 3), q.ne[1], q.ne[2], p.max_bias) if _has(node, 3) else lambda: None
    sinks = view(_at(node, 4)).reshape(-1) if _has(node, 4) else None
    queries, keys, values = _floats(q), _floats(k), _floats(v)
    n_cells = k.ne[1]

    def run() -> None:
        x, y, z, m = rounds(queries()), keys(), values(), mask()
        n3, n_head, n, width = x.shape
        if len(y) != n3:
            y, z = y.repeat_interleave(n3 // len(y), 0), z.repeat_interleave(n3 // len(z), 0)
        if m is not None:
            m = m[..., :n_cells]
        if not p.logit_softcap and sinks is None and y.shape[1] == z.shape[1]:
            x = x.reshape(n3, y.shape[1], -1, width)  # the heads that share a key are queries of one head
            if m is not None:
                m = m.repeat(n3 // len(m), 1, 1, 1) if len(m) not in (1, n3) else m
                shared = n_head // y.shape[1]
                one = n == m.shape[1] == 1
                m = m if one or shared == 1 else m.expand(-1, n_head, -1, -1).reshape(len(m), y.shape[1], -1, n_cells)
            found = functional.scaled_dot_product_attention(x, y, z, attn_mask=m, scale=p.scale)
        else:
            y, z = (each.repeat_interleave(n_head // each.shape[1], 1) for each in (y, z))
            scores = x @ y.transpose(-1, -2) * (p.scale / (p.logit_softcap or 1))
            if p.logit_softcap:
                scores = p.logit_softcap * torch.tanh(scores)
            found = _softmax(_masked(scores, m), sinks).nan_to_num(0) @ z
        out.copy_(found.reshape(n3, n_head, n, -1).transpose(1, 2))

    return run


_UNARY: dict[str, Callable[[Array], Array]] = {
    "ABS": torch.abs,
    "NEG": torch.neg,
    "EXP": torch.exp,
    "LOG": torch.log,
    "SQR": torch.square,
    "SIN": torch.sin,
    "COS": torch.cos,
    "TANH": torch.tanh,
    "RELU": lambda x: functional.threshold(x, 0, 0),
    "SIGMOID": torch.sigmoid,
    "SOFTPLUS": functional.softplus,
    "SILU": functional.silu,
    "GELU": _gelu,
    "GELU_QUICK": _gelu_quick,
    "GELU_ERF": functional.gelu,
}
KERNELS: dict[str, Bind] = {
    **{name: _of_one(function) for name, function in _UNARY.items()},
    **dict.fromkeys(("CPY", "DUP", "CONT"), _copy),
    "GET_ROWS": _get_rows,
    "SET_ROWS": _set_rows,
    "REPEAT": _repeat,
    "CONCAT": _concat,
    "ADD": _of_two(torch.add),
    "SUB": _of_two(torch.sub),
    "MUL": _of_two(torch.mul),
    "DIV": _of_two(torch.div),
    "ADD_ID": _add_id,
    "SCALE": _scale,
    "CLAMP": _clamp,
    "GEGLU": _glu(_gelu),
    "GEGLU_QUICK": _glu(_gelu_quick),
    "GEGLU_ERF": _glu(functional.gelu),
    "SWIGLU": _glu(functional.silu),
    "SWIGLU_OAI": _swiglu_oai,
    "RMS_NORM": _rms_norm,
    "NORM": _norm,
    "L2_NORM": _l2_norm,
    "SUM_ROWS": _sum_rows,
    "MEAN": _mean,
    "ARGSORT": _argsort,
    "SOFT_MAX": _soft_max,
    "ROPE": _rope,
    "MUL_MAT": _mul_mat,
    "MUL_MAT_ID": _mul_mat_id,
    "FLASH_ATTN_EXT": _flash_attn_ext,
}


def refusal(node: Node) -> str | None:
    """Returns why a node is not taken: what ggml's CPU does not take either, types, parameters, strides."""
    reason = OWN[node.op].refusal(node)
    if reason is not None:
        return reason
    copied = node.op in ("CPY", "DUP", "CONT") and _at(node, 0).type == node.dst.type  # whole blocks, of any type
    for index, tensor in enumerate((node.dst, *node.src)):
        if tensor is None:
            continue
        if tensor.type not in DTYPES and tensor.type not in (DECODERS if index else ENCODERS) and not copied:
            return f"type {tensor.type}"
        if any(
            n > 1 and nb % DTYPES.get(tensor.type, torch.uint8).itemsize
            for n, nb in zip(tensor.ne, tensor.nb, strict=True)
        ):
            return f"strides {tensor.nb}"
    if node.op == "ROPE":
        p = params(node)
        return f"mode {p.mode}" if p.mode not in (_NORMAL, _NEOX) or p.n_offs else None
    if node.op == "ADD" and _at(node, 0).type not in FLOATS:
        return f"type {_at(node, 0).type}"
    if node.op == "MUL_MAT" and params(node).hint:
        return "a Hadamard matrix"
    return None
