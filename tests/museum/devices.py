"""Devices that are wrong as a whole: they fuse nodes, order them, or wait for copies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kit.museum import exhibit
from kit.right_devices import NORMS, Fusing

from ggml_backend_npu import Graph, Node, Tensor
from ggml_backend_npu.device.device import Program
from ggml_backend_npu.device.sim import Simulator, _moved
from ggml_backend_npu.ops.norms import Norm
from ggml_backend_npu.registry.mistakes import with_stride
from quant.kernels.threads import POOL

TOGETHER = "when nodes run together, not one by one"


class Fuses(Fusing):
    """Computes a norm and its weights at once. fixed: as the nodes say, without the fault of `spoilt`."""

    fixed = False

    def __init__(self, *chains: str, **options: Any) -> None:
        super().__init__(*(chains or (NORMS,)), **options)

    def _chain(self, nodes: tuple[Node, ...], kept: list[bool]) -> Callable[[], None]:
        return super()._chain(nodes if self.fixed else self.spoilt(*nodes), kept)

    def spoilt(self, *nodes: Node) -> tuple[Node, ...]:
        """The nodes whose right result is what the device gives."""
        raise NotImplementedError


def weights_of(node: Node) -> Tensor:
    found = node.src[1]
    assert found is not None
    return found


@exhibit("ggml-org/llama.cpp 14545", "Vulkan", "MUL", says=TOGETHER)
class NormTakesEpsOfMul(Fuses):
    """A fused RMS_NORM and MUL took the eps from the wrong place: spaces in the wrong places, and worse in some models.
    Here the eps is 0."""

    def spoilt(self, *nodes: Node) -> tuple[Node, ...]:
        return replace(nodes[0], params=Norm(eps=0.0).packed), *nodes[1:]


@exhibit("ggml-org/llama.cpp 27798", "Hexagon", "MUL", says=TOGETHER, model="mamba2")
class NormTakesOneGroupOfWeights(Fuses):
    """A fused RMS_NORM and MUL was wrong for weights in groups. Here all take those of the first."""

    def spoilt(self, *nodes: Node) -> tuple[Node, ...]:
        weights = weights_of(nodes[1])
        return nodes[0], replace(nodes[1], src=(nodes[1].src[0], replace(weights, nb=with_stride(weights.nb, 1, 0))))


@exhibit("ggml-org/llama.cpp 26085", "OpenCL", "MUL", says=TOGETHER, model="qwen3 of one matrix")
class NormTakesTheOffsetOfItsSource(Fuses):
    """A fused RMS_NORM and MUL read the weights at the offset of the norm's source, if that is a view."""

    def spoilt(self, *nodes: Node) -> tuple[Node, ...]:
        x, weights = nodes[0].src[0], weights_of(nodes[1])
        assert x is not None
        shifted = replace(weights, offset=weights.offset + x.offset) if not x.is_contiguous() else weights
        return nodes[0], replace(nodes[1], src=(nodes[1].src[0], shifted))


@exhibit("ggml-org/llama.cpp 17080", "CUDA", "ADD", says=TOGETHER, model="gpt2")
class BiasIsAddedOnce(Fuses):
    """A fused MUL_MAT and ADD added a repeated vector to the first column alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__("MUL_MAT ADD", **options)

    def _chain(self, nodes: tuple[Node, ...], kept: list[bool]) -> Callable[[], None]:
        right = Fusing._chain(self, nodes, kept)
        dst, bias = nodes[-1].dst, weights_of(nodes[-1])

        def call() -> None:
            right()
            if not self.fixed and bias.ne[1] < dst.ne[1]:
                dst.view()[..., 1:, :] -= bias.view()

        return call


class Orders(Simulator):
    """Runs the nodes of a graph in another order. fixed: in their own."""

    fixed = False

    def compile(self, graph: Graph) -> Program:
        nodes = _moved(graph).nodes
        calls = [self._backend.bind(node) for node in (nodes if self.fixed else self.ordered(list(nodes)))]

        def run() -> None:
            with POOL.working():
                for call in calls:
                    call()

        return lambda: self._later(run)

    def ordered(self, nodes: list[Node]) -> list[Node]:
        """The nodes as the device runs them."""
        raise NotImplementedError


@exhibit("ggml-org/llama.cpp 27812", "a GPU", "SET_ROWS", says=TOGETHER)
class OrdersViewsAsOthers(Orders):
    """What optimises the graph took a cache and a view of it for two tensors, and moved a node across one that writes
    what it reads: another answer at each start, and each node alone right."""

    def ordered(self, nodes: list[Node]) -> list[Node]:
        for place in reversed(range(len(nodes) - 3)):
            if nodes[place].op == "SET_ROWS":
                nodes.insert(place + 3, nodes.pop(place))
        return nodes


@exhibit("ggml-org/llama.cpp 2757", "Metal", "ROPE", says=TOGETHER)
class OrdersByReadsAlone(Orders):
    """Nodes ran at once if neither reads what the other gives, though memory that one reads had been given to the other
    for its result."""

    def ordered(self, nodes: list[Node]) -> list[Node]:
        for i in range(len(nodes) - 1):
            a, b = nodes[i : i + 2]
            if not any(source is not None and source.overlaps(a.dst) for source in (*b.src, b.dst)):
                nodes[i : i + 2] = b, a
        return nodes


@exhibit("ggml-org/ggml 659", "CUDA", "", says="wrong: synchronize|wrong: copy_out", memory=True)
class DoesNotWait(Simulator):
    """A tensor could be set or read before what had been queued was done."""

    late, fixed = 3e-3, False

    def synchronize(self) -> None:
        if self.fixed:
            super().synchronize()


@exhibit("ggml-org/llama.cpp 19179", "ggml-backend", "", says="wrong: copy_in_async", memory=True)
class SetsAtOnce(Simulator):
    """Setting a tensor asynchronously fell back on setting it at once, without waiting for what was queued before."""

    late, fixed = 3e-3, False

    def copy_in_async(self, handle: Any, offset: int, data: Any) -> None:
        if self.fixed:
            super().copy_in_async(handle, offset, data)
        else:
            self.copy_in(handle, offset, data)


@exhibit("ggml-org/llama.cpp 19402", "Metal", "", says="wrong: (record|wait_for)", memory=True)
class EventsHappenTooEarly(Simulator):
    """An event after a copy was recorded in another command buffer than the copy, and happened before it."""

    late, fixed = 3e-3, False

    def record(self) -> threading.Event:
        if self.fixed:
            return super().record()
        event = threading.Event()
        event.set()
        return event

    def wait_for(self, event: Any) -> None:
        if self.fixed:
            super().wait_for(event)
        else:
            event.wait()
