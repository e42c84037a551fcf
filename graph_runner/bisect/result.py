"""What a bisection has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graph_runner.base.settings import Settings


@dataclass(frozen=True)
class Unit:
    """A node of the run; in each step the one of that name.

    name   of its tensor; nodes of one name go together
    types  of its output and sources, as a diff writes them
    """

    name: str
    op: str
    types: str
    ne: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op} {self.name!r}"


@dataclass(frozen=True)
class Trial:
    """A whole run with some nodes on the device.

    nodes  which, as ranges of their numbers
    nmse   of what the steps give, logits or embeddings, the largest of all steps; None if the run did not end
    first_token  the first step after which another token is the most likely; None if there is none
    error  why it did not end, or ""
    """

    nodes: str
    nmse: float | None
    first_token: int | None
    seconds: float
    error: str = ""


@dataclass
class Bisection:
    """A bisection. Truthy if the run with all nodes on the device is right.

    units    the nodes that may be on the device, in their order
    limit    of the NMSE at the end, beyond which a run is wrong
    threshold  the same while nodes are looked for: a hundredth of the whole run's, if that is more
    trials   all runs, in their order
    needed   numbers of the nodes with which alone the run is wrong; empty if it is right, or if `why` says why not
    is_whole whether these are all; False if there may be more
    span     if there may be more: the shortest range of nodes, up to the last of these, with which the run is wrong
    rate     the part of runs with all nodes on the device that fail; less than 1: each trial is repeated
    why      why nothing was looked for though the run is wrong, or ""
    by_token whether a run is wrong if another token follows, whatever the NMSE
    ends     whether nothing is looked for, and the run alone is judged
    """

    model: str
    device: str
    n_prompt: int
    steps: int
    settings: Settings
    units: Sequence[Unit] = ()
    limit: float = 0.0
    threshold: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    is_whole: bool = True
    span: range | None = None
    rate: float = 0.0
    why: str = ""
    by_token: bool = False
    ends: bool = False

    def __bool__(self) -> bool:
        return not self.rate

    def is_wrong(self, trial: Trial, limit: float) -> bool:
        """Whether a run is wrong, by a limit of its NMSE."""
        if trial.nmse is None:
            return True
        return trial.first_token is not None if self.by_token else not trial.nmse <= limit
