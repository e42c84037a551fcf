"""The command plugin."""

from __future__ import annotations


def plugin() -> None:
    """Print the path of the plugin that gives any ggml program the device NPU.

    GGML_BACKEND_PATH="$(ggml-npu plugin)" llama-bench -m model.gguf
    """
    from ggml_backend_npu.abi.embedding import plugin

    print(plugin())
