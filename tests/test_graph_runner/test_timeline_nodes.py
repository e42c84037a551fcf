"""What nodes are called and cost: `graph_runner.timeline.nodes`."""

from __future__ import annotations

import numpy as np
from kit.support import Scene

from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.timeline.nodes import Copied, StepNodes


def test_nodes_have_places_bytes_and_operations(backend: Plugin) -> None:
    with Scene(backend.ggml, "CPU") as scene:
        a = scene.root("f16", (64, 8), np.zeros((8, 64), np.float16))
        b = scene.root("f32", (64, 3), np.zeros((3, 64), np.float32))
        product = scene.op("mul_mat", a, b)
        view = scene.view(product, (4, 3, 1, 1), (32, 96, 96), 0)
        total = scene.op("sqr", view)
        scene.ggml.ggml_set_name(b, b"NPU#tokens#0")
        scene.ggml.ggml_set_name(total, b"total")
        nodes = StepNodes(backend.ggml)
        found = nodes.of([product, view, total])
        assert [(node.op, node.place, node.computes) for node in found] == [
            ("MUL_MAT", 0, True), ("VIEW", -1, False), ("SQR", 1, True),
        ]  # fmt: skip
        assert found[0].nbytes == 64 * 8 * 2 + 64 * 3 * 4 + 8 * 3 * 4
        assert [node.operations for node in found] == [2 * 64 * 8 * 3, 0, 0]
        assert found[0].reads == {b: Copied("tokens", 64 * 3 * 4)}
        assert found[2].name == "total"
        assert nodes.of([product, view, total]) is found
        assert nodes.of([product, view]) is not found
        scene.ggml.ggml_set_name(total, b"another")
        assert nodes.of([product, view, total])[2].name == "another"
