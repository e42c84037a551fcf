"""Has the reference compute nodes of a diff in whole runs, in a process of its own, once the diff is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graph_runner.base.errors import LimitError, SessionError
from graph_runner.process.child import EndedError, Trail, begun
from graph_runner.process.jobs import DiffJob, NpuOptions

if TYPE_CHECKING:
    from graph_runner.bisect.whole import WholeOptions
    from graph_runner.diff.result import DiffResult, Replaced
    from graph_runner.diff.run import DiffOptions

_SECONDS = 600.0  # that the runs of a group of nodes may take


@dataclass(frozen=True)
class ReplaceJob:
    """Whole runs in which groups of nodes are replaced. `wanted` as in `bisect.replacing.replaced`."""

    device: NpuOptions
    model: Path
    prompt: str
    options: WholeOptions
    wanted: Sequence[str | tuple[str, ...]]

    def __call__(self, send: Callable[[object], None], trail: Trail | None = None) -> None:
        """Sends what became of each group."""
        from graph_runner.bisect.replacing import replaced

        def seen(found: Replaced) -> None:
            send(found)
            if trail is not None:
                trail.is_moving()

        if trail is not None:
            trail.begins("a run of the model")
        replaced(self.model, self.prompt, self.options, self.device.use(tells=False), self.wanted, seen)


def with_replaced(result: DiffResult, job: DiffJob, wanted: Sequence[str]) -> DiffResult:
    """Returns a diff that says what becomes of its end if the reference computes nodes: those that are wanted, and if
    several are wrong or have inputs that differ, those that may be why.

    wanted  items of nodes, a text for each run

    Raises BadInputError for an item that no node matches, and SessionError for a model that cannot be run so.
    """
    from graph_runner.bisect.replacing import suspects
    from graph_runner.bisect.whole import WholeOptions

    asked = job.options
    found: list[Replaced] = []
    groups: list[str | tuple[str, ...]] = [*wanted, *(suspects(result) if may_be_replaced(asked) else [])]
    if not groups:
        return result
    options = WholeOptions(asked.device, asked.devices, asked.steps, asked.settings or result.settings)
    work = ReplaceJob(job.device, job.model, job.prompt, options, groups)
    try:
        with begun("graph_runner.bisect.replacing") as child:
            child.run(work, receive=found.append, node_timeout=_SECONDS)
    except (EndedError, LimitError, SessionError) as error:
        if wanted and len(found) < len(wanted):
            raise SessionError(f"--replace {wanted[len(found)]!r}: the run {error}") from None
    return replace(result, replaced=found)


def may_be_replaced(options: DiffOptions) -> bool:
    """Whether nodes can be replaced: by ggml's CPU, with settings that both sides have."""
    return options.reference == "CPU" and options.device != "CPU" and not options.variants
