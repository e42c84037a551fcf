"""The device in ggml's list: registered once, and hidden while it is not to be used."""

from __future__ import annotations

import numpy as np
from kit.support import Scene, supported

import ggml_backend_npu
from ggml_backend_npu.ggml.lib import list_devices
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.registration import alone


def test_registering_again_changes_nothing(backend: Plugin) -> None:
    assert ggml_backend_npu.register() is backend
    assert [device.name for device in list_devices(backend.ggml)].count("NPU") == 1


def test_a_device_is_hidden_from_llama_cpp_while_it_is_not_to_be_used(backend: Plugin) -> None:
    def recipe(scene: Scene) -> int:
        return scene.op("cont", scene.root("f32", (4, 2), np.zeros(8, np.float32)))

    assert supported(backend, recipe)
    with alone(backend.ggml):
        assert "NPU" not in [device.name for device in list_devices(backend.ggml)]
    assert supported(backend, recipe)
