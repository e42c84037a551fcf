"""Finds reads that cannot see what they should, without running a graph.

What a read should see is defined by the graph as it was built: nodes run in that order, and each tensor that is not a
view has memory of its own. What it sees follows from the order in which steps run and the addresses at which tensors
lie. Both are followed exactly; a byte whose last writer differs is a hazard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations, groupby

import numpy as np

from graph_runner.hazards.extents import Extent, layout, windows
from graph_runner.hazards.findings import Finding, Kind, Report, Seen
from graph_runner.hazards.graph import Graph, Operand, Step
from graph_runner.hazards.history import History, Piece, Write, Writes, together


class HazardError(AssertionError):
    """Hazards of a graph, a line for each."""


def assert_no_hazards(graph: Graph) -> None:
    """Raises HazardError, an AssertionError with a sentence for each hazard, if a graph has hazards."""
    found = check(graph).findings
    if found:
        raise HazardError("\n".join(map(str, found)))


def check(graph: Graph) -> Report:
    """Returns the hazards of a graph, in the order in which the nodes that they concern run."""
    checked = _Check(graph)
    checked.run()
    return Report(graph.name, len(graph.nodes), checked.n_reads, tuple(checked.findings), graph.is_as_built)


@dataclass(frozen=True)
class _Differing:
    """The first byte of a read that has another last writer than it should: the writers, None for what was there before
    the graph; and how many such bytes there are."""

    address: int
    size: int
    wanted: int | None
    found: int | None


class _Check:
    """One check. Writers are numbered: nodes by their places, inputs after them."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._order = graph, graph.order
        self._runs_at = {node: place for place, step in enumerate(self._order) for node in step.nodes}
        self._left_out = {
            node for step in self._order if step.written is not None for node in step.nodes if node not in step.written
        }
        self._stay = (*graph.inputs, *graph.outputs)
        self._memory: dict[int, History] = defaultdict(History)  # by space
        self._should: dict[tuple[int, int], list[Piece]] = {}  # by node and read
        self.findings: list[Finding] = []
        self.n_reads = 0

    def run(self) -> None:
        """Fills `findings`."""
        self._follow_as_built()
        for place, each in enumerate(self._graph.inputs):
            self._write(len(self._graph.nodes) + place, each)
        for step in self._order:
            self._run(step)
        end = len(self._graph.nodes)
        for number, each in enumerate(self._graph.outputs):
            self._read(end, number, each, ())
        for _, steps in groupby(self._order, key=lambda step: step.group):
            self._check_at_once([*steps])

    def _follow_as_built(self) -> None:
        """Notes for each read who should have written its bytes, by their offsets in the root."""
        graph = self._graph
        roots: dict[int, History] = defaultdict(History)

        def write(writer: int, each: Operand) -> None:
            roots[each.root].add(Write(writer, 0, Extent.of(each.tensor, each.offset)))

        def note(node: int, number: int, each: Operand) -> None:
            size = each.extent.end - each.extent.begin
            self._should[node, number] = [*roots[each.root].over(each.offset, each.offset + size)]

        for place, each in enumerate(graph.inputs):
            write(len(graph.nodes) + place, each)
        for place, node in enumerate(graph.nodes):
            for number, each in enumerate(node.reads):
                note(place, number, each)
            for each in node.writes:
                write(place, each)
        for number, each in enumerate(graph.outputs):
            note(len(graph.nodes), number, each)

    def _write(self, writer: int, each: Operand) -> None:
        self._memory[each.space].add(Write(writer, each.shift, each.extent))

    def _run(self, step: Step) -> None:
        for place in step.nodes:
            for number, each in enumerate(self._graph.nodes[place].reads):
                self._read(place, number, each, step.nodes)
        self._check_in_place(step)
        for place, operands in self._written(step):
            for each in operands:
                self._write(place, each)

    def _written(self, step: Step) -> Iterator[tuple[int, tuple[Operand, ...]]]:
        for place in step.nodes:
            yield place, self._graph.nodes[place].writes if step.written is None else step.written.get(place, ())

    def _read(self, reader: int, number: int, read: Operand, besides: tuple[int, ...]) -> None:
        """Checks a read. What a node of the same operator writes is not read from memory.

        reader  place of the node; that after the last one for a read after the graph's end
        besides places of the nodes of the operator
        """
        extent, shift = read.extent, read.shift
        if extent.begin >= extent.end:
            return
        self.n_reads += 1
        should = (Piece(begin + shift, end + shift, writes) for begin, end, writes in self._should[reader, number])
        does = self._memory[read.space].over(extent.begin, extent.end)
        differing: list[_Differing] = []
        for begin, end, wanted, found in together(should, does):
            if len(wanted) == len(found) and all(
                a.writer == b.writer and b.shift == shift for a, b in zip(wanted, found, strict=True)
            ):
                continue
            wanted = tuple(Write(each.writer, shift, each.extent.moved(shift)) for each in wanted)
            seen, due = _visible(found, extent, begin, end), _visible(wanted, extent, begin, end)
            if [each[:2] for each in seen] != [each[:2] for each in due]:
                differing += _differing(extent, begin, end, (due, seen), besides)
        if differing:
            self._tell(reader, read, differing)

    def _tell(self, reader: int, read: Operand, differing: list[_Differing]) -> None:
        first = differing[0]
        reuses = first.found is not None and all(each.root != read.root for each in self._writes_of(first.found))
        self.findings.append(
            Finding(
                self._kind(reader, read, first), self._seen(reader) if reader < len(self._graph.nodes) else None,
                self._seen(first.wanted), self._seen(first.found), read.name, read.root, read.space,
                first.address, first.address - read.shift, sum(each.size for each in differing), reuses,
            )
        )  # fmt: skip

    def _kind(self, reader: int, read: Operand, first: _Differing) -> Kind:
        wanted, at = first.wanted, self._runs_at.get(reader, len(self._order))
        if wanted is None:
            stays = {(each.shift, each.space) for each in self._stay if each.root == read.root}
            is_elsewhere = first.found is None or (stays and (read.shift, read.space) not in stays)
            return Kind.ELSEWHERE if is_elsewhere else Kind.OVERWRITTEN
        if wanted in self._left_out:
            return Kind.LEFT_OUT
        if wanted < len(self._graph.nodes) and self._runs_at.get(wanted, at) >= at:
            return Kind.TOO_EARLY
        lies = {(each.shift, each.space) for each in self._writes_of(wanted) if each.root == read.root}
        return Kind.OVERWRITTEN if (read.shift, read.space) in lies else Kind.ELSEWHERE

    def _writes_of(self, writer: int) -> tuple[Operand, ...]:
        nodes = self._graph.nodes
        return nodes[writer].writes if writer < len(nodes) else (self._graph.inputs[writer - len(nodes)],)

    def _seen(self, writer: int | None) -> Seen | None:
        if writer is None:
            return None
        nodes = self._graph.nodes
        if writer >= len(nodes):
            return Seen(None, "input", self._graph.inputs[writer - len(nodes)].name)
        return Seen(self._runs_at.get(writer), nodes[writer].op, nodes[writer].name)

    def _check_in_place(self, step: Step) -> None:
        """A node may write where it still reads if element lies on element, and if its op allows it."""
        for place, written in self._written(step):
            for write in written:
                for reader in step.nodes:
                    node = self._graph.nodes[reader]
                    for read in node.reads:
                        if read.space != write.space or not read.extent.meets(write.extent):
                            continue
                        if self._is_computed_in(step, read) or place in step.in_place:
                            continue
                        alike = read.tensor.address == write.tensor.address
                        alike = alike and layout(read.tensor) == layout(write.tensor)
                        if not (alike and (node.in_place or read.root == write.root)):
                            self._tell_pair(Kind.IN_PLACE, reader, place, read, write)

    def _is_computed_in(self, step: Step, read: Operand) -> bool:
        """Whether an operator computes what one of its nodes reads."""
        return len(step.nodes) > 1 and any(
            write.root == read.root for place in step.nodes for write in self._graph.nodes[place].writes
        )

    def _check_at_once(self, steps: list[Step]) -> None:
        """Of steps that may run at the same time none may touch what another one writes."""
        if len(steps) < 2 or steps[0].group is None:
            return
        touched = []
        for step in steps:
            reads = [(place, each) for place in step.nodes for each in self._graph.nodes[place].reads]
            writes = [(place, each) for place, operands in self._written(step) for each in operands]
            touched.append((reads, writes))
        for (reads, writes), (other_reads, other_writes) in combinations(touched, 2):
            pairs = chain(
                ((read, write) for write in other_writes for read in chain(reads, writes)),
                ((read, write) for write in writes for read in other_reads),
            )
            for (place, read), (writer, write) in pairs:
                if read.space == write.space and read.extent.meets(write.extent):
                    self._tell_pair(Kind.AT_ONCE, place, writer, read, write)

    def _tell_pair(self, kind: Kind, reader: int, writer: int, read: Operand, write: Operand) -> None:
        address, size = _common(read.extent, write.extent)
        self.findings.append(
            Finding(
                kind, self._seen(reader), None, self._seen(writer), read.name, read.root, read.space, address,
                address - read.shift, size, reuses=read.root != write.root,
            )
        )  # fmt: skip


