"""What became of each node that was computed a second time: the verdict and what it rests on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ggml_backend_npu import KernelError, Node
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry import said_by
from graph_runner.blocks import BlockComparison
from graph_runner.compare import Comparison, Heat

ISOLATED, OWN_RUN = "isolated", "own run"


class Verdict(StrEnum):
    """What a node has to do with the error of its result.

    exact       right: every byte is the reference's
    rounding    right: apart by no more than the op's rule allows
    introduced  wrong: the device computes something else from the same inputs, alone or in its own run
    inherited   right, from inputs that are off
    amplified   right, but its result is more than ten times as far off as its inputs
    failed      wrong: the device could not compute it, or did damage beside it
    """

    EXACT = "exact"
    ROUNDING = "rounding"
    INTRODUCED = "introduced"
    INHERITED = "inherited"
    AMPLIFIED = "amplified"
    FAILED = "failed"


@dataclass(frozen=True)
class NodeResult:
    """One node of the run, or one output of a span of nodes that the NPU runs as one operator. Falsy where it is wrong.

    step        0 is the prompt, then one per decoded token
    index       place among the step's nodes; of a span, that of its last node
    op          of the node, or the operator's name
    types       of its sources and of its output: "q8_0 i32 -> f32"; of a span its ops: "SUB REPEAT MUL ADD -> f32"
    on          who computed it in the device's own run; "" where that did not take place
    isolated    the device's result from the reference's inputs; None where the device does not take the node
    cumulative  the result of the device's own run beside the reference's; None where there is none
    mirrored    the result of the device's own run beside what the reference makes of what the node read there; None
                where the device did not compute it
    failure     why the device could not compute it, or what it did beside that
    heat        where the errors are
    blocks      of a quantised output that differs, block by block
    diagnosis   which usual mistake gives these bytes, where one does; of the first wrong nodes of each op and type
    test        the line of ggml's test-backend-ops that runs the cases nearest to it; of the same nodes, where wrong
    noise       how many times as far from a float64 evaluation as the reference it is; of the same nodes
    reproducer  the trace that computes it again; of the same nodes, where it is kept
    wrong_in    of a wrong node where that shows: ISOLATED, or in the device's OWN_RUN alone
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
    noise: float | None = None
    reproducer: str | None = None
    wrong_in: str = ""

    @property
    def shown(self) -> Comparison | None:
        """The comparison that the verdict rests on; None where there is none."""
        if self.wrong_in == OWN_RUN:
            return self.mirrored
        return self.isolated if self.isolated is not None and not self.isolated else self.cumulative

    @property
    def compared(self) -> bool:
        """Whether the device computed it by itself."""
        return self.isolated is not None or self.failure is not None

    def __bool__(self) -> bool:
        return self.verdict not in (Verdict.INTRODUCED, Verdict.FAILED)


def types_of(node: Node) -> str:
    """The types of the sources that the NPU's kernel reads, or of all where there is none, and of the output."""
    sources = node.src[: OWN[node.op].n_src] if node.op in OWN else node.src
    return " ".join(source.type for source in sources if source is not None) + f" -> {node.dst.type}"


def failure_of(error: BaseException) -> str:
    """What a kernel raised, in a line, with the file and the line of it where that was no KernelError."""
    return str(error) if isinstance(error, KernelError) else said_by(error)
