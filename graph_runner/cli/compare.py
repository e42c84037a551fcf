"""The command compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from graph_runner.cli.common import stdout
from graph_runner.cli.options import READS, HtmlFile, JsonFile
from graph_runner.cli.outputs import delivered, json_text, write


def compare(
    a: Annotated[Path, typer.Argument(metavar="A.gguf", help="A record, taken as right.", show_default=False), READS],
    b: Annotated[Path, typer.Argument(metavar="B.gguf", help="Another record.", show_default=False), READS],
    *,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Compare two recorded runs: the first node where they part, the drift along the layers, the ends, the tokens.

    Exit code 0: they are equal; 1: they part; 2: bad input; 3: an internal error.
    """
    from graph_runner.record.comparing import compare as compared
    from graph_runner.record.files import read_run
    from graph_runner.reports.record import compare_html, comparison_json, print_comparison

    result = compared(read_run(a), read_run(b), a, b)
    outputs: list[Callable[[], None]] = [lambda: print_comparison(result, stdout(json_file, html_file))]
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(comparison_json(result))))
    if html_file is not None:
        outputs.append(lambda: write("--html", html_file, compare_html(comparison_json(result))))
    raise typer.Exit(delivered(bool(result), *outputs))
