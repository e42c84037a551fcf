"""ROPE: rotary position embedding, as ggml_compute_forward_rope computes it on a processor with fused multiply-add."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.registry import op

_NORMAL, _NEOX = 0, 2

Floats = NDArray[np.float32]


class _Params(NamedTuple):
    """op_params of ROPE"""

    n_past: int
    n_dims: int
    mode: int
    n_ctx: int
    n_ctx_orig: int
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float
    section_t: int
    section_h: int
    section_w: int
    section_e: int
    n_offs: int


def _params(params: bytes) -> _Params:
    return _Params(*struct.unpack("5i6f5i", params))


def _corrected_dims(p: _Params) -> tuple[float, float]:
    """ggml_rope_yarn_corr_dims"""

    def dim(rotations: float) -> float:
        return float(p.n_dims * np.log(p.n_ctx_orig / (rotations * 2 * np.pi)) / (2 * np.log(p.freq_base)))

    return max(0.0, np.floor(dim(p.beta_fast))), min(p.n_dims - 1.0, np.ceil(dim(p.beta_slow)))


def _angles(p: _Params, positions: NDArray[np.int32], factors: Floats | None) -> tuple[Floats, Floats]:
    """cos and sin of every position's angles, (positions, n_dims / 2): ggml_rope_cache_init and rope_yarn.

    The angles are float32 products, one after the other, as there: their rounding decides the last bits of the result.
    """
    pair = np.arange(p.n_dims // 2, dtype=np.float32)
    steps = np.full((len(positions), p.n_dims // 2), np.float32(p.freq_base ** (-2 / p.n_dims)))
    steps[:, 0] = positions
    theta = np.multiply.accumulate(steps, axis=1)
    if factors is not None:
        theta = theta / factors[: p.n_dims // 2]
    scale, angle = np.float32(p.attn_factor), np.float32(p.freq_scale) * theta
    if p.ext_factor:
        low, high = _corrected_dims(p)
        ramp = np.float32(p.ext_factor) * (1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)).astype(np.float32)
        angle = angle * (1 - ramp) + theta * ramp
        scale *= np.float32(1 + 0.1 * np.log(1 / p.freq_scale))
    exact = angle.astype(np.float64)
    return np.cos(exact).astype(np.float32) * scale, np.sin(exact).astype(np.float32) * scale


def _rounded(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """To float32, as a fused multiply-add leaves it: one product is rounded, then the sum with the other one."""
    return x.astype(np.float32).astype(np.float64)


def _refuse(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: bytes) -> str | None:
    p = _params(params)
    if p.mode not in (_NORMAL, _NEOX):
        return f"mode {p.mode}"
    if dst.ne != x.ne or positions.ne != (x.ne[2], 1, 1, 1):
        return f"x of ne {x.ne}, positions of ne {positions.ne} do not fit dst of ne {dst.ne}"
    return None


@op("ROPE", types=[("f32", "f32", "i32"), ("f16", "f16", "i32")], refuse=_refuse, optional=True)
def rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: bytes) -> None:
    """Rotates pairs of a row's n_dims elements by angles of the row's position; the others stay.

    A pair is two neighbours (mode normal) or two elements half of n_dims apart (mode neox).
    """
    p = _params(params)
    cos, sin = _angles(p, positions.view()[0, 0, 0], factors.view()[0, 0, 0] if factors is not None else None)
    cos, sin = cos[:, None], sin[:, None]
    rows = x.view().astype(np.float64)
    if p.mode == _NORMAL:
        first, second = (slice(p.n_offs + i, p.n_offs + p.n_dims, 2) for i in (0, 1))
    else:
        half = p.n_dims // 2
        first, second = (slice(p.n_offs + i * half, p.n_offs + (i + 1) * half) for i in (0, 1))
    x0, x1 = rows[..., first].copy(), rows[..., second].copy()
    rows[..., first] = x0 * cos - _rounded(x1 * sin)
    rows[..., second] = x0 * sin + _rounded(x1 * cos)
    rows = _rounded(rows)
    dst.view()[...] = rows
