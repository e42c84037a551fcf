"""Records a run in a process of its own: one that a kernel ends, or that hangs, leaves no file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graph_runner.base.errors import SessionError
from graph_runner.process.child import EndedError, Trail, begun
from graph_runner.process.jobs import NpuOptions

if TYPE_CHECKING:
    from graph_runner.record import RecordOptions

_MODULE = "graph_runner.record"


@dataclass(frozen=True)
class RecordJob:
    """A run that is recorded in a file."""

    device: NpuOptions
    model: Path
    prompt: str
    output: Path
    options: RecordOptions

    def __call__(self, send: Callable[[object], None], trail: Trail | None = None) -> dict[str, Any]:
        """Sends the number of each step after it. Returns what was written: see `files.size_of`."""
        from graph_runner.record import record, write_run
        from graph_runner.record.files import size_of

        backend = self.device.use()
        options = replace(self.options, notes=self.device.described)

        def seen(step: int) -> None:
            if trail is not None:
                trail.is_moving()
            send(step)

        if trail is not None:
            trail.begins("a step of the model")
        run = record(self.model, self.prompt, options, backend, seen)
        write_run(self.output, run)
        return size_of(self.output, run)


def run_record(job: RecordJob, *, timeout: float, seen: Callable[[object], None]) -> dict[str, Any]:
    """Records a run. Returns what was written.

    timeout  seconds that a step may take
    seen     called after each step with its number

    Raises what `record` and `write_run` raise, and SessionError if the process ends before it is done.
    """
    try:
        with begun(_MODULE) as child:
            found: dict[str, Any] = child.run(job, receive=seen, node_timeout=timeout)
            return found
    except EndedError as error:
        reason = error.reason.replace("--node-timeout", "--step-timeout")
        raise SessionError(f"model {str(job.model)!r}: llama.cpp {reason}") from None
