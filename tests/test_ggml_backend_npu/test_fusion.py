"""Fusion: a pattern of nodes gives what its nodes give one by one, and what only looks like one is left alone."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from models import WRITERS, Models
from numpy.typing import NDArray
from support import Scene, assert_same_bytes, choose, engine, plain_floats

from ggml_backend_npu import Graph, KernelError, Memory, Node, Tensor, default_backend, fusion
from ggml_backend_npu.abi import convert, structs
from ggml_backend_npu.abi.plugin import Plugin
from ggml_backend_npu.fusion import Fused, Span
from ggml_backend_npu.profiles import ANY, Profile
from ggml_backend_npu.registry import Call, Op
from graph_runner import tiny
from graph_runner.compare import Comparison
from graph_runner.diff import DiffResult, diff
from graph_runner.session import DeviceName, Sampler, Session, Settings, context_for, generate

PROMPT = "The capital of France is"
N = 64
INF = float("inf")
NE_AT = 16  # of a ggml_tensor
SPANS = {
    "rwkv7": {"token_shift": 2},
    "moe": {"TopKSoftmax": 2, "masked_softmax": 2},
    "olmoe": {"TopKSoftmax": 2, "masked_softmax": 2},
    "gpt-oss": {"TopKSoftmax": 2, "masked_softmax": 2},
}  # per step; each model has 2 layers


@pytest.fixture(autouse=True)
def all_ops(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    choose(monkeypatch, ops="all")
    choose(monkeypatch, fusion="on")
    backend.forget_plans()
    yield
    backend.forget_plans()


# models


@pytest.fixture(scope="session")
def f32_model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The models of `model` with matrices of F32: there, rounding in a softmax stays as small as it is."""
    folder = tmp_path_factory.mktemp("f32 models")

    @cache
    def find(name: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny, "F16", GGMLQuantizationType.F32)
            return WRITERS[name](folder / f"{name}.gguf")

    return find


@dataclass(frozen=True)
class Decoded:
    """64 greedy tokens, the logits before each, and what was fused."""

    text: bytes
    logits: NDArray[np.float32]
    spans: Counter[str]


def decoded(file: Path, device: DeviceName, fusion: str = "on", cache_type: str = "f32") -> Decoded:
    settings = Settings(
        device=device,
        n_ctx=context_for(PROMPT, N),
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        flash_attention="off",
        threads=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, fusion=fusion)
        with Session(file, settings) as session:
            tokens = session.tokenize(PROMPT)
            steps = [(session.piece(t), session.logits()) for t in generate(session, tokens, N, Sampler())]
            assert len(steps) == N
            pieces, logits = zip(*steps, strict=True)
            return Decoded(b"".join(pieces), np.array(logits), session.npu_spans)


