"""The graphs of a model, as llama.cpp runs them on a device: read whole, split by split, before each split runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ggml_backend_npu import AnyBackend, default_backend
from ggml_backend_npu.backend import fusion
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.plugin.foreign import ForeignDevice
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.settings import Settings, context_for
from graph_runner.hazards.graph import Graph
from graph_runner.hazards.reading import Joined, Reading
from graph_runner.run.devices import Devices
from graph_runner.run.session import Sampler, Session

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
    """An observer that reads every node of a run, and lets whole splits run, as they do if nobody looks.

    npu  a device of this project that takes part, and nowhere else: it says which nodes it runs as one operator
    """

    def __init__(self, ggml: Ggml, npu: Plugin | None = None) -> None:
        self._ggml, self._npu = ggml, npu
        self.graphs: list[Graph] = []
        self._name, self._n_graphs = "", 0
        if npu is not None:
            npu.run = self.run
        self._begin()

    def _begin(self) -> None:
        packed = self._npu.memory.packed if self._npu is not None and self._npu.memory is not None else convert.nowhere
        self._reading, self._joined, self._device = Reading(self._ggml, packed), list[Joined](), 0
        if self._npu is not None:
            self._npu.forget_plans()  # a graph that it knows it runs without saying what runs as one

    def step(self, name: str) -> None:
        """Called before some tokens are decoded: their graphs get the name."""
        self._name, self._n_graphs = name, 0

    def end(self) -> None:
        """Called after a batch: its last graph is whole."""
        if self._reading.addresses:
            self._n_graphs += 1
            number = f", graph {self._n_graphs}" if self._n_graphs > 1 else ""
            self.graphs.append(self._reading.graph(self._name + number, self._joined))
            self._begin()

    def before(self, node: int) -> bool:
        if node in self._reading.addresses:
            self.end()
        device = self._device_of(node)
        if device and device != self._device:
            self._device = device
            self._reading.begins_split()
        self._reading.add(node)
        return False

    def after(self, node: int) -> None:
        """Never called: no node is observed after it has run."""

    def _device_of(self, node: int) -> int:
        """The device in whose memory a node's result lies; 0 for a node that computes nothing."""
        buffer = convert.buffer_of(node)
        if not buffer or not convert.is_to_be_computed(self._ggml, node):
            return 0
        return int(self._ggml.ggml_backend_buft_get_device(self._ggml.ggml_backend_buffer_get_type(buffer)) or 0)

    def run(self, plan: Plan, graph: int) -> None:
        """Runs a split on this project's device, and notes which of its nodes run as one."""
        nodes = convert.computing(self._ggml, graph)
        self._reading.begins_split(next((node for node in nodes if node in self._reading.places), None))
        self._reading.begins_split()
        for what, _ in plan.steps:
            if isinstance(what, fusion.Joined):
                begin, fused = what.span.begin, what.fused
                self._joined.append(
                    Joined(
                        tuple(nodes[begin : what.span.end]),
                        {nodes[begin + place]: tensor for place, tensor in fused.written.items()},
                        frozenset(nodes[begin + place] for place in fused.in_place),
                    )
                )
        plan.run()


def watched(model: Path, prompt: str, options: HazardOptions, backend: AnyBackend | None = None) -> list[Graph]:
    """Runs a prompt and some tokens; returns their graphs as they ran. The order in which they were built is that of a
    run on the CPU, which changes none.

    backend  of this project's device; None: the default backend

    Raises SessionError for a model or settings that cannot be used, BadInputError and ForeignError for a device.
    """
    ggml = lib.ggml()
    settings = replace(options.settings, n_ctx=context_for(prompt, options.steps))
    if options.device == CPU:
        return _Run(model, prompt, options.steps, Watch(ggml)).graphs(settings)
    npu = Plugin(ggml, backend or default_backend()) if options.device == NPU else None
    foreign = None if npu is not None else options.devices.named(ggml, options.device)
    on_device = replace(settings, device="npu" if npu is not None else "foreign")
    run = _Run(model, prompt, options.steps, Watch(ggml, npu), npu, foreign)
    graphs = run.graphs(on_device)
    on_cpu = replace(settings, without=run.lacks)
    built = {each.name: each for each in _Run(model, prompt, options.steps, Watch(ggml)).graphs(on_cpu)}
    return [each.built_like(built.get(each.name, Graph(()))) for each in graphs]


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
            tokens, sample = session.prompts(self.prompt), Sampler()
            for step in range(self.steps + 1):
                watch.step(f"token {step}" if step else "prompt")
                for part in session.parts(*tokens):
                    session.decode(*part)
                    watch.end()
                if step < self.steps:
                    tokens = [[sample(logits)] for logits in session.logits_of_each()]
            self.lacks = session.lacks
        return watch.graphs
