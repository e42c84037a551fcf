"""Runs a bisection in child processes: a run that ends its process, or hangs, has failed, and the next one goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graph_runner.base.errors import SessionError
from graph_runner.process.child import EndedError, Trail, begun
from graph_runner.process.jobs import NpuOptions

if TYPE_CHECKING:
    from graph_runner.bisect.kept import Kept
    from graph_runner.bisect.result import Bisection, Trial
    from graph_runner.bisect.running import BisectOptions

_A_RUN = "a run of the model"


@dataclass(frozen=True)
class BisectJob:
    """A bisection.

    known     trials that were made before
    is_first  whether no process has run before this one's
    """

    device: NpuOptions
    model: Path
    prompt: str
    options: BisectOptions
    known: tuple[Trial, ...] = ()
    is_first: bool = True

    @property
    def asked(self) -> dict[str, str]:
        """What its runs depend on, by name."""
        found = self.model.stat()
        given = {name: value for name, value in self.device.options.items() if value is not None}
        options = {each.name: str(getattr(self.options, each.name)) for each in fields(self.options)}
        for name in ("repeat", "ends", "limit", "by_token"):  # these say how runs are read
            del options[name]
        model = f"{found.st_size} bytes"
        return {"model": model, "prompt": self.prompt, **options, "npu": str(given), **self.device.described}

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

        backend = self.device.use(tells=self.is_first)
        return Runs(self.model, self.prompt, self.options, backend, told, seen, self.known).bisected()


def run_bisect(job: BisectJob, *, timeout: float, seen: Callable[[Trial], None], kept: Kept | None = None) -> Bisection:
    """Runs a bisection.

    timeout  seconds that a run may take
    seen     called with each trial that is made
    kept     has trials that were made before, and is given each that is made

    Raises what `Runs` raises, and SessionError if the process ends before the first trial.
    """
    from graph_runner.bisect.result import Trial

    told: list[str | Trial] = []

    def receive(value: str | Trial) -> None:
        told.append(value)
        if isinstance(value, Trial):
            if kept is not None:
                kept.add(value)
            seen(value)

    if kept is not None:
        job = replace(job, known=kept.known)
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
            receive(Trial(nodes, None, None, 0.0, error.reason.replace("--node-timeout", "--run-timeout")))
            made = tuple(each for each in told if isinstance(each, Trial))
            job = replace(job, known=(*job.known, *made), is_first=False)
