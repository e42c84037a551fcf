"""One op at a time on ggml's CPU and on the device NPU, from the same bytes; and the bytes to try it with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from kit.nodes import bind, dims
from numpy.typing import NDArray

import quant
from ggml_backend_npu import Memory, Node, Tensor, default_backend
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml import aborts, convert, lib
from ggml_backend_npu.ggml.convert import PackedAt
from ggml_backend_npu.ggml.graph_read import GraphRead
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ir import Dims as Dims
from ggml_backend_npu.plugin.build import Builder
from ggml_backend_npu.plugin.forms import Forms
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.judging.compare import compare
from graph_runner.judging.promises import holds
from graph_runner.judging.rules import Rules
from quant import codec
from quant.kernels import threads
from quant.kernels.jit import LINE

Bytes = NDArray[np.uint8]
Kind = Literal["any", "number", "plain", "dense"]  # floats: any bits; not NaN; quantisable; no block of zeros
ENGINES = ("compiled", "reference")
IN_ORDER: Dims = (0, 1, 2, 3)
NO_ELEMENTS: list[Dims] = [(0, 3, 2, 1), (32, 0, 2, 1), (32, 3, 0, 1), (32, 3, 2, 0)]
LACKING = sorted({"AVX2", "FMA", "F16C"} - lib.unchecked().features.keys())
with_avx2 = pytest.mark.skipif(bool(LACKING), reason=f"this ggml was built without {', '.join(LACKING)}")

_GUARD = 1 << 14


def choose(patch: pytest.MonkeyPatch, **options: Any) -> None:
    """Gives the default backend other options, by field name, until the patch is undone."""
    backend = default_backend()
    patch.setattr(backend, "options", replace(backend.options, **options))


# running


@contextmanager
def recorded_works() -> Iterator[list[threads.Work]]:
    """The works that Python runs meanwhile, each as often as it runs."""
    works: list[threads.Work] = []
    run = threads.Work.run

    def record(work: threads.Work) -> None:
        run(work)
        works.append(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads.Work, "run", record)
        patch.setattr(Forms, "_planned", _bound_where_it_lies)
        yield works


def _bound_where_it_lies(forms: Forms, read: GraphRead, packed: PackedAt) -> Plan:
    """`Forms._planned` without forms: its calls are works."""
    return forms._backend.plan(read.graph(forms._ggml, packed))


@contextmanager
def in_pieces(rng: np.random.Generator, n: int = 4) -> Iterator[None]:
    """Every work that may be cut runs as pieces of any sizes, however small it is, in any order."""

    def run(work: threads.Work) -> None:
        n_units, scratch = work.block.units, np.zeros(work.block.scratch, np.uint8)
        aligned = -(-scratch.ctypes.data // LINE) * LINE
        cuts = (
            sorted({0, n_units, *rng.integers(0, n_units + 1, n - 1).tolist()})
            if work.block.parts > 1
            else [0, n_units]
        )
        kernel = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(work.block.kernel)
        pieces = [*pairwise(cuts)]
        for i in rng.permutation(len(pieces)):
            status = kernel(work.block.parameters, *pieces[i], aligned)
            if status and work._failed is not None:
                raise work._failed(status)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "GRAIN", 1)
        patch.setattr(threads.Work, "run", run)
        patch.setattr(Forms, "_planned", _bound_where_it_lies)
        yield


T = TypeVar("T")
N = TypeVar("N", covariant=True)


class Sketch(Protocol[T, N]):
    """What a recipe makes tensors and a node in: a `Scene` of ggml's, or `kit.paper.Paper`."""

    roots: list[tuple[T, NDArray[Any]]]

    def root(self, type: str, ne: tuple[int, ...], data: NDArray[Any], /) -> T: ...
    def view(self, source: T, ne: Dims, nb: tuple[int, int, int], offset: int, /) -> T: ...
    def permute(self, source: T, axes: Dims, /) -> T: ...
    def op(self, function: str, /, *arguments: Any) -> N: ...