def _visible(writes: Writes, read: Extent, begin: int, end: int) -> list[Write]:
    """Those of the writes that a read may see a byte of in [begin, end), the newest first."""
    found = []
    for write in reversed(writes):
        covers = write.extent.is_solid or write.extent == read
        if covers or read.meets_within(write.extent, begin, end):
            found.append(write)
        if covers:
            break
    return found


def _differing(
    read: Extent, begin: int, end: int, writes: tuple[list[Write], list[Write]], besides: tuple[int, ...]
) -> Iterator[_Differing]:
    """The bytes of a read in [begin, end) of which the last writers by two lists are not the same.

    besides  writers whose bytes do not matter
    """
    for first, last in windows(begin, end):
        due, seen = (_last(each, first, last) for each in writes)
        keys: dict[tuple[int, int], int] = {}
        for each in chain(*writes):
            keys.setdefault((each.writer, each.shift), len(keys))
        of = [np.array([keys[each.writer, each.shift] for each in those] + [-1]) for those in writes]
        wrong = read.held(first, last) & (of[0][due] != of[1][seen])
        if besides:
            within = np.array([each.writer in besides for each in writes[0]] + [False])
            wrong &= ~within[due]
        places = np.flatnonzero(wrong)
        if len(places):
            wanted, found = (
                those[index].writer if (index := int(last_writer[places[0]])) < len(those) else None
                for those, last_writer in zip(writes, (due, seen), strict=True)
            )
            yield _Differing(first + int(places[0]), len(places), wanted, found)


def _last(writes: list[Write], begin: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """For each byte of [begin, end) which of the writes, the newest first, wrote it last; their number if none did."""
    found = np.full(end - begin, len(writes), np.intp)
    for place, write in reversed([*enumerate(writes)]):
        found[write.extent.held(begin, end)] = place
    return found


def _common(one: Extent, other: Extent) -> tuple[int, int]:
    """The first byte that two sets share, and how many they share."""
    first, size = None, 0
    for begin, end in windows(max(one.begin, other.begin), min(one.end, other.end)):
        places = np.flatnonzero(one.held(begin, end) & other.held(begin, end))
        size += len(places)
        if first is None and len(places):
            first = begin + int(places[0])
    assert first is not None
    return first, size
