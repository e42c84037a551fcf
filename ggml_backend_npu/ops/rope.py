"""ROPE, ROPE_BACK: rotary position embedding, as ggml's CPU computes it on a processor with fused multiply-add."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import types
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.params import Params, f32, i32
from ggml_backend_npu.registry import Call, op
from quant.kernels.jit import array_at, bits_float, compiled, copy, fused_multiply_add, keep, parameters, values
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
    mode: i32
    n_ctx: i32
    n_ctx_orig: i32
    freq_base: f32
    freq_scale: f32
    ext_factor: f32
    attn_factor: f32
    beta_fast: f32
    beta_slow: f32
    section_t: i32
    section_h: i32
    section_w: i32
    section_e: i32
    n_offs: i32

    @property
    def sections(self) -> tuple[int, int, int, int]:
        """How many neighbouring angles, over and over, are of which of a token's four positions."""
        return self.section_t, self.section_h, self.section_w, self.section_e

    @property
    def n_positions(self) -> int:
        """Of a token."""
        return 4 if self.mode & _MROPE else 1

    @property
    def n_pairs(self) -> int:
        return self.n_dims if self.mode == _VISION else self.n_dims // 2

    @property
    def step(self) -> np.float32:
        """From one angle to the next, a factor."""
        return np.float32(self.freq_base ** float(np.float32(-2) / np.float32(self.n_dims)))

    @property
    def scale(self) -> np.float32:
        """Of cos and sin."""
        scale = np.float32(self.attn_factor)
        return scale * np.float32(1 + 0.1 * np.log(1 / self.freq_scale)) if self.ext_factor else scale


def _axes(p: Rope) -> tuple[Integers, Integers]:
    """For each angle, which of the token's positions it is of, and which one begins anew with it; -1 where none does.

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

    The angles are float32 products, one after the other, as there: their rounding decides the last bits of the result.
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


@op("ROPE", types=_TYPES, refuse=_refuse, optional=True, params=Rope)
def rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    """Rotates pairs of a row's n_dims elements from n_offs on by angles of the row's position; the others stay.

    x (elements, heads, tokens, sequences). A pair is two neighbours (mode normal) or two elements half of n_dims apart
    (neox; mrope and imrope, where a token has four positions, each that of some pairs) or half a row (vision). An
    angle is divided by its factor. Equals ggml_compute_forward_rope.
    """
    _rotate(dst, x, positions, factors, params, 1)


@op("ROPE_BACK", types=_TYPES, refuse=_refuse, optional=True, params=Rope)
def rope_back(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    """As ROPE, the other way round. Equals ggml_compute_forward_rope_back."""
    _rotate(dst, x, positions, factors, params, -1)


@compiled
def rotate(p, begin, end):
    """Tokens [begin, end), all heads of all sequences."""
    (
        sign, mode, n_pairs, n_offs, n_positions, n_tokens, step_bits, freq_scale_bits, scale_bits, axes, restarts,
        ramps, factors, positions, code, n0, n1, n3, src, src_nb1, src_nb2, src_nb3, dst, dst_nb1, dst_nb2, dst_nb3,
    ) = values(p, 26)  # fmt: skip
    step, freq_scale = bits_float(types.uint32(step_bits)), bits_float(types.uint32(freq_scale_bits))
    scale = bits_float(types.uint32(scale_bits))
    axis, restart = array_at(axes, types.int64, n_pairs), array_at(restarts, types.int64, n_pairs)
    ramp, position = array_at(ramps, types.float32, n_pairs), array_at(positions, types.int32, n_positions * n_tokens)
    cos, sin, work = np.empty(n_pairs, np.float32), np.empty(n_pairs, np.float32), np.empty(2 * n_pairs, np.float32)
    theta, y = np.empty(n_positions, np.float32), types.int64(work.ctypes.data)
    size = 4 if code == F32 else 2
    for i2 in range(begin, end):
        for i in range(n_positions):
            theta[i] = position[i * n_tokens + i2]
        for pair in range(n_pairs):
            if restart[pair] >= 0:
                theta[restart[pair]] = position[restart[pair] * n_tokens + i2]
            angle = theta[axis[pair]]
            for i in range(n_positions):
                theta[i] *= step
            if factors:
                angle /= array_at(factors + 4 * pair, types.float32, 1)[0]
            angle = freq_scale * angle * (types.float32(1) - ramp[pair]) + angle * ramp[pair]
            cos[pair] = math.cos(angle) * scale
            sin[pair] = math.sin(angle) * scale * types.float32(sign)
        for row in range(n1 * n3):
            i1, i3 = row % n1, row // n1
            x = src + i1 * src_nb1 + i2 * src_nb2 + i3 * src_nb3
            to = dst + i1 * dst_nb1 + i2 * dst_nb2 + i3 * dst_nb3
            widen_run(code, x + size * n_offs, size, y, 2 * n_pairs)
            if x != to:
                copy(x, to, size * n0)
            if mode == _NORMAL:
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
    keep(work)
    return 0


def _rotation(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, p: Rope, sign: int) -> Call | None:
    if dst.overlaps(x) and (dst.address, dst.nb) != (x.address, x.nb):
        return None
    ramp, (axes, restarts) = _ramp(p), _axes(p)
    numbers = parameters(
        sign, p.mode, p.n_pairs, p.n_offs, p.n_positions, x.ne[2], p.step, np.float32(p.freq_scale), p.scale,
        axes.ctypes.data, restarts.ctypes.data, ramp.ctypes.data, factors.address if factors is not None else 0,
        positions.address, CODES[x.type], x.ne[0], x.ne[1], x.ne[3],
        x.address, np.array(x.nb[1:]), dst.address, np.array(dst.nb[1:]),
    )  # fmt: skip
    n_bytes = x.n_elements * x.codec.block_bytes * 2 + _ANGLE_BYTES * p.n_pairs * x.ne[2]
    return Job(Work(rotate, numbers, x.ne[2], n_bytes, keep=(axes, restarts, ramp)))


@rope.compiled
def _rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> Call | None:
    return _rotation(dst, x, positions, factors, params, 1)


@rope_back.compiled
def _rope_back(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> Call | None:
    return _rotation(dst, x, positions, factors, params, -1)
