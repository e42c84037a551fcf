"""ROPE and TIMESTEP_EMBEDDING."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .bounded import U32, B, exact
from .movers import Result
from .tensors import Node, UnknownError

NEOX, MROPE, VISION, IMROPE = 2, 8, 24, 40


@dataclass(frozen=True)
class Rope:
    """ROPE's parameters, read from op_params."""

    n: int
    mode: int
    context: int
    base: float
    scale: float
    ext: float
    attn: float
    fast: float
    slow: float
    sections: tuple[int, ...]
    offset: int

    @staticmethod
    def of(node: Node) -> Rope:
        base, scale, ext, attn, fast, slow = (node.f32(k) for k in range(5, 11))
        sections = tuple(node.i32(k) for k in range(11, 15))
        whole = node.i32(1), node.i32(2), node.i32(4)
        return Rope(*whole, base, scale, ext, attn, fast, slow, sections, node.i32(15))

    def ramp(self, pairs: np.ndarray) -> np.ndarray:
        """YaRN: how much of the extrapolated angle each pair takes."""
        ends = [
            self.n * np.log(self.context / (turns * 2 * np.pi)) / (2 * np.log(self.base))
            for turns in (self.fast, self.slow)
        ]
        if any(abs(x - round(x)) < 1e-4 for x in ends):
            raise UnknownError("an end of YaRN's ramp is too near a whole number")
        low, high = max(0.0, np.floor(ends[0])), min(self.n - 1.0, np.ceil(ends[1]))
        y = (pairs - low) / max(0.001, high - low)
        return 1 - np.clip(y, 0, 1)

    def sector(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For M-RoPE: which of the four positions each pair takes, and the power of its frequency."""
        first, second, third, _ = self.sections
        at = pairs % sum(self.sections)
        if self.mode == IMROPE:
            kind = np.full(at.shape, 3)
            for i in range(3):
                kind[(at % 3 == i) & (at < 3 * self.sections[i])] = i
            return kind, pairs
        ends = np.cumsum([first, second, third])
        kind = np.searchsorted(ends, at, side="right")
        if self.mode == VISION:  # each section's angles start anew
            return kind, at - np.concatenate([[0], ends])[kind]
        return kind, pairs


def angles(node: Node, pairs: np.ndarray, rope: Rope) -> tuple[B, B]:
    """Cosine and sine times the magnitude, (positions, pairs)."""
    tokens = node.source(0).ne[2]
    positions = node.x(1).reshape(-1).astype(float)
    if rope.mode & MROPE:
        kind, power = rope.sector(pairs)
        at = positions.reshape(4, tokens)[kind].T
    else:
        power, at = pairs, np.repeat(positions[:tokens, None], pairs.size, 1)
    theta = at * rope.base ** (-2.0 * power / rope.n)
    error = np.abs(theta) * (4 * power + 8) * U32  # theta is multiplied on from pair to pair, by a powf
    far = B(theta, error)
    if node.has(2):
        far = far / node.x(2).reshape(-1)[: pairs.size]
    angle, magnitude = far * rope.scale, exact(rope.attn)
    if rope.ext != 0:
        mix = rope.ramp(pairs) * rope.ext
        angle = angle * (1.0 - exact(mix)) + far * exact(mix).with_error(16 * U32)
        magnitude = magnitude * (1.0 + 0.1 * exact(1 / rope.scale).log())
    return angle.smooth(np.cos, 1.0) * magnitude, angle.smooth(np.sin, 1.0) * magnitude


def rope(node: Node) -> Result:
    x, rope = node.x(0), Rope.of(node)
    vision = rope.mode == VISION
    n = x.shape[-1] if vision else rope.n
    pairs = np.arange(n // 2)
    if rope.mode == 0:
        first, second = 2 * pairs, 2 * pairs + 1
    elif rope.mode in (NEOX, MROPE, VISION, IMROPE):
        first, second = pairs, pairs + (rope.n if vision else rope.n // 2)
    else:
        raise UnknownError(f"rope mode {rope.mode}")
    first, second = first + rope.offset, second + rope.offset
    cos, sin = angles(node, pairs, rope)
    if node.op == "ROPE_BACK":
        sin = -sin
    cos, sin = (B(t.v[None, :, None, :], t.e[None, :, None, :]) for t in (cos, sin))
    a, b = exact(x[..., first]), exact(x[..., second])
    v, e = x.copy(), np.zeros(x.shape)
    for places, found in ((first, a * cos - b * sin), (second, a * sin + b * cos)):
        v[..., places], e[..., places] = found.v, found.e
    return B(v, e)


def timestep_embedding(node: Node) -> Result:
    steps, dim, period = node.x(0).reshape(-1), node.i32(0), node.i32(1)
    half = dim // 2
    j = np.arange(half)
    power = -np.log(float(period)) * j / half
    freq = B(np.exp(power), np.exp(power) * (8 * np.abs(power) + 8) * U32)
    angle = exact(steps[:, None]) * freq
    found_v, found_e = np.zeros(node.dst.shape), np.zeros(node.dst.shape)
    for at, f in ((0, np.cos), (half, np.sin)):
        part = angle.smooth(f, 1.0)
        found_v[0, 0, :, at : at + half], found_e[0, 0, :, at : at + half] = part.v, part.e
    if node.dst.ne[0] > 2 * half + 1:
        found_e[..., 2 * half + 1 :] = np.inf
    return B(found_v, found_e)


OPS: dict[str, Callable[[Node], Result]] = {
    "ROPE": rope, "ROPE_BACK": rope, "TIMESTEP_EMBEDDING": timestep_embedding,
}  # fmt: skip
