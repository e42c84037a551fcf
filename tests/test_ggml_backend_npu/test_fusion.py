"""Kernels, profiles and plans decide whether nodes run as one operator; a masked softmax gives what its node gives."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import numpy as np
import pytest
from kit.fusing import (
    INF,
    Build,
    assert_close,
    assert_fuses,
    floats,
    ran,
    route,
    scaled,
    shift,
    without_its_last_node,
)
from kit.support import Scene, assert_same_bytes, choose

from ggml_backend_npu import Graph, KernelError, Node, Tensor, default_backend
from ggml_backend_npu.backend import fusion
from ggml_backend_npu.backend.fusion import Fused, Span
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.profiles.rules import ANY, Profile
from ggml_backend_npu.registry.entry import Call, Op

NE_AT = 16  # of a ggml_tensor

pytestmark = pytest.mark.usefixtures("all_fused")


def test_a_fusion_has_the_ops_of_its_pattern_and_the_results_it_writes() -> None:
    for entry in fusion.FUSIONS:
        assert all(default_backend().ops[op.name] is op for op in entry.ops)
        assert entry.op_names[0] in default_backend().fusible


def test_a_span_names_its_nodes() -> None:
    nodes = tuple(Node(op, Tensor.of(np.zeros(1, np.float32), name=op.lower()), ()) for op in ("SUB", "REPEAT"))
    span = Span(Graph(nodes, ((), ()), ((), ())), 0, 2)
    assert str(span) == "SUB REPEAT up to 'repeat'"
    assert span.leaves_out_only_what_nobody_reads(Fused(lambda: None, {1: nodes[1].dst}))


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
            scene.function("soft_max_add_sinks")(y, floats(scene, 4))
        return [y]

    assert_fuses(backend, build, "masked_softmax", cpu_nmse=1e-11)


def test_a_softmax_without_a_mask_or_with_slopes_is_no_span(backend: Plugin) -> None:
    def build(scene: Scene) -> list[int]:
        mask = scene.root("f32", (9, 7), np.zeros((7, 9), np.float32))
        plain = scene.op("soft_max_ext", floats(scene, 9, 7, 4), None, 1.0, 0.0)
        return [plain, scene.op("soft_max_ext", floats(scene, 9, 7, 4), mask, 1.0, 8.0)]

    assert_fuses(backend, build, cpu_nmse=1e-11)


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

    monkeypatch.setattr(fusion, "bind_token_shift", failing)
    with pytest.raises(AssertionError, match=r"SUB REPEAT MUL ADD up to '.*': no shift today"):
        ran(backend, tokens_shifted)


def test_fusion_is_switched_while_plans_are_kept(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    with Scene(backend.ggml, "NPU") as scene:
        graph = scene.graph(shift(scene).add)
        scene.load()
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
        scene.load()
        part = without_its_last_node(more)
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
        scene.load()
        for columns, count in ((3, 1), (8, 0), (3, 1)):
            ctypes.c_int64.from_address(elsewhere + NE_AT).value = columns
            backend.statistics.reset()
            assert scene.run(graph) == 0
            assert backend.statistics.fused["TopKSoftmax"] == count
            ids = np.sort(scene.as_tensor(elsewhere).view())
            assert columns == 3 or ids.tolist() == [[[[*range(8)]] * 5]]
