"""The command ops."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def ops() -> None:
    """List the ops that the backend supports, by type."""
    from ggml_backend_npu import OPS

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("op", "sources", "output"):
        table.add_column(column)
    for name in sorted(OPS):
        for sources, outputs in OPS[name].signatures():
            table.add_row(name, sources, outputs)
            name = ""
    Console().print(table)
