"""What a check of a graph found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Kinds of hazards."""

    OVERWRITTEN = "overwritten"
    TOO_EARLY = "read before it is written"
    LEFT_OUT = "left out by a fusion"
    ELSEWHERE = "lies elsewhere"
    IN_PLACE = "overwritten while it is read"
    AT_ONCE = "touched at the same time"


@dataclass(frozen=True)
class Seen:
    """A node, or an input.

    place  of the step in which it runs; None for an input, and for a node that does not run
    """

    place: int | None
    op: str
    name: str

    def __str__(self) -> str:
        return f"{self.op} {self.name!r}" + ("" if self.place is None else f" (at {self.place})")


@dataclass(frozen=True)
class Finding:
    """A hazard: bytes that a node reads, or that a second node writes, and that are not safe.

    reader   the node that reads them; None for a read after the graph's end
    wanted   who should have written them last; None if that is what they held before the graph, or does not matter
    found    who writes them at the wrong time; None if nobody does
    tensor   the name of what is read
    root     the number of the tensor that it is, or is a view of
    space, address, offset, size  where the first byte lies: its address and the address space, its offset in the root;
             and how many bytes there are
    reuses   whether `found` writes to another tensor, in the same memory
    """

    kind: Kind
    reader: Seen | None
    wanted: Seen | None
    found: Seen | None
    tensor: str
    root: int
    space: int
    address: int
    offset: int
    size: int
    reuses: bool = False

    def __str__(self) -> str:
        where = f"{self.size:,} bytes at {self.address:#x}, offset {self.offset} of {self.tensor!r}"
        return f"{self.kind}: {self.what}: {where}; right: {self.right}"

    @property
    def what(self) -> str:
        """What one node does to what another one reads."""
        reader = str(self.reader) if self.reader is not None else "what comes after the graph"
        wanted = f"what {self.wanted} wrote" if self.wanted is not None else "what was there before the graph"
        match self.kind:
            case Kind.OVERWRITTEN:
                return f"{self.found} wrote over {wanted}, before {reader} reads it"
            case Kind.TOO_EARLY:
                return f"{reader} reads what {self.wanted} has not written yet"
            case Kind.LEFT_OUT:
                return f"{reader} reads the result of {self.wanted}, which a fusion leaves out"
            case Kind.ELSEWHERE:
                other = "" if self.found is None else f", but what {self.found} wrote"
                return f"{reader} reads where {wanted} does not lie{other}"
            case Kind.IN_PLACE:
                return f"{self.found} writes over what {reader} still reads"
            case Kind.AT_ONCE:
                return f"{self.found} writes what {reader} may touch at the same time"

    @property
    def right(self) -> str:
        """The order, or the place in memory, that would be right."""
        reader = str(self.reader) if self.reader is not None else "the read after the graph"
        match self.kind:
            case Kind.OVERWRITTEN if self.reuses:
                return f"{reader} before {self.found}, or other memory for {self.found}"
            case Kind.OVERWRITTEN:
                written = f"{self.found} before {self.wanted}, or " if self.wanted is not None else ""
                return f"{written}{reader} before {self.found}"
            case Kind.TOO_EARLY:
                return f"{self.wanted} before {reader}"
            case Kind.LEFT_OUT:
                return f"no fusion there, or one that writes the result of {self.wanted}"
            case Kind.ELSEWHERE:
                return f"{self.tensor!r} at the address of what it is a view of, plus its offset"
            case Kind.IN_PLACE:
                return f"other memory for {self.found}"
            case Kind.AT_ONCE:
                return f"a barrier between {reader} and {self.found}"


@dataclass(frozen=True)
class Report:
    """The check of a graph. Falsy if there are hazards.

    nodes  how many there are
    reads  how many were checked
    is_as_built  whether the order in which the nodes were built is known; else it is taken to be that in which they run
    """

    graph: str
    nodes: int
    reads: int
    findings: Sequence[Finding]
    is_as_built: bool = True

    def __bool__(self) -> bool:
        return not self.findings
