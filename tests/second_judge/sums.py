"""Sums, norms, soft_max, losses, and what sorts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .bounded import U32, B, concatenated, exact, where
from .movers import Result
from .tensors import Given, Node, UnknownError


def sum_(node: Node) -> Result:
    """f16 and bf16 are added up in float32 as well; ggml's f16 dot products may use f16 for a part."""
    x = exact(node.x(0))
    return x.sum().reshape(1, 1, 1, 1)


def sum_rows(node: Node) -> Result:
    return exact(node.x(0)).sum(-1, keepdims=True)


def mean(node: Node) -> Result:
    return exact(node.x(0)).sum(-1, keepdims=True) / float(node.source(0).ne[0])


def cumsum(node: Node) -> Result:
    x = node.x(0)
    n = np.arange(1, x.shape[-1] + 1)
    magnitude = np.cumsum(np.abs(x), -1)
    return B(np.cumsum(x, -1), np.minimum(n, 7 * np.sqrt(n)) * U32 * magnitude)


def repeat_back(node: Node) -> Result:
    """Each element the sum over the repetitions."""
    x, ne = node.x(0), node.dst.shape
    shape = [size for whole, n in zip(x.shape, ne, strict=True) for size in (whole // n, n)]
    return exact(x.reshape(shape)).sum((0, 2, 4, 6))


def get_rows_back(node: Node) -> Result:
    grad, rows = node.x(0), node.x(1).reshape(-1)
    found, error = np.zeros(node.dst.shape), np.zeros(node.dst.shape)
    np.add.at(found[0, 0], rows, grad.reshape(rows.size, -1))
    np.add.at(error[0, 0], rows, np.abs(grad.reshape(rows.size, -1)))
    n = np.bincount(rows, minlength=node.dst.ne[1])[:, None]
    return B(found, n * U32 * error)


def count_equal(node: Node) -> Result:
    n = int((node.x(0) == node.x(1)).sum())
    return np.frombuffer(np.int64(n).tobytes(), np.uint8).reshape(1, 1, 1, 1, 8)


# norms


def norm(node: Node) -> Result:
    return _normed(exact(node.x(0)), -1, node.f32(0))


def _normed(x: B, axis: int | tuple[int, ...], eps: float) -> B:
    n = float(np.prod([x.v.shape[a] for a in np.atleast_1d(axis)]))
    away = x - x.sum(axis, keepdims=True) / n if n > 1 else exact(np.zeros(x.v.shape))
    return away * ((away * away).sum(axis, keepdims=True) / n + eps).sqrt().reciprocal()


def rms_norm(node: Node) -> Result:
    x = exact(node.x(0))
    return x * ((x * x).sum(-1, keepdims=True) / float(x.v.shape[-1]) + node.f32(0)).sqrt().reciprocal()


def rms_norm_back(node: Node) -> Result:
    dz, x, eps = exact(node.x(0)), exact(node.x(1)), node.f32(0)
    n = float(x.v.shape[-1])
    squares, products = (x * x).sum(-1, keepdims=True), (x * dz).sum(-1, keepdims=True)
    return (dz - x * (products / (squares + eps * n))) * (squares / n + eps).sqrt().reciprocal()


def l2_norm(node: Node) -> Result:
    x = exact(node.x(0))
    size = (x * x).sum(-1, keepdims=True).sqrt()
    return x * B(np.maximum(size.v, node.f32(0)), size.e).reciprocal()


def group_norm(node: Node) -> Result:
    x, groups, eps = exact(node.x(0)), node.i32(0), node.f32(1)
    channels = x.v.shape[1]
    each = -(-channels // groups)
    if channels > each * groups or each * (groups - 1) >= channels:
        raise UnknownError("groups without channels")
    return concatenated([_normed(x[:, i : i + each], (1, 2, 3), eps) for i in range(0, channels, each)], 1)


# soft_max


def slopes(heads: int, max_bias: float) -> np.ndarray:
    """ALiBi's slope of each head."""
    if max_bias <= 0:
        return np.ones(heads)
    n = 2.0 ** np.floor(np.log2(heads))
    h = np.arange(heads)
    first, second = 2.0 ** (-max_bias / n), 2.0 ** (-max_bias / 2 / n)
    return np.where(h < n, first ** (h + 1), second ** (2 * (h - n) + 1))


def masked(logits: B, mask: np.ndarray | None, max_bias: float) -> B:
    """Logits (ne3, heads, rows, columns) with slope times mask."""
    if mask is None:
        return logits
    n3, heads, rows, _ = logits.v.shape
    mask = mask[np.arange(n3) % mask.shape[0]][:, np.arange(heads) % mask.shape[1], :rows]
    slope = slopes(heads, max_bias)[None, :, None, None]
    with np.errstate(all="ignore"):
        bias = slope * mask
        # powf is wrong by a few units
        e = np.where(np.isfinite(bias), (8 * U32 * np.abs(bias) if max_bias > 0 else 0.0), 0.0)
        v = logits.v + bias
        gone = v == -np.inf
        e = np.where(gone & np.isfinite(logits.e), 0.0, logits.e + e + 2 * U32 * (np.abs(v) + np.abs(logits.v)))
    return B(v, e)


def shares(t: B, sinks: np.ndarray | None) -> tuple[B, B]:
    """exp(t - max) of each row, and their sum with that of the sink of each head."""
    top = t.max(-1)
    if sinks is not None:
        sink = exact(sinks.reshape(1, -1, 1, 1))
        top = where(sink.v > top.v, sink, top)
    away = t - top
    away = B(away.v, np.where(t.v == -np.inf, 0.0, away.e))
    weights = away.exp()
    total = weights.sum(-1, keepdims=True)
    return weights, total if sinks is None else total + (sink - top).exp()


def soft_max(node: Node) -> Result:
    x = exact(node.x(0))
    mask = node.x(1) if node.has(1) else None
    t = masked(x * node.f32(0), mask, node.f32(1))
    weights, total = shares(t, node.x(2) if node.has(2) else None)
    return weights / total


def soft_max_back(node: Node) -> Result:
    dy, y = exact(node.x(0)), exact(node.x(1))
    return (dy - (dy * y).sum(-1, keepdims=True)) * y * node.f32(0)


def cross_entropy_loss(node: Node) -> Result:
    x, target = exact(node.x(0)), node.x(1)
    top = x.max(-1)
    logs = x - top - (x - top).exp().sum(-1, keepdims=True).log()
    rows = float(np.prod(target.shape[:3]))
    return -((logs * target).sum() / rows).reshape(1, 1, 1, 1)


def cross_entropy_loss_back(node: Node) -> Result:
    grad, x, target = node.x(0).reshape(-1)[0], exact(node.x(1)), node.x(2)
    weights, total = shares(x, None)
    return (weights / total - target) * (exact(grad) / float(np.prod(target.shape[:3])))


# what sorts: any order of equal values is right


def argmax(node: Node) -> Result:
    """The place of the largest of each row; of equal ones, any."""
    x = _ordered(node)

    def units(result: Given) -> np.ndarray:
        place = result.exact.reshape(x.shape[2])
        rows = x[0, 0]
        inside = (place >= 0) & (place < rows.shape[1])
        at = np.take_along_axis(rows, np.where(inside, place, 0)[:, None], 1)[:, 0]
        return np.where(inside & (at == rows.max(1)), 0.0, np.inf)

    return units


def _ordered(node: Node) -> np.ndarray:
    x = node.x(0)
    if np.isnan(x).any():
        raise UnknownError("NaN has no order")
    return x


def argsort(node: Node) -> Result:
    x, down = _ordered(node), node.i32(0) == 1
    order = np.sort(x, -1)[..., ::-1] if down else np.sort(x, -1)

    def units(result: Given) -> np.ndarray:
        place = result.exact
        permutation = (np.sort(place, -1) == np.arange(x.shape[-1])).all(-1, keepdims=True)
        if not permutation.all():
            return np.where(permutation, 0.0, np.inf)
        return np.where(np.take_along_axis(x, place, -1) == order, 0.0, np.inf)

    return units


def top_k(node: Node) -> Result:
    """The places of the k largest, in any order."""
    x, k = _ordered(node), node.dst.ne[0]
    largest = np.sort(x, -1)[..., x.shape[-1] - k :]

    def units(result: Given) -> np.ndarray:
        place = np.sort(result.exact, -1)
        valid = (place >= 0) & (place < x.shape[-1])
        once = np.concatenate([np.ones((*place.shape[:3], 1), bool), np.diff(place, axis=-1) > 0], -1)
        found = np.sort(np.take_along_axis(x, np.where(valid, place, 0), -1), -1)
        return np.where(valid & once & (found == largest), 0.0, np.inf)

    return units


OPS: dict[str, Callable[[Node], Result]] = {
    "SUM": sum_, "SUM_ROWS": sum_rows, "MEAN": mean, "CUMSUM": cumsum, "REPEAT_BACK": repeat_back,
    "GET_ROWS_BACK": get_rows_back, "COUNT_EQUAL": count_equal, "NORM": norm, "RMS_NORM": rms_norm,
    "RMS_NORM_BACK": rms_norm_back, "L2_NORM": l2_norm, "GROUP_NORM": group_norm, "SOFT_MAX": soft_max,
    "SOFT_MAX_BACK": soft_max_back, "CROSS_ENTROPY_LOSS": cross_entropy_loss,
    "CROSS_ENTROPY_LOSS_BACK": cross_entropy_loss_back, "ARGMAX": argmax, "ARGSORT": argsort, "TOP_K": top_k,
}  # fmt: skip
