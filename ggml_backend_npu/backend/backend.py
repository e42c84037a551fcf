"""A backend: what it takes, and how its nodes and graphs are computed; and the one whose kernels are in Python.

A process may have several, each registered with ggml as its own device (`ggml_backend_npu.register`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from ggml_backend_npu.backend import NO_KERNEL
from ggml_backend_npu.backend.fusion import FUSIONS, Fused, Fusion, Joined, Span, longest
from ggml_backend_npu.backend.options import Options
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ir import Graph, Node
from ggml_backend_npu.ir.buffer import OwnMemory
from ggml_backend_npu.ir.memory import DeviceMemory
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import Call, KernelError, Op
from quant.kernels.jit import engine
from quant.kernels.threads import POOL, Team

_MEMORY = 8 << 30  # bytes of the device's own memory, where no limit is given


class Ops(Mapping[str, Op]):
    """The ops of a backend, by name. Adding an op replaces the one of the same name: this is how a user's kernel
    replaces one of ours.

    changed  called whenever the ops change
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
        """Adds ops; each replaces the op of its name, if there is one."""
        self._ops.update({op.name: op for op in ops})
        self._changed()

    @contextmanager
    def having(self, *ops: Op) -> Iterator[None]:
        """Has these ops, added or in place of its own, until the context ends."""
        before = dict(self._ops)
        self.add(*ops)
        try:
            yield
        finally:
            self._ops = before
            self._changed()


class AnyBackend(ABC):
    """One device of ggml: what it takes, and how its nodes and graphs are computed. `Backend` computes by kernels in
    Python, `DeviceBackend` by a `Device`. Another one has its own `description`, `op_names`, `kernel_refusal`, `bind`,
    `compute`, `plan` and `like`.

    name, description  of the device in ggml's registry
    ops      its kernels in Python, by name; a user's are added to them
    options  default: those of the environment
    team     the threads that run its kernels: ggml's, once the backend is registered; a pool before
    runs_without_python  whether it runs graphs that come again without Python

    Options are read when they are first needed: a program may add ops before that, and hears of a wrong variable only
    then. Every change gives a new `version`, because older plans hold the old kernels.
    """

    description: str
    runs_without_python = False

    def __init__(self, name: str, options: Options | None = None, ops: Iterable[Op] = ()) -> None:
        self.name, self._options = name, options
        self.ops = Ops(ops, self._changed)
        self.team = POOL
        self._numerics: Numerics | None = None
        self._fusions: tuple[Fusion, ...] = ()
        self._version = np.zeros(1, np.int64)

    def _changed(self) -> None:
        self._version[0] += 1

    @property
    def version(self) -> int:
        """A number that changes whenever older plans become void."""
        return int(self._version[0])

    @property
    def version_at(self) -> int:
        """The address at which compiled code reads the version, an int64."""
        return int(self._version.ctypes.data)

    @property
    def options(self) -> Options:
        """Its options, read from the environment when first needed. Raises DeviceError for a wrong variable."""
        if self._options is None:
            self._options = Options.from_environment()
        return self._options

    @options.setter
    def options(self, options: Options) -> None:
        """Sets the options, which makes older plans void."""
        self._options = options
        self._changed()

    @property
    def numerics(self) -> Numerics:
        """Its arithmetic: as given, or that of the bound ggml's CPU; always with `options.matmul`."""
        return replace(self._numerics or codecs.bound(), matmul=self.options.matmul)

    @numerics.setter
    def numerics(self, numerics: Numerics) -> None:
        """Sets the arithmetic, which makes older plans void."""
        self._numerics = numerics
        self._changed()

    @abstractmethod
    def like(self, *, options: Options | None = None) -> AnyBackend:
        """Another backend of the same device, with the same or other options."""

    def memory(self) -> OwnMemory | None:
        """New memory of the device's own; None if tensors stay in ggml's buffers. Raises DeviceError for a device that
        cannot be opened."""
        return None

    # fusions

    @property
    def fusions(self) -> tuple[Fusion, ...]:
        """The patterns of nodes that it may run as one operator; `options.fusion` says whether it does."""
        return self._fusions

    @fusions.setter
    def fusions(self, fusions: Iterable[Fusion]) -> None:
        """Sets the fusions, which makes older plans void."""
        self._fusions = tuple(fusions)
        self._changed()

    @property
    def fuses(self) -> bool:
        """Whether patterns of nodes run as one operator. With `options.fallback` "cpu" nodes run one by one."""
        return self.options.fusion == "on" and self.options.fallback == "none"

    @property
    def fusible(self) -> frozenset[str]:
        """The ops with which a fused pattern may begin; none where `fuses` is False."""
        return frozenset(fusion.ops[0].name for fusion in self._fusions) if self.fuses else frozenset()

    def longest_fusion(
        self, graph: Graph, begin: int, among: Iterable[Fusion] | None = None
    ) -> tuple[Fusion, Fused] | None:
        """The longest pattern of nodes, from node `begin` on, that the backend runs as one operator; None where there
        is none.

        among  the fusions to try; default: all of the backend's
        """
        return longest(graph, begin, self._fusions if among is None else among, self.ops)

    # nodes

    @property
    def op_names(self) -> Collection[str]:
        """The ops of which it may take nodes."""
        return self.ops

    def offers(self, op: str) -> bool:
        """Whether nodes of an op may be placed on the device, if no kernel refuses them. Also True of an op that is not
        among `op_names`; `refusal` turns it away."""
        return True

    def refusal(self, node: Node) -> str | None:
        """Why the backend does not take the node: no kernel does, or the profile does not. None where it takes it."""
        return self.kernel_refusal(node) or self.options.profile.refusal(node)

    def kernel_refusal(self, node: Node) -> str | None:
        """Why no kernel takes the node; None if one does. Raises KernelError if it cannot say."""
        op = self.ops.get(node.op)
        return NO_KERNEL if op is None else op.refusal(node)

    def check(self, node: Node) -> None:
        """Raises KernelError where the backend does not take the node."""
        reason = self.refusal(node)
        if reason is not None:
            raise KernelError(f"{node}: {reason}")

    @abstractmethod
    def bind(self, node: Node) -> Call:
        """The call that computes a node whose tensors lie where a graph's do: in the device's own memory if it has one,
        else in the host's. Raises KernelError if the backend does not take the node."""

    @abstractmethod
    def compute(self, node: Node) -> None:
        """Computes a node over host memory into its output's. Raises what a kernel raises, and KernelError if the
        backend does not take the node."""

    def bound(self, node: Node) -> Call:
        """The call that computes a node over host memory as `compute` does, as often as it is wanted. Raises
        KernelError if the backend does not take the node."""
        return partial(self.compute, node)

    # graphs

    @abstractmethod
    def plan(self, graph: Graph) -> Plan:
        """Makes a graph ready to run, its empty nodes left out. Raises KernelError if the backend does not take a
        node."""

    def compute_graph(self, graph: Graph) -> None:
        """Computes a graph's nodes in order, patterns as one operator. Raises KernelError."""
        with self.team.working():
            self.plan(graph).run()


