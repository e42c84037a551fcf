"""The command doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graph_runner.base.console import Console, table
from graph_runner.base.errors import BadInputError


def doctor(
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[LIBRARY|PROGRAM]...",
            help="Libraries and programs to look at, besides the packages.",
            show_default=False,
        ),
    ] = None,
    pid: Annotated[
        int | None,
        typer.Option(
            metavar="PID", min=1, max=(1 << 31) - 1, help="A program that runs, in place of them.", show_default=False
        ),
    ] = None,
) -> None:
    """Say which ggml there are, whether the device NPU can go into each, and what to type; and how compiled kernels are
    kept.

    Looks at the packages of this Python environment, and at libraries and programs that are named. Exit code 1 where
    the device can go into none of them.
    """
    from graph_runner.tools.examination import examined
    from quant.kernels.objects import how_kept

    found = examined(places or [], pid)
    if not found:
        raise BadInputError("no package here has a ggml: pip install 'ggml-backend-npu[llama]', or name a library")
    shown = table("where", "ggml", "layout", "NPU", "what to type, or why not")
    for each in found:
        shown.add_row(each.where, each.version, each.layout, "yes" if each.fits else "no", each.advice)
    console = Console()
    console.print(shown)
    console.print(f"compiled kernels are kept {how_kept()}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if any(each.fits for each in found) else 1)
