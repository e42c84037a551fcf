"""The command ops."""

from __future__ import annotations

from graph_runner.cli.common import stdout, use_kernels
from graph_runner.cli.options import JsonFile, Kernels
from graph_runner.cli.outputs import json_text, write
from graph_runner.console import table


def ops(json_file: JsonFile = None, kernels: Kernels = None) -> None:
    """List the ops that the backend supports, by type."""
    from ggml_backend_npu import default_backend

    use_kernels(kernels)
    known = default_backend().ops
    signatures = {name: known[name].signatures() for name in sorted(known)}
    if json_file is not None:
        data = {
            name: [{"sources": sources, "outputs": outputs} for sources, outputs in found]
            for name, found in signatures.items()
        }
        write("--json", json_file, json_text({"schema": "ggml-npu ops 1", "ops": data}))
    shown = table("op", "sources", "output", padding=(0, 2, 0, 0))
    for name, found in signatures.items():
        for place, (sources, outputs) in enumerate(found):
            shown.add_row("" if place else name, sources, outputs)
    stdout().print(shown)
