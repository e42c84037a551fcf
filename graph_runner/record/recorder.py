"""The observer of a run that is recorded: a row for each node, and the form of each graph."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.lib import Ggml
from graph_runner.record.forms import Form, form_of
from graph_runner.record.measures import (
    CODES,
    DECODED,
    ENTRY_BYTES,
    GROWS,
    ROW,
    Rows,
    measure,
    result,
    watch,
)
from quant import codec

_MOST_NODES = 1 << 16
_SCRATCH, _CAPACITY, _ADDRESS, _SIZE, _DATA, _PLACES = 0, 1, 2, 3, 6, 7  # of measures.WORK
_ROOM, _USED, _PYTHON = 1, 2, 4  # of measures.NOTES

Keep = Callable[[int, NDArray[np.uint8]], object]  # a node's place in its step, and the bytes of its result
Selects = Callable[[int, str, str], bool]  # by place, op and name


class DeviceMemory(Protocol):
    """What reads memory that the host may not have."""

    def packed(self, address: int, buffer: int, /) -> Any:
        """Returns what an address lies in, if it is not the host's memory."""

    def bytes_at(self, address: int, size: int) -> Any:
        """Returns the bytes of a span."""


class Recorder:
    """An observer that measures the result of each node.

    memory   of the device, if it may have one of its own
    selects  the nodes whose results are kept whole; None: none
    keep     called with these
    forms    of the graphs so far
    """

    def __init__(
        self, ggml: Ggml, memory: DeviceMemory | None = None, selects: Selects | None = None, keep: Keep | None = None
    ) -> None:
        self._ggml, self._memory, self._selects, self._keep = ggml, memory, selects, keep
        kinds = np.full((max(ggml.types) + 1, 3), -1, np.int64)
        for number, kind in ggml.types.items():
            kinds[number] = kind.block_size, kind.block_bytes, CODES.get(kind.name, -1)
        computes = np.array([convert.computes(ggml.ops[number]) for number in sorted(ggml.ops)], np.uint8)
        self._tables = kinds, computes
        set_rows = next((number for number, name in ggml.ops.items() if name == "SET_ROWS"), -1)
        self._work = array("q", [0, 0, 0, 0, set_rows, kinds.ctypes.data, 0, 0])
        self._notes = array("q", [0, 0, 0, computes.ctypes.data, 0])
        self._work_at, self._notes_at = self._work.buffer_info()[0], self._notes.buffer_info()[0]
        self._scratch, self._noted = np.empty(0, np.uint8), np.empty(0, np.uint8)
        self._rows, self._hashes, self._n = np.zeros(_MOST_NODES, ROW), array("Q", bytes(8 * _MOST_NODES)), 0
        self._rows_at = int(self._rows.ctypes.data)
        self._known: dict[int, tuple[int, tuple[int, ...]]] = {}  # graphs, by the hash of what was noted
        self.forms: list[Form] = []

    @property
    def callback(self) -> int:
        """The address of a cb_eval in machine code: of a `run.observing.Sieve`."""
        return watch.address

    def over(self, callback: int) -> int:
        """Returns its user data, given the address of the cb_eval in Python."""
        self._notes[_PYTHON] = callback
        return self._notes_at

    def before(self, node: int) -> bool:
        """Called if the memory for notes does not suffice."""
        grown = np.empty(max(2 * self._noted.size, 4096 * ENTRY_BYTES), np.uint8)
        grown[: self._noted.size] = self._noted
        self._noted = grown
        self._notes[0], self._notes[1] = grown.ctypes.data, grown.size
        return True

    def note(self, node: int) -> None:
        """Notes a node of a graph that is computed without a cb_eval, before the graph is."""
        if self._notes[_USED] + ENTRY_BYTES * (structs.N_SRC + 1) > self._notes[_ROOM]:
            self.before(node)
        watch(node, True, self._notes_at)

    def after(self, node: int) -> None:
        """Measures the result."""
        n = self._n
        if n == _MOST_NODES:
            raise OverflowError(f"a step has more than {_MOST_NODES:,} nodes")
        self._n = n + 1
        held = self._copied(node) if self._memory is not None else None
        row, work = self._rows_at + n * ROW.itemsize, self._work
        how = result(node, row, self._work_at)
        if how == GROWS:
            self._scratch = np.empty(2 * work[_SIZE], np.uint8)
            work[_SCRATCH], work[_CAPACITY] = self._scratch.ctypes.data, self._scratch.size
            how = result(node, row, self._work_at)
        data = convert.bytes_at(work[_ADDRESS], work[_SIZE])
        if how == DECODED:
            self._measure_decoded(node, data, row)
        self._hashes[n] = xxhash.xxh3_64_intdigest(data)
        if self._selects is not None and self._keep is not None:
            name = convert.name_of(node)
            if self._selects(n, convert.op_name(self._ggml, node), name):
                self._keep(n, np.frombuffer(data, np.uint8).copy())
        del held

    def _copied(self, node: int) -> object:
        """Tells the kernel where the bytes are that it reads, if the host does not have them; returns what must live
        as long as it runs."""
        assert self._memory is not None
        work, held = self._work, []
        work[_DATA] = work[_PLACES] = 0
        read = [(_DATA, node)]
        if convert.op_name(self._ggml, node) == "SET_ROWS":
            read.append((_PLACES, convert.sources_of(node)[1]))
        for which, address in read:
            tensor = convert.tensor(self._ggml, address, packed=self._memory.packed)
            if tensor.apart is not None:
                held.append(tensor.unpacked())
                work[which] = held[-1].address
        return held

    def _measure_decoded(self, node: int, data: Any, row: int) -> None:
        """Measures the result of a type that is decoded first."""
        kind = codec(convert.tensor(self._ggml, node).type)
        blocks = np.frombuffer(data, np.uint8).reshape(-1, kind.block_bytes)
        if kind.dtype is None:
            values = np.ascontiguousarray(kind.decode(blocks), np.float32)
        else:
            with np.errstate(all="ignore"):
                values = blocks.reshape(-1).view(kind.dtype).astype(np.float32)
        measure(int(values.ctypes.data), values.size, CODES["f32"], row)

    def forget(self) -> None:
        """Forgets what was noted and measured since the last step."""
        self._notes[_USED] = self._n = 0

    def step(self) -> tuple[int, tuple[int, ...], Rows]:
        """Called after a step: returns the form of its graph by place, its sizes, and its rows."""
        noted = self._noted[: self._notes[_USED]]
        key = xxhash.xxh3_64_intdigest(noted.data)
        if key not in self._known:
            form, sizes = form_of(self._ggml, noted)
            if form not in self.forms:
                self.forms.append(form)
            self._known[key] = self.forms.index(form), sizes
        rows = self._rows[: self._n].copy()
        rows["hash"] = self._hashes[: self._n]
        self.forget()
        return *self._known[key], rows


def measured(values: NDArray[np.float32]) -> Rows:
    """Returns the row of an array of float32, (1,)."""
    values, row = np.ascontiguousarray(values), np.zeros(1, ROW)
    measure(int(values.ctypes.data), values.size, CODES["f32"], int(row.ctypes.data))
    row["hash"] = xxhash.xxh3_64_intdigest(values.data)
    return row
