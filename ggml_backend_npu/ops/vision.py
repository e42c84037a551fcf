"""Ops that only image encoders and generators use: WIN_PART, WIN_UNPART, GET_REL_POS, ADD_REL_POS (of SAM), and
TIMESTEP_EMBEDDING."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels.functions import Floats, cosf, expf, logf, sinf
from ggml_backend_npu.registry import exact, probes
from ggml_backend_npu.registry.checks import Exact, Make, Probe, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.params import Params, i32
from ggml_backend_npu.registry.shapes import gaps, gaps_in_rows, other_ne
from quant.kernels.jit import array_at, compiled, copy
from quant.kernels.late import types
from quant.kernels.records import Place, record_at
from quant.kernels.threads import Job, Work

_COST = 16  # how much longer than to move an element it takes to compute a sine


@dataclass(frozen=True)
class WinPart(Params):
    """op_params of WIN_PART: the number of windows in dimensions 1 and 2, and their size; ggml_win_part."""

    nep0: i32
    nep1: i32
    w: i32


@dataclass(frozen=True)
class WinUnpart(Params):
    """op_params of WIN_UNPART: the windows' size; ggml_win_unpart."""

    w: i32


@dataclass(frozen=True)
class AddRelPos(Params):
    """op_params of ADD_REL_POS: whether dst holds src0 already; ggml_add_rel_pos_impl."""

    inplace: i32


@dataclass(frozen=True)
class Timestep(Params):
    """op_params of TIMESTEP_EMBEDDING: ggml_timestep_embedding."""

    dim: i32
    max_period: i32


