"""Devices and kernels that are right, though their bytes depend on what runs together, on how much there is, or on
chance; and the same with a fault that shows only where nodes run together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Graph, Node, Tensor
from ggml_backend_npu.device.device import Program
from ggml_backend_npu.device.sim import Simulator, _moved
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import Op
from ggml_backend_npu.registry.exact import values
from ggml_backend_npu.registry.params import Params
from graph_runner.judging import noise
from quant.kernels.threads import POOL

Exact = NDArray[np.float64]


class Fusing(Simulator):
    """A simulated device that computes chains of nodes without rounding in between, where a graph has them.

    chains  by ops; a node reads the result of the one before it
    type    what results inside of a chain are rounded to
    fault   what it does to the last result of a chain

    A result that is read inside of its chain alone is not written.
    """

    def __init__(
        self, *chains: str, type: Any = np.float64, fault: Callable[[Exact], Exact] = lambda x: x, **options: Any
    ) -> None:
        super().__init__(**options)
        self._chains = sorted((tuple(chain.split()) for chain in chains), key=len, reverse=True)
        self._type, self._alter = type, fault
        self.n_fused = 0

    def compile(self, graph: Graph) -> Program:
        nodes, calls, begin = _moved(graph).nodes, [], 0
        while begin < len(nodes):
            n = next((len(chain) for chain in self._chains if self._is(chain, graph, begin)), 1)
            if n == 1:
                calls.append(self._backend.bind(nodes[begin]))
            else:
                self.n_fused += 1
                calls.append(self._chain(nodes[begin : begin + n], self._kept(graph, begin, n)))
            begin += n

        def run() -> None:
            with POOL.working():
                for call in calls:
                    call()

        return lambda: self._later(run)

    def _is(self, chain: tuple[str, ...], graph: Graph, begin: int) -> bool:
        nodes = graph.nodes[begin : begin + len(chain)]
        if tuple(node.op for node in nodes) != chain:
            return False
        return all(
            at - 1 in graph.producers[at] and nodes[at - 1 - begin].dst.is_contiguous()
            for at in range(begin + 1, begin + len(chain))
        )

    def _kept(self, graph: Graph, begin: int, n: int) -> list[bool]:
        """Which results of a chain are read outside of it."""
        outside = {
            made
            for at, producers in enumerate(graph.producers)
            if not begin <= at < begin + n
            for made in producers
            if made is not None
        }
        return [bool(graph.beyond[at]) or at in outside or at == begin + n - 1 for at in range(begin, begin + n)]

    def _chain(self, nodes: tuple[Node, ...], kept: list[bool]) -> Callable[[], None]:
        def call() -> None:
            made: list[Exact] = []
            for node in nodes:
                sources = []
                for source in node.src:
                    at = [i for i, other in enumerate(nodes[: len(made)]) if _is_of(source, other.dst)]
                    wide = Tensor.of(made[at[-1]].reshape(source.ne[::-1]), "f64") if source and at else source
                    sources.append(wide)
                found = noise.exact(replace(node, src=tuple(sources)))
                assert found is not None
                made.append(found.astype(self._type).astype(np.float64))
            made[-1] = self._alter(made[-1])
            for node, result, is_kept in zip(nodes, made, kept, strict=True):
                if is_kept:
                    node.dst.view()[...] = result

        return call


def _is_of(source: Tensor | None, dst: Tensor) -> bool:
    return source is not None and source.address == dst.address and source.n_elements == dst.n_elements


# kernels


def _rows(a: Tensor, b: Tensor) -> NDArray[np.float32]:
    return np.repeat(np.repeat(values(a).astype(np.float32), b.ne[2] // a.ne[2], 1), b.ne[3] // a.ne[3], 0)


def _columns(a: Tensor, b: Tensor) -> NDArray[np.float32]:
    x = values(b).astype(np.float32)
    return x.astype(np.float16).astype(np.float32) if a.type == "f16" else x


def in_random_order(dst: Tensor, a: Tensor, b: Tensor, params: Params) -> None:
    order = np.random.default_rng().permutation(a.ne[0])
    dst.view()[...] = _columns(a, b)[..., order] @ _rows(a, b)[..., order].swapaxes(2, 3)


def _in_parts(dst: Tensor, a: Tensor, b: Tensor, size: int) -> None:
    rows, columns = _rows(a, b), _columns(a, b)
    total = np.zeros(dst.ne[::-1], np.float32)
    for begin in range(0, a.ne[0], size):
        total += columns[..., begin : begin + size] @ rows[..., begin : begin + size].swapaxes(2, 3)
    dst.view()[...] = total


def split_k(dst: Tensor, a: Tensor, b: Tensor, params: Params) -> None:
    _in_parts(dst, a, b, max(1, a.ne[0] // 4))


def other_tiles(dst: Tensor, a: Tensor, b: Tensor, params: Params) -> None:
    """Of 16 columns or more in tiles of 32, of fewer in tiles of 8."""
    _in_parts(dst, a, b, 32 if b.ne[1] >= 16 else 8)


def repacked(dst: Tensor, a: Tensor, b: Tensor, params: Params) -> None:
    """Weights in groups of four rows, whose elements lie beside each other."""
    rows, columns = _rows(a, b), _columns(a, b)
    n = -(-rows.shape[2] // 4)
    packed = np.zeros((*rows.shape[:2], n, rows.shape[3], 4), np.float32)
    for row in range(rows.shape[2]):
        packed[:, :, row // 4, :, row % 4] = rows[:, :, row]
    products = np.einsum("abck,abgkr->abcgr", columns, packed, dtype=np.float32)
    dst.view()[...] = products.reshape(*columns.shape[:3], 4 * n)[..., : rows.shape[2]]


def by_int8(dst: Tensor, a: Tensor, b: Tensor, params: Params) -> None:
    """Weights of q4_0 as ggml-cuda multiplies them: quants from 0 to 15 by columns rounded to int8, and -8 scales by
    the sum of the columns' values, not of what they were rounded to (ggml-cuda/quantize.cu, mmq.cuh)."""
    if a.type != "q4_0":
        in_doubles(dst, a, b, params)
        return
    rows, columns = np.repeat(values(a), b.ne[2] // a.ne[2], 1), values(b)
    blocks = columns.reshape(*columns.shape[:-1], -1, 32)
    scales = np.abs(blocks).max(-1, keepdims=True) / 127
    rounded = (np.round(blocks / np.where(scales, scales, 1)) * scales).reshape(columns.shape)
    of_blocks = rows.reshape(*rows.shape[:-1], -1, 32)
    largest = np.take_along_axis(of_blocks, np.abs(of_blocks).argmax(-1, keepdims=True), -1)  # -8 scales, or nearly 8
    offsets = np.broadcast_to(largest, of_blocks.shape).reshape(rows.shape)
    dst.view()[...] = rounded @ (rows - offsets).swapaxes(2, 3) + columns @ offsets.swapaxes(2, 3)


def in_doubles(dst: Tensor, a: Tensor, b: Tensor, params: Params) -> None:
    found = noise.exact(Node("MUL_MAT", dst, (a, b)))
    dst.view()[...] = found


def with_atomics(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: Params
) -> None:
    """Attention whose cells come in another order each time."""
    order = np.random.default_rng().permutation(k.ne[1])
    taken = [Tensor.of(np.ascontiguousarray(x.view()[:, :, order]), x.type) for x in (k, v)]
    moved = None if mask is None else Tensor.of(np.ascontiguousarray(mask.view()[..., : k.ne[1]][..., order]))
    OWN["FLASH_ATTN_EXT"].define(dst, q, *taken, moved, sinks, params=params)


def norm_in_doubles(dst: Tensor, x: Tensor, params: Params) -> None:
    dst.view()[...] = noise.exact(Node("RMS_NORM", dst, (x,), params.packed))


def softmax_from_the_end(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: Params) -> None:
    dst.view()[...] = noise.exact(Node("SOFT_MAX", dst, (x, mask, sinks), params.packed))


KERNELS: dict[str, tuple[str, Callable[..., None]]] = {
    "products in random order": ("MUL_MAT", in_random_order),
    "products split along k": ("MUL_MAT", split_k),
    "products in other tiles": ("MUL_MAT", other_tiles),
    "products of repacked weights": ("MUL_MAT", repacked),
    "products in doubles": ("MUL_MAT", in_doubles),
    "attention by atomics": ("FLASH_ATTN_EXT", with_atomics),
    "norms in doubles": ("RMS_NORM", norm_in_doubles),
    "softmax in doubles": ("SOFT_MAX", softmax_from_the_end),
}


def kernel(op: str, define: Callable[..., None]) -> Op:
    own = OWN[op]
    return Op(op, define, own.types, own.refuse, params=own.params)


@dataclass(frozen=True)
class Right:
    """A device that is right. tolerances: the rules that it is right by."""

    device: Callable[[], Fusing]
    tolerances: str | None = None


NORMS, PRODUCTS = "RMS_NORM MUL", "RMS_NORM MUL MUL_MAT"
DEVICES: dict[str, Right] = {
    "norms in doubles": Right(lambda: Fusing(NORMS)),
    "norms in floats of 80 bits": Right(lambda: Fusing(NORMS, type=np.longdouble)),
    "norms and products in doubles": Right(lambda: Fusing(PRODUCTS, NORMS)),
    "rotated products in doubles": Right(lambda: Fusing("MUL_MAT ROPE", NORMS)),
    "sums of products": Right(lambda: Fusing("MUL_MAT ADD")),
    "sums and norms": Right(lambda: Fusing("ADD RMS_NORM MUL")),
    "weights of attention": Right(lambda: Fusing("MUL_MAT SOFT_MAX", "MUL_MAT ADD")),
    "the whole of attention": Right(lambda: Fusing("MUL_MAT SOFT_MAX MUL_MAT")),
    "activations": Right(lambda: Fusing("SWIGLU MUL_MAT", "SWIGLU MUL_MAT ADD")),
    "a whole layer's end": Right(lambda: Fusing("SWIGLU MUL_MAT ADD RMS_NORM MUL", "MUL_MAT ADD RMS_NORM MUL")),
    "norms in half floats": Right(lambda: Fusing(NORMS, type=np.float16), "gpu"),
    "activations in half floats": Right(lambda: Fusing("SWIGLU MUL_MAT ADD", type=np.float16), "gpu"),
}


def wrong_devices() -> Iterator[tuple[str, Fusing]]:
    """Right node by node, wrong where a chain runs as one."""

    def without_last(x: Exact) -> Exact:
        x[..., -1] = 0
        return x

    yield "a factor", Fusing(NORMS, fault=lambda x: x * 1.01)
    yield "the last element", Fusing("MUL_MAT ADD", fault=without_last)
    yield "rows the other way round", Fusing("SWIGLU MUL_MAT", fault=lambda x: x[..., ::-1])
    yield "another sign", Fusing("MUL_MAT SOFT_MAX MUL_MAT", fault=lambda x: -x)
    yield "half floats", Fusing(NORMS, type=np.float16)
