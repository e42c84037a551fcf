"""A node that the device computes alone: from copies of what the reference read, between fences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.convert import Read, Storage
from graph_runner.diff.erring import Erring
from graph_runner.diff.side import Side
from graph_runner.diff.turns import Compared, Turn
from graph_runner.judging.compare import compare
from graph_runner.judging.copies import Copied, Kept, Layout, blank, continues_dst, copy, held, put
from graph_runner.judging.footprints import Footprints
from graph_runner.judging.results import ISOLATED, failure_of
from graph_runner.judging.rules import Rules

_MOST_KNOWN = 8192  # nodes of the reference
_ANOTHER = 0x3F  # each byte of dst: 0.747 as f32, 1.81 as f16


@dataclass(frozen=True)
class _Known:
    """What is the same each time a node of the reference comes.

    overlapped  sources that share a byte with its output
    refusal     why the device does not take it
    layout      of copies of it, if the device is to compute it
    kept        weights that the device keeps, of which no copies are made
    """

    overlapped: tuple[Tensor, ...]
    refusal: str | None = None
    layout: Layout | None = None
    kept: tuple[Tensor, ...] = ()


class Alone:
    """Has the device compute nodes of the reference's run alone.

    ops      the ops to compute; all if None
    erring   the device's memory
    refused  nodes that the device does not take, by op and reason
    """

    def __init__(
        self, device: Side, ops: Collection[str] | None, rules: Rules, footprints: Footprints, erring: Erring
    ) -> None:
        self._device, self._ops, self._rules = device, ops, rules
        self._footprints, self._erring = footprints, erring
        self.refused: Counter[tuple[str, str]] = Counter()
        self._known: dict[Read, _Known] = {}
        self._copies = Kept()

    def turn(self, read: Read, step: int, place: int) -> Turn:
        """Called before the reference computes a node. Takes down what that reads, and copies it for the device."""
        if read not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
                self._copies = Kept()
            self._known[read] = self._seen_first(read)
        known, node = self._known[read], read.node
        overlapped = {id(source): _over_root(source) for source in known.overlapped}
        sources = tuple([overlapped.get(id(source), source) for source in node.src]) if overlapped else node.src
        before = Node(node.op, held(node.dst), sources, node.params)
        copied = None
        if known.refusal is not None:
            self.refused[node.op, known.refusal] += 1
        elif known.layout is not None:
            for each in known.kept:
                self._device.keeps(each)
            copied = known.layout.copied()
        return Turn(step, place, read, before, copied)

    def _seen_first(self, read: Read) -> _Known:
        """Returns what is the same each time a node comes."""
        node = read.node
        overlapped = tuple(source for source in node.src if source is not None and source.overlaps(node.dst))
        if node.dst.n_elements == 0 or (self._ops is not None and node.op not in self._ops):
            return _Known(overlapped)
        refusal = self._device.refusal(node)
        if refusal is not None:
            return _Known(overlapped, refusal)
        packed = _in_device_layout(read) if self._device.packs else set()
        weights = [
            tensor
            for tensor, storage in zip(node.src, read.src, strict=True)
            if tensor is not None and tensor.apart is None and storage is not None and storage.is_weight
        ]
        kept = tuple(tensor for tensor in weights if self._device.keeps(tensor))
        left = {*map(id, kept)}
        layout = Layout(
            node, lambda tensor: id(tensor) in packed, blanks=True, weights={*map(id, weights)} - left, left=left,
            kept=self._copies,
        )  # fmt: skip
        return _Known(overlapped, layout=layout, kept=kept)

    def synthetic(self, node: Node, expected: Tensor, step: int, place: int) -> Compared | None:
        """Has the device compute a node of no run. None if it does not take the node, or if memory errs.

        expected  the reference's result
        """
        read = Read(0, node, (), 0, Storage(0, node.dst, 0, is_set=True), (None,) * len(node.src))
        turn = self.turn(read, step, place)
        put(expected, node.dst)
        return self.compared(turn)

    def compared(self, turn: Turn) -> Compared | None:
        """Called after the reference has computed a node. Has the device compute it from the copies. If that is wrong
        since memory errs, what it gives when each reading is compared with a copy within the device counts. None if it
        says nothing of the kernel."""
        copied = turn.copied
        if copied is None or self._erring.unrepaired is not None:
            return None
        found = [self._computed(turn, copied)]
        if not found[0]:
            self._forget(turn)
        if found[0] or found[0] is None:
            return found[0]

        def again() -> None:
            copied.reset()
            found.append(self._computed(turn, copied))

        errs = self._erring.found_carefully(again)
        if errs is None and not self._erring.is_late:
            return found[0]
        return found[-1] if found[-1] else None  # what memory that errs shows blames no kernel

    def _computed(self, turn: Turn, copied: Copied) -> Compared | None:
        failure = None
        try:
            with self._footprints.about_to("isolated", turn.step, turn.place, turn.node):
                if copied.call is None:
                    copied.call = self._device.bound(copied.node)
                copied.call()
        except Exception as error:
            failure = failure_of(error)
        return self._judged(turn, copied, failure) if self._erring.unrepaired is None else None

    def _forget(self, turn: Turn) -> None:
        """Called after a node that may have damaged its copies, or what the device has of weights."""
        self._device.forgets()
        layout = self._known[turn.read].layout
        if layout is not None:
            layout.forget()

    def _judged(self, turn: Turn, copied: Copied, failure: str | None) -> Compared:
        """Compares what the device has computed from copies with the reference's result.

        failure  why it could not
        """
        node, result = turn.node, copied.result
        found, right = None, False
        changed = copied.changed()
        if failure is None and changed:
            roles = " and ".join(f"src{index} {_name(node.src[index])}" for index in changed)
            failure = f"changes {roles}, which it is only to read"
        if failure is None:
            found = compare(node.dst, result, copied.outside())
            right = bool(found) or (not found.outside and self._rules.allows(turn.before, node.dst, result, found))
        return Compared(
            ISOLATED, copied.node, turn.before, lambda: copied.before, node.dst, result, found, right, failure
        )

    def giving(self, turn: Turn, bad: Tensor) -> Compared:
        """Compares another result with the reference's, as if the device had computed that."""
        assert turn.copied is not None
        good = copy(turn.copied.result)
        put(bad, turn.copied.node.dst)
        try:
            return self._judged(turn, turn.copied, None)
        finally:
            put(good, turn.copied.node.dst)

    def once_more(self, turn: Turn) -> tuple[Tensor, Tensor] | None:
        """Has the device compute the node again, over another content of dst than a blank one. Returns that content and
        the result; None if the node continues from what dst held, or fails."""
        if turn.copied is None or continues_dst(turn.copied.node):
            return None
        node = Copied.of(turn.copied.node, lambda tensor: tensor.packed is not None).node
        blank(node.dst, _ANOTHER)
        before = copy(node.dst)
        try:
            with self._footprints.about_to("isolated", turn.step, turn.place, node):
                self._device.compute(node)
        except Exception:
            return None
        return before, copy(node.dst)


def _in_device_layout(read: Read) -> set[int]:
    """Returns the tensors of a node that the device's memory may have in its own layout: those that no op computes."""
    pairs = [(read.node.dst, read.dst), *zip(read.node.src, read.src, strict=True)]
    return {
        id(tensor)
        for tensor, storage in pairs
        if tensor is not None and storage is not None and not storage.is_set and storage.is_leaf
    }


def _name(tensor: Tensor | None) -> str:
    return repr(tensor.name) if tensor is not None else "nothing"


def _over_root(tensor: Tensor) -> Tensor:
    """Returns the tensor over a copy of all the memory that it is a view of."""
    return replace(tensor, memory=convert.copy_of(tensor.memory))
