"""Parts of the nodes that errors are measured on: small sources of any type, from a random number generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import quant
from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ir import PARAMS_BYTES, Node, Tensor
from ggml_backend_npu.registry.checks import Make, Probe, Types
from ggml_backend_npu.registry.params import Params
from quant import Codec, codec

Rng: TypeAlias = "np.random.Generator"  # quoted: numpy.random is loaded when it is used

HEADS, TOKENS = 4, 6
_LARGE = 100.0
_WIDTHS = (*range(1, 36), 47, 64, 70, 130)


def tensor(type: str, x: NDArray[Any]) -> Tensor:
    """Values as a tensor of a type, rounded; for a type without a quantiser, blocks of random bits that are numbers."""
    x = np.asarray(x)
    kind = codec(type)
    if kind.dtype is not None:
        return Tensor.of(x.astype(kind.dtype))
    try:
        blocks = quant.quantize(x.astype(np.float32), type)
    except Exception:
        blocks = _any_blocks(kind, x.size // kind.block_size)
    return Tensor.of(
        np.ascontiguousarray(blocks).reshape(*x.shape[:-1], x.shape[-1] // kind.block_size * kind.block_bytes), type
    )


def _any_blocks(kind: Codec, n: int) -> NDArray[np.uint8]:
    blocks = np.random.default_rng(n).integers(0, 256, (n, kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        blocks[~(np.abs(codecs.bound().codec(kind.name).decode(blocks)) < _LARGE).all(axis=1)] = 0
    return blocks


def normal(rng: Rng, type: str, *shape: int, size: float = 1.0) -> Tensor:
    """Normally distributed values as a tensor of a type and a shape (ne3, ..., ne0)."""
    return tensor(type, size * rng.standard_normal(shape))


def node(op: str, type: str, shape: tuple[int, ...], *src: Tensor | None, params: Params | None = None) -> Node:
    """A node over its sources, with a dst of a type and shape that is 0."""
    dst = tensor(type, np.zeros((1,) * (4 - len(shape)) + shape))
    return Node(op, dst, src, bytes(PARAMS_BYTES) if params is None else params.packed)


def of_rows(op: str, width: int = 512, params: Params | None = None, size: float = 0.1, dst: int = 0) -> Make:
    """A row of dst, or `dst` elements of it, from each of 5 x 3 rows, one of which is small."""

    def make(rng: Rng, types: Types) -> Node:
        x = size * rng.standard_normal((1, 3, 5, width))
        x[0, 1, 2] /= 8
        return node(op, types[0], (1, 3, 5, dst or width), tensor(types[1], x), params=params)

    return make


def of_elements(op: str, low: float = -6, high: float = 6, params: Params | None = None, width: int = 64) -> Make:
    """A function of values from low to high, in rows of some width."""

    def make(rng: Rng, types: Types) -> Node:
        shape = 1, 3, 5, width
        return node(op, types[0], shape, tensor(types[1], rng.uniform(low, high, shape)), params=params)

    return make


def of_widths(make: Callable[[int], Make], widths: Iterable[int] = _WIDTHS) -> tuple[Make, ...]:
    """Nodes with rows of many widths."""
    return tuple(map(make, widths))


def of_channels(make: Callable[[int], Make], per_channel: int) -> Iterator[Probe]:
    """Probes of a convolution whose dot products have per_channel elements of each channel."""
    counts = *range(1, 20), 32, 64, 128
    whole = [n for n in counts if n * per_channel % 64 == 0]
    other = [n for n in counts if n * per_channel % 64]
    yield Probe("of f16", of_widths(make, (*other, *whole)), ("f32", "f16", "f32"), fixed=True)
    yield Probe("of f32, rows of whole 64s", of_widths(make, whole), fixed=True)
    yield Probe("of f32, other rows", of_widths(make, other))


def turned(make: Make, *places: int) -> Make:
    """The same node, with dimensions 0 and 1 of some of its sources swapped in memory."""

    def made(rng: Rng, types: Types) -> Node:
        of = make(rng, types)
        return replace(of, src=tuple(_turned(x) if x and place in places else x for place, x in enumerate(of.src)))

    return made


def _turned(x: Tensor) -> Tensor:
    other = Tensor.of(np.ascontiguousarray(np.swapaxes(x.view(), -1, -2)), x.type)
    (ne0, ne1, ne2, ne3), (nb0, nb1, nb2, nb3) = other.ne, other.nb
    return replace(other, ne=(ne1, ne0, ne2, ne3), nb=(nb1, nb0, nb2, nb3))
