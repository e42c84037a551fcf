"""What a diff has found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ggml_backend_npu.device.faults import MemoryFault
from graph_runner.base.builds import About
from graph_runner.base.settings import Settings
from graph_runner.base.variants import Variants
from graph_runner.diff.blindness import Sight
from graph_runner.diff.canary import Canaries
from graph_runner.diff.contents import Stray
from graph_runner.diff.logits import Ending
from graph_runner.diff.state import StateResult
from graph_runner.hazards.findings import Finding, Report
from graph_runner.judging.results import Fate, NodeResult
from graph_runner.judging.spoilt import Spoilt


@dataclass(frozen=True)
class Replaced:
    """The end of a whole run in which the reference computed some of the device's nodes, from what the device's own run
    read there. Truthy if that heals it.

    what    the nodes, in words
    nodes   their names; in each step the ones of these names
    before, after  NMSE of the logits when the device computes all nodes, and without these; None if the run did not end
    limit   of what is healed
    why     why the run did not end, or which node was not replaced, or ""
    """

    what: str
    nodes: tuple[str, ...]
    before: float
    after: float | None
    limit: float
    why: str = ""

    def __bool__(self) -> bool:
        return self.after is not None and self.after <= self.limit < self.before


@dataclass
class DiffResult:
    """The diff of one model. Falsy if a node or anything else of the device's own run is wrong, if a node that the
    device ran was not judged, if the device ran none, or if no node was compared.

    nodes    all nodes of the run, in order, with the spans among them
    states   cells of caches and recurrent states that differ from the reference's, at the step when they first did
    strays   tensors that no longer held what the last node had written into them
    faults   what the memory of the device was caught at
    ending   how far apart the two runs end; None if the device's run ended early
    remarks  what is not the same each time, or when nodes run together, though right
    spoilt   where NaN or infinity began in the reference's run; None if it has none
    stopped  why the device's own run ended before the reference's, or None
    ops      names of the chosen ops and fusions; None: all
    refused  nodes of the chosen ops that the device does not take, by op and reason
    reference, device  names of the two sides, with their variants
    device_options  of the backend, by name
    strict   whether every buffer of the own run was checked after every node
    canaries  faults that were planted into copies of results; None if the run ended early
    sights   which parameters and sources of the ops a wrong kernel could have been seen to ignore
    counted  how many nodes of its own run the device says that it has computed, by its own counter; None if it has none
    is_unobserved  whether the device also ran the tokens unobserved, in its own order
    lengths  of the prompts of all sequences, in tokens
    see      whether synthetic nodes were to show what no node of the run could have shown
    strict_coverage  whether the result is falsy too if no node could have shown that a parameter is ignored
    variants  settings that only one side has
    notes    what cannot be compared with these
    replaced  what becomes of the end if the reference computes nodes
    order    the check for hazards of each graph of the device's own run that has come to its end
    order_unknown  why the order of that run is not known, or not of all graphs; "" if it was checked
    builds   what the reference and the device compute with, if they are of two builds of llama.cpp
    is_scheduled  whether ggml's scheduler gives the device its nodes, and could give them to the CPU in its place
    """

    model: str
    description: str
    reference: str
    device: str
    prompt: str
    text: str
    n_prompt: int
    steps: int
    settings: Settings
    ggml: str
    rounding: str
    device_options: dict[str, str]
    strict: bool = False
    nodes: list[NodeResult] = field(default_factory=list)
    states: list[StateResult] = field(default_factory=list)
    strays: list[Stray] = field(default_factory=list)
    faults: list[MemoryFault] = field(default_factory=list)
    ending: Ending | None = None
    remarks: list[str] = field(default_factory=list)
    spoilt: Spoilt | None = None
    stopped: str | None = None
    ops: Collection[str] | None = None
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    canaries: Canaries | None = None
    sights: list[Sight] = field(default_factory=list)
    counted: int | None = None
    is_unobserved: bool = False
    lengths: Collection[int] = ()
    see: bool = False
    strict_coverage: bool = False
    variants: Variants = field(default_factory=Variants)
    notes: list[str] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)
    order: Sequence[Report] = ()
    order_unknown: str = "the run ended early"
    builds: tuple[About, About] | None = None
    is_scheduled: bool = True

    @property
    def hazards(self) -> list[tuple[str, Finding]]:
        """What a node of the device's own run reads that it should not, by order and addresses alone; each with the
        name of the graph."""
        return [(each.graph, found) for each in self.order for found in each.findings]

    @property
    def stray(self) -> list[StateResult]:
        """Cells that differ although no node that writes to their tensor wrote them."""
        return [state for state in self.states if state.node is None]

    @property
    def compared(self) -> list[NodeResult]:
        """Nodes that the device computed by itself, from the reference's inputs."""
        return [node for node in self.nodes if node.compared]

    @property
    def wrong(self) -> list[NodeResult]:
        """Nodes that introduce an error, and nodes that failed."""
        return [node for node in self.nodes if not node]

    @property
    def fates(self) -> Counter[Fate]:
        """How many nodes of the device's own run were judged, fused away, not judged, and run by ggml's CPU. Their
        total is the number of the graph's nodes that compute something, over all steps."""
        return Counter(node.fate for node in self.nodes if node.fate is not None)

    @property
    def not_judged(self) -> list[NodeResult]:
        """Nodes of which nobody knows what they gave in the device's own run."""
        return [node for node in self.nodes if node.fate is Fate.NOT_JUDGED]

    @property
    def n_computed(self) -> int:
        """How many nodes of its own run the device computed: as it counts them, or by where their results lie."""
        if self.counted is not None:
            return self.counted
        return sum(node.on == self.device or node.on not in ("", "CPU") for node in self.nodes)

    @property
    def blind(self) -> list[Sight]:
        """Parameters and sources that a wrong kernel could have ignored unseen."""
        return [sight for sight in self.sights if sight.is_blind]

    @property
    def is_covered(self) -> bool:
        """Whether each parameter could be seen, if that is asked for."""
        return not (self.strict_coverage and self.blind)

    @property
    def ran_none(self) -> bool:
        """Whether the device computed no node of its own run, though the run has come to its end."""
        return self.stopped is None and self.n_computed == 0

    @property
    def ends_apart(self) -> bool:
        """Whether the logits are further apart than rounding explains, where ggml defines what they are."""
        undefined = self.spoilt is not None and self.spoilt.n_undefined > 0
        return self.ending is not None and not self.ending and not undefined

    @property
    def is_unexplained(self) -> bool:
        """Whether the run is wrong but no node is, or whether a stray write was found no later than the first wrong
        node."""
        first = min(((node.step, node.index) for node in self.wrong), default=None)
        off = bool(self.stray) or self.ends_apart
        found = [(stray.step, stray.index) for stray in self.strays]
        return (first is None and off) or (bool(found) and (first is None or min(found) <= first))

    def __bool__(self) -> bool:
        off = self.wrong or self.faults or self.hazards or self.strays or self.stray or self.ends_apart
        unknown = not self.compared or self.not_judged or self.ran_none
        return not off and not unknown and self.stopped is None and self.is_covered
