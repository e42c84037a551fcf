"""The two sides of a diff. A side computes single nodes, and runs a model's graphs in llama.cpp."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ggml_backend_npu import AnyBackend, Backend, Node
from ggml_backend_npu.backend.fusion import Fusion
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.device.backend import checks_of
from ggml_backend_npu.device.faults import Checks
from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.ggml.convert import Read, Storage
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ggml.node_reader import Reader
from ggml_backend_npu.ir.buffer import Buffer
from ggml_backend_npu.ir.packed import Packed
from ggml_backend_npu.plugin.foreign import ForeignDevice, ForeignMemory
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.replica import Replica
from graph_runner.base.settings import DeviceName, Settings
from graph_runner.base.variants import Variant
from graph_runner.elsewhere.other import Other
from graph_runner.elsewhere.session import AnySession, RecordingElsewhere, SessionElsewhere
from graph_runner.run.session import Observer, Session

CPU, NPU = "CPU", "NPU"


class Side(ABC):
    """One side of a diff.

    name     what each page calls it
    device   of the settings of its sessions
    plugin   of its sessions, if it is a backend of this project
    foreign  of its sessions, if it is a device of somebody else's backend
    backend  whose fusions it may run as one operator
    checks   of each call into its memory; None if calls are not checked
    """

    name: str
    device: DeviceName
    backend: AnyBackend
    plugin: Plugin | None = None
    foreign: ForeignDevice | None = None
    checks: Checks | None = None

    @abstractmethod
    def refusal(self, node: Node) -> str | None:
        """Returns why it does not take a node; None if it does."""

    @abstractmethod
    def compute(self, node: Node) -> None:
        """Computes a node over host memory into that of its output. Raises KernelError if it refuses it or fails."""

    def bound(self, node: Node) -> Callable[[], object]:
        """Returns a call that computes a node, as `compute` does, as often as it is wanted. Raises KernelError."""
        return partial(self.compute, node)

    @property
    def ops(self) -> Collection[str] | None:
        """The names of the ops and fusions that it may take; None: any."""
        return {*self.backend.op_names, *(fusion.name for fusion in self.backend.fusions)}

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

    def has_run(self, node: int, n_graphs: int) -> bool:
        """Whether it, and not llama.cpp's CPU, has just run a node of its run, given by its address.

        n_graphs  as it was before
        """
        return self.n_graphs != n_graphs

    @property
    def fusions(self) -> Sequence[Fusion]:
        """The patterns of nodes that it may run as one operator."""
        return self.backend.fusions if self.backend.fuses else ()

    def on(self, computed: bool) -> str:
        """Returns which device ran a node of its run.

        computed  whether the side itself did, not llama.cpp's CPU
        """
        return self.name if computed else CPU

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


class Cpu(Side):
    """ggml's CPU: llama.cpp runs graphs on it alone.

    replica  of it, which computes nodes
    variant  its own settings
    is_rival  whether it is compared with itself under other settings: then its own run is judged
    """

    device: DeviceName = "cpu"

    def __init__(self, ggml: Ggml, replica: Replica | Other, variant: Variant, *, is_rival: bool = False) -> None:
        self.name, self.backend = variant.named(CPU), Backend(CPU, ops=(), fusions=())
        self._ggml, self._replica, self._variant, self._is_rival = ggml, replica, variant, is_rival
        self._hidden: set[str] = set()  # names of the weights that lie repacked

    @property
    def ops(self) -> None:
        return None

    @property
    def is_cpu(self) -> bool:
        return True

    def refusal(self, node: Node) -> str | None:
        return self._replica.refusal(node)

    def compute(self, node: Node) -> None:
        self._replica.compute(node)

    def runs_with(self, settings: Settings) -> Settings:
        return self._variant.over(super().runs_with(settings))

    def has_run(self, node: int, n_graphs: int) -> bool:
        return self._is_rival

    def hides(self, storage: Storage) -> bool:
        hides = storage.is_weight and self._is_hidden(storage)
        self._hidden |= {storage.tensor.name} if hides else set()
        return hides

    def _is_hidden(self, storage: Storage) -> bool:
        return not self._ggml.ggml_backend_buffer_is_host(storage.buffer)

    @property
    def notes(self) -> list[str]:
        if not self._variant.over(Settings()).repack:
            return []
        if not self._hidden:
            return [f"{self.name}: no weight of this model lies repacked"]
        n, why = len(self._hidden), "memory that nobody can read"
        return [f"{self.name}: {n:,} weights lie repacked, in {why}: they are not compared, but taken to be the file's"]


class Elsewhere(Cpu):
    """The CPU of another llama.cpp, in a process of its own, which runs graphs and computes nodes.

    about  that llama.cpp
    """

    device: DeviceName = "elsewhere"

    def __init__(self, ggml: Ggml, other: Other, variant: Variant) -> None:
        super().__init__(ggml, other, variant, is_rival=True)
        self._other, self.about = other, other.about

    @property
    def is_cpu(self) -> bool:
        return False

    def bound(self, node: Node) -> Callable[[], object]:
        return self._other.bound(node)

    def session(
        self,
        model: Path,
        settings: Settings,
        observer: Observer | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> AnySession:
        if settings.device != self.device:
            return super().session(model, settings, observer, progress)
        return SessionElsewhere(self._other, model, replace(settings, device="cpu"), observer)

    def reader(self, ggml: Ggml) -> Callable[[int], Read]:
        return self._other.read

    @property
    def is_elsewhere(self) -> bool:
        return True

    def recording(self) -> RecordingElsewhere | None:
        return RecordingElsewhere(self._other)

    def computes(self, address: int) -> bool:
        return True  # it tells of no others

    def bytes_at(self, address: int, size: int) -> Any:
        return self._other.reach.read(address, size)

    def _is_hidden(self, storage: Storage) -> bool:
        buffer = storage.tensor.buffer
        return buffer is not None and not buffer.handle.is_host


class Own(Side):
    """A backend of this project: llama.cpp gives it the nodes that it takes, and computes the others on the CPU."""

    device = "npu"

    def __init__(self, ggml: Ggml, backend: AnyBackend, name: str | None = None) -> None:
        self.name, self.backend = name or backend.name, backend
        self.checks = checks_of(backend)
        self.plugin = Plugin(ggml, backend)

    def refusal(self, node: Node) -> str | None:
        return self.backend.refusal(node)

    def compute(self, node: Node) -> None:
        self.backend.compute(node)

    def bound(self, node: Node) -> Callable[[], object]:
        return self.backend.bound(node)


class Foreign(Side):
    """A device of a ggml backend that somebody else wrote: llama.cpp gives it nodes as it would in any program.

    replica  of it, which computes nodes
    layers   that llama.cpp offloads to it, if it takes any
    variant  its own settings
    instead  computes the nodes that it does not take, if it is a reference
    """

    device = "foreign"

    def __init__(
        self,
        ggml: Ggml,
        device: ForeignDevice,
        replica: Replica,
        layers: int,
        variant: Variant,
        instead: Replica | None = None,
    ) -> None:
        self.name, self.foreign, self._own, self._variant = variant.named(device.name), device, device, variant
        self._layers, self._instead = layers if device.takes_layers else 0, instead
        self.backend = Backend(device.name, ops=(), fusions=())
        self._ggml, self._replica, self._memory = ggml, replica, ForeignMemory(ggml)

    @property
    def ops(self) -> None:
        return None

    def refusal(self, node: Node) -> str | None:
        return self._replica.refusal(node)

    def compute(self, node: Node) -> None:
        if self._instead is not None and self._replica.refusal(node) is not None:
            self._instead.compute(node)
        else:
            self._replica.compute(node)

    def runs_with(self, settings: Settings) -> Settings:
        return self._variant.over(replace(settings, device=self.device, gpu_layers=self._layers))

    def has_run(self, node: int, n_graphs: int) -> bool:
        return self._own.runs(self._ggml, node)

    @property
    def runs_elsewhere(self) -> bool:
        return self._own.info.backend == "RPC"

    def bytes_at(self, address: int, size: int) -> Any:
        return self._memory.bytes_at(address, size)

    def packed(self, address: int, buffer: int) -> Packed | Buffer | None:
        return self._memory.packed(address, buffer)


@dataclass(frozen=True)
class Sides:
    """Both sides: the device is compared with the reference, which is taken to be right."""

    reference: Side
    device: Side


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
