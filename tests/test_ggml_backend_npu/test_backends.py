"""Several backends in one process: each has ops, options, threads and plans of its own, and nothing of another's."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from kit.models import Models
from kit.support import Scene, assert_same_bytes, choose

import ggml_backend_npu
from ggml_backend_npu import (
    AnyBackend,
    Backend,
    DeviceBackend,
    DeviceError,
    Graph,
    Node,
    Op,
    Options,
    Plan,
    Tensor,
    default_backend,
    register,
)
from ggml_backend_npu.backend.fusion import FUSIONS
from ggml_backend_npu.device.sim import Simulator
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ggml.lib import list_devices
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.registration import PLUGINS
from ggml_backend_npu.plugin.replica import Replica
from ggml_backend_npu.profiles.generations import PROFILES
from ggml_backend_npu.registry.entry import Call, KernelError
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.run.session import Sampler, Session, Settings, generate
from graph_runner.trace import CaptureOptions, capture, replay
from quant import ROUNDINGS
from quant.kernels.threads import Team

PROMPT = "The capital of France is"
ALL = Options(ops="all", matmul="exact")
Registered = Callable[..., Plugin]


def twice(dst: Tensor, x: Tensor) -> None:
    OWN["CONT"].define(dst, x)
    dst.view()[...] *= 2


def fails(dst: Tensor, x: Tensor) -> None:
    raise ValueError("not today")


def of_cont(kernel: Callable[[Tensor, Tensor], None]) -> Op:
    return Op("CONT", kernel, OWN["CONT"].types, OWN["CONT"].refuse)


@pytest.fixture
def registered(backend: Plugin) -> Iterator[Registered]:
    """Registers a backend; ggml has it no more after the test."""
    ggml, before = backend.ggml, set(PLUGINS)
    yield lambda name="NPU1", **owns: register(Backend(name, **owns))
    for name in PLUGINS.keys() - before:
        ggml.ggml_backend_unload(ctypes.addressof(PLUGINS.pop(name).registry))


def cont_of(scene: Scene) -> int:
    return scene.op("cont", scene.root("f32", (4, 3), np.arange(12, dtype=np.float32)))


def computed(plugin: Plugin, device: str) -> list[float]:
    with Scene(plugin.ggml, device) as scene:
        node = cont_of(scene)
        scene.fill(node)
        assert scene.run(scene.graph_of(node)) == 0
        result: list[float] = scene.get(node).view(np.float32).tolist()
        return result


# registered with ggml


def test_each_is_a_device_with_its_own_name_type_and_memory(backend: Plugin, registered: Registered) -> None:
    other = registered(options=Options(memory="device", memory_limit=1 << 26, device_type="gpu"))
    found = {device.name: device for device in list_devices(backend.ggml)}
    assert (found["NPU"].type, found["NPU1"].type) == ("ACCEL", "GPU")
    assert (found["NPU"].backend, found["NPU1"].backend) == ("NPU", "NPU1")
    assert (backend.memory, other.memory and other.memory.limit) == (None, 1 << 26)
    assert found.keys() == {"CPU", "NPU", "NPU1"}


def test_a_backend_is_registered_once_and_a_name_belongs_to_one(backend: Plugin, registered: Registered) -> None:
    assert ggml_backend_npu.register() is backend
    assert backend.backend is default_backend()
    other = registered()
    assert register(other.backend) is other
    for name in ("NPU", "NPU1", "CPU"):
        with pytest.raises(DeviceError, match=f"^name='{name}': ggml has another device of this name$"):
            register(Backend(name))


def test_a_node_is_computed_by_the_ops_of_its_device(backend: Plugin, registered: Registered) -> None:
    other = registered(ops=[of_cont(twice)])
    backend.statistics.reset()
    right = [float(i) for i in range(12)]
    assert computed(backend, "NPU") == right
    assert computed(backend, "NPU1") == [2 * i for i in right]
    assert computed(backend, "NPU") == right
    assert (backend.statistics.computed, other.statistics.computed) == ({"CONT": 2}, {"CONT": 1})
    x = Tensor.of(np.ones((3, 4), np.float32))
    moved = Node("DUP", Tensor.of(np.zeros((3, 4), np.float32)), (x,))
    with Replica(backend.ggml, "NPU") as one, Replica(backend.ggml, "NPU1") as two:
        assert (one.refusal(moved), two.refusal(moved)) == (None, "not supported")
    assert (backend.refusals.get("DUP"), other.refusals) == (None, {"DUP": "no kernel"})


def test_a_refusal_is_told_once_if_that_is_asked_for(
    registered: Registered, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    other = registered(ops=[of_cont(twice)])
    moved = Node("DUP", Tensor.of(np.zeros((3, 4), np.float32)), (Tensor.of(np.ones((3, 4), np.float32)),))
    with Replica(other.ggml, "NPU1") as replica:
        assert replica.refusal(moved)
        monkeypatch.setenv("GGML_NPU_VERBOSE", "1")
        assert replica.refusal(moved)
        assert replica.refusal(moved)
    assert capfd.readouterr().err == "ggml-npu: NPU1 refuses DUP: no kernel\n"


def test_a_failure_is_of_the_device_that_failed(backend: Plugin, registered: Registered) -> None:
    other = registered(ops=[of_cont(fails)])
    backend.statistics.reset()
    x = Tensor.of(np.ones((3, 4), np.float32))
    node = Node("CONT", Tensor.of(np.zeros((3, 4), np.float32)), (x,))
    with Replica(backend.ggml, "NPU1") as device, pytest.raises(KernelError, match="ValueError: not today"):
        device.compute(node)
    assert other.statistics.error is not None
    assert backend.statistics.error is None
    computed(backend, "NPU")


def test_plans_are_void_where_their_backend_changed_and_in_no_other(
    backend: Plugin,
    registered: Registered,
    in_python: list[int],
) -> None:
    other = registered()
    with Scene(backend.ggml, "NPU") as one, Scene(backend.ggml, "NPU1") as two:
        scenes = [(scene, node, scene.graph_of(node)) for scene in (one, two) for node in [cont_of(scene)]]

        def run() -> list[float]:
            results = []
            for scene, node, graph in scenes:
                scene.fill(node)
                assert scene.run(graph) == 0
                results.append(float(scene.get(node).view(np.float32)[1]))
            return results

        for _ in range(3):
            assert run() == [1, 1]
        assert in_python == [scenes[0][2], scenes[1][2]], "the first time only"
        del in_python[:]
        other.backend.ops.add(of_cont(twice))
        assert (run(), in_python) == ([1, 2], [scenes[1][2]])
        del in_python[:]
        backend.backend.options = replace(backend.backend.options)
        assert (run(), in_python) == ([1, 2], [scenes[0][2], scenes[1][2]]), "a definition runs in Python each time"


def test_threads_are_of_a_backend(backend: Plugin, registered: Registered) -> None:
    registered(team=Team(size=1))
    registered("NPU2", team=Team(backend.ggml.openmp, 7))
    with Scene(backend.ggml, "NPU1") as one, Scene(backend.ggml, "NPU2") as seven:
        teams = [PLUGINS[name].contexts[scene._backend].team for name, scene in (("NPU1", one), ("NPU2", seven))]
    assert teams == [Team(0, 1), Team(backend.ggml.openmp, 7)]


# without ggml


def test_options_numerics_and_fusions_are_of_a_backend(backend: Plugin) -> None:
    x = Tensor.of(np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32))
    blocks = [Tensor.of(np.zeros((1, 2, 34), np.uint8), "q8_0") for _ in ROUNDINGS]
    ties = np.full((1, 64), 0.5, np.float32)
    ties[0, ::32] = 127
    for rounding, dst in zip(ROUNDINGS, blocks, strict=True):
        its = Backend(options=Options(), numerics=replace(default_backend().numerics, rounding=rounding))
        its.compute(Node("CPY", dst, (Tensor.of(ties),)))
    assert not np.array_equal(blocks[0].view(), blocks[1].view())
    ascend, plain = Backend(options=Options(profile=PROFILES["ascend-310p"])), Backend(options=Options())
    node = Node("CPY", Tensor.of(np.zeros((1, 64), np.int32)), (x,))
    assert plain.refusal(node) is None
    assert (ascend.refusal(node) or "").startswith("profile ascend-310p")
    none = Backend(options=ALL, fusions=())
    assert (none.fusible, Backend(options=replace(ALL, fusion="off")).fusible) == (frozenset(), frozenset())
    assert Backend(options=ALL).fusible == {fusion.ops[0].name for fusion in FUSIONS}
    assert [each.numerics.matmul for each in (plain, none)] == ["fast", "exact"]


def test_what_is_made_like_another_does_not_follow_it(backend: Plugin) -> None:
    one = Backend(options=ALL)
    two = one.like("NPU1", options=replace(ALL, fusion="off"))
    one.ops.add(of_cont(twice))
    one.options = Options()
    assert two.ops["CONT"] is OWN["CONT"]
    assert (two.name, two.options.ops, two.fuses, one.fuses) == ("NPU1", "all", False, True)


SCRIPT = """
import numpy as np
from ggml_backend_npu import Node, Tensor, default_backend, op, register