class Scene(Builder):
    """A Builder that knows which bytes each root tensor begins with."""

    def __init__(self, ggml: Ggml, device: str) -> None:
        super().__init__(ggml, device)
        self.roots: list[tuple[int, NDArray[Any]]] = []

    def root(self, type: str, ne: tuple[int, ...], data: NDArray[Any]) -> int:
        """A tensor that begins with the bytes of data."""
        tensor = self.tensor(type, ne)
        self.roots.append((tensor, data))
        return tensor

    def guard(self) -> None:
        """A tensor that nothing may write to, larger than most rows."""
        self.root("i8", (_GUARD,), np.full(_GUARD, 0x5A, np.uint8))

    def fill(self, node: int) -> None:
        """Sets all bytes: the node's to a pattern, then those of the roots, of which the node may be a view."""
        self.set(node, np.full(self.nbytes(node), 0xA5, np.uint8))
        self.load()

    def load(self) -> None:
        """Sets the bytes of the roots."""
        for tensor, data in self.roots:
            self.set(tensor, data)

    def memory(self, node: int) -> list[Bytes]:
        """The bytes of the node, then of every root."""
        return [self.get(node), *(self.get(tensor) for tensor, _ in self.roots)]


Recipe = Callable[[Scene], int]  # makes roots and returns the node to compute


@dataclass
class Outcome:
    """status  of graph_compute
    before, after  bytes of the output and of every root
    """

    status: int
    before: list[Bytes]
    after: list[Bytes]


def supported(backend: Plugin, recipe: Recipe) -> bool:
    """Whether the NPU takes the recipe's node."""
    with Scene(backend.ggml, "NPU") as scene:
        return scene.supported(recipe(scene))


def why_not(backend: Plugin, scene: Scene, node: int) -> str | None:
    """Why the NPU does not take a node of the scene; None where it does."""
    op = convert.op_name(scene.ggml, node)
    backend.refusals.pop(op, None)
    if scene.supported(node):
        return None
    return backend.refusals.get(op, "the option `ops` leaves it to the CPU (fixture every_op)")


def outcome(backend: Plugin, device: str, recipe: Recipe) -> Outcome:
    """The recipe's node computed on a device, between two guards. The NPU must take it."""
    with Scene(backend.ggml, device) as scene:
        scene.guard()
        node = recipe(scene)
        if device == "CPU":
            if (reason := aborts.why(scene.ggml, scene.as_node(node))) is not None:
                pytest.skip(reason)
        else:
            reason = why_not(backend, scene, node)
            assert reason is None, f"the NPU does not take the node: {reason}"
        scene.guard()
        scene.fill(node)
        before = scene.memory(node)
        return Outcome(scene.compute(node), before, scene.memory(node))


@contextmanager
def engine(backend: Plugin, name: str) -> Iterator[None]:
    """The backend with kernels of one engine: "compiled" or "reference"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGML_NPU_ENGINE", name)
        backend.forget_plans()
        yield
    backend.forget_plans()


def by_engines(backend: Plugin, recipe: Recipe, in_place: bool = False) -> dict[str, Outcome]:
    """The recipe's node as the NPU computes it, by either engine. It leaves all roots as they were.

    in_place  whether it may write to its roots
    """
    results = {}
    for name in ENGINES:
        with engine(backend, name):
            results[name] = outcome(backend, "NPU", recipe)
        assert results[name].status == 0, f"{name}: {backend.statistics.error}"
        if not in_place:
            for i, (actual, before) in enumerate(zip(results[name].after[1:], results[name].before[1:], strict=True)):
                assert_same_bytes(actual, before, f"{name}: root {i}")
    return results


def _outcomes(backend: Plugin, recipe: Recipe) -> tuple[dict[str, Outcome], Outcome]:
    """The recipe's node as the NPU computes it, by either engine, and as ggml's CPU does."""
    results = by_engines(backend, recipe, in_place=True)
    cpu = outcome(backend, "CPU", recipe)  # after the NPU: on a node that it does not take ggml may abort
    assert cpu.status == 0
    return results, cpu


def assert_equals_cpu(backend: Plugin, recipe: Recipe, floats: str | None = None, in_place: bool = False) -> None:
    """The NPU takes the node and leaves every byte, of the output and of all roots, as ggml's CPU does.

    floats    type of an output whose NaNs are equal whatever their bits: which one arithmetic gives, nobody promises
    in_place  whether the output lies in a root of that type
    """
    results, cpu = _outcomes(backend, recipe)
    for name, npu in results.items():
        for i, (actual, expected) in enumerate(zip(npu.after, cpu.after, strict=True)):
            if floats and (in_place or not i):
                actual, expected = one_nan(actual, floats), one_nan(expected, floats)
            assert_same_bytes(actual, expected, f"{name}: {f'root {i - 1}' if i else 'output'}")


def assert_as_promised(backend: Plugin, recipe: Recipe, promise: str, floats: str | None = None) -> None:
    """The NPU takes the node and leaves all roots as ggml's CPU does. The compiled kernel gives the CPU's bytes where
    that is promised of such nodes on this machine; where it is not, and by the definition, the op's rule holds.

    floats  as in `assert_equals_cpu`
    """
    results, cpu = _outcomes(backend, recipe)
    for name, npu in results.items():
        for i, (actual, expected) in enumerate(zip(npu.after[1:], cpu.after[1:], strict=True)):
            assert_same_bytes(actual, expected, f"{name}: root {i}")
        actual, expected = (one_nan(each.after[0], floats) if floats else each.after[0] for each in (npu, cpu))
        if name == "compiled" and holds(promise):
            assert_same_bytes(actual, expected, name)
        else:
            assert is_allowed(backend.ggml, recipe, actual, expected), name


def is_allowed(ggml: Ggml, recipe: Recipe, actual: Bytes, expected: Bytes) -> bool:
    """Whether a diff takes the output of the recipe's node for right."""
    with Scene(ggml, "CPU") as scene:
        address = recipe(scene)
        scene.fill(address)
        node = convert.node(ggml, address)
        reference, result = (replace(node.dst, memory=Memory.of(x), offset=0) for x in (expected, actual))
        found = compare(reference, result)
        return bool(found) or Rules().allows(node, reference, result, found)


