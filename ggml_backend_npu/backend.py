"""A backend: the ops, options, numerics and threads of one device, and what follows from them, in one object.

A process may have several, each registered with ggml as a device of its own (`ggml_backend_npu.register`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ggml_backend_npu import registry
from ggml_backend_npu.abi import codecs
from ggml_backend_npu.checks import Types
from ggml_backend_npu.device_memory import DeviceMemory
from ggml_backend_npu.fusion import FUSIONS, Fused, Fusion, Span, longest
from ggml_backend_npu.ir import Graph, Node
from ggml_backend_npu.numerics import Numerics
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.options import Options
from ggml_backend_npu.params import Params
from ggml_backend_npu.plan import Plan
from ggml_backend_npu.registry import Call, KernelError, Op
from quant.kernels.jit import engine
from quant.kernels.threads import POOL, Team

if TYPE_CHECKING:
    from ggml_backend_npu.opaque import OpaqueMemory

NO_KERNEL = "no kernel"
_MEMORY = 8 << 30  # bytes of the device's own, where nobody says


class Ops(Mapping[str, Op]):
    """The ops of a backend, by name. Adding a name again replaces the op: how a user's kernel takes the place of one of
    ours.

    changed  called whenever they do
    """

    def __init__(self, ops: Iterable[Op], changed: Callable[[], None]) -> None:
        self._ops = {op.name: op for op in ops}
        self._changed = changed

    def __getitem__(self, name: str) -> Op:
        return self._ops[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)

    def add(self, *ops: Op) -> None:
        """Takes ops, each in the place of one of its name."""
        self._ops.update({op.name: op for op in ops})
        self._changed()

    @contextmanager
    def having(self, *ops: Op) -> Iterator[None]:
        """Has these ops too, or in place of its own, until the context ends."""
        before = dict(self._ops)
        self.add(*ops)
        try:
            yield
        finally:
            self._ops = before
            self._changed()


class Backend:
    """What one device computes, and how.

        register(Backend("NPU1", ops=[*OWN.values(), mine], options=Options(memory="device")))

    name     of the device in ggml's registry
    ops      the project's own, where left out
    options  those of the environment, where left out
    fusions  patterns of nodes that it runs as one operator; the project's own, where left out

    Of the ggml of this process, which it has one of, follows what all backends share where they do not say otherwise:

    numerics  what ggml's CPU computes, with `options.matmul`
    team      the threads that its kernels run in: ggml's, once the backend is registered; a pool before

    Options are read when they are needed first: a program may add ops before, and be told of a wrong variable later.
    Each change makes a new `version`: plans made before hold other kernels.
    """

    description = "Python kernels (ggml-backend-npu)"
    runs_without_python = True  # graphs that come again

    def __init__(
        self,
        name: str = "NPU",
        *,
        ops: Iterable[Op] | None = None,
        options: Options | None = None,
        numerics: Numerics | None = None,
        team: Team = POOL,
        fusions: Iterable[Fusion] = FUSIONS,
    ) -> None:
        self.name = name
        self.ops = Ops(OWN.values() if ops is None else ops, self._changed)
        self.team = team
        self._options, self._numerics, self._fusions = options, numerics, tuple(fusions)
        self._version = np.zeros(1, np.int64)

    def _changed(self) -> None:
        self._version[0] += 1

    @property
    def version(self) -> int:
        """Another number whenever plans made before are void."""
        return int(self._version[0])

    @property
    def version_at(self) -> int:
        """Where compiled code reads the version, int64."""
        return int(self._version.ctypes.data)

    @property
    def options(self) -> Options:
        if self._options is None:
            self._options = Options.from_environment()
        return self._options

    @options.setter
    def options(self, options: Options) -> None:
        self._options = options
        self._changed()

    @property
    def fusions(self) -> tuple[Fusion, ...]:
        return self._fusions

    @fusions.setter
    def fusions(self, fusions: Iterable[Fusion]) -> None:
        self._fusions = tuple(fusions)
        self._changed()

    @property
    def numerics(self) -> Numerics:
        return replace(self._numerics or codecs.bound(), matmul=self.options.matmul)

    @numerics.setter
    def numerics(self, numerics: Numerics) -> None:
        self._numerics = numerics
        self._changed()

    @property
    def fuses(self) -> bool:
        """Whether patterns of nodes run as one operator."""
        return self.options.fusion == "on"

    @property
    def fusible(self) -> frozenset[str]:
        """The ops that a pattern which runs as one operator may begin with."""
        return frozenset(fusion.ops[0].name for fusion in self._fusions) if self.fuses else frozenset()

    def like(self, name: str | None = None, *, options: Options | None = None) -> Backend:
        """Another one with the same ops, and the same or other options."""
        chosen = options or self.options
        return Backend(
            name or self.name, ops=self.ops.values(), options=chosen, numerics=self._numerics, team=self.team,
            fusions=self._fusions,
        )  # fmt: skip

    def memory(self, moved: Callable[[], None]) -> DeviceMemory | OpaqueMemory | None:
        """Memory of the device's own; None where tensors stay in ggml's buffers.

        moved  called whenever a tensor begins or ceases to be packed
        """
        limit = self.options.memory_limit or _MEMORY
        return DeviceMemory(limit, moved) if self.options.memory == "device" else None

    # nodes

    def offers(self, op: str) -> bool:
        """Whether the device is to take nodes of an op where its kernel can: by default of what a user has registered,
        and of the backend's own what is marked so."""
        kernel = self.ops.get(op)
        return kernel is None or self.options.ops == "all" or kernel.default or kernel is not OWN.get(op)

    def refusal(self, node: Node) -> str | None:
        """Why the backend does not take the node: no kernel does, or not the profile. None where it does."""
        return self.kernel_refusal(node) or self.options.profile.refusal(node)

    def kernel_refusal(self, node: Node) -> str | None:
        """Why no kernel takes the node; None where one does."""
        op = self.ops.get(node.op)
        return NO_KERNEL if op is None else op.refusal(node)

    def check(self, node: Node) -> None:
        """Raises KernelError where the backend does not take the node."""
        reason = self.refusal(node)
        if reason is not None:
            raise KernelError(f"{node}: {reason}")

    def bind(self, node: Node) -> Call:
        """The call that computes the node, in the team that works where it is called. Raises KernelError where the
        backend does not take it."""
        self.check(node)
        return self.ops[node.op].bind(node, self.numerics)

    def compute(self, node: Node) -> None:
        """Computes the node into its output's memory, in the backend's threads. Raises what the kernel raises, and
        KernelError where the backend does not take the node."""
        with self.team.working():
            self.bind(node)()

    # graphs

    def longest_fusion(
        self, graph: Graph, begin: int, among: Iterable[Fusion] | None = None
    ) -> tuple[Fusion, Fused] | None:
        """The longest pattern of nodes from `begin` on, of all or of some, which the backend runs as one operator."""
        return longest(graph, begin, self._fusions if among is None else among, self.ops)

    def plan(self, graph: Graph) -> Plan:
        """Binds every node that is not empty. Raises KernelError where the backend takes one not."""
        steps: list[tuple[Node | Span, Call]] = []
        counts, fused = Counter[str](), Counter[str]()
        fuses = graph.producers and self.fuses and engine() == "compiled"
        begin = 0
        while begin < len(graph.nodes):
            node, end = graph.nodes[begin], begin + 1
            found = self.longest_fusion(graph, begin) if fuses else None
            if node.dst.n_elements == 0:
                pass
            elif found is None:
                steps.append((node, self.bind(node)))
                counts[node.op] += 1
            else:
                fusion, bound = found
                end = begin + len(fusion.ops)
                span = Span(graph, begin, end)
                for each in span.nodes:
                    self.check(each)
                steps.append((span, bound.call))
                counts.update(each.op for each in span.nodes)
                fused[fusion.name] += 1
            begin = end
        return Plan(tuple(steps), counts, fused)

    def compute_graph(self, graph: Graph) -> None:
        """Computes nodes in order, those as one operator that are one. Raises KernelError."""
        with self.team.working():
            self.plan(graph).run()


@cache
def default_backend() -> Backend:
    """The backend that `ggml_backend_npu.register()` registers, and that `ggml_backend_npu.op` adds to: that of the
    first device of GGML_NPU_DEVICE_FILE, where that is set. Raises DeviceError."""
    name = os.environ.get("GGML_NPU_DEVICE_FILE")
    if not name:
        return Backend()
    from ggml_backend_npu.device_backend import backends_of

    return backends_of(name)[0]


def op(
    name: str,
    *,
    types: Iterable[Types] | None = None,
    refuse: Callable[..., str | None] | None = None,
    default: bool = False,
    params: type[Params] | None = None,
) -> Callable[[Callable[..., None]], Op]:
    """Decorator: as `registry.op`. The op is the default backend's, or, in a file of kernels, of the backend that the
    file is loaded for."""
    make = registry.op(name, types=types, refuse=refuse, default=default, params=params)

    def added(define: Callable[..., None]) -> Op:
        entry = make(define)
        if not registry.is_recorded():
            default_backend().ops.add(entry)
        return entry

    return added
