"""Calls of a user's code: kernels, and the methods of devices.

Whatever such code raises fails the call, SystemExit as well. What it leaves changed of how the processor computes with
floats is put back, and fails the call. A copy of the process that it makes ends when it comes back from the call. And
those who watch are told of each call, so that they can name one that never returns.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ggml_backend_npu.ggml import modes
from quant.errors import UserError


class KernelError(UserError):
    """A node that a kernel cannot compute: the message names the op, the node and the value."""


_PACKAGES = Path(__file__).resolve().parents[2]
_NOT_A_USERS = (*(str(_PACKAGES / name) for name in ("ggml_backend_npu", "graph_runner", "quant")), "<")


def said_by(error: BaseException) -> str:
    """An exception's type and message, and where in a user's file it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [
        frame
        for frame in frames
        if not frame.filename.startswith(_NOT_A_USERS) and "site-packages" not in frame.filename
    ]
    where = f" ({Path(users[-1].filename).name} line {users[-1].lineno})" if users else ""
    return f"{type(error).__name__}: {error}{where}"


class Watcher(Protocol):
    """Is told of calls, in the thread that makes them."""

    def begins(self, what: str) -> None:
        """Called before a call, with its name."""

    def ends(self) -> None:
        """Called after the last call that has begun in this thread and not ended."""


_watchers: list[Watcher] = []


def watched_by(watcher: Watcher) -> None:
    """Has a watcher told of all calls from now on."""
    _watchers.append(watcher)


def are_watched() -> bool:
    """Whether somebody is told of calls."""
    return bool(_watchers)


class Watched:
    """A context around a call that may never return.

    what  names it, by its text
    """

    __slots__ = ("_what",)

    def __init__(self, what: object) -> None:
        self._what = what

    def __enter__(self) -> None:
        for watcher in _watchers:
            watcher.begins(str(self._what))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watcher in _watchers:
            watcher.ends()


class UserCode:
    """A context around a call of a user's code. Ordinary exceptions and KeyboardInterrupt leave it as they are. Raises
    KernelError in place of any other one, and if modes of the processor were left changed."""

    __slots__ = ("_modes", "_process")

    def __enter__(self) -> None:
        self._process, self._modes = os.getpid(), modes.modes()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process:
            os._exit(0)  # whatever it would compute, the process that it is a copy of computes as well
        changed = modes.put_back(self._modes)
        if error is None and changed is not None:
            raise KernelError(f"leaves the processor with {changed}")
        if error is not None and not isinstance(error, Exception | KeyboardInterrupt):
            raise KernelError(said_by(error)) from error


@contextmanager
def calling(device: str, call: str, size: int | None = None) -> Iterator[None]:
    """A context around a call of a device's method: whatever that raises becomes a KernelError, which names the device,
    the call and the size in bytes."""
    what = f"{device}: {call}" if size is None else f"{device}: {call} of {size} bytes"
    try:
        with Watched(what), UserCode():
            yield
    except KeyboardInterrupt:
        raise
    except Exception as error:
        said = str(error) if isinstance(error, KernelError) else said_by(error)
        raise KernelError(f"{what}: {' '.join(said.split())}") from error  # an SDK's exceptions may have many lines