@op("CONT", types=[("f32", "f32")])
def cont(dst, x):
    dst.view()[...] = 7

npu = register()
assert npu.backend.ops["CONT"] is cont

@op("DUP", types=[("f32", "f32")])
def dup(dst, x):
    dst.view()[...] = 8

x = Tensor.of(np.zeros(3, np.float32))
for name in ("CONT", "DUP"):
    y = Tensor.of(np.zeros(3, np.float32))
    default_backend().compute(Node(name, y, (x,)))
    print(y.view().reshape(-1).tolist())
"""


@pytest.mark.slow
def test_a_scripts_kernels_are_of_the_default_backend_before_and_after_it_is_registered() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[7.0, 7.0, 7.0]\n[8.0, 8.0, 8.0]\n"), done.stderr


# models


def text_of(session: Session, n: int = 12) -> tuple[list[int], np.ndarray]:
    tokens = list(generate(session, session.tokenize(PROMPT), n, Sampler()))
    return tokens, session.logits()


def opened(file: Path, npu: Plugin | None) -> Session:
    settings = Settings("cpu" if npu is None else "npu", flash_attention="off", threads=1)
    return Session(file, settings, npu=npu)


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_model_runs_on_each_and_on_the_cpu_alone(
    backend: Plugin, registered: Registered, model: Models, is_registered: bool
) -> None:
    file = model("llama")

    def made(name: str, ops: list[Op], options: Options) -> Plugin:
        if is_registered:
            return registered(name, ops=ops, options=options)
        return Plugin(backend.ggml, Backend(name, ops=ops, options=options))

    right = made("NPU1", [*OWN.values()], ALL)
    wrong = made("NPU2", [*OWN.values(), of_cont(twice)], Options())
    backend.statistics.reset()
    with opened(file, right) as on_right, opened(file, wrong) as on_wrong, opened(file, None) as on_cpu:
        texts = [text_of(session) for session in (on_right, on_wrong, on_cpu)]
        assert on_right.npu_nodes == on_right.nodes
        assert 0 < on_wrong.npu_nodes["CONT"] < on_wrong.nodes.total()
        assert on_wrong.npu_nodes["MUL_MAT"] == on_cpu.npu_nodes.total() == 0
        assert on_right.token_splits == 1 < on_wrong.token_splits
    assert texts[0][0] == texts[2][0]
    assert_same_bytes(texts[0][1], texts[2][1])
    assert not np.array_equal(texts[1][1], texts[2][1])
    assert not backend.statistics.computed


def test_two_run_in_two_threads_at_once(backend: Plugin, registered: Registered, model: Models) -> None:
    file = model("llama")
    npus = registered("NPU1", options=ALL), registered("NPU2", ops=[of_cont(twice)], options=Options())

    def run(npu: Plugin) -> list[np.ndarray]:
        with opened(file, npu) as session:
            found = []
            for token in session.tokenize(PROMPT):
                session.decode([token])
                found.append(session.logits())
            return found

    alone = [run(npu) for npu in npus]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, npus))
    for one, other in zip(alone, together, strict=True):
        for expected, found in zip(one, other, strict=True):
            assert_same_bytes(found, expected)


@pytest.mark.slow
def test_a_diff_is_of_the_backend_that_it_is_given(
    backend: Plugin, model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, settings = model("llama"), Settings(flash_attention="off", threads=1)
    choose(monkeypatch, ops="all")
    wrong = Backend("another", ops=[*OWN.values(), of_cont(twice)], options=replace(ALL, fusion="off"))
    plan = backend.backend.version, default_backend().options, dict(default_backend().ops)
    for reference in ("CPU", "NPU"):
        found = diff(file, PROMPT, DiffOptions(steps=1, settings=settings, backend=wrong, reference=reference))
        assert {node.op for node in found.wrong} == {"CONT"}
        assert (found.device_options["fusion"], found.device_options["ops"]) == ("off", "all")
        right = diff(file, PROMPT, DiffOptions(steps=1, settings=settings, reference=reference))
        assert (bool(right), right.device_options["fusion"]) == (True, "on")
    assert plan == (backend.backend.version, default_backend().options, dict(default_backend().ops))
    assert wrong.options.fusion == "off"
    assert wrong.ops["CONT"] is not OWN["CONT"]


def test_a_replay_is_of_the_backend_that_it_is_given(backend: Plugin, model: Models, tmp_path: Path) -> None:
    trace = tmp_path / "trace.gguf"
    capture(model("llama"), PROMPT, trace, CaptureOptions(steps=0, select=lambda step, index, node: node.op == "CONT"))
    wrong = Backend("another", ops=[*OWN.values(), of_cont(twice)], options=Options())
    assert [bool(replay(trace, backend=each)) for each in (None, wrong, None)] == [True, False, True]


# kinds of backends


class OfGgml(AnyBackend):
    """Any device that ggml has."""

    description = "a device of ggml"

    def __init__(self, replica: Replica, options: Options | None = None) -> None:
        super().__init__(f"{replica.name} of ggml", options or ALL)
        self._replica = replica

    @property
    def op_names(self) -> Collection[str]:
        return lib.ggml().op_names

    def like(self, *, options: Options | None = None) -> AnyBackend:
        return OfGgml(self._replica, options or self.options)

    def kernel_refusal(self, node: Node) -> str | None:
        placed = all(tensor.memory.size for tensor in (node.dst, *node.src) if tensor is not None)
        return self._replica.refusal(node) if placed else None  # asked before tensors have memory

    def bind(self, node: Node) -> Call:
        return partial(self.compute, node)

    def compute(self, node: Node) -> None:
        self._replica.compute(node)

    def plan(self, graph: Graph) -> Plan:
        nodes = graph.without_empty().nodes
        return Plan(tuple((node, self.bind(node)) for node in nodes), Counter(n.op for n in nodes), Counter())


def test_a_third_kind_of_backend_cannot_leave_out_how_it_computes() -> None:
    assert AnyBackend.__abstractmethods__ == {"bind", "compute", "like", "plan"}


def test_a_third_kind_of_backend_is_a_side_of_a_diff(backend: Plugin, model: Models) -> None:
    with Replica(backend.ggml, "CPU", threads=1) as cpu:
        result = diff(model("llama"), PROMPT, DiffOptions(steps=2, backend=OfGgml(cpu)))
    assert result
    assert {node.verdict.name for node in result.nodes} == {"EXACT"}
    assert {node.on for node in result.nodes} == {"CPU of ggml"}


def test_a_device_is_a_backend_without_kernels_in_python() -> None:
    device = Simulator()
    of_device = DeviceBackend(device)
    assert (isinstance(of_device, Backend), isinstance(of_device, AnyBackend)) == (False, True)
    assert (dict(of_device.ops), set(of_device.op_names)) == ({}, set(device.ops))
    again = of_device.like(options=replace(of_device.options, profile=PROFILES["ascend-310p"]))
    assert (again.name, again.like().options) == (device.name, again.options)
    with of_device.ops.having(Op("NEW", lambda dst: None)):
        assert "NEW" in of_device.op_names
