"""The order of the device's own run: does each node read what it was built to read, by order and addresses alone?"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.convert import Read
from ggml_backend_npu.ggml.lib import Ggml
from graph_runner.elsewhere.session import RecordingElsewhere
from graph_runner.hazards.check import check
from graph_runner.hazards.findings import Report
from graph_runner.hazards.recording import Recording, as_built, step_name


class Order:
    """The graphs of both runs, from the nodes that these come to: of the reference's in the order in which they were
    built, of the device's as it runs them.

    ran  the recording of the device's, if that is not in this process
    """

    def __init__(self, ggml: Ggml, ran: RecordingElsewhere | None = None) -> None:
        self._ggml, self._built = ggml, Recording(ggml)
        self._ran = ran or Recording(ggml)

    def step(self, step: int) -> None:
        """Called before a step."""
        for each in (self._built, self._ran):
            each.step(step_name(step))

    def reference(self, read: Read) -> None:
        """Called before the reference computes a node."""
        self._built.add(read)

    def own(self, read: Read) -> None:
        """Called when the device's own run comes to a node, one that computes nothing too."""
        self._ran.add(read)

    def runs(self, plan: Plan, graph: int) -> None:
        """Called before the device runs the plan of a graph, by the graph's address."""
        self._ran.runs(plan, convert.computing(self._ggml, graph))

    def reference_ended(self) -> None:
        """Called after the last node of a graph."""
        self._built.end()

    def own_ended(self) -> None:
        """Called after the last node of a graph."""
        self._ran.end()

    def reports(self) -> Sequence[Report]:
        """Returns what is found in each graph of the device's own run that has ended; of a graph that came again
        unchanged once."""
        graphs = {id(each.nodes): each for each in reversed(self._ran.graphs)}
        return [check(each) for each in as_built([*reversed(graphs.values())], self._built.graphs)]