def nmse(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    return float(np.square(a - b).sum() / np.square(b).sum())


@pytest.mark.parametrize("name", SPANS)
def test_a_model_decodes_as_on_the_cpu_with_every_span_counted(f32_model: Models, name: str) -> None:
    file = f32_model(name)
    cpu, fused, alone = decoded(file, "cpu"), decoded(file, "npu"), decoded(file, "npu", "off")
    assert cpu.text == fused.text == alone.text
    assert not cpu.spans
    assert fused.spans == {span: count * N for span, count in SPANS[name].items()}
    assert not alone.spans
    for step in range(N):
        assert nmse(fused.logits[step], cpu.logits[step]) < 1e-10
        assert nmse(fused.logits[step], alone.logits[step]) < 1e-10
    if name == "rwkv7":
        assert_same_bytes(fused.logits, alone.logits)


@pytest.mark.parametrize("name", SPANS)
def test_a_model_of_f16_writes_the_same_text(model: Models, name: str) -> None:
    """A last bit of a softmax may round an activation to the next float16 there, so logits are less close."""
    cpu, fused = (decoded(model(name), device, cache_type="f16") for device in ("cpu", "npu"))
    assert fused.text == cpu.text
    assert nmse(fused.logits, cpu.logits) < 1e-5


@pytest.mark.parametrize("name", SPANS)
def test_the_reference_engine_fuses_nothing(backend: Plugin, model: Models, name: str) -> None:
    with engine(backend, "reference"), Session(model(name), Settings(device="npu", flash_attention="off")) as session:
        session.decode([5, 6, 7])
        session.decode([8])
        assert not session.npu_spans
        assert session.npu_nodes["ADD"]


def test_only_the_ops_that_the_device_takes_are_fused(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, ops="default")
    assert not decoded(model("moe"), "npu").spans


ELSEWHERE = """
import json, sys
from pathlib import Path
import numpy as np
from dataclasses import replace
from ggml_backend_npu import default_backend
from graph_runner.session import Sampler, Session, Settings, context_for, generate
told = {}
for file in sys.argv[1:]:
    runs = []
    for device, fusion in (("cpu", "on"), ("npu", "off"), ("npu", "on")):
        default_backend().options = replace(default_backend().options, fusion=fusion)
        settings = Settings(
            device=device, n_ctx=256, cache_type_k="f32", cache_type_v="f32", flash_attention="off", threads=1,
            gpu_layers=99,
        )
        with Session(Path(file), settings) as session:
            tokens = session.tokenize("The capital of France is")
            steps = [(t, session.logits()) for t in generate(session, tokens, 64, Sampler())]
            runs.append((*map(np.array, zip(*steps)), session.npu_spans))
    (text, logits, none), (alone, beside, off), (fused, found, spans) = runs
    told[Path(file).stem] = {
        "same text": bool((text == fused).all() and (text == alone).all()),
        "same logits": bool((found == beside).all()),
        "nmse": float(np.square(found - logits).sum() / np.square(logits).sum()),
        "none": none, "off": off, "spans": spans,
    }
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "device_type", "moe"),
    [
        pytest.param("host", "gpu", SPANS["moe"], marks=pytest.mark.slow),
        pytest.param("device", "accel", SPANS["moe"], marks=pytest.mark.slow),
        ("device", "gpu", SPANS["moe"]),
    ],
)
def test_models_are_fused_wherever_their_tensors_lie(
    f32_model: Models, memory: str, device_type: str, moe: dict[str, int]
) -> None:
    options = {"GGML_NPU_MEMORY": memory, "GGML_NPU_DEVICE_TYPE": device_type, "GGML_NPU_OPS": "all"}
    command = [sys.executable, "-c", ELSEWHERE, *(str(f32_model(name)) for name in SPANS)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | options, check=False)
    assert done.returncode == 0, done.stderr
    for name, run in json.loads(done.stdout).items():
        assert run["same text"]
        assert run["nmse"] < 1e-10
        assert run["same logits"] or name != "rwkv7"
        assert run["spans"] == {span: count * N for span, count in (SPANS | {"moe": moe, "olmoe": moe})[name].items()}
        assert run["none"] == run["off"] == {}


# small graphs

Build = Callable[[Scene], Sequence[int]]  # makes roots and returns the outputs of a graph


@dataclass(frozen=True)
class Ran:
    """What a graph gave: its outputs, without what lies between their elements, and the spans."""

    outputs: list[NDArray[Any]]
    fused: Counter[str]


def ran(backend: Plugin, build: Build, device: str = "NPU", fusion: str = "on", *, shared: bool = True) -> Ran:
    """A graph on a device; shared: results share memory as llama.cpp's do."""
    backend.statistics.reset()
    with pytest.MonkeyPatch.context() as patch, Scene(backend.ggml, device) as scene:
        choose(patch, fusion=fusion)
        outputs = build(scene)
        if shared:
            graph = scene.graph(*outputs)
        else:
            for output in outputs:
                backend.ggml.ggml_set_output(output)
            graph = scene._expanded(tuple(outputs))
            scene._allocate()
        for tensor, data in scene.roots:
            scene.set(tensor, data)
        assert scene.run(graph) == 0, backend.statistics.error
        return Ran([scene.as_tensor(t).view().copy() for t in outputs], Counter(backend.statistics.fused))


def assert_close(actual: NDArray[Any], expected: NDArray[Any], ulp: int) -> None:
    """Equal, float32 up to some units in the last place; NaN where NaN is."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype != np.float32 or not ulp:
        np.testing.assert_array_equal(actual, expected)
        return
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        apart = np.abs(actual.astype(np.float64) - expected) / np.spacing(np.abs(expected))
    assert np.where(same, 0, apart).max(initial=0) <= ulp


def assert_fuses(backend: Plugin, build: Build, *spans: str, ulp: int = 0, cpu_nmse: float = 0.0) -> None:
    """The graph has exactly these spans, and its outputs are those of its nodes one by one, and of ggml's CPU."""
    for shared in (False, True):
        fused = ran(backend, build, shared=shared)
        alone = ran(backend, build, fusion="off", shared=shared)
        cpu = ran(backend, build, "CPU", shared=shared)
        assert fused.fused == Counter(spans)
        assert not alone.fused
        for one, other in zip(fused.outputs, alone.outputs, strict=True):
            assert_close(one, other, ulp)
        for one, other in zip(fused.outputs, cpu.outputs, strict=True):
            if cpu_nmse and one.dtype == np.float32 and np.isfinite(other).all():
                assert nmse(one, other) <= cpu_nmse
            else:
                np.testing.assert_array_equal(one, other)


def floats(scene: Scene, *ne: int, seed: int = 0) -> int:
    rng = np.random.default_rng((seed, *ne))
    return scene.root("f32", ne, rng.standard_normal(ne[::-1]).astype(np.float32))


def reshaped(scene: Scene, tensor: int, *ne: int) -> int:
    return scene.op("reshape_4d", tensor, *ne, *[1] * (4 - len(ne)))


def scaled(scene: Scene, tensor: int, factor: float = 3.0) -> int:
    """A node that reads a tensor: CLAMP, which needs no other one."""
    return scene.op("clamp", tensor, -INF, factor)


# token_shift


@dataclass(frozen=True)
class Shift:
    """The nodes of a token shift: before - x, repeated, times mu, plus x."""

    x: int
    before: int
    mu: int
    sub: int
    repeat: int
    mul: int
    add: int


def shift(
    scene: Scene,
    width: int = 8,
    rows: int = 3,
    sequences: int = 1,
    n: int = 6,
    *,
    x: int | None = None,
    mu: int | None = None,
    repeated: Callable[[int], int] = lambda sub: sub,
    multiplied: Callable[[int], int] = lambda repeat: repeat,
    summed: Callable[[int], int] = lambda mul: mul,
    added: int | None = None,
) -> Shift:
    """x, and before it what llama.cpp puts there; `repeated` and so on stand between two nodes."""
    x = scaled(scene, floats(scene, width, rows, sequences), 1e3) if x is None else x
    state = floats(scene, width, 1, sequences, seed=1)
    before = state
    if rows > 1:
        held = scene.as_tensor(x)
        shifted = scene.view(x, (width, rows - 1, sequences, 1), held.nb[1:])
        before = scene.op("concat", state, shifted, 1)
    elif sequences == 1:
        before = scaled(scene, state, 1e3)
    mu = floats(scene, width, 1, 1, n, seed=2) if mu is None else mu
    sub = scene.op("sub", before, x)
    repeat = scene.op("repeat", repeated(sub), scene.tensor("f32", (width, rows, sequences, n)))
    mul = scene.op("mul", multiplied(repeat), mu)
    add = scene.op("add", summed(mul), x if added is None else added)
    return Shift(x, before, mu, sub, repeat, mul, add)


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize(
    ("width", "rows", "sequences"), [(1, 1, 1), (3, 1, 4), (64, 5, 1), (513, 2, 3), (1030, 9, 2), (128, 700, 1)]
)
def test_a_token_shift_is_its_nodes_bit_for_bit(backend: Plugin, width: int, rows: int, sequences: int, n: int) -> None:
    assert_fuses(backend, lambda scene: [shift(scene, width, rows, sequences, n).add], "token_shift")


def test_a_token_shift_of_any_values(backend: Plugin) -> None:
    pool = plain_floats()
    pool[::97] = INF
    pool[5::89] = -INF
    pool[7::83] = np.nan

    def build(scene: Scene) -> list[int]:
        x, mu = scene.root("f32", (96, 40), pool[: 96 * 40]), scene.root("f32", (96, 1, 1, 3), pool[-96 * 3 :])
        return [shift(scene, 96, 40, n=3, x=x, mu=mu).add]

    assert_fuses(backend, build, "token_shift")


def test_several_token_shifts_in_a_graph(backend: Plugin) -> None:
    def build(scene: Scene) -> list[int]:
        first = shift(scene, 16, 5, n=6)
        row = scene.view(first.add, (16, 5, 1, 1), (64, 320, 320), 3 * 320)
        second = shift(scene, 16, 5, n=2, x=scaled(scene, row))
        return [second.add, shift(scene, 16, 5, n=1, x=scaled(scene, first.x)).add]

    assert_fuses(backend, build, *["token_shift"] * 3)


def test_rows_that_lie_apart_are_shifted(backend: Plugin) -> None:
    """x and before are rows of one tensor, mu every second of another."""

    def build(scene: Scene) -> list[int]:
        both = floats(scene, 8, 2, 5)
        x, before = (scene.view(both, (8, 5, 1, 1), (64, 320, 320), offset) for offset in (0, 32))
        mu = scene.view(floats(scene, 8, 2, 1, 3), (8, 1, 1, 3), (32, 32, 64), 32)
        repeat = scene.op("repeat", scene.op("sub", before, x), scene.tensor("f32", (8, 5, 1, 3)))
        return [scene.op("add", scene.op("mul", repeat, mu), x)]

    assert_fuses(backend, build, "token_shift")


INNER = ("sub", "repeat", "mul")


@pytest.mark.parametrize("name", INNER)
def test_what_is_an_output_of_a_token_shift_is_computed(backend: Plugin, name: str) -> None:
    def build(scene: Scene) -> list[int]:
        nodes = shift(scene)
        return [getattr(nodes, name), nodes.add]

    assert_fuses(backend, build)


@pytest.mark.parametrize("name", INNER)
def test_what_another_node_reads_of_a_token_shift_is_computed(backend: Plugin, name: str) -> None:
    def direct(scene: Scene) -> list[int]:
        nodes = shift(scene)
        return [nodes.add, scaled(scene, getattr(nodes, name))]

    def through_views(scene: Scene) -> list[int]:
        nodes = shift(scene)
        inner = getattr(nodes, name)
        flat = reshaped(scene, inner, scene.as_tensor(inner).n_elements)
        return [nodes.add, scaled(scene, scene.view(flat, (4, 1, 1, 1), (16, 16, 16), 16))]

    def a_view_is_an_output(scene: Scene) -> list[int]:
        nodes = shift(scene)
        return [nodes.add, scene.view(getattr(nodes, name), (4, 1, 1, 1), (16, 16, 16), 16)]

    for build in (direct, through_views, a_view_is_an_output):
        assert_fuses(backend, build)


def test_the_sum_of_a_token_shift_may_be_read_in_any_way(backend: Plugin) -> None:
    def build(scene: Scene) -> list[int]:
        nodes = shift(scene, 8, 3, n=4)
        rows = [scene.view(nodes.add, (8, 3, 1, 1), (32, 96, 96), i * 96) for i in range(4)]
        return [scaled(scene, rows[2], 0.5), scaled(scene, rows[0], 0.5), scene.op("mul", rows[1], rows[3])]

    assert_fuses(backend, build, "token_shift")


def other_x(scene: Scene) -> int:
    return shift(scene, added=floats(scene, 8, 3, seed=9)).add


def equal_but_other_x(scene: Scene) -> int:
    """The same rows in another order."""
    x = scaled(scene, floats(scene, 8, 3), 1e3)
    return shift(scene, x=x, added=scene.view(x, (8, 3, 1, 1), (0, 96, 96))).add


def mu_permuted(scene: Scene) -> int:
    return shift(scene, mu=scene.permute(floats(scene, 6, 8), (3, 0, 1, 2)), n=6).add


def mu_by_row(scene: Scene) -> int:
    return shift(scene, mu=floats(scene, 8, 3, 1, 6)).add


def mu_for_all(scene: Scene) -> int:
    return shift(scene, mu=floats(scene, 8)).add


def mu_of_one_number(scene: Scene) -> int:
    return shift(scene, mu=floats(scene, 1, 1, 1, 6)).add


def mu_is_the_difference(scene: Scene) -> int:
    x = floats(scene, 8)
    before = scaled(scene, floats(scene, 8, seed=1), 1e3)
    sub = scene.op("sub", before, x)
    repeat = scene.op("repeat", sub, scene.tensor("f32", (8,)))
    return scene.op("add", scene.op("mul", repeat, sub), x)


def mu_is_the_repeated_difference(scene: Scene) -> int:
    x = floats(scene, 8)
    sub = scene.op("sub", scaled(scene, floats(scene, 8, seed=1), 1e3), x)
    repeat = scene.op("repeat", sub, scene.tensor("f32", (8, 1, 1, 6)))
    return scene.op("add", scene.op("mul", repeat, repeat), x)


def differences_reshaped(scene: Scene) -> int:
    """Rows that were one sequence are one each of several mu."""
    return shift(scene, 4, 2, n=2, repeated=lambda sub: reshaped(scene, sub, 4, 1, 1, 2)).add


def repeated_reshaped(scene: Scene) -> int:
    """mu of every second row, not of every second tensor."""
    nodes = shift(
        scene, 4, 2, n=2,
        multiplied=lambda repeat: reshaped(scene, repeat, 4, 1, 1, 4),
        summed=lambda mul: reshaped(scene, mul, 4, 2, 1, 2),
    )  # fmt: skip
    return nodes.add


def subtracted_from_x(scene: Scene) -> int:
    x, before = floats(scene, 8, 3), floats(scene, 8, 3, seed=1)
    repeat = scene.op("repeat", scene.op("sub", x, before), scene.tensor("f32", (8, 3, 1, 2)))
    return scene.op("add", scene.op("mul", repeat, floats(scene, 8, 1, 1, 2)), x)


def one_row_before_all(scene: Scene) -> int:
    """before - x, where before is longer than x."""
    x, before = floats(scene, 8, 1), floats(scene, 8, 3, seed=1)
    repeat = scene.op("repeat", scene.op("sub", before, x), scene.tensor("f32", (8, 3, 1, 2)))
    return scene.op("add", scene.op("mul", repeat, floats(scene, 8, 1, 1, 2)), x)


def sum_in_other_order(scene: Scene) -> int:
    x, before = floats(scene, 8, 3), floats(scene, 8, 3, seed=1)
    repeat = scene.op("repeat", scene.op("sub", before, x), scene.tensor("f32", (8, 3, 1, 1)))
    return scene.op("add", x, scene.op("mul", repeat, floats(scene, 8)))


NOT_A_TOKEN_SHIFT = [
    other_x, equal_but_other_x, mu_permuted, mu_by_row, mu_for_all, mu_of_one_number, mu_is_the_difference,
    mu_is_the_repeated_difference, differences_reshaped, repeated_reshaped, subtracted_from_x, one_row_before_all,
    sum_in_other_order,
]  # fmt: skip


@pytest.mark.parametrize("build", NOT_A_TOKEN_SHIFT, ids=lambda build: build.__name__)
def test_what_only_looks_like_a_token_shift_is_computed_node_by_node(
    backend: Plugin, build: Callable[[Scene], int]
) -> None:
    assert_fuses(backend, lambda scene: [build(scene)])


# routing


@dataclass(frozen=True)
class Route:
    """The nodes of a routing; of those that a kind has not, the one before."""

    logits: int
    probs: int
    order: int
    ids: int
    rows: int
    total: int
    least: int
    weights: int


KINDS = ("softmax", "normalised", "softmax of selected")


def route(
    scene: Scene,
    kind: str = "normalised",
    n_expert: int = 8,
    n_tokens: int = 5,
    k: int = 3,
    *,
    logits: int | None = None,
    softmax: tuple[int | None, float, float] = (None, 1.0, 0.0),
    descending: int = 1,
    first: int = 0,
    table: int | None = None,
    most: float = INF,
    least: float = 2.0**-14,
) -> Route:
    """The nodes as llama.cpp builds them: of all 3 kinds that are fused."""
    e, n = n_expert, n_tokens
    logits = floats(scene, e, n) if logits is None else logits
    probs = scene.op("soft_max_ext", logits, *softmax) if kind != "softmax of selected" else logits
    values = reshaped(scene, probs if table is None else table, 1, e, n)
    order = scene.op("argsort", probs, descending)
    ids = scene.view(order, (k, n, 1, 1), (4 * e, 4 * e * n, 4 * e * n), 4 * first)
    rows = total = clamped = weights = scene.op("get_rows", values, ids)
    if kind == "normalised":
        flat = reshaped(scene, rows, k, n)
        total = scene.op("sum_rows", flat)
        clamped = scene.op("clamp", total, least, most)
        weights = scene.op("div", flat, clamped)
    elif kind == "softmax of selected":
        weights = scene.op("soft_max_ext", reshaped(scene, rows, k, n), *softmax)
    return Route(logits, probs, order, ids, rows, total, clamped, weights)


def routed_outputs(scene: Scene, nodes: Route) -> list[int]:
    """The weights, and what a later node reads with the ids: themselves, from 1 on."""
    n_expert, n_tokens = scene.as_tensor(nodes.order).ne[:2]
    numbers = np.tile(np.arange(1, n_expert + 1, dtype=np.float32), (n_tokens, 1))
    return [nodes.weights, scene.op("get_rows", scene.root("f32", (1, n_expert, n_tokens), numbers), nodes.ids)]


def routed_right(backend: Plugin, build: Callable[[Scene], Sequence[int]], *spans: str) -> None:
    assert_fuses(backend, build, *spans, ulp=2, cpu_nmse=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n_expert", "n_tokens"), [(1, 1), (2, 3), (8, 1), (8, 5), (9, 40), (300, 3)])
def test_a_routing_selects_what_its_nodes_select(backend: Plugin, kind: str, n_expert: int, n_tokens: int) -> None:
    for k in {*range(1, min(n_expert, 9) + 1), n_expert}:

        def build(scene: Scene, k: int = k) -> list[int]:
            nodes = route(scene, kind, n_expert, n_tokens, k)
            return routed_outputs(scene, nodes)

        routed_right(backend, build, "TopKSoftmax")


@pytest.mark.parametrize("kind", KINDS)
def test_a_routing_of_many_rows_by_several_threads(backend: Plugin, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_backend(), "team", replace(default_backend().team, size=3))

    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind, 64, 5000, 6)
        return routed_outputs(scene, nodes)

    routed_right(backend, build, "TopKSoftmax")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_nobody_else_reads_and_weights_read_on(backend: Plugin, kind: str) -> None:
    def build(scene: Scene) -> list[int]:
        logits = scaled(scene, floats(scene, 8, 5), 1e3)
        nodes = route(scene, kind, 8, 5, 2, logits=logits)
        return [scaled(scene, reshaped(scene, nodes.weights, 1, 2, 5), 0.5)]

    routed_right(backend, build, "TopKSoftmax")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_read_again_as_mul_mat_id_reads_them(backend: Plugin, kind: str) -> None:
    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind, 8, 5, 2, logits=scaled(scene, floats(scene, 8, 5), 1e3))
        return [nodes.weights, scene.op("get_rows", floats(scene, 3, 8, 5), nodes.ids)]

    routed_right(backend, build, "TopKSoftmax")


