"""The result of each node that was computed again: the verdict and what it is based on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ggml_backend_npu import KernelError, Node
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.calls import said_by
from graph_runner.base.limits import refuse_where_memory_is_limited
from graph_runner.judging.blocks import BlockComparison
from graph_runner.judging.compare import Comparison, Heat
from graph_runner.judging.rules import Judged

ISOLATED, OWN_RUN = "isolated", "own run"
# with which the verdict of a whole diff begins
RIGHT, ROUNDING, WRONG, UNDECIDED = "right", "right within rounding", "wrong", "not judged"
STOPPED, UNSEEN = "the device's run had stopped", "nobody has looked at its result"


class Fate(StrEnum):
    """What became of a node in the device's own run.

    judged  the device ran it, and its result was compared with what the reference computes from the same inputs
    fused   the device ran an operator in its place, which does not write its result; what that writes is judged
    not_judged  nobody knows what it gave
    on_cpu  ggml's CPU ran it, in the device's run
    """

    JUDGED = "judged"
    FUSED = "fused"
    NOT_JUDGED = "not judged"
    ON_CPU = "on the CPU"


class Verdict(StrEnum):
    """How a node relates to the error of its result.

    exact       right: every byte is the reference's
    rounding    right: the difference is allowed by the op's rule
    introduced  wrong: the device computes something else from the same inputs, alone or in its own run
    inherited   right, from inputs that have an error
    amplified   right, but the error of its result is more than ten times that of its inputs
    failed      wrong: the device could not compute it, or damaged other memory
    """

    EXACT = "exact"
    ROUNDING = "rounding"
    INTRODUCED = "introduced"
    INHERITED = "inherited"
    AMPLIFIED = "amplified"
    FAILED = "failed"


@dataclass(frozen=True)
class NodeResult:
    """One node of the run, or one output of a span of nodes that the NPU runs as one operator. Falsy if it is wrong.

    step        0 is the prompt, then one per decoded token
    index       place among the step's nodes; for a span, that of its last node
    op          the node's op, or the operator's name
    types       of its sources and of its output: "q8_0 i32 -> f32"; for a span its ops: "SUB REPEAT MUL ADD -> f32"
    on          which device computed it in the device's own run; "" if it did not run there
    isolated    the device's result from the reference's inputs; None if the device does not take the node
    cumulative  the result of the device's own run against the reference's; None if there is none
    mirrored    the result of the device's own run against what the reference computes from what the node read there;
                None if the device did not compute it. Of a node that an operator ran: what that writes of it
    fused       the operator that ran it in the device's own run; "" if none did
    not_judged  why nobody knows what it gave in the device's own run; "" if that is known
    failure     why the device could not compute it, or what else it damaged
    heat        where the errors are
    blocks      for a quantised output that differs, the comparison by block
    diagnosis   which common mistake gives these bytes, if any; for the first wrong nodes of each op and type
    test        the test-backend-ops line that runs ggml's cases nearest to it; for the same nodes, if wrong
    judged      the row that decides by the op's bound; for the same nodes, if the op has a bound
    noise       its error against a float64 evaluation, as a multiple of the reference's; for the same nodes
    reproducer  the trace that computes it again; for the same nodes, if one was saved
    repeats     how often a replay of that was seen to have to compute it until it was wrong; 0: it was right each time;
                None: it was not tried
    since       the first of several nodes up to this one, one of which is wrong; "" if it is this node
    wrong_in    where a wrong node shows its error: ISOLATED, or only in the device's OWN_RUN
    """

    step: int
    index: int
    op: str
    name: str
    types: str
    ne: tuple[int, int, int, int]
    verdict: Verdict
    on: str = ""
    isolated: Comparison | None = None
    cumulative: Comparison | None = None
    mirrored: Comparison | None = None
    failure: str | None = None
    heat: Heat | None = None
    blocks: BlockComparison | None = None
    diagnosis: str | None = None
    test: str | None = None
    judged: Judged | None = None
    noise: float | None = None
    reproducer: str | None = None
    repeats: int | None = None
    wrong_in: str = ""
    since: str = ""
    fused: str = ""
    not_judged: str = ""

    @property
    def fate(self) -> Fate | None:
        """What became of it in the device's own run; None if it is no node of that: nodes that were compared as one
        operator, or a node of a run that was repeated."""
        if self.not_judged:
            return Fate.NOT_JUDGED
        if self.mirrored is not None:
            return Fate.JUDGED
        if self.fused:
            return Fate.FUSED
        return Fate.ON_CPU if self.on == "CPU" else None

    @property
    def shown(self) -> Comparison | None:
        """The comparison that the verdict is based on; None if there is none."""
        if self.wrong_in == OWN_RUN:
            return self.mirrored
        return self.isolated if self.isolated is not None and not self.isolated else self.cumulative

    @property
    def compared(self) -> bool:
        """Whether the device computed it in isolation, or failed to compute it."""
        return self.isolated is not None or self.failure is not None

    def __bool__(self) -> bool:
        return self.verdict not in (Verdict.INTRODUCED, Verdict.FAILED)


def types_of(node: Node) -> str:
    """Returns the types of the output and of the sources: those that the NPU's kernel reads, or all if there is no
    kernel."""
    sources = node.src[: OWN[node.op].n_src] if node.op in OWN else node.src
    return " ".join(source.type for source in sources if source is not None) + f" -> {node.dst.type}"


def failure_of(error: BaseException) -> str:
    """Returns what a kernel raised, in one line; with file and line if it was not a KernelError. Raises LimitError if
    it was for want of memory that the process is not given."""
    refuse_where_memory_is_limited(error)
    return str(error) if isinstance(error, KernelError) else said_by(error)
