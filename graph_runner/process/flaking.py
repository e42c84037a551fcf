"""Repeats whole runs in several processes: one that ends, or hangs, is a run apart, and the next one goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graph_runner.base.errors import SessionError
from graph_runner.process.child import EndedError, Trail, begun
from graph_runner.process.jobs import NpuOptions

if TYPE_CHECKING:
    from graph_runner.bisect.flakiness import Flakiness, Parting, Repeat, Way
    from graph_runner.bisect.whole import Batches, WholeOptions

_STARTS = 3  # processes that share the runs: each has other addresses
_MODULE = "graph_runner.bisect.flaky"


@dataclass(frozen=True)
class FlakyJob:
    """Runs of the same tokens in one process.

    ways     of the runs
    process  its number
    batches  the tokens; those of the first run, if there were none before
    rate     of the runs that were apart; None while these are not known. If they are, the first node at which runs part
             is looked for, in the first of the ways
    last_step  in which that is, or before
    """

    device: NpuOptions
    model: Path
    prompt: str
    options: WholeOptions
    ways: Sequence[Way] = ()
    process: int = 0
    batches: Batches | None = None
    rate: float | None = None
    last_step: int = 0

    def __call__(self, send: Callable[[object], None], trail: Trail | None = None) -> Parting | None:
        """Sends the tokens once they are known, then each run."""
        from graph_runner.bisect.flaky import Repeats

        def begins() -> None:
            if trail is not None:
                trail.begins("a run of the model")

        backend = self.device.use(tells=not self.process)
        repeats = Repeats(self.model, self.prompt, self.options, backend, self.batches)
        begins()
        if self.rate is not None:
            return repeats.parting(self.ways[0], self.last_step, self.rate)
        send((repeats.name, repeats.batches))
        for way in self.ways:
            if trail is not None:
                trail.is_moving()
            send(repeats.run(way, self.process))
        return None


def run_flaky(
    job: FlakyJob, ways: Sequence[Way], *, timeout: float, seen: Callable[[Repeat], object], narrows: bool = True
) -> Flakiness:
    """Runs the tokens in ways, shared by several processes, and looks for the first node at which two runs part.

    timeout  seconds that a run may take

    Raises what `Repeats` raises, and SessionError if the process ends before the first run.
    """
    from graph_runner.bisect.flakiness import Flakiness, Repeat, worst_way

    known: list[tuple[str, Batches]] = []
    repeats: list[Repeat] = []

    def receive(value: Repeat | tuple[str, Batches]) -> None:
        if isinstance(value, Repeat):
            repeats.append(value)
            seen(value)
        else:
            known.append(value)

    n_starts, process = min(_STARTS, len(ways)), 0
    ends = [len(ways) * (start + 1) // n_starts for start in range(n_starts)]
    while len(repeats) < len(ways):
        begin = len(repeats)
        end = next(each for each in ends if each > begin)
        batches = known[0][1] if known else None
        try:
            with begun(_MODULE) as child:
                now = replace(job, ways=ways[begin:end], process=process, batches=batches)
                child.run(now, receive=receive, node_timeout=timeout)
        except EndedError as error:
            if not known:
                raise SessionError(f"model {str(job.model)!r}: llama.cpp {error.reason}") from None
            reason = error.reason.replace("--node-timeout", "--run-timeout")
            receive(Repeat(ways[len(repeats)], process, (), 0.0, reason))
        process += 1
    name, batches = known[0]
    options = job.options
    result = Flakiness(str(job.model), name, len(batches[0][0]), len(batches) - 1, options.settings, repeats)
    apart = [each for each in result.apart if not each.error]
    if apart and narrows:
        last = min(result.steps, max(result.first_apart(each) for each in apart))
        way = worst_way(apart)
        rate = sum(each.way == way for each in apart) / sum(each.way == way for each in repeats)
        search = replace(job, ways=[way], process=process, batches=batches, rate=rate, last_step=last)
        try:
            with begun(_MODULE) as child:
                result.parting = child.run(search, receive=lambda _: None, node_timeout=max(timeout, 600.0))
        except EndedError:
            pass
    return result