@pytest.mark.parametrize("kind", KINDS)
def test_logits_without_a_softmax_are_nan_and_ids_stay_in_range(backend: Plugin, kind: str) -> None:
    logits = np.random.default_rng(3).standard_normal((6, 8)).astype(np.float32)
    logits[1, 3], logits[2, 3], logits[3] = np.nan, INF, -INF
    logits[4, 1:], logits[5] = -INF, np.nan

    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind, 8, 6, 3, logits=scene.root("f32", (8, 6), logits))
        return routed_outputs(scene, nodes)

    fused, alone = ran(backend, build), ran(backend, build, fusion="off")
    assert fused.fused == {"TopKSoftmax": 1}
    for one, other in zip(fused.outputs, alone.outputs, strict=True):
        assert_close(one, other, 2)
    ids = fused.outputs[1][0, :, :, 0]
    assert all(len({*row}) == 3 and min(row) >= 1 and max(row) <= 8 for row in ids.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_logits_the_first_are_selected(backend: Plugin, kind: str) -> None:
    logits = np.float32([[1, 2, 2, 1, 2, 0, 2, 1], [3] * 8])

    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind, 8, 2, 5, logits=scene.root("f32", (8, 2), logits))
        return routed_outputs(scene, nodes)

    fused, alone = ran(backend, build), ran(backend, build, fusion="off")
    for one, other in zip(fused.outputs, alone.outputs, strict=True):
        assert_close(one, other, 2)
    assert fused.outputs[1][0, :, :, 0].tolist() == [[2, 3, 5, 7, 1], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("least", [0.0, 0.25, 2.0, -INF])
def test_the_sum_of_weights_is_no_less_than_the_clamp_says(backend: Plugin, least: float) -> None:
    def build(scene: Scene) -> list[int]:
        return [route(scene, k=2, least=least).weights]

    routed_right(backend, build, "TopKSoftmax")


INNER_OF = {
    "softmax": ("probs", "order"),
    "normalised": ("probs", "order", "rows", "total", "least"),
    "softmax of selected": ("order", "rows"),
}
READ_TOO = [(kind, name) for kind, names in INNER_OF.items() for name in names]


def shorter(kind: str, name: str) -> list[str]:
    """What of a routing is still one operator where that result is read: without norm, the first 3 nodes."""
    return ["TopKSoftmax"] if kind == "normalised" and name in ("rows", "total", "least") else []


@pytest.mark.parametrize(("kind", "name"), READ_TOO)
def test_what_is_an_output_of_a_routing_is_computed(backend: Plugin, kind: str, name: str) -> None:
    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind)
        return [getattr(nodes, name), nodes.weights]

    routed_right(backend, build, *shorter(kind, name))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_are_an_output_keep_all_columns(backend: Plugin, kind: str) -> None:
    """ggml marks the ARGSORT that they are a view of as an output as well."""

    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind)
        return [nodes.ids, nodes.order, nodes.weights]

    routed_right(backend, build)


