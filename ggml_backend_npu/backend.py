"""A backend: the ops, options, numerics and threads of one device in one object, and what follows from them.

A process may have several, each registered with ggml as its own device (`ggml_backend_npu.register`).
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
from ggml_backend_npu.options import DeviceError, Options
from ggml_backend_npu.params import Params
from ggml_backend_npu.plan import Plan
from ggml_backend_npu.registry import Call, KernelError, Op
from quant.kernels.jit import engine
from quant.kernels.threads import POOL, Team

if TYPE_CHECKING:
    from ggml_backend_npu.opaque import OpaqueMemory

NO_KERNEL = "no kernel"
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


class Backend:
    """What one device computes, and how.

        register(Backend("NPU1", ops=[*OWN.values(), mine], options=Options(memory="device")))

    name     of the device in ggml's registry
    ops      default: the project's own
    options  default: those of the environment
    fusions  patterns of nodes that it runs as one operator; default: the project's own

    A process has one ggml. From it come two more defaults, which all backends share:

    numerics  what ggml's CPU computes, with `options.matmul`
    team      the threads that run its kernels: ggml's, once the backend is registered; a pool before

    Options are read when they are first needed: a program may add ops before that, and hears of a wrong variable only
    then. Every change gives a new `version`, because older plans hold the old kernels.
    """

    description = "Python kernels (ggml-backend-npu)"
    runs_without_python = True  # runs graphs that come again

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
    def fusions(self) -> tuple[Fusion, ...]:
        """The patterns of nodes that it may run as one operator; `options.fusion` says whether it does."""
        return self._fusions

    @fusions.setter
    def fusions(self, fusions: Iterable[Fusion]) -> None:
        """Sets the fusions, which makes older plans void."""
        self._fusions = tuple(fusions)
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

    @property
    def fuses(self) -> bool:
        """Whether patterns of nodes run as one operator."""
        return self.options.fusion == "on"

    @property
    def fusible(self) -> frozenset[str]:
        """The ops with which a fused pattern may begin; none where `fuses` is False."""
        return frozenset(fusion.ops[0].name for fusion in self._fusions) if self.fuses else frozenset()

    def like(self, name: str | None = None, *, options: Options | None = None) -> Backend:
        """Another backend with the same ops, and with the same or other options."""
        chosen = options or self.options
        return Backend(
            name or self.name, ops=self.ops.values(), options=chosen, numerics=self._numerics, team=self.team,
            fusions=self._fusions,
        )  # fmt: skip

    def memory(self, moved: Callable[[], None]) -> DeviceMemory | OpaqueMemory | None:
        """Memory of the device's own; None where tensors stay in ggml's buffers.

        moved  called whenever a tensor becomes packed or stops being packed
        """
        limit = self.options.memory_limit or _MEMORY
        return DeviceMemory(limit, moved) if self.options.memory == "device" else None

    # nodes

    def offers(self, op: str) -> bool:
        """Whether nodes of an op may be placed on the device, where no kernel refuses them.

        With `options.ops` "all" every op may; else the ops of a user's kernels, and those of the project's own that are
        marked `default`. True as well for an op without a kernel, which `refusal` refuses.
        """
        kernel = self.ops.get(op)
        return kernel is None or self.options.ops == "all" or kernel.default or kernel is not OWN.get(op)

    def refusal(self, node: Node) -> str | None:
        """Why the backend does not take the node: no kernel does, or the profile does not. None where it takes it."""
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
        """The call that computes the node, in the team that is working where it is called. Raises KernelError where the
        backend does not take the node."""
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
        """The longest pattern of nodes, from node `begin` on, that the backend runs as one operator; None where there
        is none.

        among  the fusions to try; default: all of the backend's
        """
        return longest(graph, begin, self._fusions if among is None else among, self.ops)

    def plan(self, graph: Graph) -> Plan:
        """Binds every non-empty node of a graph, patterns as one operator. Raises KernelError where the backend does
        not take a node."""
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
        """Computes a graph's nodes in order, patterns as one operator. Raises KernelError."""
        with self.team.working():
            self.plan(graph).run()


@cache
def default_backends() -> tuple[Backend, ...]:
    """The backends that `ggml_backend_npu.register()` registers: those of the devices of GGML_NPU_DEVICE_FILE, where
    that is set, else this project's own. Raises DeviceError."""
    name = os.environ.get("GGML_NPU_DEVICE_FILE")
    if not name:
        return (Backend(),)
    from ggml_backend_npu.device_backend import backends_of

    return tuple(backends_of(name))


def default_backend() -> Backend:
    """The backend that `ggml_backend_npu.op` adds to, and that is meant where none is named: the first of
    `default_backends`. Raises DeviceError."""
    return default_backends()[0]


def only_backend() -> Backend:
    """The default backend, where one device runs a model. Raises DeviceError where GGML_NPU_DEVICE_FILE names
    several."""
    first, *others = default_backends()
    if others:
        name, names = os.environ["GGML_NPU_DEVICE_FILE"], " and ".join(each.name for each in (first, *others))
        raise DeviceError(f"device {name!r}: registers {names}, and one runs here: choose it, as {name}:{first.name}")
    return first


def op(
    name: str,
    *,
    types: Iterable[Types] | None = None,
    refuse: Callable[..., str | None] | None = None,
    default: bool = False,
    params: type[Params] | None = None,
) -> Callable[[Callable[..., None]], Op]:
    """Decorator: makes a function a kernel of the ggml op `name`, in the default backend, or, in a file of kernels, in
    the backend that the file is loaded for.

        @op("SQRT", types=[("f32", "f32")], refuse=lambda dst, x: "one row" if x.ne[1] < 2 else None)
        def sqrt(dst, x):
            dst.view()[...] = np.sqrt(x.view())

    name     ggml_op_desc of the nodes that it computes ("GET_ROWS", "SOFT_MAX", "SILU", ...)
    types    the type combinations (dst, src0, src1, ...) that it takes; default: any
    refuse   called like the kernel: returns a reason why such a node is not taken, or None
    default  has no effect on an op that a user registers, which the device always takes
    params   the record of the node's op_params (`ggml_backend_npu.params`)

    The kernel gets `Tensor`s, reads its sources with `.view()` and writes into `dst.view()`. A source that a node
    leaves out is None. A keyword `params` gets the node's op_params: as the record, or without one as bytes, for
    `struct.unpack_from("2f", params)`. An exception in the kernel fails the node, not the process.

    Raises TypeError where `name` is not a string, and where `Op` does.
    """
    make = registry.op(name, types=types, refuse=refuse, default=default, params=params)

    def added(define: Callable[..., None]) -> Op:
        entry = make(define)
        if not registry.is_recorded():
            default_backend().ops.add(entry)
        return entry

    return added
