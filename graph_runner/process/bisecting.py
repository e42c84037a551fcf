"""Runs a bisection in child processes: a run that ends its process, or hangs, has failed, and the next one goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graph_runner.base.errors import SessionError
from graph_runner.process.child import EndedError, Trail, begun
from graph_runner.process.jobs import NpuOptions

if TYPE_CHECKING:
    from graph_runner.bisect.result import Bisection, Trial
    from graph_runner.bisect.running import BisectOptions

_A_RUN = "a run of the model"


@dataclass(frozen=True)
class BisectJob:
    """A bisection.

    known  trials that were made before
    """

    device: NpuOptions
    model: Path
    prompt: str
    options: BisectOptions
    known: tuple[Trial, ...] = ()

    def __call__(self, send: Callable[[object], None], trail: Trail | None = None) -> Bisection:
        """Sends the nodes of each run before it, as text, and its trial after it."""
        from graph_runner.bisect.running import Runs

        def told(nodes: str) -> None:
            send(nodes)
            if trail is not None:
                trail.begins(_A_RUN)

        def seen(trial: Trial) -> None:
            if trail is not None:
                trail.ends()
            send(trial)

        backend = self.device.use(tells=not self.known)
        return Runs(self.model, self.prompt, self.options, backend, told, seen, self.known).bisected()


def run_bisect(job: BisectJob, *, timeout: float, seen: Callable[[Trial], None]) -> Bisection:
    """Runs a bisection.

    timeout  seconds that a run may take
    seen     called with each trial that is made

    Raises what `Runs` raises, and SessionError if the process ends before the first trial.
    """
    from graph_runner.bisect.result import Trial

    told: list[str | Trial] = []

    def receive(value: str | Trial) -> None:
        told.append(value)
        if isinstance(value, Trial):
            seen(value)

    while True:
        told.clear()
        try:
            with begun("graph_runner.bisect.running") as child:
                result: Bisection = child.run(job, receive=receive, node_timeout=timeout)
                return result
        except EndedError as error:
            nodes = told[-1] if told else None
            if not isinstance(nodes, str):
                raise SessionError(f"model {str(job.model)!r}: llama.cpp {error.reason}") from None
            receive(Trial(nodes, None, None, 0.0, error.reason))
            job = replace(job, known=(*job.known, *(each for each in told if isinstance(each, Trial))))
