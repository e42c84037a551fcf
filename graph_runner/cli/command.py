"""What every command does: it takes groups of options, never writes over what it reads, and has --verbose."""

from __future__ import annotations

import functools
import inspect
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from graph_runner.base.errors import SessionError
from graph_runner.base.files import STDOUT, check_folders, check_outputs, parts_of
from graph_runner.cli.codes import CLOSED_PIPE
from graph_runner.cli.options import KEEPS_TRACES, READS, WRITES
from graph_runner.cli.outputs import stdout_apart
from quant.folders import tidy, tidy_all

_READ_BY_VARIABLE = ("GGML_NPU_KERNELS", "GGML_NPU_PROFILE", "GGML_NPU_DEVICE_FILE")
_WRITTEN_BY_VARIABLE = ("GGML_NPU_CAPTURE",)
_SPELLINGS = {
    "-fa": "--flash-attn", "-ctk": "--cache-type-k", "-ctv": "--cache-type-v", "-t": "--threads",
    "-ngl": "--gpu-layers", "--n-gpu-layers": "--gpu-layers", "-dev": "--device", "-s": "--seed",
    "--temp": "--temperature", "--predict": "--n-predict", "-m": "--model",
}  # fmt: skip
_VALUES = {"1": "on", "true": "on", "enabled": "on", "0": "off", "false": "off", "disabled": "off", "-1": "auto"}
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Also show tracebacks, llama.cpp's log and refused ops (GGML_NPU_VERBOSE=1).")
]


class Command(typer.core.TyperCommand):
    """A command that also takes options as llama.cpp's programs spell them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the words of a command line, in our own spelling."""
        options = {name: each for each in self.get_params(ctx) for name in each.opts if name.startswith("-")}
        taking = {name for name, each in options.items() if not getattr(each, "is_flag", False)}
        return super().parse_args(ctx, [*_spelled(args, options, taking)])


def _spelled(words: Iterable[str], options: Collection[str], taking: Collection[str]) -> Iterator[str]:
    """Yields the words of a command line with llama.cpp's names of options in ours, and MODEL without its -m.

    taking  the options that have a value
    """
    left = deque(words)
    while left:
        word = left.popleft()
        if word == "--":
            yield from (word, *left)
            return
        ours = _SPELLINGS.get(word, word)
        if ours == "--model" and ours not in options:
            continue
        yield ours if ours in options else word
        if ours == "--flash-attn" and (not left or left[0] in _VALUES or left[0].startswith("-")):
            yield _VALUES[left.popleft()] if left and left[0] in _VALUES else "on"
        elif ours in taking and left:
            yield left.popleft()


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """Returns the function in the form that typer needs: with an option for each field of a group, with --verbose, and
    with a check that refuses to write over an input before anything is done. Options that name files have READS or
    WRITES beside typer's part of their annotation."""
    parameters = parameters_of(function)
    reads, writes = files_of(function, READS), files_of(function, WRITES)
    folders = files_of(function, KEEPS_TRACES)

    @functools.wraps(function)
    def command(*, verbose: bool, **arguments: Any) -> None:
        if verbose:
            os.environ["GGML_NPU_VERBOSE"] = "1"
        tidy_all()
        tidy(Path())
        outputs = {option: _text(arguments[name]) for name, option in writes.items()}
        outputs |= {name: os.environ.get(name) or None for name in _WRITTEN_BY_VARIABLE}
        kept = {option: _text(arguments[name]) for name, option in folders.items()}
        if any({**outputs, **kept}.values()):
            inputs = {option: [*files_read(arguments[name])] for name, option in reads.items()}
            inputs |= read_by_variables()
            check_outputs(outputs, inputs)
            check_folders(kept, inputs)
        try:
            with stdout_apart() if STDOUT in outputs.values() else nullcontext():
                function(**_grouped(function, arguments))
        except BrokenPipeError:  # typer would make it exit code 1
            raise SystemExit(CLOSED_PIPE) from None

    del command.__wrapped__
    verbose = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Verbose)
    shown = [*parameters, verbose]
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in shown} | {"return": None}
    return command


@functools.cache
def parameters_of(function: Callable[..., None]) -> list[inspect.Parameter]:
    """Returns what the user gives to a command: its parameters, with the fields of a group in place of the group."""
    hints = get_type_hints(function, include_extras=True)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if not is_dataclass(hints[name]):
            found.append(parameter.replace(annotation=hints[name]))
            continue
        of_group = get_type_hints(hints[name], include_extras=True)
        found += [
            inspect.Parameter(each.name, parameter.kind, default=each.default, annotation=of_group[each.name])
            for each in fields(hints[name])
        ]
    return found


def _grouped(function: Callable[..., None], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments for a command, with those of a group combined into one object."""
    groups: dict[str, Any] = {name: hint for name, hint in get_type_hints(function).items() if is_dataclass(hint)}
    options = {name: [each.name for each in fields(group)] for name, group in groups.items()}
    made = {name: group(**{each: arguments[each] for each in options[name]}) for name, group in groups.items()}
    in_groups = {each for names in options.values() for each in names}
    return {name: value for name, value in arguments.items() if name not in in_groups} | made


def files_of(function: Callable[..., None], what: str) -> dict[str, str]:
    """Returns the parameters of a command that name a file which it READS or WRITES, each with the user's name for
    it."""
    found = {}
    for parameter in parameters_of(function):
        typed, *others = getattr(parameter.annotation, "__metadata__", (None,))
        if typed is not None and what in others:
            called = [each for each in (typed.default, *(typed.param_decls or ())) if str(each).startswith("--")]
            is_option = isinstance(typed, typer.models.OptionInfo)
            usual = f"--{parameter.name.replace('_', '-')}" if is_option else parameter.name.upper()
            found[parameter.name] = called[0] if called else usual
    return found


def _text(value: str | Path | None) -> str | None:
    return None if value is None else str(value)


def read_by_variables() -> dict[str, list[Path]]:
    """Returns the files that variables name, by variable."""
    return {name: [*files_read(os.environ.get(name, "").split(os.pathsep))] for name in _READ_BY_VARIABLE}


def files_read(value: str | Path | Iterable[str | Path] | None) -> Iterator[Path]:
    """Yields the files that an option's value names, if any: it may be the name of something else."""
    if value is None or value == "":
        return
    if not isinstance(value, str | Path):
        for each in value:
            yield from files_read(each)
        return
    yield from parts_of(Path(value))
    if isinstance(value, str) and "=" in value:  # a setting: kernels=FILE.py
        yield Path(value.partition("=")[2])
    from ggml_backend_npu.device import files  # late, as it is slow

    yield Path(files.place_of(str(value))[0])
    if value == "demo":
        from graph_runner.base.models import demo_file

        with suppress(SessionError):  # a command that does not run it does not need it
            yield demo_file()
