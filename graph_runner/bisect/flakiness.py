"""What runs of the same tokens have shown: are they the same, and if not, where do they part?"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from graph_runner.base.settings import Settings
from graph_runner.bisect.result import Unit
from graph_runner.diff.walks import Place
from quant.kernels.processor import processors

_SURE = 0.95  # that a fault would have been seen


@dataclass(frozen=True)
class Way:
    """How tokens are run, to provoke what comes seldom.

    threads  of llama.cpp and the kernels; 0: as many as the others. Runs are compared with those of as many threads
    dirty    other tokens run before in the same context, so that memory holds what they left
    moved    blocks of memory are held, so that buffers lie elsewhere
    busy     the processors have other work
    pauses   of random length, before and after each split of this project's device
    """

    name: str
    threads: int = 0
    dirty: bool = False
    moved: bool = False
    busy: bool = False
    pauses: bool = False


@dataclass(frozen=True)
class Repeat:
    """A run.

    process  the number of the process that it ran in
    digests  of what each step gives, logits or embeddings, and of the states at the end; none if it did not end
    error    why it did not end, or ""
    """

    way: Way
    process: int
    digests: tuple[str, ...]
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Parting:
    """The first node whose result is not the same each time.

    place, unit  of the node; None if every node that is looked at gives the same
    runs         that it took
    """

    place: Place | None
    unit: Unit | None
    runs: int

    def __str__(self) -> str:
        if self.place is None:
            return "no node parts when it is looked at"
        return f"step {self.place[0]} node {self.place[1]}: {self.unit}"


@dataclass
class Flakiness:
    """Runs of the same tokens on a device. Truthy if all with as many threads are the same.

    repeats  the runs in their order
    parting  where two part, if that was looked for
    """

    model: str
    device: str
    n_prompt: int
    steps: int
    settings: Settings
    repeats: list[Repeat] = field(default_factory=list)
    parting: Parting | None = None

    def __bool__(self) -> bool:
        return bool(self.repeats) and not self.apart

    @property
    def _usual(self) -> dict[int, tuple[str, ...]]:
        """What most runs of as many threads give, by that number."""
        found: dict[int, Counter[tuple[str, ...]]] = defaultdict(Counter)
        for each in self.repeats:
            if each.digests:
                found[each.way.threads][each.digests] += 1
        return {threads: counts.most_common(1)[0][0] for threads, counts in found.items()}

    @property
    def apart(self) -> list[Repeat]:
        """The runs that are not as most are, or did not end."""
        usual = self._usual
        return [each for each in self.repeats if each.error or each.digests != usual[each.way.threads]]

    @property
    def rate(self) -> float:
        """The part of runs that are apart."""
        return len(self.apart) / len(self.repeats) if self.repeats else 0.0

    def first_apart(self, repeat: Repeat) -> int:
        """Returns the first step that gives what is apart; the number of steps, if only the states at the end are."""
        usual = self._usual.get(repeat.way.threads, ())
        return next((step for step, (a, b) in enumerate(zip(repeat.digests, usual, strict=False)) if a != b), 0)

    @property
    def bound(self) -> float:
        """The rate of a fault that would have been seen, with a certainty of 95%."""
        return 1 - math.pow(1 - _SURE, 1 / max(1, len(self.repeats)))


def worst_way(repeats: Sequence[Repeat]) -> Way:
    """Returns the way in which most runs were apart."""
    return Counter(each.way for each in repeats).most_common(1)[0][0]


def ways_of(threads: int, *, is_npu: bool) -> list[Way]:
    """Returns the ways of running in turn, of which each may show what the others do not.

    threads  of the others; 0: as many as the process may use
    """
    ways = [
        Way("as it is"), Way("over what other tokens left", dirty=True), Way("at other addresses", moved=True),
        Way("with busy processors", busy=True),
    ]  # fmt: skip
    ways += [Way("with pauses between splits", pauses=True)] if is_npu else []
    others = sorted({1, 2 * processors()} - {threads or processors()})
    return ways + [Way(f"{n} thread{'s' * (n > 1)}", threads=n) for n in others]


def planned(ways: Sequence[Way], times: int) -> list[Way]:
    """Returns the way of each run: in turn, and each that has threads of its own twice or not at all."""
    plan = [ways[run % len(ways)] for run in range(times)]
    return [way if not way.threads or plan.count(way) > 1 else ways[0] for way in plan]
