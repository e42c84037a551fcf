"""A device with `fallback` "cpu": what it does not take, the CPU computes between its nodes."""

from __future__ import annotations

import pytest
from kit.recipes import GetRows
from kit.support import Scene, assert_same_bytes, choose

from ggml_backend_npu.plugin.plugin import Plugin


@pytest.mark.parametrize(
    ("ops", "taken"), [("default", ["CONT", "GET_ROWS"]), ("all", ["CONT", "GET_ROWS", "SQR", "SUM_ROWS"])]
)
def test_the_cpu_computes_what_the_device_is_not_to_take(
    backend: Plugin, monkeypatch: pytest.MonkeyPatch, ops: str, taken: list[str]
) -> None:
    choose(monkeypatch, ops=ops)
    choose(monkeypatch, fallback="cpu")

    def squares_of_sums_of_rows(scene: Scene) -> int:
        rows = GetRows("f32", (5, 3, 1, 1), 2)(scene)
        return scene.op("sqr", scene.op("cont", scene.op("sum_rows", rows)))

    backend.statistics.reset()
    results = {}
    for device in ("NPU", "CPU"):
        with Scene(backend.ggml, device) as scene:
            node = squares_of_sums_of_rows(scene)
            scene.fill(node)
            assert scene.compute(node) == 0, backend.statistics.error
            results[device] = scene.get(node)
    assert sorted(backend.statistics.computed.elements()) == taken
    assert_same_bytes(results["NPU"], results["CPU"])
