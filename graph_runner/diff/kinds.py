"""The kinds of sides: ggml's CPU here or in another process, this project's backends, and devices of other backends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ggml_backend_npu import AnyBackend, Backend, Node, Tensor
from ggml_backend_npu.backend.kernel_files import load_kernels
from ggml_backend_npu.device.backend import checks_of
from ggml_backend_npu.ggml.convert import Read, Storage
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ir.buffer import Buffer
from ggml_backend_npu.ir.packed import Packed
from ggml_backend_npu.plugin.foreign import ForeignDevice, ForeignMemory
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.repacking import Repacking
from ggml_backend_npu.plugin.replica import Replica
from graph_runner.base.errors import BadInputError
from graph_runner.base.settings import DeviceName, Settings
from graph_runner.base.variants import Variant
from graph_runner.diff.side import CPU, NPU, Side, Wanted
from graph_runner.elsewhere.other import Other
from graph_runner.elsewhere.session import AnySession, RecordingElsewhere, SessionElsewhere
from graph_runner.run.session import Observer


class Cpu(Side):
    """ggml's CPU: llama.cpp runs graphs on it alone.

    replica  of it, which computes nodes
    variant  its own settings
    is_rival  whether it is compared with itself under other settings: then its own run is judged
    """

    device: DeviceName = "cpu"

    @classmethod
    def of(cls, wanted: Wanted) -> Cpu | None:
        if wanted.name != CPU:
            return None
        replica = wanted.replica(CPU, Repacking if wanted.of_session.repack else Replica)
        is_rival = wanted.reference == CPU and bool(wanted.variants)
        return Cpu(wanted.ggml, replica, wanted.variant, is_rival=is_rival)

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

    def ran_on(self, node: int, n_graphs: int) -> str:
        return self.name if self._is_rival else ""

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
    """The CPU of another llama.cpp, in a process of its own, which runs graphs and computes nodes."""

    device: DeviceName = "elsewhere"

    @classmethod
    def of(cls, wanted: Wanted) -> Elsewhere | None:
        build = wanted.variants.elsewhere
        if wanted.name != CPU or wanted.is_reference or build is None:
            return None
        called, its = wanted.variant.named(CPU), wanted.of_session
        other = wanted.closing.enter_context(Other(called, build, repacks=its.repack, threads=its.threads))
        return cls(wanted.ggml, other, wanted.variant)

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

    @classmethod
    def of(cls, wanted: Wanted) -> Own | None:
        if wanted.name != NPU:
            return None
        ours = _node_by_node(wanted.ours, wanted.variant) if wanted.is_reference else wanted.ours
        return cls(wanted.ggml, ours, wanted.variant.named(NPU if wanted.is_reference else ours.name))

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


def _node_by_node(ours: AnyBackend, variant: Variant) -> Backend:
    """Returns the project's own kernels, with a variant's file of kernels."""
    plain = replace(ours.options.updated(variant.options), fusion="off")
    backend = Backend("NPU's own kernels", options=plain, numerics=ours.numerics)
    for path in variant.kernels:
        load_kernels(path, backend)
    return backend


class Foreign(Side):
    """A device of a ggml backend that somebody else wrote: llama.cpp gives it nodes as it would in any program.

    replica  of it, which computes nodes
    layers   that llama.cpp offloads to it, if it takes any
    variant  its own settings
    instead  computes the nodes that it does not take, if it is a reference
    """

    device = "foreign"

    @classmethod
    def of(cls, wanted: Wanted) -> Foreign:
        found, variant = wanted.devices.named(wanted.ggml, wanted.name), wanted.variant
        if variant and not found.takes_layers:
            option = "--reference-with" if wanted.is_reference else "--device-with"
            raise BadInputError(f"{option} op-offload={variant.texts['op-offload']}: {found.name} is given no layers")
        replica = wanted.replica(found.handle)
        instead = wanted.replica(CPU) if wanted.is_reference else None
        return cls(wanted.ggml, found, replica, wanted.layers, variant, instead)

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

    def keeps(self, tensor: Tensor) -> bool:
        return self._replica.keeps(tensor)

    def forgets(self) -> None:
        self._replica.forget()

    def runs_with(self, settings: Settings) -> Settings:
        return self._variant.over(replace(settings, device=self.device, gpu_layers=self._layers))

    def ran_on(self, node: int, n_graphs: int) -> str:
        name = self._own.running(self._ggml, node)
        return self._variant.named(name) if name else ""

    @property
    def runs_elsewhere(self) -> bool:
        return self._own.info.backend == "RPC"

    @property
    def is_read_slowly(self) -> bool:
        return self._own.takes_layers and not self._replica.in_host_memory

    def at_rest(self) -> AbstractContextManager[None]:
        return self._memory.at_rest()

    def bytes_at(self, address: int, size: int) -> Any:
        return self._memory.bytes_at(address, size)

    def packed(self, address: int, buffer: int) -> Packed | Buffer | None:
        return self._memory.packed(address, buffer)