@pytest.mark.parametrize(("kind", "name"), READ_TOO)
def test_what_another_node_reads_of_a_routing_is_computed(backend: Plugin, kind: str, name: str) -> None:
    def direct(scene: Scene) -> list[int]:
        nodes = route(scene, kind)
        return [nodes.weights, scene.op("cont", getattr(nodes, name))]

    def through_views(scene: Scene) -> list[int]:
        nodes = route(scene, kind)
        flat = reshaped(scene, getattr(nodes, name), scene.as_tensor(getattr(nodes, name)).n_elements)
        return [nodes.weights, scene.op("cont", scene.view(flat, (3, 1, 1, 1), (12, 12, 12), 8))]

    def a_view_is_an_output(scene: Scene) -> list[int]:
        nodes = route(scene, kind)
        return [nodes.weights, scene.view(getattr(nodes, name), (1, 1, 1, 1), (4, 4, 4), 4)]

    for build in (direct, through_views, a_view_is_an_output):
        routed_right(backend, build, *shorter(kind, name))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "first"), [(4, 0), (2, 1), (2, 3)])
def test_other_ids_than_those_selected_are_computed_too(backend: Plugin, kind: str, k: int, first: int) -> None:
    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind, k=3)
        return [nodes.weights, scene.view(nodes.order, (k, 5, 1, 1), (32, 160, 160), 4 * first)]

    routed_right(backend, build)


def ascending(scene: Scene, kind: str) -> Route:
    return route(scene, kind, descending=0)


def ids_not_the_first(scene: Scene, kind: str) -> Route:
    return route(scene, kind, first=1)


def other_table(scene: Scene, kind: str) -> Route:
    return route(scene, kind, table=floats(scene, 8, 5, seed=4))


