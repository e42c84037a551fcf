"""python -m ggml_backend_npu: runs the command ggml-npu."""

from __future__ import annotations

from importlib.metadata import entry_points

if __name__ == "__main__":
    (command,) = entry_points(group="console_scripts", name="ggml-npu")
    command.load()()
