"""ROPE, ROPE_BACK: rotary position embedding, as ggml's CPU computes it on a processor with fused multiply-add."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.registry import cases, exact, mistakes, probes
from ggml_backend_npu.registry.checks import Exact, Make, Mistake, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.params import Instead, Params, f32, i32
from quant.kernels.jit import array_at, compiled, copy, fused_multiply_add, inlined
from quant.kernels.late import types
from quant.kernels.records import Dims, Place, record_at, row_of
from quant.kernels.threads import Job, Work
from quant.runs import CODES, F32, narrow_run, widen_run

_NORMAL, _NEOX, _MROPE, _VISION, _IMROPE = 0, 2, 8, 24, 40
_ANGLE_BYTES = 400  # that could be moved while one angle is computed

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Rope(Params):
    """op_params of ROPE and ROPE_BACK: ggml_rope_impl, ggml_rope_set_offset."""

    n_past: i32
    n_dims: i32
    mode: Annotated[i32, Instead("mode (0 normal, 2 neox)", (0, 2))]
    n_ctx: i32
    n_ctx_orig: i32
    freq_base: Annotated[f32, Instead("frequency base", (10000.0, 500_000.0, 1_000_000.0))]
    freq_scale: Annotated[f32, Instead("frequency scale", (1.0, 0.5, 2.0))]
    ext_factor: Annotated[f32, Instead("extrapolation factor", (0.0,))]
    attn_factor: Annotated[f32, Instead("attention factor", (1.0,))]
    beta_fast: f32
    beta_slow: f32
    section_t: i32
    section_h: i32
    section_w: i32
    section_e: i32
    n_offs: Annotated[i32, Instead("the first rotated element", (0,))]

    @property
    def sections(self) -> tuple[int, int, int, int]:
        """How many neighbouring pairs, over and over, use which of a token's four positions."""
        return self.section_t, self.section_h, self.section_w, self.section_e

    @property
    def n_positions(self) -> int:
        """Positions per token."""
        return 4 if self.mode & _MROPE else 1

    @property
    def n_pairs(self) -> int:
        """Pairs of a row that are rotated."""
        return self.n_dims if self.mode == _VISION else self.n_dims // 2

    @property
    def step(self) -> np.float32:
        """The factor from one angle to the next."""
        return np.float32(self.freq_base ** float(np.float32(-2) / np.float32(self.n_dims)))

    @property
    def scale(self) -> np.float32:
        """The factor of cos and sin."""
        scale = np.float32(self.attn_factor)
        return scale * np.float32(1 + 0.1 * np.log(1 / self.freq_scale)) if self.ext_factor else scale


def _axes(p: Rope) -> tuple[Integers, Integers]:
    """For each angle, which of the token's positions it uses, and which position's angles restart with it; -1 for none.

    Equals ggml_mrope_cache_init.
    """
    axes, restarts = np.zeros(p.n_pairs, np.int64), np.full(p.n_pairs, -1)
    if p.n_positions == 1:
        return axes, restarts
    ends = np.cumsum(p.sections)
    starts = [0, *ends[:3].tolist()]
    for pair in range(p.n_pairs):
        sector = pair % int(ends[3])
        if p.mode == _IMROPE:
            axis = sector % 3
            axes[pair] = axis if sector < 3 * p.sections[axis] else 3
        else:
            axes[pair] = min(int(np.searchsorted(ends, sector, side="right")), 3)
        if p.mode == _VISION and sector in starts:
            restarts[pair] = starts.index(sector)
    return axes, restarts


@np.errstate(divide="ignore")  # the log of an n_ctx_orig of 0 is -inf, as in ggml
def _ramp(p: Rope) -> Floats:
    """How much of each angle stays as it is for positions beyond n_ctx_orig; the rest is scaled. 0 without YaRN."""
    if not p.ext_factor:
        return np.zeros(p.n_pairs, np.float32)

    def dim(rotations: float) -> float:
        return float(p.n_dims * np.log(p.n_ctx_orig / (rotations * 2 * np.pi)) / (2 * np.log(p.freq_base)))

    low, high = max(0.0, np.floor(dim(p.beta_fast))), min(p.n_dims - 1.0, np.ceil(dim(p.beta_slow)))
    pair = np.arange(p.n_pairs, dtype=np.float32)
    ramp: Floats = (1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)).astype(np.float32)
    return ramp * np.float32(p.ext_factor)