def scale_not_1(scene: Scene, kind: str) -> Route:
    return route(scene, kind, softmax=(None, 0.5, 0.0))


NOT_A_ROUTING = [(build, kind) for build in (ascending, ids_not_the_first, other_table, scale_not_1) for kind in KINDS]


@pytest.mark.parametrize(("build", "kind"), NOT_A_ROUTING)
def test_what_only_looks_like_a_routing_is_computed_node_by_node(
    backend: Plugin, build: Callable[[Scene, str], Route], kind: str
) -> None:
    def outputs(scene: Scene) -> list[int]:
        nodes = build(scene, kind)
        return routed_outputs(scene, nodes)

    routed_right(backend, outputs)


def test_a_mask_in_the_softmax_of_a_routing(backend: Plugin) -> None:
    def build(scene: Scene) -> list[int]:
        nodes = route(scene, softmax=(floats(scene, 8, 5, seed=7), 1.0, 0.0))
        return routed_outputs(scene, nodes)

    routed_right(backend, build, "masked_softmax")


def test_sinks_in_the_softmax_of_a_routing(backend: Plugin) -> None:
    def build(scene: Scene) -> list[int]:
        sink = floats(scene, 1, seed=8)
        nodes = route(scene)
        backend.ggml.ggml_soft_max_add_sinks(nodes.probs, sink)
        return routed_outputs(scene, nodes)

    routed_right(backend, build)


def sum_with_a_maximum(scene: Scene) -> Route:
    return route(scene, most=0.5)


def divided_by_the_sum(scene: Scene) -> Route:
    """Of the clamped sum only the sum: CLAMP is computed all the same."""
    nodes = route(scene, k=3)
    clamp = scene.op("clamp", nodes.total, 0.9, INF)
    return replace(nodes, least=clamp, weights=scene.op("div", reshaped(scene, nodes.rows, 3, 5), nodes.total))


def divided_by_groups(scene: Scene) -> Route:
    """Sums of pairs, not of rows."""
    nodes = route(scene, "softmax", k=4)
    pairs = reshaped(scene, nodes.rows, 2, 5, 2)
    clamp = scene.op("clamp", scene.op("sum_rows", pairs), 2.0**-14, INF)
    return replace(nodes, weights=scene.op("div", pairs, clamp))


def sums_of_single_weights(scene: Scene) -> Route:
    """As many tokens as are selected: sums of rows of one element look like one for each token."""
    nodes = route(scene, "softmax", n_tokens=3, k=3)
    clamp = scene.op("clamp", scene.op("sum_rows", nodes.rows), 2.0**-14, INF)
    return replace(nodes, weights=scene.op("div", nodes.rows, clamp))


def divided_by_columns(scene: Scene) -> Route:
    """The sums of the rows, laid along the columns."""
    nodes = route(scene, "softmax", n_tokens=3, k=3)
    flat = reshaped(scene, nodes.rows, 3, 3)
    clamp = scene.op("clamp", scene.op("sum_rows", flat), 2.0**-14, INF)
    return replace(nodes, weights=scene.op("div", flat, reshaped(scene, clamp, 3)))


@pytest.mark.parametrize(
    "build",
    [sum_with_a_maximum, divided_by_the_sum, divided_by_groups, sums_of_single_weights, divided_by_columns],
    ids=lambda build: build.__name__,
)
def test_weights_divided_by_something_else_are_not_normalised(backend: Plugin, build: Callable[[Scene], Route]) -> None:
    def outputs(scene: Scene) -> list[int]:
        nodes = build(scene)
        return routed_outputs(scene, nodes)

    routed_right(backend, outputs, "TopKSoftmax")


def test_an_argsort_of_a_part_of_each_row(backend: Plugin) -> None:
    """The 8 probabilities as 2 rows of 4: the first 2 ids are of the first 4."""

    def build(scene: Scene) -> list[int]:
        probs = scene.op("soft_max_ext", scene.root("f32", (8,), np.arange(8, dtype=np.float32)), None, 1.0, 0.0)
        order = scene.op("argsort", reshaped(scene, probs, 4, 2), 1)
        ids = scene.view(order, (2, 1, 1, 1), (16, 16, 16))
        return [scene.op("get_rows", reshaped(scene, probs, 1, 8), ids)]

    routed_right(backend, build)


# masked_softmax


@pytest.mark.parametrize("type", ["f32", "f16"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_masked_softmax_is_its_node(backend: Plugin, type: str, with_sinks: bool) -> None:
    rng = np.random.default_rng(0)
    mask = np.where(rng.random((7, 33)) < 0.3, -INF, 0)
    mask[:, 0] = 0

    def build(scene: Scene) -> list[int]:
        x = scaled(scene, floats(scene, 33, 7, 4, 2), 1e3)
        held = scene.root(type, (33, 7), mask.astype({"f32": np.float32, "f16": np.float16}[type]))
        y = scene.op("soft_max_ext", x, held, 0.3, 0.0)
        if with_sinks:
            backend.ggml.ggml_soft_max_add_sinks(y, floats(scene, 4))
        return [y]

    assert_fuses(backend, build, "masked_softmax", cpu_nmse=1e-11)


def test_a_softmax_without_a_mask_or_with_slopes_is_no_span(backend: Plugin) -> None:
    def build(scene: Scene) -> list[int]:
        mask = scene.root("f32", (9, 7), np.zeros((7, 9), np.float32))
        plain = scene.op("soft_max_ext", floats(scene, 9, 7, 4), None, 1.0, 0.0)
        return [plain, scene.op("soft_max_ext", floats(scene, 9, 7, 4), mask, 1.0, 8.0)]

    assert_fuses(backend, build, cpu_nmse=1e-11)


# where results lie


def laid_out(backend: Plugin, build: Build, places: dict[int, tuple[int, int]]) -> Ran:
    """The nodes of a graph, node i's result `bytes` behind node or root j's begin for each i: (j, bytes).

    Roots are -1, -2, ... in the order in which they were made. Returns the outputs.
    """
    with Scene(backend.ggml, "NPU") as scene:
        outputs = build(scene)
        for output in outputs:
            backend.ggml.ggml_set_output(output)
        address = scene._expanded(tuple(outputs))
        scene._allocate()
        graph = convert.graph(backend.ggml, address)
        roots = [scene.as_tensor(tensor) for tensor, _ in scene.roots]
        homes: dict[int, Memory] = {}
        for tensor in [*(node.dst for node in graph.nodes), *roots]:
            homes[tensor.address] = Memory.of(np.zeros(1 << 12, np.uint8))
        begins = {i: node.dst.address for i, node in enumerate(graph.nodes)}
        begins |= {-1 - i: root.address for i, root in enumerate(roots)}
        for i, (j, offset) in places.items():
            home = homes[begins[j]]
            homes[begins[i]] = Memory(home.address + offset, home.size - offset, owner=home)

        def moved(tensor: Tensor) -> Tensor:
            return replace(tensor, memory=homes[tensor.memory.address])

        nodes = tuple(
            replace(node, dst=moved(node.dst), src=tuple(moved(t) if t else None for t in node.src))
            for node in graph.nodes
        )
        beyond = tuple(tuple(map(moved, tensors)) for tensors in graph.beyond)
        for root, (_, data) in zip(roots, scene.roots, strict=True):
            moved(root).memory.bytes()[: data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        bound = default_backend().plan(Graph(nodes, graph.producers, beyond))
        bound.run()
        return Ran([moved(scene.as_tensor(output)).view().copy() for output in outputs], bound.fused)


def anywhere(backend: Plugin, build: Build, places: dict[int, tuple[int, int]], *spans: str) -> None:
    """Laid out so, the outputs are those of nodes that lie apart, with these spans."""
    fused = laid_out(backend, build, places)
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, fusion="off")
        alone, apart = laid_out(backend, build, places), laid_out(backend, build, {})
    assert fused.fused == Counter(spans)
    for one, other, third in zip(fused.outputs, alone.outputs, apart.outputs, strict=True):
        assert_close(other, third, 0)  # or the graph itself is wrong
        assert_close(one, other, 2)


LAST = {"softmax": 2, "normalised": 5, "softmax of selected": 2}


def ids_and_weights(kind: str, k: int = 3) -> Build:
    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind, k=k)
        return routed_outputs(scene, nodes)

    return build


def weights_alone(kind: str, k: int = 3) -> Build:
    return lambda scene: [route(scene, kind, k=k).weights]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 4, 40, 156])
