"""python -m graph_runner: the command ggml-npu."""

from __future__ import annotations

from graph_runner.cli import main

if __name__ == "__main__":
    main()
