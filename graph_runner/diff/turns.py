"""A node of two runs in step, from before the reference computes it until both have: what is known of it by when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ggml.convert import Read
from graph_runner.diff.own import Together
from graph_runner.judging.compare import Comparison
from graph_runner.judging.copies import Copied


@dataclass(frozen=True)
class Compared:
    """One comparison of a node from equal inputs: the device's result against the reference's.

    where    ISOLATED, or in the device's OWN_RUN
    like     the node as it is in its run
    node     the same node, with sources that hold what they held
    before   returns what its output held; None if it is not known
    found    the comparison; None if there is no result
    right    whether the result is right, rounding included
    failure  why there is no result, or what else the device damaged
    whole    the nodes that it ran together with, if any
    """

    where: str
    like: Node
    node: Node
    before: Callable[[], Tensor | None]
    expected: Tensor
    actual: Tensor
    found: Comparison | None
    right: bool
    failure: str | None = None
    whole: Together | None = None

    def __bool__(self) -> bool:
        return self.right and self.failure is None


@dataclass
class Turn:
    """A node of the reference's run.

    step, place  where it stands: `place` among the step's nodes
    read      the node as it is in that run
    before    the node over what it reads, its output over a copy of what that held before it ran
    copied    the node over copies, for the device to compute; None if the device is not to
    isolated  the device's result from these, after both have computed it; None if there is none
    """

    step: int
    place: int
    read: Read
    before: Node
    copied: Copied | None = None
    isolated: Compared | None = None

    @property
    def node(self) -> Node:
        """The node as it is in the reference's run."""
        return self.read.node