class Backend(AnyBackend):
    """What one device computes by kernels in Python, and how.

        register(Backend("NPU1", ops=[*OWN.values(), mine], options=Options(memory="device")))

    name     of the device in ggml's registry
    ops      default: the project's own
    options  default: those of the environment
    fusions  patterns of nodes that it runs as one operator; default: the project's own

    A process has one ggml. From it come two more defaults, which all backends share:

    numerics  what ggml's CPU computes, with `options.matmul`
    team      the threads that run its kernels: ggml's, once the backend is registered; a pool before
    """

    description = "Python kernels (ggml-backend-npu)"
    runs_without_python = True

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
        super().__init__(name, options, OWN.values() if ops is None else ops)
        self.team, self._numerics, self._fusions = team, numerics, tuple(fusions)

    def like(self, name: str | None = None, *, options: Options | None = None) -> Backend:
        """Another backend with the same ops, and with the same or other options."""
        chosen = options or self.options
        return Backend(
            name or self.name, ops=self.ops.values(), options=chosen, numerics=self._numerics, team=self.team,
            fusions=self._fusions,
        )  # fmt: skip

    def memory(self) -> DeviceMemory | None:
        """New memory of the device's own, with `options.memory` "device"; None if tensors stay in ggml's buffers. A
        tensor that is packed there, or no longer, makes older plans void."""
        limit = self.options.memory_limit or _MEMORY
        return DeviceMemory(limit, self._changed) if self.options.memory == "device" else None

    # nodes

    def offers(self, op: str) -> bool:
        """Whether nodes of an op may be placed on the device, where no kernel refuses them.

        With `options.ops` "all" every op may; else the ops of a user's kernels, and those of the project's own that are
        marked `default`. True as well for an op without a kernel, which `refusal` refuses.
        """
        kernel = self.ops.get(op)
        return kernel is None or self.options.ops == "all" or kernel.default or kernel is not OWN.get(op)

    def bind(self, node: Node) -> Call:
        """The call that computes the node, in the team that is working where it is called. Raises KernelError where the
        backend does not take the node."""
        self.check(node)
        return self.ops[node.op].bind(node, self.numerics)

    def compute(self, node: Node) -> None:
        """Computes the node into its output's memory, in the backend's threads. Raises what the kernel raises, and
        KernelError where the backend does not take the node."""
        self.bound(node)()

    def bound(self, node: Node) -> Call:
        """The call that computes the node in the backend's threads. Raises KernelError where the backend does not take
        the node."""
        with self.team.working():
            call = self.bind(node)

        def compute() -> None:
            with self.team.working():
                call()

        return compute

    # graphs

    def plan(self, graph: Graph) -> Plan:
        """Binds every non-empty node of a graph, patterns as one operator. Raises KernelError where the backend does
        not take a node."""
        steps: list[tuple[Node | Joined, Call]] = []
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
                steps.append((Joined(fusion.name, span, bound), bound.call))
                counts.update(each.op for each in span.nodes)
                fused[fusion.name] += 1
            begin = end
        return Plan(tuple(steps), counts, fused)
