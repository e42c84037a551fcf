"""The graphs of a run, from the nodes that it comes to, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ggml_backend_npu.backend import fusion
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.convert import Read
from ggml_backend_npu.ggml.lib import Ggml
from graph_runner.hazards.graph import Graph
from graph_runner.hazards.reading import Joined, Reading, computes

_OURS = -1  # in place of the handle of a device


def step_name(step: int) -> str:
    """What the graph of a step is called: that of the prompt, or of a token after it."""
    return f"token {step}" if step else "prompt"


@dataclass(frozen=True)
class _Known:
    """A graph, and its nodes as they were read."""

    nodes: tuple[Read, ...]
    graph: Graph


class Recording:
    """The graphs of a run as it runs them; nodes are added before they run. A graph that comes again unchanged is not
    read again.

    graphs  those that have ended, each called after its step, from a step's second on with a number
    """

    def __init__(self, ggml: Ggml) -> None:
        self._ggml, self.graphs = ggml, list[Graph]()
        self._known: list[_Known] = []
        self._step, self._n_graphs = "", 0
        self._begin()

    def step(self, name: str) -> None:
        """Called before some tokens are decoded: their graphs get the name. Nodes of a graph that has not ended are
        forgotten."""
        self._step, self._n_graphs = name, 0
        self._begin()

    def _begin(self) -> None:
        self._addresses: set[int] = set()
        self._reading, self._joined = Reading(self._ggml), list[Joined]()
        self._nodes: list[Read] = []
        self._n_read = 0  # of these; those after them are as in each of `_alike`
        self._alike = list(self._known)
        self._devices: dict[int, int] = {}  # that a node runs on, if it computes something

    def add(self, read: Read) -> None:
        """Adds the next node, one that computes nothing too. If it comes again, it begins another graph."""
        if read.address in self._addresses:
            self.end()
        self._addresses.add(read.address)
        place = len(self._nodes)
        self._nodes.append(read)
        self._alike = [each for each in self._alike if place < len(each.nodes) and each.nodes[place] is read]
        if not self._alike:
            self._read()

    def _read(self) -> None:
        for each in self._nodes[self._n_read :]:
            self._reading.add(each)
            if computes(self._ggml, each):
                self._devices.setdefault(each.address, convert.device_of(self._ggml, each.address))
        self._n_read = len(self._nodes)

    def runs(self, plan: Plan, nodes: Sequence[int]) -> None:
        """Called before this project's device runs a plan of nodes, by their addresses."""
        self._devices.update(dict.fromkeys(nodes, _OURS))
        for what, _ in plan.steps if plan.fused else ():
            if isinstance(what, fusion.Joined):
                begin, fused = what.span.begin, what.fused
                self._joined.append(
                    Joined(
                        tuple(nodes[begin : what.span.end]),
                        {nodes[begin + place]: tensor for place, tensor in fused.written.items()},
                        frozenset(nodes[begin + place] for place in fused.in_place),
                    )
                )

    def end(self) -> None:
        """Called after the last node of a graph has run."""
        if not self._nodes:
            return
        self._n_graphs += 1
        name = self._step + (f", graph {self._n_graphs}" if self._n_graphs > 1 else "")
        same = next((each for each in self._alike if len(each.nodes) == len(self._nodes)), None)
        if same is None:
            self._read()
            self._mark_splits()
            same = _Known(tuple(self._nodes), self._reading.graph(name, self._joined))
            self._known.append(same)
        self.graphs.append(replace(same.graph, name=name))
        self._begin()

    def _mark_splits(self) -> None:
        """A split begins where another device goes on."""
        device = None
        for address in self._reading.places:
            if self._devices[address] != device:
                device = self._devices[address]
                self._reading.begins_split(address)


def as_built(ran: Sequence[Graph], built: Sequence[Graph]) -> list[Graph]:
    """Returns graphs as another run has built those of the same names; a run on the CPU changes none."""
    known = {each.name: each for each in built}
    return [each.built_like(known.get(each.name, Graph(()))) for each in ran]
