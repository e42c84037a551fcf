"""Memory of the device, views of it, and a graph's nodes as calls on them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor as Array

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN

from .blocks import DECODERS, ENCODERS, ROUNDED, apart

Value = Callable[[], Array]

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
}
FLOATS = ("f32", "f16", "bf16")
_AT_ONCE = 1 << 18  # elements of weights that are decoded at each use: they stay in a processor's cache


class Memory:
    """A buffer: bytes on the device.

    kept      weights that lie in it, decoded, by place and type
    version   changes when what was kept is no longer right
    is_fixed  whether no program writes to it
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.zeros(-(-size // 64) * 64, dtype=torch.uint8, device=device)
        self.kept: dict[Hashable, Array] = {}
        self.version, self.is_fixed = 0, True
        self._typed: dict[torch.dtype, Array] = {}

    def typed(self, dtype: torch.dtype) -> Array:
        """Returns the bytes as elements of a type."""
        if dtype not in self._typed:
            self._typed[dtype] = self.bytes.view(dtype)
        return self._typed[dtype]

    def forget(self) -> None:
        """Drops what was kept."""
        if self.kept:
            self.kept.clear()
            self.version += 1


def view(tensor: Tensor) -> Array:
    """Returns a tensor's elements, (ne3, ne2, ne1, ne0); of a quantised one its blocks, (ne3, ne2, ne1, blocks in a
    row, block bytes)."""
    assert tensor.buffer is not None
    dtype = DTYPES.get(tensor.type, torch.uint8)
    shape, strides, size = tensor.ne[::-1], tensor.nb[::-1], dtype.itemsize
    if tensor.type not in DTYPES:
        shape, strides = (*shape[:3], tensor.n_blocks, tensor.codec.block_bytes), (*strides, 1)
    typed = tensor.buffer.handle.typed(dtype)
    return typed.as_strided(shape, [n // size for n in strides], tensor.start // size)  # type: ignore[no-any-return]


def decoded(x: Array, type: str) -> Array:
    """Returns what `view` gives as float32; integers stay."""
    if type in DECODERS:
        return DECODERS[type](x).flatten(-2)
    return x.to(torch.float32) if type in FLOATS else x


def encoded(x: Array, type: str) -> Array:
    """Returns (..., n) elements as those of a type; as blocks, (..., blocks, block bytes), if it is quantised."""
    if type in ENCODERS:
        return ENCODERS[type](x.to(torch.float32).unflatten(-1, (-1, 32)))
    return x.to(DTYPES[type])


def _span(tensor: Tensor) -> Hashable:
    return tensor.start, tensor.type, tensor.ne, tensor.nb


class Bound:
    """The calls of a graph.

    calls     in order
    versions  of memory in which weights are kept
    keep      gives what is kept in a memory by a key, of a size and made by a function; None if it is not to be kept
    rounds    whether x is rounded as ggml's CPU does it for quantised weights
    """

    def __init__(self, keep: Callable[[Memory, Hashable, int, Value], Array | None], rounds: bool) -> None:
        self.calls: list[Callable[[], object]] = []
        self.versions: dict[Memory, int] = {}
        self._keep, self._rounds = keep, rounds
        self._values: dict[Hashable, Array] = {}
        self._known: dict[Hashable, tuple[Hashable, Tensor]] = {}

    def run(self) -> None:
        """Makes the calls."""
        try:
            for call in self.calls:
                call()
        finally:
            self._values.clear()

    def is_right(self) -> bool:
        """Whether the weights are still those that were kept."""
        return all(memory.version == version for memory, version in self.versions.items())

    def add(self, node: Node, bind: Callable[[Bound, Node], Callable[[], object]]) -> None:
        """Adds a node's call."""
        self.calls.append(bind(self, node))
        self._known = {slot: known for slot, known in self._known.items() if not known[1].overlaps(node.dst)}

    def shared(self, slot: Hashable, of: Tensor, how: Hashable, make: Value) -> Value:
        """Returns a value that is made of a tensor once, for all nodes that want the same until another one takes the
        slot or the tensor is written."""
        key, values = (id(of.buffer), _span(of), how), self._values
        if self._known.get(slot, (None,))[0] != key:
            self._known[slot] = key, of
            self.calls.append(lambda: values.__setitem__(slot, make()))
        return lambda: values[slot]

    def rounded(self, x: Tensor, weights: str) -> Value:
        """Returns the elements of x as ggml's CPU rounds them for weights of a type."""
        made, source = view(x), x.type
        type = weights if self._rounds or weights in FLOATS else "f32"
        rounds = ROUNDED[type]
        if source == type == "f32":
            return lambda: made
        return self.shared("x", x, rounds, lambda: rounds(decoded(made, source)))

    def weights(self, tensor: Tensor) -> tuple[Array, Callable[[Array], Array], int]:
        """Returns what holds weights, what makes float32 of it, or of a part of it, and how many of their rows are to
        be made at once. If x is rounded, a row of (q4_1, q5_1) has its minima apart. They are decoded once if no
        program writes where they lie, and there is room; else each time."""
        assert tensor.buffer is not None
        memory: Memory = tensor.buffer.handle
        found, type, rounds = view(tensor), tensor.type, self._rounds
        if type == "f32":
            return found, _as_it_is, tensor.ne[1]

        def decode(x: Array) -> Array:
            return apart(x, type).flatten(-2) if rounds and type in ("q4_1", "q5_1") else decoded(x, type)

        kept = self._keep(memory, _span(tensor), 5 * tensor.n_elements, lambda: decode(found))
        if kept is None:
            return found, decode, max(1, _AT_ONCE // tensor.ne[0])
        self.versions[memory] = memory.version
        return kept, _as_it_is, tensor.ne[1]


def _as_it_is(x: Array) -> Array:
    return x


def params(node: Node) -> Any:
    """Returns a node's parameters by name."""
    record = OWN[node.op].params
    assert record is not None
    return record.of(node.params)
