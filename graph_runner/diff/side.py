"""What a side of a diff is: it computes single nodes, and runs a model's graphs in llama.cpp."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from ggml_backend_npu import AnyBackend, Node, Tensor
from ggml_backend_npu.backend.fusion import Fusion
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.device.faults import Checks
from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.ggml.convert import Read, Storage
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ggml.node_reader import Reader
from ggml_backend_npu.ir.buffer import Buffer
from ggml_backend_npu.ir.packed import Packed
from ggml_backend_npu.plugin.foreign import ForeignDevice
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.replica import Replica
from graph_runner.base.builds import About
from graph_runner.base.settings import DeviceName, Settings
from graph_runner.base.variants import Variant, Variants
from graph_runner.elsewhere.session import AnySession, RecordingElsewhere
from graph_runner.run.devices import Devices
from graph_runner.run.session import Observer, Session

CPU, NPU = "CPU", "NPU"


@dataclass(frozen=True)
class Wanted:
    """A side as it is asked for.

    reference, device  names of both sides: "CPU", "NPU", or what ggml calls a device
    is_reference       which of them is meant
    settings           of sessions, without those that one side alone has
    layers             that llama.cpp offloads to a device that takes any
    variants           settings that one side alone has
    devices            where devices are, besides those that ggml has by itself
    ours               the backend of this project that is compared
    closing            closes what a side opens
    """

    ggml: Ggml
    reference: str
    device: str
    is_reference: bool
    settings: Settings
    layers: int
    variants: Variants
    devices: Devices
    ours: AnyBackend
    closing: ExitStack

    @property
    def name(self) -> str:
        """The name of the side."""
        return self.reference if self.is_reference else self.device

    @property
    def variant(self) -> Variant:
        """Its own settings."""
        return self.variants.reference if self.is_reference else self.variants.device

    @property
    def of_session(self) -> Settings:
        """The settings of its sessions."""
        return self.variant.over(self.settings)

    def replica(self, device: str | int, kind: type[Replica] = Replica) -> Replica:
        """Returns what computes nodes on a device of ggml's, by its name or handle."""
        return self.closing.enter_context(kind(self.ggml, device, threads=self.of_session.threads))


