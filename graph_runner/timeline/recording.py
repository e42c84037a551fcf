"""Runs a model and measures when its nodes run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import AnyBackend
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.times import Ran
from graph_runner.base.settings import ALL_LAYERS, DeviceName, Settings
from graph_runner.run.devices import Devices
from graph_runner.run.session import Session
from graph_runner.timeline.events import LLAMA, STEP, Event, Timeline
from graph_runner.timeline.laying import lay_out
from graph_runner.timeline.nodes import StepNodes
from graph_runner.timeline.roofline import measured_roofline
from graph_runner.timeline.turns import Turns
from graph_runner.timeline.watching import Watcher
from quant.kernels.jit import now
from quant.kernels.processor import processor_name, processors

CPU, NPU = "CPU", "NPU"
Batches = Sequence[list[list[int]]]  # tokens of each sequence, step by step
_OF_SETTINGS = ("flash_attention", "cache_type_k", "cache_type_v", "threads", "gpu_layers")


@dataclass(frozen=True)
class TimelineOptions:
    """What runs where.

    device   "NPU", "CPU", or one of `devices`
    steps    tokens to decode after the prompt
    settings of the context; device and n_ctx are set here
    """

    device: str = NPU
    devices: Devices = field(default_factory=Devices)
    steps: int = 16
    settings: Settings = field(default_factory=Settings)


def record_timeline(
    model: Path,
    prompt: str,
    options: TimelineOptions,
    npu: Plugin | None = None,
    seen: Callable[[int], object] = lambda step: None,
) -> Timeline:
    """Runs a prompt and the most likely tokens after it, and returns when its nodes ran. The same tokens run four
    times: once without clocks, once to see which nodes this project's device takes, and then in turns, step by step,
    without clocks and measured.

    npu   the plugin of `options.device` "NPU"; that of the default backend if omitted
    seen  called after each step of all runs with its number

    Raises SessionError for a model or settings that llama.cpp refuses, and BadInputError for a device that is not
    there.
    """
    measuring, turns = _Measuring(model, prompt, options, npu, seen), Turns()
    batches, events, untimed = measuring.run(turns)
    roof = measured_roofline()
    settings = {name: str(getattr(measuring.settings, name)) for name in _OF_SETTINGS}
    if measuring.backend is not None:
        settings |= measuring.backend.options.chosen()
    about: dict[str, Any] = {
        "model": model.name, "description": measuring.description, "device": measuring.name, "settings": settings,
        "tokens": sum(len(tokens) for step in batches for tokens in step), "steps": len(batches),
        "machine": processor_name(), "processors": processors(), "ggml": lib.ggml().version,
        "llama-cpp-python": version("llama-cpp-python"), "ggml-backend-npu": version("ggml-backend-npu"),
        **turns.json, "nodes_without_times": untimed, "measured": measuring.how,
        "roofline": {"bytes_per_second": roof.bytes, "operations_per_second": roof.operations},
    }  # fmt: skip
    return Timeline(about, events)


class _Measuring:
    """The runs of one timeline."""

    def __init__(
        self, model: Path, prompt: str, options: TimelineOptions, npu: Plugin | None, seen: Callable[[int], object]
    ) -> None:
        self._model, self._prompt, self._options, self._npu, self._seen = model, prompt, options, npu, seen
        self._ggml = lib.ggml()
        self._foreign = None
        if options.device not in (CPU, NPU):
            self._foreign = options.devices.named(self._ggml, options.device)
        kind: DeviceName = "foreign" if self._foreign is not None else "npu" if options.device == NPU else "cpu"
        settings = replace(options.settings.holding(prompt, options.steps), device=kind)
        if self._foreign is not None:
            layers = ALL_LAYERS if settings.gpu_layers is None else settings.gpu_layers
            settings = replace(settings, gpu_layers=layers if self._foreign.takes_layers else 0)
        self.settings = settings
        self.name = options.device if self._foreign is None else self._foreign.name
        self.description = ""
        self.backend: AnyBackend | None = None

    @property
    def how(self) -> dict[str, str]:
        """How the times of each device were taken."""
        alone = "each node runs alone, which the scheduler's eval callback asks for: its graph is cut there"
        if self.backend is not None:
            compiled = self.backend.runs_without_python
            ours = "inside of the graph's one call" if compiled else "a graph at once, which is waited for"
            return {self.name: ours, CPU: alone}
        return dict.fromkeys(dict.fromkeys((self.name, CPU)), alone)

    def _opened(self, observer: Watcher | None = None) -> Session:
        return Session(
            self._model, self.settings, npu=self._npu, foreign=self._foreign, observer=observer, counts_nodes=False
        )

    def run(self, turns: Turns) -> tuple[Batches, list[Event], int]:
        """Runs the prompt and the most likely tokens after it in a session without clocks, the same in one that sees
        which nodes have to run alone, and then both again in turns. Returns the tokens of each step, the events of the
        session with clocks, and how many nodes have no time of their own."""
        watcher, events, untimed = Watcher(), list[Event](), 0
        with self._opened() as plain, self._opened(watcher) as session:
            batches = self._drawn(plain)
            context = session.npu_context
            with nullcontext(list) if context is None else context.timed() as taken:
                alone = [*self._alone(session, watcher, taken, batches)]
                for each in (plain, session):
                    each.clear()
                nodes, start = StepNodes(self._ggml), now()
                for step, tokens in enumerate(batches):
                    watcher.begin(alone[step])
                    begin, end = turns.take(partial(_decode, plain, tokens), partial(_decode, session, tokens))
                    entries, ran = watcher.entries(), [(self.name, each) for each in taken()]
                    known = nodes.of(entries[entries[:, 0] != 0, 0].tolist())
                    found, without = lay_out(step, entries, known, ran, self._device_of)
                    n = len(tokens[0])
                    name = f"step {step}: {n} token{'s' if n > 1 else ''}"
                    found.insert(0, Event(STEP, name, LLAMA, begin, end, {"step": step, "tokens": n}))
                    events += [replace(each, begin=each.begin - start, end=each.end - start) for each in found]
                    untimed += without
                    self._seen(step)
        return batches, events, untimed

    def _drawn(self, session: Session) -> Batches:
        """Runs the prompt and the most likely tokens after it. Returns the tokens of each step."""
        batches = [*session.parts(session.tokenize(self._prompt))]
        self.description = session.description
        self.backend = None if session.npu is None else session.npu.backend
        for step in range(len(batches) - 1 + session.n_steps(self._options.steps)):
            if step == len(batches):
                batches.append(session.next_tokens())
            session.decode(*batches[step])
            self._seen(step)
        return batches

    def _alone(
        self, session: Session, watcher: Watcher, taken: Callable[[], list[Ran]], batches: Batches
    ) -> Iterator[NDArray[np.bool_]]:
        """Runs tokens without having any node run alone. Yields which of each step have to: those that this project's
        device does not run."""
        nodes = StepNodes(self._ggml)
        for step, tokens in enumerate(batches):
            watcher.begin(np.zeros(0, np.bool_))
            _decode(session, tokens)
            ours = {address for each in taken() for address in each.nodes.tolist()}
            entries = watcher.entries()
            known = nodes.of(entries[:, 0].tolist())
            yield np.array([node.computes and node.address not in ours for node in known], np.bool_)
            self._seen(step)

    def _device_of(self, node: int) -> str:
        """Returns where a node ran that this project's device did not."""
        return (self._foreign.running(self._ggml, node) if self._foreign is not None else "") or CPU


def _decode(session: Session, tokens: list[list[int]]) -> None:
    """Runs a step, and has what it gives come to the host."""
    session.decode(*tokens)
    session.outputs()
