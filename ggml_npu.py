"""The command ggml-npu, as it is installed: it checks that Python finds our packages, then runs it."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command."""
    try:
        from ggml_backend_npu import names  # it refuses a foreign `quant`

        names.check("graph_runner")
    except ImportError as error:
        print(f"ggml-npu: {error}", file=sys.stderr)
        sys.exit(2)
    from graph_runner.cli import main as command

    command()