def test_weights_may_lie_on_the_logits(backend: Plugin, kind: str, offset: int) -> None:
    for k in (1, 3, 8):
        anywhere(backend, ids_and_weights(kind, k), {LAST[kind]: (-1, offset)}, "TopKSoftmax")


@pytest.mark.parametrize("kind", ["softmax", "normalised"])
def test_ids_on_the_logits_are_not_fused(backend: Plugin, kind: str) -> None:
    anywhere(backend, ids_and_weights(kind), {1: (-1, 0)})


@pytest.mark.parametrize("kind", ["normalised", "softmax of selected"])
@pytest.mark.parametrize("offset", [0, 8, 100])
def test_weights_on_ids_that_nobody_reads_any_more(backend: Plugin, kind: str, offset: int) -> None:
    order = 0 if kind == "softmax of selected" else 1
    spans = ["TopKSoftmax"] if kind == "normalised" else []  # of the first 3 nodes, that is
    anywhere(backend, weights_alone(kind), {LAST[kind]: (order, offset)}, *spans)


def one_shift(scene: Scene) -> list[int]:
    x, before = floats(scene, 8, 3), floats(scene, 8, 3, seed=1)
    repeat = scene.op("repeat", scene.op("sub", before, x), scene.tensor("f32", (8, 3)))
    return [scene.op("add", scene.op("mul", repeat, floats(scene, 8, seed=2)), x)]


@pytest.mark.parametrize("root", [-1, -2])
def test_a_token_shift_onto_its_sources_is_not_fused(backend: Plugin, root: int) -> None:
    anywhere(backend, one_shift, {3: (root, 0)})


def test_a_token_shift_onto_its_mu_or_what_it_leaves_out(backend: Plugin) -> None:
    anywhere(backend, one_shift, {3: (-3, 0)})
    anywhere(backend, one_shift, {0: (-2, 0), 2: (1, 0), 3: (1, 0)}, "token_shift")


# kernels, profiles, plans


def tokens_shifted(scene: Scene) -> list[int]:
    return [shift(scene).add]


def experts_routed(scene: Scene) -> list[int]:
    return [route(scene).weights]


@pytest.mark.parametrize(
    ("build", "name", "spans"),
    [
        *((tokens_shifted, op, ()) for op in ("SUB", "REPEAT", "MUL", "ADD")),
        *((experts_routed, op, ()) for op in ("SOFT_MAX", "ARGSORT", "GET_ROWS")),
        *((experts_routed, op, ("TopKSoftmax",)) for op in ("SUM_ROWS", "CLAMP", "DIV")),
    ],
)
def test_a_kernel_of_the_users_own_is_called(backend: Plugin, build: Build, name: str, spans: tuple[str, ...]) -> None:
    called = []
    right = default_backend().ops[name]

    def own(dst: Tensor, a: Tensor, b: Tensor | None, params: bytes) -> None:
        called.append(name)
        right.bind(Node(name, dst, (a, b) if b is not None else (a,), params))()

    before = ran(backend, build)
    with default_backend().ops.having(Op(name, own)):
        during = ran(backend, build)
        assert called
    after = ran(backend, build)
    assert during.fused == Counter(spans)
    assert before.fused == after.fused
    assert before.fused.total() == 1
    assert_close(during.outputs[0], before.outputs[0], 2)
    assert_same_bytes(after.outputs[0], before.outputs[0])


@pytest.mark.parametrize(("build", "name"), [(tokens_shifted, "MUL"), (experts_routed, "CLAMP")])
def test_a_profile_that_refuses_an_op_refuses_its_node(
    backend: Plugin, monkeypatch: pytest.MonkeyPatch, build: Build, name: str
) -> None:
    choose(monkeypatch, profile=Profile("small", "", "", {op: ANY for op in default_backend().ops if op != name}))
    messages = []
    for fusion_is in ("on", "off"):
        with pytest.raises(AssertionError) as failure:
            ran(backend, build, fusion=fusion_is)
        messages.append(str(failure.value).splitlines()[0])
        assert messages[-1].startswith(f"{name} node ")
    assert messages[0] == messages[1]
    assert not backend.statistics.computed


