"""What commands do before and during a run: set the device's options, load kernel files, show progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn

from graph_runner.base.console import Console, printable
from graph_runner.base.errors import BadInputError
from graph_runner.base.files import STDOUT
from graph_runner.cli.options import ComputeOptions, KindOptions, OpOptions
from graph_runner.cli.outputs import is_seen_with_stderr
from quant.errors import say


def stderr() -> Console:
    """Returns the console for everything but results."""
    return Console(stderr=True)


def stdout(*files: str | None) -> Console:
    """Returns the console for results. If one of the output files is stdout, it is stderr, and silent if stdout and
    stderr are the same terminal or file."""
    if STDOUT not in files:
        return Console()
    return Console(stderr=True, quiet=is_seen_with_stderr())


def warn(text: str) -> None:
    """Prints a warning on stderr, in one line."""
    say(text)


def warn_if_kernels_are_not_kept() -> None:
    """Says on stderr, before a command starts others whose own words are not shown, that each compiles its kernels."""
    from quant.folders import FolderError
    from quant.kernels.cache import kept_in

    try:
        kept_in()
    except FolderError as error:
        warn(f"each process compiles its kernels; not kept: {error}")


def refuse_without_the_npu(device: str, npu: ComputeOptions, *, takes_layers: bool = False, **others: object) -> None:
    """Raises BadInputError for the first NPU option that is given although another device computes everything.

    takes_layers  whether that device may be given layers
    """
    given = others | vars(npu) | {"fusion": None, "no_fusion": not npu.fusion}
    for name, value in given.items():
        if value and (name, value) != ("gpu_layers", "0") and not (takes_layers and name == "gpu_layers"):
            option = {"all_ops": "--all"}.get(name, f"--{name.replace('_', '-')}")
            raise BadInputError(f"{option}: applies to the NPU, but --device is {device}")


@contextmanager
def loading(console: Console) -> Iterator[Callable[[float], None]]:
    """Yields the update of a progress bar for loading a model (0..1), shown on a terminal only."""
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
    """Yields the update of a progress bar for a prompt (in tokens), shown on a terminal only."""
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


def use_device(npu: KindOptions) -> None:
    """Sets the options of the default backend. Raises DeviceError if the device file has several devices."""
    from ggml_backend_npu.default import only_backend

    backend = only_backend()
    backend.options = backend.options.updated(npu.chosen)


def gpu_layers(npu: OpOptions) -> int:
    """Returns the number of layers to offload: 0 for a device that is not of type gpu."""
    from ggml_backend_npu import default_backend

    return npu.layers if default_backend().options.device_type == "gpu" else 0


def use_kernels(files: list[Path] | None) -> None:
    """Runs a user's kernel files, or those of GGML_NPU_KERNELS if none is given, and says on stderr what they
    registered."""
    from ggml_backend_npu import default_backend
    from ggml_backend_npu.backend.kernel_files import load_kernels, named_by_the_environment

    for path in files or named_by_the_environment():
        ops = ", ".join(f"{name} ({how})" for name, how in load_kernels(path, default_backend()).items())
        print(printable(f"kernels of {path}: {ops}"), file=sys.stderr)