def assert_near_cpu(backend: Plugin, recipe: Recipe, type: str, ulp: int, least: float = 0.0) -> None:
    """As `assert_equals_cpu`, but for floats of the output, which may be so many units in the last place away from
    the CPU's, or by up to `least`."""
    results, cpu = _outcomes(backend, recipe)
    for name, npu in results.items():
        assert_near(one_nan(npu.after[0], type), one_nan(cpu.after[0], type), ulp, least, name)
        for i, (actual, expected) in enumerate(zip(npu.after[1:], cpu.after[1:], strict=True)):
            assert_same_bytes(actual, expected, f"{name}: root {i}")


def assert_near(actual: NDArray[Any], expected: NDArray[Any], ulp: int, least: float = 0.0, what: str = "") -> None:
    """Floats of one type no further apart than so many units in the last place, or than `least`."""
    places = [array.view(f"i{array.itemsize}").astype(np.int64) for array in (actual, expected)]
    lowest = -(1 << 8 * actual.itemsize - 1)
    ordered = [np.where(place < 0, lowest - place, place) for place in places]
    with np.errstate(all="ignore"):
        close = np.abs(actual.astype(np.float64) - expected.astype(np.float64)) <= least
    far = np.flatnonzero((np.abs(ordered[0] - ordered[1]) > ulp) & ~close)
    if far.size:
        at = int(far[0])
        got, wanted = actual.reshape(-1)[at], expected.reshape(-1)[at]
        pytest.fail(f"{what}: {far.size} of {actual.size} floats are off, the first at {at}: {got}, not {wanted}")


def one_nan(data: NDArray[Any], type: str) -> NDArray[Any]:
    """Floats of a type, as bytes, with one bit pattern for every NaN."""
    values = data.view(dtype_of(type)).copy()
    values[np.isnan(values)] = np.nan
    return values


def computed(op: str, dst: NDArray[Any], *src: NDArray[Any], params: bytes = b"") -> NDArray[Any]:
    """dst, after the kernel of an op, of the engine in force, has filled it from arrays: without ggml."""
    bind(Node(op, Tensor.of(dst), tuple(Tensor.of(array) for array in src), params))()
    return dst


def refusal(op: str, dst: NDArray[Any], *src: NDArray[Any] | None, params: bytes = b"") -> str | None:
    """Why the kernel of an op does not take a node over arrays; None where it does."""
    sources = tuple(None if array is None else Tensor.of(array) for array in src)
    return default_backend().ops[op].refusal(Node(op, Tensor.of(dst), sources, params))


def assert_same_bytes(actual: NDArray[Any], expected: NDArray[Any], what: str = "") -> None:
    """Equal byte for byte; the message says where not."""
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (actual, expected))
    assert a.size == b.size, f"{what}: {a.size} bytes, not {b.size}"
    differs = np.flatnonzero(a != b)
    if differs.size:
        at = int(differs[0])
        got, wanted = a[at : at + 16].tobytes().hex(" "), b[at : at + 16].tobytes().hex(" ")
        pytest.fail(f"{what}: {differs.size} of {a.size} bytes differ, the first at {at}: {got}, not {wanted}")