def test_a_kernel_that_fails_names_the_span(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Call:
        def call() -> None:
            raise KernelError("no shift today")

        return call

    monkeypatch.setattr(fusion, "shifted", failing)
    with pytest.raises(AssertionError, match=r"SUB REPEAT MUL ADD up to '.*': no shift today"):
        ran(backend, tokens_shifted)


def test_fusion_is_switched_while_plans_are_kept(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    with Scene(backend.ggml, "NPU") as scene:
        graph = scene.graph(shift(scene).add)
        for tensor, data in scene.roots:
            scene.set(tensor, data)
        for value, count in (("on", 1), ("off", 0), ("on", 1), ("off", 0)):
            choose(monkeypatch, fusion=value)
            backend.statistics.reset()
            assert scene.run(graph) == 0
            assert backend.statistics.fused["token_shift"] == count
            assert backend.statistics.computed["SUB"] == 1


def test_a_part_of_a_graph_has_a_plan_of_its_own(backend: Plugin) -> None:
    """The same nodes, once as all there is and once as the part that a scheduler hands over: there, another part reads
    what the first has nobody for."""
    with Scene(backend.ggml, "NPU") as scene:
        nodes = shift(scene)
        reader = scaled(scene, nodes.sub)
        alone, more = scene._expanded((nodes.add,)), scene._expanded((nodes.add, reader))
        scene._allocate()
        for tensor, data in scene.roots:
            scene.set(tensor, data)
        part = structs.GgmlCGraph.from_buffer_copy(structs.GgmlCGraph.from_address(more))
        part.n_nodes -= 1
        scene.set(nodes.sub, np.zeros(3 * 8, np.float32))
        for graph, count in ((alone, 1), (ctypes.addressof(part), 0), (alone, 1)):
            backend.statistics.reset()
            assert scene.run(graph) == 0
            assert backend.statistics.fused["token_shift"] == count
        x, before, sub = (scene.as_tensor(t).view() for t in (nodes.x, nodes.before, nodes.sub))
        np.testing.assert_array_equal(sub, before - x)


def test_another_view_of_the_same_node_is_another_plan(backend: Plugin) -> None:
    """It is read elsewhere, so no node that computes something has it as a source."""
    with Scene(backend.ggml, "NPU") as scene:
        nodes = route(scene, "softmax", k=3)
        elsewhere = scene.view(nodes.order, (3, 5, 1, 1), (32, 160, 160))
        graph = scene._expanded((nodes.weights, elsewhere))
        scene._allocate()
        for tensor, data in scene.roots:
            scene.set(tensor, data)
        for columns, count in ((3, 1), (8, 0), (3, 1)):
            ctypes.c_int64.from_address(elsewhere + NE_AT).value = columns
            backend.statistics.reset()
            assert scene.run(graph) == 0
            assert backend.statistics.fused["TopKSoftmax"] == count
            ids = np.sort(scene.as_tensor(elsewhere).view())
            assert columns == 3 or ids.tolist() == [[[[*range(8)]] * 5]]


# diff


def rows(result: DiffResult) -> Counter[tuple[str, str]]:
    """Rows of a diff that are spans, by name and type of the output."""
    return Counter((node.op, node.types.split()[-1]) for node in result.compared if not node.op.isupper())


EXPECTED = {
    "rwkv7": {("token_shift", "f32"): 2},
    "moe": {("TopKSoftmax", "i32"): 2, ("TopKSoftmax", "f32"): 2, ("masked_softmax", "f32"): 2},
    "olmoe": {("TopKSoftmax", "i32"): 2, ("TopKSoftmax", "f32"): 2, ("masked_softmax", "f32"): 2},
    "gpt-oss": {("TopKSoftmax", "i32"): 2, ("TopKSoftmax", "f32"): 2, ("masked_softmax", "f32"): 2},
}


@pytest.mark.parametrize("name", SPANS)
def test_a_diff_compares_the_outputs_of_every_span(model: Models, name: str) -> None:
    result = diff(model(name), PROMPT, steps=2)
    assert result, result.wrong[:1]
    assert rows(result) == {row: count * 3 for row, count in EXPECTED[name].items()}
    for node in result.compared:
        if node.op == "TopKSoftmax":
            assert node.ne[0] == 2 or node.ne[:2] == (1, 2)
        if node.op == "token_shift":
            assert node.isolated
            assert node.ne[3] == 6


@pytest.mark.parametrize("name", SPANS)
def test_a_diff_without_fusion_has_no_spans(model: Models, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, fusion="off")
    result = diff(model(name), PROMPT, steps=0)
    assert result
    assert not rows(result)


def test_a_diff_of_one_fusion_compares_nothing_else(model: Models) -> None:
    result = diff(model("moe"), PROMPT, steps=1, ops={"TopKSoftmax"})
    assert result
    assert len(result.compared) == 8
    assert {node.op for node in result.compared} == {"TopKSoftmax"}
    assert not diff(model("moe"), PROMPT, steps=0, ops={"token_shift"}).compared


@pytest.mark.some(1)
@pytest.mark.parametrize("name", SPANS)
def test_a_diff_of_several_batches_compares_the_spans_of_each(model: Models, name: str) -> None:
    prompt = "one two three " * 40
    result = diff(model(name), prompt, steps=0)
    assert result, result.wrong[:1]
    assert result.n_prompt > 512
    assert rows(result) == {row: count * 2 for row, count in EXPECTED[name].items()}


Wrong = Callable[..., Call]


def mu_in_other_order(
    x: Any, before: int, mu: Any, outputs: Sequence[int], *rest: Any, right: Wrong, **keywords: Any
) -> Call:
    return right(x, before, mu, [*outputs[1:], outputs[0]], *rest, **keywords)


def writes_in_front(x: Any, before: int, mu: Any, outputs: Sequence[int], *rest: Any, right: Wrong, **kw: Any) -> Call:
    call = right(x, before, mu, outputs, *rest, **kw)

    def wrong() -> None:
        call()
        Memory(outputs[0] - 1, 1).bytes()[:] ^= 0xFF

    return wrong


def ids_off_by_one(values: Tensor, ids: Tensor, x: Tensor, *, right: Wrong, **keywords: Any) -> Call:
    call = right(values, ids, x, **keywords)

    def wrong() -> None:
        call()
        ids.view()[...] += 1

    return wrong


def last_row_of_many(values: Tensor, ids: Tensor, x: Tensor, *, right: Wrong, **keywords: Any) -> Call:
    call = right(values, ids, x, **keywords)

    def wrong() -> None:
        call()
        if values.ne[1] == 1:
            values.view()[0, 0, -1, -1] *= 1.01

    return wrong


def not_normalised(values: Tensor, ids: Tensor, x: Tensor, *, right: Wrong, **keywords: Any) -> Call:
    return right(values, ids, x, **keywords | {"norm": False})


def writes_behind(values: Tensor, ids: Tensor, x: Tensor, *, right: Wrong, **keywords: Any) -> Call:
    call = right(values, ids, x, **keywords)

    def wrong() -> None:
        call()
        Memory(values.end, 1).bytes()[:] ^= 0xFF

    return wrong


def raises(*_: Any, right: Wrong, **__: Any) -> Call:
    def wrong() -> None:
        raise ValueError("no rows today")

    return wrong


def first_span(file: Path, ops: str, step: int) -> int:
    """The index of the last node of the first such span among a step's nodes."""
    seen: list[list[str]] = [[]]

    class Names:
        def before(self, node: int) -> None:
            op = convert.op_name(session.ggml, node)
            if convert.computes(op):
                seen[-1].append(op)

        def after(self, node: int) -> None:
            pass

    with Session(file, Settings(flash_attention="off"), observer=Names()) as session:
        tokens = session.tokenize(PROMPT)
        for _ in range(step + 1):
            seen.append([])
            session.decode(tokens)
            tokens = [Sampler()(session.logits())]
    wanted, found = ops.split(), seen[-1]
    return next(i for i in range(len(found)) if found[i : i + len(wanted)] == wanted) + len(wanted) - 1


SHIFT = "SUB REPEAT MUL ADD"
NORMALISED = "SOFT_MAX ARGSORT GET_ROWS SUM_ROWS CLAMP DIV"
AS_IT_IS = "SOFT_MAX ARGSORT GET_ROWS"
OF_SELECTED = "ARGSORT GET_ROWS SOFT_MAX"


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("name", "kernel", "wrong", "ops", "step", "types"),
    [
        ("rwkv7", "shifted", mu_in_other_order, SHIFT, 0, {"f32"}),
        ("rwkv7", "shifted", writes_in_front, SHIFT, 0, {"f32"}),
        ("rwkv7", "shifted", raises, SHIFT, 0, {"f32"}),
        ("moe", "routed", ids_off_by_one, NORMALISED, 0, {"i32"}),
        ("moe", "routed", not_normalised, NORMALISED, 0, {"f32"}),
        ("moe", "routed", last_row_of_many, NORMALISED, 1, {"f32"}),
        ("moe", "routed", writes_behind, NORMALISED, 0, {"f32"}),
        ("olmoe", "routed", ids_off_by_one, AS_IT_IS, 0, {"i32"}),
        ("olmoe", "routed", writes_behind, AS_IT_IS, 0, {"f32"}),
        ("gpt-oss", "routed", ids_off_by_one, OF_SELECTED, 0, {"i32"}),
        ("gpt-oss", "routed", writes_behind, OF_SELECTED, 0, {"f32"}),
        ("gpt-oss", "routed", raises, OF_SELECTED, 0, {"f32", "i32"}),
    ],
)
def test_a_wrong_fused_kernel_is_found_while_single_nodes_are_right(
    model: Models,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kernel: str,
    wrong: Wrong,
    ops: str,
    step: int,
    types: set[str],
) -> None:
    choose(monkeypatch, ops="default")  # in its own run, the device does not compute them
    right = getattr(fusion, kernel)
    monkeypatch.setattr(fusion, kernel, lambda *args, **keywords: wrong(*args, right=right, **keywords))
    result = diff(model(name), PROMPT, steps=2)
    assert not result
    assert {node.op for node in result.wrong} == {next(iter(EXPECTED[name]))[0]}
    first = result.wrong[0]
    # of a prompt, the last layer computes the last token alone
    layer_of_one_row = wrong is last_row_of_many
    assert (first.step, first.index) == (0 if layer_of_one_row else step, first.index)
    if not layer_of_one_row:
        assert first.index == first_span(model(name), ops, step)
    assert {node.types for node in result.wrong} == {f"{ops} -> {type}" for type in types}
    if wrong is raises:
        assert first.isolated is None
        assert first.failure is not None
        assert first.failure.startswith("ValueError: no rows today (test_fusion.py line ")
    else:
        assert first.isolated is not None
        assert first.isolated.outside == (wrong in (writes_in_front, writes_behind))
        assert first.isolated.n_different > 0 or first.isolated.outside


class Softmax:
    """SOFT_MAX whose result is changed after it."""

    def __init__(self, change: Callable[[NDArray[Any]], None]) -> None:
        self.right, self.change = fusion.soft_max, change

    def bind(self, node: Node) -> Call:
        call = self.right.bind(node)

        def wrong() -> None:
            call()
            self.change(node.dst.view())

        return wrong


def times(factor: float) -> Callable[[NDArray[Any]], None]:
    def change(y: NDArray[Any]) -> None:
        y *= np.float32(factor)

    return change


def one_nan(y: NDArray[Any]) -> None:
    y[-1, -1, -1, 0] = np.nan


@pytest.mark.parametrize(
    ("change", "passes"),
    [(times(1 + 1e-6), True), (times(1 + 2e-6), True), (times(1 + 2e-5), False), (one_nan, False)],
)
def test_an_error_is_rounding_up_to_the_ops_nmse(
    model: Models, monkeypatch: pytest.MonkeyPatch, change: Callable[[NDArray[Any]], None], passes: bool
) -> None:
    """Its square root is 3.2e-6, of the mean over rows of which most is masked."""
    choose(monkeypatch, ops="default")
    monkeypatch.setattr(fusion, "soft_max", Softmax(change))
    result = diff(model("moe"), PROMPT, steps=0, ops={"masked_softmax", "SOFT_MAX"})
    assert bool(result) == passes
    assert all(node for node in result.compared if node.op == "SOFT_MAX")
    spans = [node for node in result.compared if node.op == "masked_softmax"]
    assert len(spans) == 2
    assert all(bool(node) == passes and not node.isolated for node in spans)


def test_rounding_is_never_a_nan_a_gap_or_a_byte_outside() -> None:
    rounded = Comparison(4, 1, False, nmse=1e-12, max_abs=1e-6, where=(0, 0, 0, 0))
    assert rounded.within(1e-11)
    assert not rounded.within(0.0)
    assert not rounded
    for changed in (
        replace(rounded, nmse=2e-11),
        replace(rounded, nmse=float("nan")),
        replace(rounded, max_abs=INF),
        replace(rounded, outside=True),
        replace(rounded, where=None),
    ):
        assert not changed.within(1e-11)


# the command


def command(*arguments: object, **options: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("ggml-npu")
    return subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, env=os.environ | options, check=False
    )


@pytest.mark.slow
def test_run_says_what_ran_as_one_operator(model: Models) -> None:
    rest = ["--flash-attn", "off", "-n", "16"]
    cpu, fused, alone = (
        command("run", model("moe"), *options, *rest)
        for options in (["--device", "cpu"], ["--all"], ["--all", "--no-fusion"])
    )
    assert cpu.returncode == fused.returncode == alone.returncode == 0
    assert cpu.stdout == fused.stdout == alone.stdout
    assert cpu.stdout.strip()
    (line,) = (line for line in fused.stderr.splitlines() if "one operator" in line)
    head, spans = line.split(": ")
    assert head == "run as one operator"
    assert {*spans.split(", ")} == {"TopKSoftmax 32", "masked_softmax 32"}
    assert "one operator" not in cpu.stderr + alone.stderr


@pytest.mark.slow
def test_the_environment_says_the_same_as_the_options(model: Models) -> None:
    options = ["run", model("rwkv7"), "-n", "4"]
    assert "run as one operator: token_shift 8" in command(*options, GGML_NPU_OPS="all").stderr
    off = command(*options, GGML_NPU_OPS="all", GGML_NPU_FUSION="off")
    assert off.returncode == 0
    assert "one operator" not in off.stderr


@pytest.mark.slow
def test_diff_has_spans_or_not(model: Models) -> None:
    with_spans, without = (command("diff", model("rwkv7"), "-n", "0", *options) for options in ([], ["--no-fusion"]))
    assert with_spans.returncode == without.returncode == 0
    assert "token_shift" in with_spans.stdout
    assert "token_shift" not in without.stdout


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "allowed"), [("GGML_NPU_OPS", "default, all"), ("GGML_NPU_FUSION", "on, off")])
def test_an_option_that_cannot_be_is_refused_in_one_line(name: str, allowed: str) -> None:
    done = command("run", "tiny", **{name: "x"})
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr == f"ggml-npu: {name}='x': must be one of {allowed}\n"


# the pattern itself


def test_a_fusion_has_the_ops_of_its_pattern_and_the_results_it_writes() -> None:
    for entry in fusion.FUSIONS:
        assert all(default_backend().ops[op.name] is op for op in entry.ops)
        assert entry.op_names[0] in default_backend().fusible


def test_a_span_names_its_nodes() -> None:
    nodes = tuple(Node(op, Tensor.of(np.zeros(1, np.float32), name=op.lower()), ()) for op in ("SUB", "REPEAT"))
    span = Span(Graph(nodes, ((), ()), ((), ())), 0, 2)
    assert str(span) == "SUB REPEAT up to 'repeat'"
    assert span.leaves_out_only_what_nobody_reads(Fused(lambda: None, {1: nodes[1].dst}))
