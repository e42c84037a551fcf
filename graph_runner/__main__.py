"""python -m graph_runner: the command ggml-npu."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    if not sys.flags.safe_path and Path(sys.path[0]).resolve() != Path(__file__).resolve().parents[1]:
        del sys.path[0]  # the current folder, where a file beside a model may be called numpy.py
    from graph_runner.cli import main

    main()
