"""The graphs of a model, as llama.cpp runs them on a device: read whole, split by split, before each split runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ggml_backend_npu import AnyBackend, default_backend
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ggml.node_reader import Reader
from ggml_backend_npu.plugin.foreign import ForeignDevice
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.settings import Settings
from graph_runner.hazards.graph import Graph
from graph_runner.hazards.recording import Recording, as_built, step_name
from graph_runner.run.devices import Devices
from graph_runner.run.session import Session

CPU, NPU = "CPU", "NPU"


@dataclass(frozen=True)
class HazardOptions:
    """What runs where.

    device   "NPU", "CPU" or one of `devices`
    devices  where other devices are looked for
    steps    tokens to decode after the prompt
    settings of the context; device and n_ctx are set here
    """

    device: str = "NPU"
    devices: Devices = field(default_factory=Devices)
    steps: int = 1
    settings: Settings = field(default_factory=Settings)


class Watch:
    """An observer that notes every node of a run, and lets whole splits run, as they do if nobody looks.

    npu  a device of this project that takes part, and nowhere else: it says which nodes it runs as one operator
    """

    def __init__(self, ggml: Ggml, npu: Plugin | None = None) -> None:
        self._ggml, self.recording, self._npu = ggml, Recording(ggml), npu
        packed = npu.packed if npu is not None else convert.nowhere
        self._read = Reader(ggml, packed)
        if npu is not None:
            npu.run = self._run

    def begin(self) -> None:
        """Called before a graph runs."""
        if self._npu is not None:
            self._npu.forget_plans()  # a graph that it knows it runs without saying what runs as one

    def before(self, node: int) -> bool:
        self.recording.add(self._read(node))
        return False

    def after(self, node: int) -> None:
        """Never called: no node is observed after it has run."""

    def _run(self, plan: Plan, graph: int) -> None:
        """Runs a split on this project's device."""
        self.recording.runs(plan, convert.computing(self._ggml, graph))
        plan.run()


def watched(model: Path, prompt: str, options: HazardOptions, backend: AnyBackend | None = None) -> list[Graph]:
    """Runs a prompt and some tokens; returns their graphs as they ran. The order in which they were built is that of a
    run on the CPU, which changes none.

    backend  of this project's device; None: the default backend

    Raises SessionError for a model or settings that cannot be used, BadInputError and ForeignError for a device.
    """
    ggml = lib.ggml()
    settings = options.settings.holding(prompt, options.steps)
    if options.device == CPU:
        return _Run(model, prompt, options.steps, Watch(ggml)).graphs(settings)
    npu = Plugin(ggml, backend or default_backend()) if options.device == NPU else None
    foreign = None if npu is not None else options.devices.named(ggml, options.device)
    on_device = replace(settings, device="npu" if npu is not None else "foreign")
    run = _Run(model, prompt, options.steps, Watch(ggml, npu), npu, foreign)
    ran = run.graphs(on_device)
    on_cpu = replace(settings, without=run.lacks)
    return as_built(ran, _Run(model, prompt, options.steps, Watch(ggml)).graphs(on_cpu))


@dataclass
class _Run:
    """A run of a model. Afterwards `lacks` has the ops that its graphs do without."""

    model: Path
    prompt: str
    steps: int
    watch: Watch
    npu: Plugin | None = None
    foreign: ForeignDevice | None = None
    lacks: frozenset[str] = frozenset()

    def graphs(self, settings: Settings) -> list[Graph]:
        """Runs it, and returns its graphs."""
        watch = self.watch
        with Session(self.model, settings, npu=self.npu, foreign=self.foreign, observer=watch) as session:
            tokens, n_steps = session.prompts(self.prompt), session.n_steps(self.steps)
            for step in range(n_steps):
                watch.recording.step(step_name(step))
                for part in session.parts(*tokens):
                    watch.begin()
                    session.decode(*part)
                    watch.recording.end()
                if step + 1 < n_steps:
                    tokens = session.next_tokens()
            self.lacks = session.lacks
        return watch.recording.graphs