def _refuse_part(dst: Tensor, x: Tensor, params: WinPart) -> str | None:
    p = params
    fits = p.w > 0 and (p.nep0, p.nep1) == (-(-x.ne[1] // p.w), -(-x.ne[2] // p.w))
    if not fits or x.ne[3] != 1 or dst.ne != (x.ne[0], p.w, p.w, p.nep0 * p.nep1):
        return f"x of ne {x.ne} in {p.nep0} x {p.nep1} windows of {p.w} does not fit dst of ne {dst.ne}"
    return gaps(x=x, dst=dst)


@op("WIN_PART", types=[("f32", "f32")], refuse=_refuse_part, params=WinPart, built_by={"ggml_win_part": "ct i"})
def win_part(dst: Tensor, x: Tensor, params: WinPart) -> None:
    """dst[py * nep0 + px, i2, i1] = x[py * w + i2, px * w + i1], 0 outside x: splits an image into windows.

    x (channels, width, height) -> dst (channels, w, w, windows). Equals ggml_compute_forward_win_part.
    """
    p, image = params, x.view()[0]
    for window, (py, px) in zip(dst.view(), np.ndindex(p.nep1, p.nep0), strict=True):
        part = image[py * p.w : (py + 1) * p.w, px * p.w : (px + 1) * p.w]
        height, width = part.shape[:2]
        window[:height, :width] = part
        window[height:] = 0
        window[:height, width:] = 0


class MoveWindows(NamedTuple):
    """Addresses of an image and of windows of w * w pixels, both without gaps; n_bytes: of a pixel, all its channels.

    back  windows are put together, not split
    """

    image: int
    windows: int
    n_bytes: int
    width: int
    height: int
    w: int
    back: int


@compiled
def move_windows(p, begin, end, scratch):
    """A unit is a row of a window."""
    of = record_at(p, MoveWindows)
    w, n_bytes = of.w, of.n_bytes
    along = -(-of.width // w)
    for row in range(begin, end):
        window = row // w
        i1, i2 = window % along * w, window // along * w + row % w
        n_inside = min(w, of.width - i1) * n_bytes if i2 < of.height else 0
        at, part = of.image + (i2 * of.width + i1) * n_bytes, of.windows + row * w * n_bytes
        if of.back:
            copy(part, at, n_inside)
        else:
            copy(at, part, n_inside)
            array_at(part + n_inside, types.uint8, w * n_bytes - n_inside)[:] = types.uint8(0)
    return 0


def _bind_windows(image: Tensor, windows: Tensor, back: bool) -> Call | None:
    """The call of `move_windows`; None if the two share bytes."""
    if image.overlaps(windows):
        return None
    n, width, height, _ = image.ne
    w = windows.ne[1]
    of = MoveWindows(image.address, windows.address, 4 * n, width, height, w, back)
    n_rows = -(-width // w) * -(-height // w) * w
    return Job(Work(move_windows, of, n_rows, image.nbytes, keep=(image, windows)))


@win_part.compiled
def _win_part(dst: Tensor, x: Tensor, params: WinPart) -> Call | None:
    return _bind_windows(x, dst, back=False)


def _refuse_unpart(dst: Tensor, x: Tensor, params: WinUnpart) -> str | None:
    w = params.w
    needed = -(-dst.ne[1] // w) * -(-dst.ne[2] // w) if w > 0 else 0
    if w < 1 or x.ne[:3] != (dst.ne[0], w, w) or x.ne[3] < needed or dst.ne[3] != 1:
        return f"x of ne {x.ne} in windows of {w} does not fit dst of ne {dst.ne}"
    return gaps(x=x, dst=dst)


@op(
    "WIN_UNPART",
    types=[("f32", "f32")],
    refuse=_refuse_unpart,
    params=WinUnpart,
    built_by={"ggml_win_unpart": "ct iii"},
)
def win_unpart(dst: Tensor, x: Tensor, params: WinUnpart) -> None:
    """dst = the image that WIN_PART split into windows, without the padding.

    x (channels, w, w, windows) -> dst (channels, width, height). Equals ggml_compute_forward_win_unpart.
    """
    w, image = params.w, dst.view()[0]
    along = -(-dst.ne[1] // w)
    for i, window in enumerate(x.view()[: along * -(-dst.ne[2] // w)]):
        part = image[i // along * w :, i % along * w :][:w, :w]
        part[...] = window[: part.shape[0], : part.shape[1]]


@win_unpart.compiled
def _win_unpart(dst: Tensor, x: Tensor, params: WinUnpart) -> Call | None:
    return _bind_windows(dst, x, back=True)


def _refuse_get(dst: Tensor, x: Tensor) -> str | None:
    n = dst.ne[1]
    if dst.ne != (x.ne[0], n, n, 1) or x.ne[1:] != (2 * n - 1, 1, 1):
        return f"x of ne {x.ne} does not fit dst of ne {dst.ne}"
    return gaps(x=x, dst=dst)


@op(
    "GET_REL_POS",
    types=[("f16", x) for x in ("f16", "bf16")],
    refuse=_refuse_get,
    built_by={"ggml_get_rel_pos": "ct ii"},
)
def get_rel_pos(dst: Tensor, x: Tensor) -> None:
    """dst[i2, i1] = x[i2 - i1 + n - 1]: the embedding of each position relative to each other, of n; the bits of x are
    copied.

    x (n_embd, 2 n - 1) -> dst (n_embd, n, n). Equals ggml_compute_forward_get_rel_pos.
    """
    n, rows = dst.ne[1], x.view().view(np.uint16)[0, 0]
    strides = rows.strides[0], -rows.strides[0], rows.strides[1]
    dst.view().view(np.uint16)[0] = np.lib.stride_tricks.as_strided(rows[n - 1 :], (n, n, x.ne[0]), strides)


class RelPos(NamedTuple):
    """Addresses of tensors without gaps: rows of n_bytes, 2 n - 1 in x, n * n in dst."""

    x: int
    dst: int
    n: int
    n_bytes: int


@compiled
def rel_pos(p, begin, end, scratch):
    """A unit is n rows of dst, a matrix. Each begins with one row of x, behind which the matrix before it comes again;
    the first one takes all of its rows from x."""
    of = record_at(p, RelPos)
    n, n_bytes = of.n, of.n_bytes
    for i2 in range(begin, end):
        x, y = of.x + (i2 + n - 1) * n_bytes, of.dst + i2 * n * n_bytes
        for i1 in range(n if i2 == begin else 1):
            copy(x - i1 * n_bytes, y + i1 * n_bytes, n_bytes)
        if i2 > begin:
            copy(y - n * n_bytes, y + n_bytes, (n - 1) * n_bytes)
    return 0


@get_rel_pos.compiled
def _get_rel_pos(dst: Tensor, x: Tensor) -> Call | None:
    if x.overlaps(dst):
        return None
    of = RelPos(x.address, dst.address, dst.ne[1], 2 * x.ne[0])
    n_bytes = dst.nbytes // 4  # what it reads is in the first cache
    return Job(Work(rel_pos, of, dst.ne[1], n_bytes, keep=(dst, x)))


def _refuse_add(dst: Tensor, x: Tensor, pw: Tensor, ph: Tensor, params: AddRelPos) -> str | None:
    n, rows, n_images = pw.ne[0], pw.ne[1] * pw.ne[2], pw.ne[3]
    if x.ne != (n * n, rows, n_images, 1):
        return f"x of ne {x.ne}, pw of ne {pw.ne}"
    if params.inplace and x.address != dst.address:
        return "in place of another tensor than x"
    return other_ne(x=x, dst=dst) or other_ne(pw=pw, ph=ph) or gaps(x=x, dst=dst, pw=pw, ph=ph)


@op(
    "ADD_REL_POS",
    types=[("f32",) * 4],
    refuse=_refuse_add,
    params=AddRelPos,
    bound=1e-12,
    wide=True,
    built_by={"ggml_add_rel_pos": "cttt", "ggml_add_rel_pos_inplace": "cttt"},
)
def add_rel_pos(dst: Tensor, x: Tensor, pw: Tensor, ph: Tensor, params: AddRelPos) -> None:
    """dst[i, kh, kw] = x[i, kh, kw] + ph[i, kh] + pw[i, kw]; below the diagonal pw is added first.

    x (n * n, width * height, images), pw and ph (n, width, height, images). Equals ggml_compute_forward_add_rel_pos.
    """
    n = pw.ne[0]
    scores = x.view().reshape(-1, n, n)
    w, h = pw.view().reshape(-1, 1, n), ph.view().reshape(-1, n, 1)
    below = np.tri(n, k=-1, dtype=bool)
    with np.errstate(all="ignore"):
        dst.view()[...] = np.where(below, scores + w + h, scores + h + w).reshape(dst.view().shape)


class AddPositions(NamedTuple):
    """Addresses of tensors without gaps; matrices of n * n."""

    x: int
    pw: int
    ph: int
    dst: int
    n: int


@compiled
def add_positions(p, begin, end, scratch):
    """A unit is a matrix of n * n."""
    of = record_at(p, AddPositions)
    n = of.n
    for unit in range(begin, end):
        w = array_at(of.pw + 4 * unit * n, types.float32, n)
        h = array_at(of.ph + 4 * unit * n, types.float32, n)
        for row in range(n):
            at = 4 * (unit * n + row) * n
            scores, y = array_at(of.x + at, types.float32, n), array_at(of.dst + at, types.float32, n)
            for i in range(row):
                y[i] = scores[i] + w[i] + h[row]
            for i in range(row, n):
                y[i] = scores[i] + h[row] + w[i]
    return 0


@add_rel_pos.compiled
def _add_rel_pos(dst: Tensor, x: Tensor, pw: Tensor, ph: Tensor, params: AddRelPos) -> Call | None:
    if (x.overlaps(dst) and x.address != dst.address) or pw.overlaps(dst) or ph.overlaps(dst):
        return None
    of = AddPositions(x.address, pw.address, ph.address, dst.address, pw.ne[0])
    return Job(Work(add_positions, of, pw.n_elements // max(1, pw.ne[0]), 2 * dst.nbytes, keep=(dst, x, pw, ph)))


@add_rel_pos.nodes
def _make_positions(rng: probes.Rng, types: Types) -> Node:
    x, (pw, ph) = probes.normal(rng, "f32", 1, 2, 15, 36), (probes.normal(rng, "f32", 2, 3, 5, 6) for _ in range(2))
    return probes.node("ADD_REL_POS", "f32", (2, 15, 36), x, pw, ph, params=AddRelPos(0))


def _refuse_embedding(dst: Tensor, timesteps: Tensor, params: Timestep) -> str | None:
    if params.dim < 1 or params.max_period < 1 or dst.ne != (params.dim, timesteps.ne[0], 1, 1):
        return f"{timesteps.ne[0]} timesteps in {params.dim} of {params.max_period} do not fit dst of ne {dst.ne}"
    return gaps_in_rows(timesteps=timesteps, dst=dst)


def _frequencies(p: Timestep) -> Floats:
    """max_period ** -(j / half), in the steps in which ggml rounds."""
    half = p.dim // 2
    places = np.arange(half, dtype=np.float32)
    return expf(-logf(np.full(1, p.max_period, np.float32)) * places / np.float32(max(1, half)))


@op(
    "TIMESTEP_EMBEDDING",
    types=[("f32", "f32")],
    refuse=_refuse_embedding,
    params=Timestep,
    bound=1e-11,  # of functions of large angles
)
def timestep_embedding(dst: Tensor, timesteps: Tensor, params: Timestep) -> None:
    """dst[t, j] = cos(timestep * f), dst[t, j + half] = sin(timestep * f), for f = max_period ** -(j / half); the last
    element of an odd dim is 0.

    timesteps (n) -> dst (dim, n). Equals ggml_compute_forward_timestep_embedding.
    """
    half, y = params.dim // 2, dst.view()[0, 0]
    with np.errstate(all="ignore"):
        angles = timesteps.view()[0, 0, 0, :, None] * _frequencies(params)
        y[:, :half], y[:, half : 2 * half] = cosf(angles), sinf(angles)
    y[:, 2 * half :] = 0


class EmbedTimesteps(NamedTuple):
    """timesteps, frequencies  addresses; there are dim // 2 frequencies"""

    timesteps: int
    frequencies: int
    dim: int
    dst: Place


@compiled
def embed_timesteps(p, begin, end, scratch):
    """A unit is a timestep, a row of dst."""
    of = record_at(p, EmbedTimesteps)
    dst, dim, half = of.dst, of.dim, of.dim // 2
    times, factors = array_at(of.timesteps, types.float32, end), array_at(of.frequencies, types.float32, half)
    for i in range(begin, end):
        y = array_at(dst.address + i * dst.nb[1], types.float32, dim)
        for j in range(half):
            angle = times[i] * factors[j]
            y[j] = np.cos(angle)
            y[j + half] = np.sin(angle)
        if dim % 2:
            y[dim - 1] = 0
    return 0


@timestep_embedding.compiled
def _timestep_embedding(dst: Tensor, timesteps: Tensor, params: Timestep) -> Call:
    table = np.ascontiguousarray(_frequencies(params))
    of = EmbedTimesteps(timesteps.address, table.ctypes.data, params.dim, dst.place)
    return Job(Work(embed_timesteps, of, timesteps.ne[0], _COST * dst.nbytes, keep=(dst, timesteps, table)))


@timestep_embedding.formula
def _exact_timestep_embedding(timesteps: Tensor, params: Timestep) -> Exact:
    half, times = params.dim // 2, exact.values(timesteps)[..., 0, :, None]
    angles = times * params.max_period ** -(np.arange(half) / half)
    rest = np.zeros((1, 1, timesteps.ne[0], params.dim % 2))
    return np.concatenate([np.cos(angles), np.sin(angles), rest], axis=-1)


def _make_embedding(dim: int) -> Make:
    def make(rng: probes.Rng, types: Types) -> Node:
        timesteps = probes.tensor("f32", rng.uniform(0, 1000, (1, 1, 1, 9)))
        return probes.node("TIMESTEP_EMBEDDING", "f32", (9, dim), timesteps, params=Timestep(dim, 10000))

    return make


timestep_embedding.nodes(_make_embedding(40))
timestep_embedding.probes(lambda: [Probe("", probes.of_widths(_make_embedding, (2, 7, 40, 320)))])
