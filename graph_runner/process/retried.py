"""Replays the saved nodes of a diff, to tell the user a command that was seen to show a fault.

Each replay has a process of its own, as the command has: a kernel that keeps something from call to call has nothing to
begin with. The processes are copies of one in which everything is imported and nothing has run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graph_runner.base.errors import LimitError
from graph_runner.process.child import EndedError, Trail, begun
from graph_runner.process.jobs import DiffJob, NpuOptions, ReplayJob
from quant.errors import UserError

if TYPE_CHECKING:
    from graph_runner.diff.result import DiffResult
    from graph_runner.run.devices import Devices

_WAYS = (1, 8, 64)  # how often the node is computed, with other values in between
_SECONDS = 30.0  # that all replays may take; what is left then is not tried
_POLL = 0.01  # seconds
_WRONG, _RIGHT, _REFUSED = 1, 0, 2


@dataclass(frozen=True)
class RetryJob:
    """Replays traces in order, each until it shows that a node is wrong.

    device   the options that the printed command has
    name     of the device, and where it is; None if it is the NPU
    seconds  that one replay may take
    """

    device: NpuOptions
    name: str | None
    where: Devices | None
    paths: list[Path]
    seconds: float

    def __call__(self, send: Callable[[object], None], trail: Trail | None = None) -> dict[Path, int]:
        """Returns by path how often a node had to be computed; 0 if it was right each time."""
        end = time.monotonic() + _SECONDS
        found: dict[Path, int] = {}
        for path in self.paths:
            if time.monotonic() > end:
                break
            found[path] = next((times for times in _WAYS if self._is_wrong(path, times)), 0)
        return found

    def _is_wrong(self, path: Path, times: int) -> bool:
        process = os.fork()
        if not process:
            self._replay(path, times)
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status) not in (_RIGHT, _REFUSED)
            time.sleep(_POLL)
        os.kill(process, 9)
        os.waitpid(process, 0)
        return times == 1  # the replay will say that the node was not done; many computations may just take long

    def _replay(self, path: Path, times: int) -> None:
        """Ends the process with what the replay has found."""
        code = _WRONG
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            for number in (1, 2):
                os.dup2(sys.stdout.fileno(), number)
            result = ReplayJob(self.device, path, None, {"device": self.name, "repeat": times}, self.where)(
                lambda _: None
            )
            code = _RIGHT if result or not result.nodes else _WRONG
        except UserError:
            code = _REFUSED
        finally:
            os._exit(code)


def retried(result: DiffResult, job: DiffJob, node_timeout: float) -> DiffResult:
    """Returns a diff whose wrong nodes say how often a replay has to compute them until they are wrong again."""
    paths = [Path(node.reproducer) for node in result.wrong if node.reproducer is not None]
    if not paths:
        return result
    try:
        with begun("graph_runner.trace") as child:
            where = job.options.devices if job.options.devices.described(job.options.device) else None
            name = None if where is None else job.options.device
            retry = RetryJob(replace(job.device, options={}), name, where, paths, node_timeout)
            found: dict[Path, int] = child.run(retry, receive=lambda _: None, node_timeout=float("inf"))
    except (EndedError, LimitError):
        return result
    nodes = [
        node if node.reproducer is None else replace(node, repeats=found.get(Path(node.reproducer)))
        for node in result.nodes
    ]
    return replace(result, nodes=nodes)
