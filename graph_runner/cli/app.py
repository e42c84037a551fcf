"""The commands of ggml-npu, as one application."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated

import typer

from graph_runner.cli.command import Command, as_command

COMMANDS = (
    "run", "diff", "matrix", "capture", "replay", "coverage", "hazards", "bisect", "flaky", "record", "compare",
    "quantdiff", "timeline", "triage", "devices", "doctor", "plugin", "test", "ops", "cache", "bench",
)  # fmt: skip
"""In the order of --help. Each is the function of this name in the module of this name."""


def function_of(command: str) -> Callable[..., None]:
    """The function of a command, whose module is imported."""
    function: Callable[..., None] = getattr(import_module(f"graph_runner.cli.{command}"), command)
    return function


def application(words: Sequence[str] = ()) -> typer.Typer:
    """The application for the words of a command line: with the command that the first one names, or with all of
    them."""
    app = typer.Typer(
        name="ggml-npu",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(main)
    for command in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        app.command(command, cls=Command)(as_command(function_of(command)))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        names = ("ggml-backend-npu", "llama-cpp-python", "numba", "numpy")
        print(", ".join(f"{name} {_version(name)}" for name in names))
        raise typer.Exit


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # late, as it is slow

    try:
        return version(name)
    except PackageNotFoundError:
        return "is not installed"


def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the versions and exit.")
    ] = False,
) -> None:
    """A ggml backend in Python: run GGUF models with its kernels, and compare them byte for byte with ggml's CPU."""
