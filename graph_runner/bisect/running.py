"""Runs a model whole, again and again, each time with other nodes on the device."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ggml_backend_npu import AnyBackend
from graph_runner.base.errors import SessionError
from graph_runner.bisect.result import Bisection, Trial
from graph_runner.bisect.search import Nodes, shortest, smallest, text_of
from graph_runner.bisect.whole import Whole, WholeOptions

_MUCH = 0.01  # of what the whole run is off by: less is another fault, or rounding
_MISSED = 0.01  # the chance at most that a run which fails now and then was right each time
_MOST_REPEATS = 50
_MOST_NODES = 8  # of a set that is looked for


@dataclass(frozen=True)
class BisectOptions(WholeOptions):
    """What runs where, and when it is wrong.

    limit    of the NMSE at the end; None: what flash attention, on or off, changes on the CPU
    repeat   runs of all nodes on the device, to see whether they always fail
    by_token a run is wrong if another token follows, whatever the NMSE
    ends     only tells whether the run is wrong
    """

    limit: float | None = None
    repeat: int = 3
    by_token: bool = False
    ends: bool = False


def few_enough(rate: float, most: int = _MOST_REPEATS) -> int:
    """Returns how often a run has to be right, if it fails at a rate, to say that it does not; at most as many as are
    allowed."""
    return 1 if rate >= 1 else min(most, math.ceil(math.log(_MISSED) / math.log(1 - rate)))


class Runs:
    """Whole runs of a model.

    told   called before each run with the nodes on the device, as text
    seen   called with each run after it
    known  runs that were made before, and are not made again
    """

    def __init__(
        self,
        model: Path,
        prompt: str,
        options: BisectOptions,
        backend: AnyBackend,
        told: Callable[[str], object] = lambda nodes: None,
        seen: Callable[[Trial], object] = lambda trial: None,
        known: Iterable[Trial] = (),
    ) -> None:
        self._options = options
        self._told, self._seen = told, seen
        self._known = defaultdict[str, list[Trial]](list)
        for trial in known:
            self._known[trial.nodes].append(trial)
        self._whole = whole = Whole(model, prompt, options, backend)
        self.result = Bisection(
            str(model), whole.name, 0, options.steps, whole.settings, by_token=options.by_token, ends=options.ends
        )

    def bisected(self) -> Bisection:
        """Looks for a smallest set of nodes with which alone the run is wrong. Raises SessionError for a model without
        text, if that is to say what is wrong."""
        result, whole, options = self.result, self._whole, self._options
        whole.prepare()
        if options.by_token and "logits" not in whole.gives:
            raise SessionError("--text: the model makes embeddings, and has no text")
        result.units, result.n_prompt = whole.units, whole.n_prompt
        result.limit = options.limit if options.limit is not None else whole.natural()
        every = frozenset(range(len(result.units)))
        trials = [self._run(every) for _ in range(options.repeat)]
        failed = sum(result.is_wrong(trial, result.limit) for trial in trials)
        result.rate = failed / len(trials)
        if not failed or options.ends:
            return result
        errors = [trial.nmse for trial in trials if trial.nmse is not None and math.isfinite(trial.nmse)]
        result.threshold = max([result.limit, *(_MUCH * error for error in errors if error > result.limit)])
        if self._fails(frozenset()):
            result.why = "the run is wrong with what has to run on the device alone: nodes that write into its memory"
            return result
        result.needed = smallest(len(every), self._fails, _MOST_NODES)
        result.is_whole = len(result.needed) < _MOST_NODES
        if not result.is_whole:
            result.span = shortest(result.needed[-1], self._fails)
        return result

    def _fails(self, nodes: Nodes) -> bool:
        """Whether a run fails with some nodes on the device, as often as it takes to know."""
        result = self.result
        return any(result.is_wrong(self._run(nodes), result.threshold) for _ in range(few_enough(result.rate)))

    def _run(self, nodes: Nodes) -> Trial:
        """Runs the tokens with some nodes on the device, unless that is known."""
        text = text_of(nodes)
        if known := self._known.get(text):
            trial = known.pop(0)
            self.result.trials.append(trial)
            return trial
        self._told(text)
        begin = time.perf_counter()
        try:
            apart = self._whole.run({self.result.units[number].name for number in nodes})
            trial = Trial(text, apart.nmse, apart.first_token, time.perf_counter() - begin)
        except SessionError as error:
            trial = Trial(text, None, None, time.perf_counter() - begin, str(error))
        self.result.trials.append(trial)
        self._seen(trial)
        return trial
