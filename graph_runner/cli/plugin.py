"""The command plugin."""

from __future__ import annotations

from graph_runner.cli.common import warn


def plugin() -> None:
    """Print the path of the plugin that gives a ggml program the device NPU.

    GGML_BACKEND_PATH="$(ggml-npu plugin)" llama-cli -m model.gguf -dev NPU

    llama-cli, llama-server and llama-completion load plugins only with -dev NPU. llama-bench always loads them.
    """
    from ggml_backend_npu.plugin.embedding import check_package, plugin

    check_package()
    print(plugin())
    warn("llama-cli, llama-server and llama-completion load it only with -dev NPU; llama-bench always loads it")
