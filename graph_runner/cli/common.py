"""What commands do before and while they run: the device's options, a user's kernels, what is shown meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn


def op_options(all_ops: bool = False, fusion: bool = True) -> dict[str, str | None]:
    """Options of the device that say which ops it takes."""
    """Options of the device that say which ops it takes."""
    return {"ops": "all" if all_ops else None, "fusion": None if fusion else "off"}


def type_for_all(device_type: str | None, memory: str | None, all_ops: bool) -> str | None:
    """llama.cpp lets a whole model be in a device's own memory where it takes it for a GPU."""
    return device_type or ("gpu" if memory == "device" and all_ops else None)


def stderr() -> Console:
    """The console for what is no result."""
    """The console for what is no result."""
    return Console(stderr=True)


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


def use_device(**options: str | None) -> None:
    """Sets options of the device, by field name; None leaves one."""
    """Sets options of the device, by field name; None leaves one."""
    from ggml_backend_npu import DEVICE

    DEVICE.update(options)


def gpu_layers() -> int:
    """A device of type gpu is to have all layers."""
    from ggml_backend_npu import DEVICE

    return 999 if DEVICE.device_type == "gpu" else 0


def use_kernels(path: Path | None) -> None:
    """Runs a user's file of kernels and says on stderr what it registered."""
    """Runs a user's file of kernels and says on stderr what it registered."""
    if path is None:
        return
    from ggml_backend_npu.kernels import load_kernels

    ops = ", ".join(f"{name} ({how})" for name, how in load_kernels(path).items())
    print(f"kernels of {path}: {ops}", file=sys.stderr)
