"""Runs a model whole, again and again, each time with other nodes on the device."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from ggml_backend_npu import AnyBackend
from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.plugin.foreign import ForeignDevice
from ggml_backend_npu.plugin.limited import limited
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.errors import SessionError
from graph_runner.base.settings import ALL_LAYERS, Settings, context_for
from graph_runner.bisect.result import Bisection, Trial, Unit
from graph_runner.bisect.search import Nodes, smallest, text_of
from graph_runner.diff.logits import Ending, Endings, Logits
from graph_runner.judging.results import types_of
from graph_runner.run.devices import Devices
from graph_runner.run.session import Observer, Sampler, Session
from quant.kernels.processor import processors

NPU = "NPU"
_NOTHING = 1e-9  # an NMSE that is small whatever flash attention alone changes
_MUCH = 0.01  # of what the whole run is off by: less is another fault, or rounding
_MISSED = 0.01  # the chance at most that a run which fails now and then was right each time
_MOST_REPEATS = 50
_MOST_NODES = 8  # of a set that is looked for


@dataclass(frozen=True)
class BisectOptions:
    """What runs where, and when it is wrong.

    device   "NPU", or one of `devices`
    steps    tokens to decode after the prompt
    settings of the context; device and n_ctx are set here
    limit    of the NMSE of logits; None: what flash attention, on or off, changes on the CPU
    repeat   runs of all nodes on the device, to see whether they always fail
    """

    device: str = NPU
    devices: Devices = field(default_factory=Devices)
    steps: int = 4
    settings: Settings = field(default_factory=Settings)
    limit: float | None = None
    repeat: int = 3


class _Names:
    """An observer that lists the nodes of a run by name, and lets whole splits run."""

    def __init__(self, ggml: Ggml) -> None:
        self._ggml = ggml
        self.found: dict[str, Unit] = {}

    def before(self, address: int) -> bool:
        if convert.is_to_be_computed(self._ggml, address):
            node = convert.node(self._ggml, address)
            self.found.setdefault(node.name, Unit(node.name, node.op, types_of(node), node.dst.ne))
        return False

    def after(self, address: int) -> None:
        """Never called: no node is observed after it has run."""


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
        self._model, self._prompt, self._options = model, prompt, options
        self._told, self._seen = told, seen
        self._known = defaultdict[str, list[Trial]](list)
        for trial in known:
            self._known[trial.nodes].append(trial)
        self._ggml = lib.ggml()
        ours = backend.like(options=backend.options.to_compare)
        self._npu = Plugin(self._ggml, ours) if options.device == NPU else None
        self._foreign: ForeignDevice | None = None
        if self._npu is None:
            self._foreign = options.devices.named(self._ggml, options.device)
        settings = options.settings
        layers = ALL_LAYERS if settings.gpu_layers is None else settings.gpu_layers
        takes_layers = ours.options.device_type == "gpu" if self._foreign is None else self._foreign.takes_layers
        self._settings = replace(
            settings, device="foreign" if self._npu is None else "npu", n_ctx=context_for(prompt, options.steps),
            threads=settings.threads or processors(), gpu_layers=layers if takes_layers else 0,
        )  # fmt: skip
        self._lacks: frozenset[str] = frozenset()
        self._batches: list[list[list[int]]] = []
        self._reference: list[Logits] = []
        name = NPU if self._foreign is None else self._foreign.name
        self.result = Bisection(str(model), name, 0, options.steps, self._settings)

    @property
    def _handle(self) -> int:
        if self._foreign is not None:
            return self._foreign.handle
        assert self._npu is not None
        return self._npu.handle

    def bisected(self) -> Bisection:
        """Looks for a smallest set of nodes with which alone the run is wrong."""
        result = self.result
        self._prepare()
        every = frozenset(range(len(result.units)))
        trials = [self._run(every) for _ in range(self._options.repeat)]
        failed = sum(trial.fails(result.limit) for trial in trials)
        result.rate = failed / len(trials)
        if not failed:
            return result
        errors = [trial.nmse for trial in trials if trial.nmse is not None and math.isfinite(trial.nmse)]
        result.threshold = max([result.limit, *(_MUCH * error for error in errors if error > result.limit)])
        if self._fails(frozenset()):
            result.why = "the run is wrong with what has to run on the device alone: nodes that write into its memory"
            return result
        result.needed = smallest(len(every), self._fails, _MOST_NODES)
        result.is_whole = len(result.needed) < _MOST_NODES
        return result

    def _prepare(self) -> None:
        """Runs the reference, and lists the nodes of the device's run."""
        names, on_cpu = _Names(self._ggml), replace(self._settings, device="cpu", gpu_layers=0)
        with self._opened(self._settings, names) as session, self._with(frozenset()):
            tokens = session.prompts(self._prompt)
            self.result.n_prompt = len(tokens[0])
            session.decode(*tokens)
            if self._options.steps:
                session.decode(*[[Sampler()(logits)] for logits in session.logits_of_each()])
            self._lacks = session.lacks
        self.result.units = [*names.found.values()]
        on_cpu = replace(on_cpu, without=self._lacks)
        self._batches, self._reference = self._of_reference(on_cpu)
        self.result.limit = self._options.limit if self._options.limit is not None else self._natural(on_cpu)

    def _of_reference(self, settings: Settings) -> tuple[list[list[list[int]]], list[Logits]]:
        """Returns the tokens of each step, and the logits after it."""
        batches, found = [], []
        with self._opened(settings) as session:
            batches.append(session.prompts(self._prompt))
            for step in range(self._options.steps + 1):
                session.decode(*batches[-1])
                found.append(session.logits_of_each())
                if step < self._options.steps:
                    batches.append([[Sampler()(logits)] for logits in found[-1]])
        return batches, found

    def _natural(self, on_cpu: Settings) -> float:
        """Returns a limit: how far apart the reference and itself may be."""
        switched = replace(on_cpu, flash_attention="off" if on_cpu.flash_attention == "on" else "on")
        try:
            return max(self._apart(self._logits(switched)).nmse, _NOTHING)
        except SessionError:
            return _NOTHING  # a model without flash attention

    def _fails(self, nodes: Nodes) -> bool:
        """Whether a run fails with some nodes on the device, as often as it takes to know."""
        rate = self.result.rate
        times = 1 if rate >= 1 else min(_MOST_REPEATS, math.ceil(math.log(_MISSED) / math.log(1 - rate)))
        return any(self._run(nodes).fails(self.result.threshold) for _ in range(times))

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
            apart = self._apart(self._logits(self._settings, nodes))
            trial = Trial(text, apart.nmse, apart.first_token, time.perf_counter() - begin)
        except SessionError as error:
            trial = Trial(text, None, None, time.perf_counter() - begin, str(error))
        self.result.trials.append(trial)
        self._seen(trial)
        return trial

    def _logits(self, settings: Settings, nodes: Nodes | None = None) -> list[Logits]:
        """Returns the logits after each step. Which nodes are on the device is decided after the context was made,
        which decides of what ops the graph is.

        nodes  that are on the device; None: all that it takes
        """
        found = []
        with self._opened(settings) as session, nullcontext() if nodes is None else self._with(nodes):
            for tokens in self._batches:
                session.decode(*tokens)
                found.append(session.logits_of_each())
        return found

    def _with(self, nodes: Nodes) -> AbstractContextManager[None]:
        names = {self.result.units[number].name for number in nodes}
        return limited(self._ggml, self._handle, names.__contains__)

    def _apart(self, logits: list[Logits]) -> Ending:
        endings = Endings()
        for reference, other in zip(self._reference, logits, strict=True):
            endings.add(reference, other)
        return endings.ending()

    def _opened(self, settings: Settings, observer: Observer | None = None) -> Session:
        return Session(
            self._model, settings, npu=self._npu, foreign=self._foreign, observer=observer, counts_nodes=False
        )