class Side(ABC):
    """One side of a diff.

    name     what each page calls it
    device   of the settings of its sessions
    plugin   of its sessions, if it is a backend of this project
    foreign  of its sessions, if it is a device of somebody else's backend
    backend  whose fusions it may run as one operator
    checks   of each call into its memory; None if calls are not checked
    about    the llama.cpp of its runs, if that is not this process's
    """

    name: str
    device: DeviceName
    backend: AnyBackend
    plugin: Plugin | None = None
    foreign: ForeignDevice | None = None
    checks: Checks | None = None
    about: About | None = None

    @classmethod
    @abstractmethod
    def of(cls, wanted: Wanted) -> Self | None:
        """Returns the side that is asked for; None if it is not of this kind. Raises BadInputError for settings that
        such a side does not have."""

    @abstractmethod
    def refusal(self, node: Node) -> str | None:
        """Returns why it does not take a node; None if it does."""

    @abstractmethod
    def compute(self, node: Node) -> None:
        """Computes a node over host memory into that of its output. Raises KernelError if it refuses it or fails."""

    def bound(self, node: Node) -> Callable[[], object]:
        """Returns a call that computes a node, as `compute` does, as often as it is wanted. Raises KernelError."""
        return partial(self.compute, node)

    def keeps(self, tensor: Tensor) -> bool:
        """Takes a model's weight, for nodes that it computes, to hold the same until `forgets`. Returns whether it
        computes in memory of its own, and cannot change what lies in the host's."""
        return False

    def forgets(self) -> None:  # noqa: B027  (most have nothing of them)
        """Called when it may have changed what it has of weights, or when these lie there no longer."""

    @property
    def ops(self) -> Collection[str] | None:
        """The names of the ops and fusions that it may take; None: any."""
        return {*self.backend.op_names, *(fusion.name for fusion in self.backend.fusions)}

    @property
    def is_scheduled(self) -> bool:
        """Whether ggml's scheduler gives it its nodes, and could give them to the CPU in its place."""
        return self.plugin is not None or self.foreign is not None

    @property
    def is_cpu(self) -> bool:
        """Whether it is ggml's CPU alone."""
        return False

    # its runs

    def runs_with(self, settings: Settings) -> Settings:
        """Returns the settings of a session on this side."""
        return replace(settings, device=self.device)

    def halt(self, reason: str | None) -> None:
        """Makes a run fail at its next graph, with a reason; None: no longer."""
        if self.plugin is not None:
            self.plugin.halted = reason

    def watch(self, *, watched: bool) -> None:
        """Has each graph come to Python, or no longer."""
        if self.plugin is not None:
            self.plugin.is_watched = watched

    def runs_plans_by(self, run: Callable[[Plan, int], None]) -> None:
        """Has a function run each plan of a graph, which is called with the plan and the graph's address."""
        if self.plugin is not None:
            self.plugin.run = run

    @property
    def n_graphs(self) -> int:
        """How many graphs it has run, if it counts them."""
        return self.plugin.statistics.graphs if self.plugin is not None else 0

    @property
    def n_computed(self) -> int | None:
        """How many nodes of graphs it says that it has computed; None if it does not count them."""
        return self.plugin.statistics.computed.total() if self.plugin is not None else None

    @property
    def notes(self) -> list[str]:
        """What of its run could not be compared, once that has ended."""
        return []

    def ran_on(self, node: int, n_graphs: int) -> str:
        """Returns the name of the device that has just run a node of its run, given by its address; "" if llama.cpp's
        CPU has.

        n_graphs  as it was before
        """
        return self.name if self.n_graphs != n_graphs else ""

    @property
    def fusions(self) -> Sequence[Fusion]:
        """The patterns of nodes that it may run as one operator."""
        return self.backend.fusions if self.backend.fuses else ()

    @property
    def runs_elsewhere(self) -> bool:
        """Whether another process runs its graphs, and nobody knows in which order."""
        return False

    def recording(self) -> RecordingElsewhere | None:
        """Returns what records the order of its next run; None if that is a run of this process."""
        return None

    @property
    def is_elsewhere(self) -> bool:
        """Whether its runs, with all that llama.cpp does, are in another process."""
        return False

    def computes(self, address: int) -> bool:
        """Whether a node of its run computes something, by the address that an observer is told."""
        return convert.computes(convert.op_name(lib.ggml(), address))

    def session(
        self,
        model: Path,
        settings: Settings,
        observer: Observer | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> AnySession:
        """Opens a session on it, or on llama.cpp's CPU if the settings say so."""
        return Session(
            model, settings, npu=self.plugin, foreign=self.foreign, observer=observer, counts_nodes=False,
            progress=progress,
        )  # fmt: skip

    def reader(self, ggml: Ggml) -> Callable[[int], Read]:
        """Returns what reads a node of its run, by the address that an observer is told."""
        return NodesOf(ggml, self)

    # the memory of its runs

    def at_rest(self) -> AbstractContextManager[None]:
        """A time in which its run computes nothing, and nobody writes to its memory."""
        return nullcontext()

    @property
    def is_read_slowly(self) -> bool:
        """Whether to read a weight of its memory may take longer than to compute with it."""
        return False

    def bytes_at(self, address: int, size: int) -> Any:
        """Returns the bytes of a span: a copy, unless it lies in the host's memory."""
        return self.plugin.bytes_at(address, size) if self.plugin is not None else convert.bytes_at(address, size)

    def packed(self, address: int, buffer: int) -> Packed | Buffer | None:
        """Returns how its own memory has a tensor, by ggml's address of its data and ggml_backend_buffer_t; None if
        that lies in ggml's layout in the host's."""
        return self.plugin.packed(address) if self.plugin is not None else None

    def hides(self, storage: Storage) -> bool:
        """Whether a tensor of its run lies in memory that nobody can read: weights that ggml's CPU has repacked."""
        return False

    @property
    def packs(self) -> bool:
        """Whether its memory has tensors in a layout of its own."""
        memory = self.plugin.memory if self.plugin is not None else None
        return memory is not None and memory.packs

    @property
    def moves(self) -> int:
        """How often a tensor of its memory was packed or unpacked."""
        memory = self.plugin.memory if self.plugin is not None else None
        return memory.moves if memory is not None else 0


class NodesOf:
    """Reads nodes of a side's run as they lie in memory now: tensors may have been packed or unpacked since they were
    last read."""

    def __init__(self, ggml: Ggml, side: Side) -> None:
        self._side, self._reader, self._n_moves = side, Reader(ggml, side.packed), 0

    def __call__(self, address: int) -> Read:
        """Returns the node whose tensor is at an address."""
        if self._side.moves != self._n_moves:
            self._n_moves = self._side.moves
            self._reader.forget()
        return self._reader(address)