# bytes to try


_POOL = 1 << 16


def dtype_of(type: str) -> np.dtype[Any]:
    """NumPy's type of the elements of a type that is not quantised."""
    dtype = codec(type).dtype
    assert dtype is not None, type
    return dtype


FLOATS = {type: dtype_of(type) for type in ("f32", "f16", "bf16")}


def zeros(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.zeros(shape, dtype)


def encoded(type: str, x: NDArray[np.float32]) -> Bytes:
    """Numbers as blocks of a type, rounded as the backend rounds them."""
    numerics = default_backend().numerics
    return numerics.codec(type).encode(x.reshape(-1, codec(type).block_size), numerics.rounding)


def plain_floats() -> NDArray[np.float32]:
    """Finite values: normal, exact ties of a quantiser, zeros of both signs, whole blocks of zeros, tiny ones."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal(_POOL).astype(np.float32)
    x *= rng.choice(np.array([0.01, 1, 100], np.float32), _POOL // 256).repeat(256)
    kind = rng.integers(0, 10, _POOL)
    x = np.where(kind == 0, rng.integers(-254, 255, _POOL).astype(np.float32) / 2, x)
    x = np.where(kind == 1, rng.choice(np.array([0.0, -0.0, 127.0, -127.0, 1e-7, -1e-7], np.float32), _POOL), x)
    x[(rng.integers(0, 8, _POOL // 32) == 0).repeat(32)] = 0
    return x


_SPECIAL = np.array(
    [
        *(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF812345, 0x7FFFFFFF, 0x7F800000, 0xFF800000),  # NaNs, infinities
        *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF),  # zeros ... largest
        *(0x477FEFFF, 0x477FF000, 0x477FF001, 0x33000000, 0x33000001, 0x387FE000, 0xB3800000),  # ends of float16
        *(0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000, 0x7F7F8000, 0x00008000),  # ties of bfloat16 and float16
    ],
    np.uint32,
)


def special_floats() -> NDArray[np.float32]:
    """Any bit patterns: the ones that conversions treat in a way of their own, random ones, and plain values."""
    rng = np.random.default_rng(6)
    bits = np.where(rng.random(_POOL) < 0.3, rng.choice(_SPECIAL, _POOL), plain_floats().view(np.uint32))
    random = rng.integers(0, 1 << 32, _POOL, dtype=np.uint32)
    return np.where(rng.random(_POOL) < 0.3, random, bits).view(np.float32)


@cache
def pool(type: str, kind: Kind) -> Bytes:
    """Elements or blocks of a type to take from, as rows of bytes."""
    of = codec(type)
    if of.dtype is None:
        blocks = np.random.default_rng(7).integers(0, 256, (4096, of.block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            finite = np.isfinite(quant.dequantize(blocks, type)).all(axis=1)
        return blocks[finite]
    if type in ("f32", "f16", "bf16") and (kind != "any" or type == "f32"):
        x = special_floats() if kind in ("any", "number") else plain_floats()
        if kind == "dense":
            x[::32] = 1
        x = x if kind == "any" else np.where(np.isnan(x), np.float32(-0.0), x)
        return quant.quantize(x, type).reshape(_POOL, -1)
    return np.random.default_rng(8).integers(0, 256, (_POOL, of.block_bytes), dtype=np.uint8)


def values(type: str, n: int, rng: np.random.Generator, kind: Kind = "any") -> Bytes:
    """Bytes of n elements of a type; `kind` says which floats. Finite blocks of any bits for a quantised type."""
    units = pool(type, kind)
    begin = int(rng.integers(0, len(units) // 2)) // 32 * 32
    return np.resize(units[begin:], (n // codec(type).block_size, units.shape[1]))


def kind_for(src: str, dst: str) -> Kind:
    """Which values of type src ggml converts to type dst in a defined way."""
    if src == dst:
        return "any"
    if dst == "f16":
        return "number"  # NaNs have tests of their own
    if dst == "iq4_nl":
        return "dense"  # ggml leaves the quants of a block of zeros as they are on its stack
    return "any" if dst in ("f32", "bf16") else "plain"


# shapes and strides


@dataclass(frozen=True)
class Placement:
    """How a tensor lies in its root.

    axes    dimension i of the memory is dimension axes[i] of the tensor (ggml_permute)
    steps   every how many-th row, matrix, ... of the root it has
    before  how much of the root lies in front of it, by dimension of the memory: blocks, rows, matrices, ...
    after   how much lies behind it
    """

    axes: Dims = IN_ORDER
    steps: Dims = (1, 1, 1, 1)
    before: Dims = (0, 0, 0, 0)
    after: Dims = (0, 0, 0, 0)

    def put(self, scene: Sketch[T, Any], type: str, ne: tuple[int, ...], fill: Callable[[int], NDArray[Any]]) -> T:
        """The tensor of size ne, a view of a root that begins with fill(its elements)."""
        root_ne, own, nb, offset = self._in_root(type, ne)
        tensor = scene.root(type, root_ne, fill(prod(root_ne)))
        if self == Placement():
            return tensor
        view = scene.view(tensor, own, nb[1:], offset)
        return view if self.axes == IN_ORDER else scene.permute(view, self.axes)

    def hold(self, scene: Sketch[T, Any], type: str, array: NDArray[Any], rest: int) -> T:
        """The tensor of these values, axes reversed; what lies around them in the root is `rest`."""
        tensor = self.put(scene, type, array.shape[::-1], lambda n: np.full(n, rest, array.dtype))
        _, data = scene.roots[-1]
        _, _, nb, offset = self._in_root(type, array.shape[::-1])
        strides = [nb[self.axes.index(axis)] for axis in (3, 2, 1, 0)]
        np.lib.stride_tricks.as_strided(data[offset // data.itemsize :], array.shape, strides)[...] = array
        return tensor

    def _in_root(self, type: str, ne: tuple[int, ...]) -> tuple[Dims, Dims, Dims, int]:
        """The root's ne; ne, nb and offset of the view, in the order of the memory."""
        kind = codec(type)
        own = dims(ne[axis] for axis in self.axes)
        units = (own[0] // kind.block_size, *own[1:])
        sizes = [b + n * s + a for b, n, s, a in zip(self.before, units, self.steps, self.after, strict=True)]
        nb = [kind.block_bytes * prod(sizes[:i]) for i in range(4)]
        offset = sum(b * stride for b, stride in zip(self.before, nb, strict=True))
        stepped = dims(s * stride for s, stride in zip(self.steps, nb, strict=True))
        return dims((sizes[0] * kind.block_size, *sizes[1:])), own, stepped, offset


PLAIN = Placement()
TRANSPOSED = Placement(axes=(1, 0, 2, 3))
ROWS_APART = Placement(steps=(1, 2, 1, 1), before=(1, 1, 0, 0), after=(0, 1, 1, 0))
EVENLY_APART = Placement(steps=(1, 2, 1, 1))  # rows with gaps between them, all the same


@st.composite
def placements(draw: st.DrawFn, rows: bool = False) -> Placement:
    """Any placement; rows: one that keeps the elements of a row together."""
    few = st.integers(0, 1)
    axes = (0, *draw(st.permutations((1, 2, 3)))) if rows else tuple(draw(st.permutations(IN_ORDER)))
    steps = (1, *(draw(st.integers(1, 2)) for _ in range(3)))
    before, after = (tuple(draw(few) for _ in range(4)) for _ in range(2))
    return Placement(dims(axes), dims(steps), dims(before), dims(after))


@st.composite
def sizes(draw: st.DrawFn, block: int = 1) -> Dims:
    """ne of a small tensor, its rows whole blocks."""
    row = block * draw(st.integers(1, 3 if block > 1 else 40))
    return dims((row, *(draw(st.integers(1, 3)) for _ in range(3))))


@st.composite
def reshapes(draw: st.DrawFn, ne: Dims, block: int = 1) -> Dims:
    """A size of as many elements as ne, its rows whole blocks."""
    factors = draw(st.permutations([ne[0] // block, *ne[1:]]))
    merged = draw(st.integers(0, 3))
    factors = [prod(factors[: merged + 1]), *factors[merged + 1 :], *[1] * merged]
    return dims((factors[0] * block, *factors[1:]))


seeds = st.integers(0, 1 << 32)


def examples(n: int) -> settings:
    """Decorator of a test: n examples where others have 20, and in each profile as many times more or fewer."""
    profile = settings.default
    assert profile is not None
    return settings(max_examples=max(1, n * profile.max_examples // 20))
