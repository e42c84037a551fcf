"""Reads a trace: its nodes, each over memory of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ggml.fenced import ALIGNMENT
from ggml_backend_npu.ir import Dims
from ggml_backend_npu.ir.packed import PACKED_TYPES, Packed
from ggml_backend_npu.user_texts import no_file
from graph_runner.base.errors import TraceError
from graph_runner.judging.copies import Room
from graph_runner.trace.format import (
    FORMAT,
    SEAL,
    Bytes,
    Origin,
    Recorded,
)
from quant.codec import ROUNDINGS

_LIMIT = 1 << 62


class Trace:
    """The nodes of a trace. Iteration reads each node from the file when it comes, over memory of its own."""

    def __init__(self, origin: Origin, nodes: list[_Stored], data: dict[int, Bytes]) -> None:
        self.origin = origin
        self._nodes, self._data = nodes, data

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Recorded]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Recorded:
        stored = self._nodes[index]
        packed = {each.memory.address for each in stored.tensors() if each.packed is not None}
        rooms = {
            number: Room.of(Memory.of(self._data[place]), beyond, stored.type_of(number) if number in packed else None)
            for number, (place, beyond) in enumerate(stored.groups)
        }

        def over(tensor: Tensor) -> Tensor:
            if tensor.nbytes == 0:
                return tensor
            room = rooms[tensor.memory.address]
            return replace(tensor, memory=room.memory, offset=room.offset + tensor.offset, packed=room.packed)

        nodes = tuple(
            replace(node, dst=over(node.dst), src=tuple(over(each) if each is not None else None for each in node.src))
            for node in stored.nodes
        )
        wanted = tuple((over(tensor), self._data[place]) for tensor, place in stored.wanted)
        return Recorded(nodes[-1], self._data[stored.expected], stored.step, stored.index, nodes[:-1], wanted)

    def outlines(self) -> Iterator[Node]:
        """Returns the nodes without the content of their tensors."""
        return (node for stored in self._nodes for node in stored.nodes)


@dataclass(frozen=True)
class _Stored:
    """Nodes as in the file. `memory.address` of a tensor is the number of its group; a group has the number of the
    tensor in the file that holds its bytes, and its offset from an aligned address; a tensor in the device's layout has
    an empty `packed`."""

    nodes: tuple[Node, ...]
    groups: list[tuple[int, int]]
    expected: int
    wanted: list[tuple[Tensor, int]]
    step: int
    index: int

    def tensors(self) -> list[Tensor]:
        """Returns all tensors of the nodes."""
        return [tensor for node in self.nodes for tensor in (node.dst, *node.src) if tensor is not None]

    def type_of(self, group: int) -> str:
        """Returns the type of the tensors of a group."""
        return next(each.type for each in self.tensors() if each.nbytes and each.memory.address == group)


def read_trace(path: Path) -> Trace:
    """Opens a trace and checks its digest. Raises TraceError for a file that is not a trace, is not whole, or was
    changed."""
    where = f"trace {str(path)!r}"
    if not path.is_file():
        raise TraceError(f"{where}: {no_file(path)}")
    try:
        if (why := SEAL.refusal(path)) is not None:
            raise TraceError(f"{where}: {why}")
        reader = GGUFReader(path, "c")
        return _parsed(reader, where)
    except TraceError:
        raise
    except OSError as error:
        raise TraceError(f"{where}: {error.strerror or error}") from None
    except Exception as error:
        raise TraceError(f"{where}: cannot be read: {type(error).__name__}: {error}") from None


def is_trace(path: Path) -> bool:
    """Whether a file begins as a trace. Raises OSError."""
    return SEAL.begins(path)


def _parsed(reader: GGUFReader, where: str) -> Trace:
    values = {name: found.contents() for name, found in reader.fields.items() if name.startswith("trace.")}
    if values.get("trace.format") != FORMAT:
        raise TraceError(f"{where}: is of format {values.get('trace.format')}; format {FORMAT} is read here")
    texts = {name: str(values.get(f"trace.{name}", "")) for name in ("model", "prompt", "device", "ggml")}
    rounding = next((known for known in ROUNDINGS if known == values.get("trace.rounding")), None)
    if rounding is None:
        raise TraceError(f"{where}: has q8_0 rounding {values.get('trace.rounding')!r}, not {' or '.join(ROUNDINGS)}")
    options = {str(name): str(value) for name, value in json.loads(values["trace.options"]).items()}
    data = {int(t.name.removeprefix("bytes.")): np.asarray(t.data).view(np.uint8) for t in reader.tensors}
    nodes = [_stored(json.loads(text), data) for text in values["trace.nodes"]]
    origin = Origin(**texts, rounding=rounding, threads=int(values["trace.threads"]), options=options)
    return Trace(origin, nodes, data)


def _stored(found: dict[str, Any], data: dict[int, Bytes]) -> _Stored:
    groups = [(int(group["bytes"]), int(group["beyond"]) % ALIGNMENT) for group in found["groups"]]
    stored = _Stored(
        tuple(_node(each, groups, data) for each in found["nodes"]),
        groups,
        int(found["expected"]),
        [(_tensor(each["tensor"], groups, data, True), int(each["bytes"])) for each in found["wanted"]],
        int(found["step"]),
        int(found["index"]),
    )
    for tensor, place in [(stored.nodes[-1].dst, stored.expected), *stored.wanted]:
        if tensor.nbytes == 0 or data[place].size != tensor.nbytes:
            raise ValueError(f"{stored.nodes[-1]} has {tensor.nbytes} bytes, expected are {data[place].size}")
    return stored


def _node(found: dict[str, Any], groups: list[tuple[int, int]], data: dict[int, Bytes]) -> Node:
    src = tuple(_tensor(source, groups, data, False) if source is not None else None for source in found["src"])
    return Node(str(found["op"]), _tensor(found["dst"], groups, data, True), src, bytes.fromhex(found["params"]))


def _tensor(found: dict[str, Any], groups: list[tuple[int, int]], data: dict[int, Bytes], writable: bool) -> Tensor:
    ne, nb = (_dims(found[key]) for key in ("ne", "nb"))
    offset, number = int(found["offset"]), found["group"]
    size = 0 if number is None else data[groups[number][0]].size
    tensor = Tensor(str(found["name"]), str(found["type"]), ne, nb, Memory(number or 0, size, writable), offset)
    if min(*ne, *nb, offset) < 0 or max(*ne, *nb) > _LIMIT or ne[0] % tensor.codec.block_size:
        raise ValueError(f"tensor {tensor.name!r} of {tensor.type} has ne {ne}, nb {nb}, offset {offset}")
    if offset + tensor.nbytes > size:
        raise ValueError(f"tensor {tensor.name!r} ends at byte {offset + tensor.nbytes} of {size}")
    if not found.get("packed"):
        return tensor
    if tensor.type not in PACKED_TYPES or size % tensor.codec.block_bytes:
        raise ValueError(f"tensor {tensor.name!r} of {tensor.type}, {size} bytes: has no layout of the device's")
    return replace(tensor, packed=Packed(tensor.type, 0, np.empty(0, np.uint8)))


def _dims(values: list[int]) -> Dims:
    a, b, c, d = (int(value) for value in values)
    return a, b, c, d
