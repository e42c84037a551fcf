"""A device that says no to some of its nodes: `ggml_backend_npu.plugin.limited`."""

from __future__ import annotations

import numpy as np
from kit.support import Scene

from ggml_backend_npu.plugin.limited import limited
from ggml_backend_npu.plugin.plugin import Plugin


def node_of(scene: Scene, name: bytes) -> int:
    x = scene.root("f32", (32,), np.zeros(32, np.float32))
    node = scene.op("silu", x)
    scene.ggml.ggml_set_name(node, name)
    return node


def test_a_device_says_no_to_nodes_by_name_as_long_as_the_context(backend: Plugin, every_op: None) -> None:
    device = backend.handle
    with Scene(backend.ggml, "NPU") as scene:
        taken, other = node_of(scene, b"taken"), node_of(scene, b"other")
        assert [scene.supported(node) for node in (taken, other)] == [True, True]
        with limited(backend.ggml, device, lambda name: name == "taken"):
            assert [scene.supported(node) for node in (taken, other)] == [True, False]
            with limited(backend.ggml, device, lambda name: name == "other"):
                assert [scene.supported(node) for node in (taken, other)] == [False, False]
            assert scene.supported(taken)
        assert [scene.supported(node) for node in (taken, other)] == [True, True]


def test_what_computes_nothing_and_what_lies_in_a_buffer_stays(backend: Plugin, every_op: None) -> None:
    with Scene(backend.ggml, "NPU") as scene:
        x = scene.root("f32", (32, 2), np.zeros(64, np.float32))
        reshaped = scene.view(x, (64, 1, 1, 1), (256, 256, 256), 0)
        inside = scene.op("cpy", scene.root("f32", (32, 2), np.zeros(64, np.float32)), x)
        scene.fill(inside)  # allocates
        with limited(backend.ggml, backend.handle, lambda name: False):
            assert scene.supported(reshaped)
            assert scene.supported(inside)


def test_an_exception_is_no(backend: Plugin, every_op: None) -> None:
    def fails(name: str) -> bool:
        raise ValueError(name)

    with Scene(backend.ggml, "NPU") as scene:
        node = node_of(scene, b"node")
        with limited(backend.ggml, backend.handle, fails):
            assert not scene.supported(node)
        assert scene.supported(node)
