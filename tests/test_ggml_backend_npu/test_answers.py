"""`supports_op` of nodes that are like known ones is answered without Python, as Python would."""

from __future__ import annotations

import numpy as np
import pytest
from kit.drawn import drawn
from kit.models import Models
from kit.support import Scene, choose

from ggml_backend_npu import Backend, Options, default_backend
from ggml_backend_npu.ggml import layouts
from ggml_backend_npu.plugin.plugin import PROBED, Plugin
from ggml_backend_npu.plugin.replica import Replica
from ggml_backend_npu.profiles.generations import ASCEND_310P
from ggml_backend_npu.profiles.rules import FULL, Profile
from ggml_backend_npu.registry.entry import op
from graph_runner.run.session import Session, Settings


@pytest.fixture
def asked(backend: Plugin, every_op: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops of the nodes that Python is asked about."""
    found: list[str] = []
    refusal = Plugin._refusal

    def record(plugin: Plugin, name: str, node: int) -> str | None:
        found.append(name)
        return refusal(plugin, name, node)

    monkeypatch.setattr(Plugin, "_refusal", record)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("profile", [FULL, ASCEND_310P])
def test_random_nodes_are_answered_as_python_answers(
    backend: Plugin, asked: list[str], monkeypatch: pytest.MonkeyPatch, profile: Profile
) -> None:
    choose(monkeypatch, profile=profile)
    rng, known, refused = np.random.default_rng(5), 0, 0
    names = sorted(default_backend().ops.keys() & backend.ggml.op_names)
    with Replica(backend.ggml, backend.handle) as device:
        for i in range(6 * len(names)):
            node = drawn(rng, names[i % len(names)])
            with device._made(node) as made:
                for _ in range(2):
                    asked.clear()
                    answer = bool(backend.ggml.ggml_backend_dev_supports_op(backend.handle, made.node))
                    without_python = not asked
                    assert backend.supports_op(0, made.node) == answer, node
                known += without_python
                refused += not answer
                if without_python:
                    assert answer
                elif answer:
                    assert node.op in PROBED, "asked twice"
    assert known > (300 if profile is FULL else 10)
    assert (refused > 300) == (profile is not FULL)


def test_a_view_is_known_by_what_shares_its_memory(backend: Plugin, asked: list[str]) -> None:
    whole, nb = (32, 1, 1, 1), (128, 128, 128)
    with Scene(backend.ggml, "NPU") as scene:
        x, y, z = (scene.root("f32", (128,), np.zeros(128, np.float32)) for _ in range(3))
        first, into, later = (scene.view(x, whole, nb, 128 * i) for i in range(3))
        for source, target in ((first, into), (first, later), (scene.view(y, whole, nb, 0), into)):
            node = scene.op("cpy", source, target)
            asked.clear()
            assert scene.supported(node)
            assert asked == ["CPY"]
            assert scene.supported(node)
            assert asked == ["CPY"]
        another = scene.op("cpy", scene.view(y, whole, nb, 0), scene.view(z, whole, nb, 128))
        assert scene.supported(another)
        assert asked == ["CPY"], "as that of y and x: of other memory nothing is said"


def test_a_changed_backend_is_asked_anew(backend: Plugin, asked: list[str]) -> None:
    @op("SILU", types=[("f16", "f16")])
    def other(dst: object, x: object) -> None: ...

    with Scene(backend.ggml, "NPU") as scene:
        x = scene.root("f32", (32,), np.zeros(32, np.float32))
        node = scene.op("silu", x)
        for _ in range(2):
            assert scene.supported(node)
        assert asked == ["SILU"]
        with default_backend().ops.having(other):
            assert not scene.supported(node)
        backend.backend.options = backend.backend.options.updated({"ops": "default"})
        assert not scene.supported(node)
    assert asked == ["SILU", "SILU"], "with the movers alone no kernel is asked"


def test_ops_that_are_left_to_others_are_refused_without_python(
    backend: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    offers = Backend.offers
    monkeypatch.setattr(Backend, "offers", lambda self, op: calls.append(op) or offers(self, op))  # type: ignore[func-returns-value]
    choose(monkeypatch, ops="default")
    with Scene(backend.ggml, "NPU") as scene:
        x = scene.root("f32", (32,), np.zeros(32, np.float32))
        left, function, taken = scene.op("rms_norm", x, 1e-5), scene.op("silu", x), scene.op("dup", x)
        for _ in range(3):
            assert [scene.supported(node) for node in (left, function, taken)] == [False, False, True]
        assert calls == ["RMS_NORM", "SILU", "DUP", "SILU", "SILU"]
        choose(monkeypatch, ops="all")
        assert scene.supported(left), "with other options it is asked anew"


def test_a_device_with_its_own_memory_is_asked_each_time(backend: Plugin) -> None:
    """Where a node's result lies is no part of a key."""
    own = Plugin(backend.ggml, Backend("NPU7", options=Options(ops="all", memory="device")))
    with Scene(backend.ggml, "NPU") as scene:
        node = scene.op("silu", scene.root("f32", (32,), np.zeros(32, np.float32)))
        calls = []
        own.backend.offers = lambda op: not calls.append(op)  # type: ignore[method-assign, func-returns-value]
        for _ in range(3):
            assert backend.ggml.ggml_backend_dev_supports_op(own.handle, node)
    assert calls == ["SILU"] * 3


def test_prompts_of_new_lengths_ask_about_few_nodes(backend: Plugin, model: Models, asked: list[str]) -> None:
    counts = []
    with Session(model("demo"), Settings("npu", n_ctx=256, threads=2)) as session:
        for n in (20, 21, 22):
            asked.clear()
            session.decode([*range(10, 10 + n)])
            counts.append(len(asked))
    assert max(counts[1:]) < 60, "of some 700 nodes, which those of other layers are like"


def test_every_layout_has_a_devices_context_at_the_same_place() -> None:
    assert len({layout["ggml_backend_device"].context.offset for layout in layouts.KNOWN}) == 1