def _angles(p: Rope, positions: NDArray[np.int32], factors: Floats | None) -> tuple[Floats, Floats]:
    """cos and sin of every token's angles, (tokens, pairs), from positions (n_positions, tokens).

    The angles are float32 products, one after the other, as in ggml: their rounding decides the last bits of the
    result.
    """
    theta, angles = positions.astype(np.float32), []
    for axis, restart in zip(*_axes(p), strict=True):
        if restart >= 0:
            theta[restart] = positions[restart]
        angles.append(theta[axis].copy())
        theta *= p.step
    extrapolated = np.stack(angles, axis=-1)
    if factors is not None:
        extrapolated = extrapolated / factors[: p.n_pairs]
    ramp = _ramp(p)
    angle = np.float32(p.freq_scale) * extrapolated * (1 - ramp) + extrapolated * ramp
    exact = angle.astype(np.float64)
    return np.cos(exact).astype(np.float32) * p.scale, np.sin(exact).astype(np.float32) * p.scale


def _rounded(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """To float32, as a fused multiply-add leaves it: one product is rounded, then the sum with the other one."""
    return x.astype(np.float32).astype(np.float64)


def _refuse(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> str | None:
    p = params
    if p.mode not in (_NORMAL, _NEOX, _MROPE, _VISION, _IMROPE):
        return f"mode {p.mode}"
    if dst.ne != x.ne or positions.ne != (p.n_positions * x.ne[2], 1, 1, 1) or not positions.is_contiguous():
        return f"x of ne {x.ne}, positions of ne {positions.ne} do not fit dst of ne {dst.ne}"
    for role, tensor in (("x", x), ("dst", dst)):
        if not tensor.has_contiguous_rows():
            return f"{role} rows have gaps: nb0 is {tensor.nb[0]}"
    if p.n_dims <= 0 or p.n_dims % 2 or p.n_offs < 0 or p.n_offs % 2 or x.ne[0] % 2 or p.n_offs + p.n_dims > x.ne[0]:
        return f"{p.n_dims} dimensions from {p.n_offs} on, of {x.ne[0]}"
    if p.mode == _VISION and (p.n_offs or 2 * p.n_dims != x.ne[0]):
        return f"{p.n_dims} dimensions from {p.n_offs} on, of {x.ne[0]}, for vision"
    if p.n_positions == 4 and (min(p.sections) < 0 or not 0 < sum(p.sections) <= x.ne[0] or not any(p.sections[:3])):
        return f"sections {p.sections} of {x.ne[0]} dimensions"
    if factors is not None and (factors.type != "f32" or factors.ne[0] < p.n_pairs or not factors.is_contiguous()):
        return f"factors of type {factors.type}, ne {factors.ne} for {p.n_pairs} angles"
    return None


def _rotate(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, p: Rope, sign: int) -> None:
    by_axis = positions.view().reshape(p.n_positions, -1)
    cos, sin = _angles(p, by_axis, factors.view()[0, 0, 0] if factors is not None else None)
    cos, sin = cos[:, None], sign * sin[:, None]
    n, begin = p.n_pairs, p.n_offs
    if p.mode == _NORMAL:
        first, second = (slice(begin + i, begin + 2 * n, 2) for i in (0, 1))
    else:
        first, second = (slice(begin + i * n, begin + (i + 1) * n) for i in (0, 1))
    rows = x.view().copy()
    x0, x1 = rows[..., first].astype(np.float64), rows[..., second].astype(np.float64)
    with np.errstate(all="ignore"):
        rows[..., first] = _rounded(x0 * cos - _rounded(x1 * sin))
        rows[..., second] = _rounded(x0 * sin + _rounded(x1 * cos))
    dst.view()[...] = rows


_TYPES = [("f32", "f32", "i32"), ("f16", "f16", "i32")]
_BOUND = 1e-11  # of functions of large angles
_ROLES = {"positions": "the positions", "factors": "the frequency factors"}
_PLAIN, _MULTI = "cttt iii ffffff", "cttt ipii ffffff"


def _built_by(*suffixes: str) -> dict[str, str]:
    kinds = (("ext", _PLAIN), ("multi", _MULTI))
    made = {f"ggml_rope_{kind}{suffix}": arguments for kind, arguments in kinds for suffix in suffixes}
    return {**made, "ggml_rope_set_offset": "ti"}


@op(
    "ROPE",
    types=_TYPES,
    refuse=_refuse,
    params=Rope,
    bound=_BOUND,
    moved=True,
    roles=_ROLES,
    built_by=_built_by("", "_inplace"),
)
def rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    """Rotates n_dims elements of each row, from n_offs on, in pairs, by angles of the row's position; other elements
    stay.

    x (elements, heads, tokens, sequences), dst alike; positions (tokens), or four times as many. A pair is two
    neighbours (mode normal), or two elements half of n_dims apart (neox; also mrope and imrope, where a token has four
    positions, each for some of the pairs), or half a row apart (vision). An angle is divided by its factor. Equals
    ggml_compute_forward_rope.
    """
    _rotate(dst, x, positions, factors, params, 1)


@op(
    "ROPE_BACK",
    types=_TYPES,
    refuse=_refuse,
    params=Rope,
    bound=_BOUND,
    moved=True,
    roles=_ROLES,
    built_by=_built_by("_back"),
)
def rope_back(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    """As ROPE, rotating in the other direction. Equals ggml_compute_forward_rope_back."""
    _rotate(dst, x, positions, factors, params, -1)


class Rotation(NamedTuple):
    """Rows of src, of ne elements, into dst; the rows of both have no gaps. Some fields are addresses:

    sign       1; -1: the other direction
    step       the factor from one angle to the next
    scale      of cos and sin
    axes, restarts  of one int64 per pair, as `_axes` returns them
    ramp       of one float32 per pair, as `_ramp` returns them
    factors    of one float32 per pair, which divides its angle; 0: there are none
    positions  of int32, (n_positions, tokens)
    code       of the type of both
    """

    sign: int
    mode: int
    n_pairs: int
    n_offs: int
    n_positions: int
    step: np.float32
    freq_scale: np.float32
    scale: np.float32
    axes: int
    restarts: int
    ramp: int
    factors: int
    positions: int
    code: int
    ne: Dims
    src: Place
    dst: Place


def scratch_of(of: Rotation) -> int:
    """Bytes that `rotate` works in: the elements of all pairs of a row, cos and sin, and theta of each position."""
    return 4 * (4 * of.n_pairs + of.n_positions)


@inlined
def _turn(of, i2, cos, sin, theta):
    """cos and sin of the angles of a token."""
    n_positions, n_pairs, n_tokens = of.n_positions, of.n_pairs, of.ne[2]
    axis, restart = array_at(of.axes, types.int64, n_pairs), array_at(of.restarts, types.int64, n_pairs)
    ramp = array_at(of.ramp, types.float32, n_pairs)
    position = array_at(of.positions, types.int32, n_positions * n_tokens)
    for i in range(n_positions):
        theta[i] = position[i * n_tokens + i2]
    for pair in range(n_pairs):
        if restart[pair] >= 0:
            theta[restart[pair]] = position[restart[pair] * n_tokens + i2]
        angle = theta[axis[pair]]
        for i in range(n_positions):
            theta[i] *= of.step
        if of.factors:
            angle /= array_at(of.factors + 4 * pair, types.float32, 1)[0]
        angle = of.freq_scale * angle * (types.float32(1) - ramp[pair]) + angle * ramp[pair]
        cos[pair] = math.cos(angle) * of.scale
        sin[pair] = math.sin(angle) * of.scale * types.float32(of.sign)


@compiled
def rotate(p, begin, end, scratch):
    """A unit is one token, with all heads of all sequences."""
    of = record_at(p, Rotation)
    code, n_pairs, n_offs, n1 = of.code, of.n_pairs, of.n_offs, of.ne[1]
    y = scratch
    work, cos = array_at(y, types.float32, 2 * n_pairs), array_at(y + 8 * n_pairs, types.float32, n_pairs)
    sin = array_at(y + 12 * n_pairs, types.float32, n_pairs)
    theta = array_at(y + 16 * n_pairs, types.float32, of.n_positions)
    size = 4 if code == F32 else 2
    for i2 in range(begin, end):
        _turn(of, i2, cos, sin, theta)
        for row in range(n1 * of.ne[3]):
            i1, i3 = row % n1, row // n1
            x, to = row_of(of.src, i1, i2, i3), row_of(of.dst, i1, i2, i3)
            widen_run(code, x + size * n_offs, size, y, 2 * n_pairs)
            if x != to:
                copy(x, to, size * of.ne[0])
            if of.mode == _NORMAL:
                for i in range(n_pairs):
                    x0, x1 = work[2 * i], work[2 * i + 1]
                    work[2 * i] = fused_multiply_add(x0, cos[i], -(x1 * sin[i]))
                    work[2 * i + 1] = fused_multiply_add(x0, sin[i], x1 * cos[i])
            else:
                for i in range(n_pairs):
                    x0, x1 = work[i], work[n_pairs + i]
                    work[i] = fused_multiply_add(x0, cos[i], -(x1 * sin[i]))
                    work[n_pairs + i] = fused_multiply_add(x0, sin[i], x1 * cos[i])
            if code == F32:
                copy(y, to + 4 * n_offs, 8 * n_pairs)
            else:
                narrow_run(y, code, to + 2 * n_offs, 2, 2 * n_pairs)
    return 0


def _bind_rotation(
    dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, p: Rope, sign: int
) -> Call | None:
    if dst.overlaps(x) and (dst.address, dst.nb) != (x.address, x.nb):
        return None
    ramp, (axes, restarts) = _ramp(p), _axes(p)
    of = Rotation(
        sign=sign,
        mode=p.mode,
        n_pairs=p.n_pairs,
        n_offs=p.n_offs,
        n_positions=p.n_positions,
        step=p.step,
        freq_scale=np.float32(p.freq_scale),
        scale=p.scale,
        axes=axes.ctypes.data,
        restarts=restarts.ctypes.data,
        ramp=ramp.ctypes.data,
        factors=factors.address if factors is not None else 0,
        positions=positions.address,
        code=CODES[x.type],
        ne=x.ne,
        src=x.place,
        dst=dst.place,
    )
    n_bytes = x.n_elements * x.codec.block_bytes * 2 + _ANGLE_BYTES * p.n_pairs * x.ne[2]
    return Job(Work(rotate, of, x.ne[2], n_bytes, scratch=scratch_of(of), keep=(axes, restarts, ramp)))


@rope.compiled
def _rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> Call | None:
    return _bind_rotation(dst, x, positions, factors, params, 1)


@rope_back.compiled
def _rope_back(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> Call | None:
    return _bind_rotation(dst, x, positions, factors, params, -1)


def _turns(p: Rope) -> tuple[list[int], list[int]]:
    """For each pair, which of a token's positions rotates it, and its number of steps from the first angle: from that
    of pair 0, or, in mode vision, from that of the position's first pair."""
    axes, powers, begin = [0] * p.n_pairs, [*range(p.n_pairs)], [0] * 4
    if p.n_positions == 4:
        of_sector = np.repeat(range(4), p.sections).tolist()
        starts = np.cumsum([0, *p.sections[:3]]).tolist()
        for pair in range(p.n_pairs):
            sector = pair % len(of_sector)
            axis = of_sector[sector]
            if p.mode == _IMROPE:
                axis = sector % 3 if sector < 3 * p.sections[sector % 3] else 3
            elif p.mode == _VISION and sector in starts:
                begin[starts.index(sector)] = pair
            axes[pair], powers[pair] = axis, pair - begin[axis]
    return axes, powers


def _exact_rotation(sign: int, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> Exact | None:
    p, n, offset = params, params.n_pairs, params.n_offs
    if p.mode not in (_NORMAL, _NEOX, _MROPE, _VISION, _IMROPE):
        return None
    axes, powers = _turns(p)
    by_axis = exact.values(positions).reshape(p.n_positions, -1)
    theta = by_axis[axes].T * p.freq_base ** (-2.0 * np.array(powers) / p.n_dims)
    if factors is not None:
        theta = theta / exact.values(factors).reshape(-1)[:n]
    angle, attn = theta * p.freq_scale, p.attn_factor
    if p.ext_factor:
        low, high = (
            p.n_dims * np.log(p.n_ctx_orig / (rotations * 2 * np.pi)) / (2 * np.log(p.freq_base))
            for rotations in (p.beta_fast, p.beta_slow)
        )
        low, high = max(0.0, np.floor(low)), min(p.n_dims - 1.0, np.ceil(high))
        ramp = p.ext_factor * (1 - np.clip((np.arange(n) - low) / max(0.001, high - low), 0, 1))
        angle = angle * (1 - ramp) + theta * ramp
        attn *= 1 + 0.1 * np.log(1 / p.freq_scale)
    cos, sin = (attn * turn[:, None] for turn in (np.cos(angle), sign * np.sin(angle)))
    first, second = (
        (slice(offset + i, offset + 2 * n, 2) if p.mode == _NORMAL else slice(offset + i * n, offset + (i + 1) * n))
        for i in (0, 1)
    )
    rows = exact.values(x)
    rotated = rows.copy()
    rotated[..., first] = rows[..., first] * cos - rows[..., second] * sin
    rotated[..., second] = rows[..., first] * sin + rows[..., second] * cos
    return rotated


def _make(op: str, mode: int, positions: list[int], ext: float = 0.0) -> Make:
    """A node of a mode at these positions; ext: the extrapolation factor."""

    def make(rng: probes.Rng, types: Types) -> Node:
        n_dims, width = (32, 64) if mode == _VISION else (64, 80)
        sections = (8, 8, 8, 8) if mode == _VISION else (12, 10, 8, 2)
        params = Rope(0, n_dims, mode, 0, 512, 1e4, 1 - ext / 2, ext, 1, 32, 1, *sections, 0)
        at = np.array(positions, np.int32)
        at = np.concatenate([at, at[::-1], at // 2, at * 0 + 3]) if params.n_positions == 4 else at
        shape = 1, len(positions), probes.HEADS, width
        x = probes.normal(rng, types[1], *shape)
        factors = None if mode & _MROPE else probes.tensor("f32", rng.uniform(1, 4, n_dims // 2))
        return probes.node(op, types[0], shape, x, Tensor.of(at), factors, params=params)

    return make


def _mistaken(node: Node, x: Tensor, positions: Tensor, factors: Tensor | None) -> Iterator[Mistake]:
    rows, who = positions.view(), mistakes.source_in_words(1)
    others = {
        f"takes position + 1 for each of {who}": rows + 1,
        f"takes position - 1 for each of {who}": rows - 1,
        f"ignores {who}: all are 0": np.zeros_like(rows),
        f"ignores {who}: the i-th is i": np.broadcast_to(np.arange(rows.shape[-1], dtype=rows.dtype), rows.shape),
    }
    for text, ids in others.items():
        yield Mistake(text, mistakes.altered(node, 1, mistakes.made(positions, ids.astype(rows.dtype))))
    params = Rope.of(node.params)
    if params.n_dims < x.ne[0] and not x.is_contiguous():

        def compute(dst: Tensor) -> None:
            rope.define(dst, x, positions, factors, params=params)
            as_it_lies = replace(x, nb=mistakes.following(x, 1)).view()
            dst.view()[..., params.n_dims :] = as_it_lies[..., params.n_dims :]

        text = f"copies what it does not rotate of src0, elements {params.n_dims} and on, as if there were no gaps"
        if node.op == rope.name:
            yield Mistake(text, node, compute)


@rope.cases
def _nearest(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> list[str]:
    mode = params.mode
    conditions = [cases.has("type", x.type), cases.has("mode", mode), cases.has("ff", factors is not None)]
    if x.type == "f32" or mode in (_NORMAL, _NEOX):
        conditions.append("v=0" if x.is_contiguous() else "v=[12]")
    return conditions


_NEAR, _FAR = [0, 1, 7, 40, 300], [3000, 100000, 517]

for _op, _sign in ((rope, 1), (rope_back, -1)):
    _op.formula(partial(_exact_rotation, _sign))
    _op.mistakes(_mistaken)
    _op.nodes(
        *(_make(_op.name, _mode, _NEAR) for _mode in (_NORMAL, _NEOX, _MROPE, _VISION, _IMROPE)),
        _make(_op.name, _NORMAL, _NEAR, 0.7),
        _make(_op.name, _NEOX, _FAR),
    )
