"""What commands do before and while they run: the device's options, a user's kernels, what is shown meanwhile."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn

from graph_runner.cli.options import PROMPT, utf8
from graph_runner.console import Console, printable
from graph_runner.errors import BadInputError
from graph_runner.files import STDOUT


def op_options(all_ops: bool = False, fusion: bool = True) -> dict[str, str | None]:
    """Options of the device that say which ops it takes."""
    return {"ops": "all" if all_ops else None, "fusion": None if fusion else "off"}


def type_for_all(device_type: str | None, memory: str | None, all_ops: bool) -> str | None:
    """llama.cpp lets a whole model be in a device's own memory where it takes it for a GPU."""
    return device_type or ("gpu" if memory == "device" and all_ops else None)


def stderr() -> Console:
    """The console for what is no result."""
    return Console(stderr=True)


def stdout(*files: str | None) -> Console:
    """The console for results, which is stderr where one of the files that are written is stdout; and silent where both
    are one terminal or file."""
    if STDOUT not in files:
        return Console()
    return Console(stderr=True, quiet=_is_one(sys.stdout, sys.stderr))


def _is_one(a: TextIO, b: TextIO) -> bool:
    try:
        return os.path.sameopenfile(a.fileno(), b.fileno())
    except (OSError, ValueError):
        return False


def warn(text: str) -> None:
    """Says on stderr, in a line, what a user may not expect."""
    print(printable(f"ggml-npu: {text}"), file=sys.stderr)


def prompt_text(prompt: str, file: Path | None) -> str:
    """The prompt, or what a file holds in its place."""
    if file is None:
        return prompt
    if prompt != PROMPT:
        raise BadInputError(f"--file {str(file)!r}: --prompt is given too")
    try:
        return utf8(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise BadInputError(f"--file {str(file)!r}: is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise BadInputError(f"--file {str(file)!r}: {error.strerror}") from None


def refuse_without_the_npu(device: str, **given: object) -> None:
    """Raises BadInputError for the first option that is given, where another device computes all."""
    for name, value in given.items():
        if value:
            option = {"all_ops": "--all"}.get(name, f"--{name.replace('_', '-')}")
            raise BadInputError(f"{option}: applies to the NPU, but --device is {device}")


@contextmanager
def loading(console: Console) -> Iterator[Callable[[float], None]]:
    """A progress bar for a model that loads, on a terminal only."""
    with Progress(
        TextColumn("loading"), BarColumn(), TaskProgressColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("loading", total=1.0)

        def update(done: float) -> None:
            progress.update(task, completed=done)
            if done >= 1.0:
                progress.stop()

        yield update


@contextmanager
def reading(console: Console, n_tokens: int) -> Iterator[Callable[[int], None]]:
    """A progress bar for a prompt that is read, on a terminal only."""
    with Progress(
        TextColumn("prompt"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), console=console, transient=True,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("prompt", total=n_tokens)

        def update(done: int) -> None:
            progress.update(task, completed=done)
            if done >= n_tokens:
                progress.stop()  # it takes stdout over, token by token, as long as it runs

        yield update


def use_device(**options: str | None) -> None:
    """Sets options of the device, by field name; None leaves one."""
    from ggml_backend_npu import default_backend

    backend = default_backend()
    backend.options = backend.options.updated(options)


def gpu_layers() -> int:
    """A device of type gpu is to have all layers."""
    from ggml_backend_npu import default_backend

    return 999 if default_backend().options.device_type == "gpu" else 0


def use_kernels(files: list[Path] | None) -> None:
    """Runs a user's files of kernels, or where there is none that of GGML_NPU_KERNELS, and says on stderr what they
    registered."""
    from ggml_backend_npu import default_backend
    from ggml_backend_npu.kernel_files import load_kernels, named_by_the_environment

    for path in files or named_by_the_environment():
        ops = ", ".join(f"{name} ({how})" for name, how in load_kernels(path, default_backend()).items())
        print(printable(f"kernels of {path}: {ops}"), file=sys.stderr)
