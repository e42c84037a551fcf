"""Writes a trace node by node, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ggml_backend_npu import Graph, Tensor
from ggml_backend_npu.ggml.fenced import ALIGNMENT
from ggml_backend_npu.ir.sharing import sharing
from graph_runner.base.errors import TraceError
from graph_runner.base.files import replacing
from graph_runner.judging.copies import span
from graph_runner.trace.format import (
    FORMAT,
    SEAL,
    Bytes,
    Origin,
    Recorded,
)


class TraceWriter:
    """Writes a trace node by node. A context manager: the file is written whole at its end, or not at all.

    Raises TraceError for a path that cannot be written, or if there is no node.
    """

    def __init__(self, path: Path, origin: Origin) -> None:
        check_output(path)
        self._path, self._beside = path, ExitStack()
        self._partial = self._beside.enter_context(replacing(path))
        self._writer = SEAL.writer(self._partial)
        self._writer.add_uint32("trace.format", FORMAT)
        for name, value in (vars(origin) | {"options": json.dumps(origin.options)}).items():
            add = self._writer.add_uint32 if isinstance(value, int) else self._writer.add_string
            add(f"trace.{name}", value)
        self._places: dict[bytes, int] = {}
        self._nodes: list[str] = []
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, recorded: Recorded) -> None:
        """Adds a node, whose output must not be empty. Raises TraceError if its bytes cannot be written."""
        nodes, place = recorded.graph.nodes, dict[int, tuple[int, int]]()
        groups: list[dict[str, int]] = []
        tensors = {
            id(tensor): tensor
            for node in nodes
            for tensor in (node.dst, *node.src)
            if tensor is not None and tensor.nbytes
        }
        tensors |= {id(tensor): tensor for tensor, _ in recorded.wanted}
        order = {role: number for number, role in enumerate(tensors)}
        for group in sorted(sharing(tensors.values()), key=lambda group: min(order[id(t)] for t in group.tensors)):
            for tensor in group.tensors:
                place[id(tensor)] = len(groups), tensor.address - group.begin
            groups.append({"bytes": self._put(group.held().bytes()), "beyond": group.begin % ALIGNMENT})

        def described(tensor: Tensor | None) -> dict[str, Any] | None:
            if tensor is None:
                return None
            group, offset = place.get(id(tensor), (None, 0))
            shape = {"name": tensor.name, "type": tensor.type, "ne": tensor.ne, "nb": tensor.nb}
            return shape | {"group": group, "offset": offset} | ({"packed": True} if tensor.packed is not None else {})

        data = {
            "step": recorded.step,
            "index": recorded.index,
            "nodes": [
                {
                    "op": node.op,
                    "params": node.params.hex(),
                    "dst": described(node.dst),
                    "src": [described(source) for source in node.src],
                }
                for node in nodes
            ],
            "groups": groups,
            "expected": self._put(recorded.expected),
            "wanted": [{"tensor": described(tensor), "bytes": self._put(data)} for tensor, data in recorded.wanted],
        }
        self._nodes.append(json.dumps(data, separators=(",", ":")))

    def _put(self, data: Bytes) -> int:
        """Returns the number of the tensor in the file that holds these bytes; equal bytes are stored once."""
        digest = hashlib.sha256(data.data).digest()
        if digest not in self._places:
            self._places[digest] = len(self._places)
            try:
                self._writer.add_tensor(f"bytes.{self._places[digest]}", data.view(np.int8))
            except OSError as error:
                raise TraceError(f"trace {str(self._path)!r}: {error.strerror or error}") from None
            self.n_bytes += data.size
        return self._places[digest]

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._beside:
                try:
                    if error is not None:
                        raise error
                    if not self._nodes:
                        raise TraceError(f"trace {str(self._path)!r}: no node to write")
                    self._finish()
                finally:
                    self._writer.close()
                    if self._writer.temp_file is not None:
                        self._writer.temp_file.close()
        except OSError as failure:
            if failure is error:
                raise
            raise TraceError(f"trace {str(self._path)!r}: {failure.strerror or failure}") from None

    def _finish(self) -> None:
        self._writer.add_array("trace.nodes", self._nodes)
        SEAL.finish(self._writer, self._partial)


def check_output(path: Path) -> None:
    """Raises TraceError for a path that a trace cannot be written to."""
    why = None
    if path.is_dir():
        why = "is a directory"
    elif not path.parent.is_dir():
        why = "no such directory"
    elif path.exists() and not path.is_file():
        why = "is no file"
    elif not os.access(path.parent, os.W_OK):
        why = "its directory may not be written"
    if why is not None:
        raise TraceError(f"trace {str(path)!r}: {why}")


def write_trace(path: Path, nodes: Iterable[Recorded], origin: Origin) -> None:
    """Writes nodes to a file, whole or not at all. Raises TraceError."""
    with TraceWriter(path, origin) as writer:
        for recorded in nodes:
            writer.add(recorded)


def save_nodes(
    path: Path, graph: Graph, expected: Mapping[int, Tensor], origin: Origin, *, step: int = 0, index: int = 0
) -> None:
    """Writes a trace of a node, or of nodes that run as one operator. Their tensors hold what they held before they
    ran.

    expected  the expected outputs by place: the whole output of the last one, and of others the whole or a view

    Raises TraceError.
    """
    *lead, last = graph.nodes[: max(expected) + 1]
    wanted = tuple(
        (_on(graph.nodes[place].dst, tensor), span(tensor)) for place, tensor in expected.items() if place < len(lead)
    )
    recorded = Recorded(last, span(expected[len(lead)]), step, index, tuple(lead), wanted)
    write_trace(path, [recorded], origin)


def _on(dst: Tensor, view: Tensor) -> Tensor:
    """Returns a view over the memory of dst, at the beginning of dst."""
    return replace(view, memory=dst.memory, offset=dst.offset, packed=None)
