"""Judges for each node of two runs in step whether the device computes it right, and where an error comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.device.faults import MemoryFault
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ggml.node_reader import Reader
from ggml_backend_npu.ops import OWN
from graph_runner.diff.alone import Alone
from graph_runner.diff.blindness import Blindness
from graph_runner.diff.canary import Planter
from graph_runner.diff.contents import Stray
from graph_runner.diff.erring import Erring
from graph_runner.diff.explaining import Explainer, Keeper, Pair
from graph_runner.diff.leaves import Leaves
from graph_runner.diff.order import Order
from graph_runner.diff.own import Mirrored, OwnNode, OwnRun
from graph_runner.diff.pairs import Pairs
from graph_runner.diff.side import CPU
from graph_runner.diff.sides import Sides
from graph_runner.diff.state import StateResult, States
from graph_runner.diff.synthetic import Synthetic
from graph_runner.diff.turns import Compared, Turn
from graph_runner.judging.compare import Comparison, compare
from graph_runner.judging.copies import copy, digest_of
from graph_runner.judging.footprints import Footprints
from graph_runner.judging.results import ISOLATED, OWN_RUN, STOPPED, NodeResult, Verdict, types_of
from graph_runner.judging.rules import Rules
from graph_runner.judging.spans import Spans, between_gaps_of
from graph_runner.judging.spoilt import Watch
from graph_runner.run.session import SessionError

_LEAST = 1e-300  # of an error that shows in no number: another zero, another NaN
_AMPLIFIES = 10.0  # times the error of its inputs
_NO_PARTNER = "the graph of {} has no such node"


@dataclass(frozen=True)
class Asked:
    """What a judge is asked, and whom it tells.

    rules   which differences are right
    ops     the ops to compute again; all if None
    strict  whether to check every buffer after every node of the own run
    keeper  saves wrong nodes
    seen    called with each result
    footprints  told before the device computes something
    seed    of the faults that are planted into copies
    pairs   which nodes of the two graphs are the same
    """

    rules: Rules
    ops: Collection[str] | None
    strict: bool
    keeper: Keeper
    seen: Callable[[NodeResult], None]
    footprints: Footprints
    seed: int
    pairs: Pairs


class OtherOrderError(SessionError):
    """A node of the device's own run is another one than the reference's at its place: one of them has moved it."""


class Judge:
    """Judges each node of two runs in step: whether the device computes it as the reference does."""

    def __init__(self, ggml: Ggml, sides: Sides, asked: Asked) -> None:
        self._sides, self._device, self._asked = sides, sides.device, asked
        self._rules, self._footprints = asked.rules, asked.footprints
        self.step = 0
        self._reader = Reader(ggml)
        self._turn: Turn
        self._erring = Erring(sides.device.checks)
        self._alone = Alone(sides.device, asked.ops, asked.rules, asked.footprints, self._erring)
        self._explainer = Explainer(asked.rules, asked.keeper)
        self._errors: dict[int, float] = {}  # of results in the device's own run, by the reference's tensor
        self.state_results: list[StateResult] = []
        self._states = States(self.state_results.append)
        self._leaves: Leaves | None = None
        if sides.reference.is_cpu and not sides.device.is_cpu:
            self._leaves = Leaves(self.faults.append, lambda own: self._states.begins(own, self.step))
        self.strays: list[Stray] = []
        self.planter = Planter(asked.rules, asked.seed)
        self.blindness = Blindness(asked.rules)
        self.watch = Watch()  # for NaN in the reference's run
        self.fingerprints: dict[tuple[int, int], int] = {}  # of what nodes of the own run gave, by step and place
        self.order = Order(ggml, sides.device.recording())
        self.order.step(self.step)
        self.own = OwnRun(
            ggml, sides, lambda: (self._turn.before, self.partner(self._turn.place)), self._about_to_run_own,
            self.order, strict=asked.strict,
        )  # fmt: skip
        ops = asked.ops
        fusions = [fusion for fusion in sides.device.fusions if ops is None or fusion.name in ops]
        self._spans = Spans(sides.device.backend, fusions, asked.rules, asked.seen, asked.keeper.span, asked.footprints)

    @property
    def refused(self) -> Counter[tuple[str, str]]:
        """How many nodes the device does not take, by op and reason."""
        return self._alone.refused

    @property
    def faults(self) -> list[MemoryFault]:
        """What the device's memory was caught at."""
        return self._erring.faults

    def next_step(self, *, stopped: bool = False) -> None:
        """Finishes the current step and begins the next one.

        stopped  whether the device's own run ended before
        """
        self.finish(stopped=stopped)
        self.step += 1
        self.order.step(self.step)

    def finish(self, *, stopped: bool = False) -> None:
        """Called after the last node of a step.

        stopped  whether the device's own run ended before
        """
        self._spans.finish()
        if not stopped:
            self._states.finish(self.step)

    def end(self) -> None:
        """Called after the last step, if the device's own run has not ended before."""
        self.strays += [Stray(changed, 0, 0, None) for changed in self.own.weights_changed()]

    def see(self, step: int) -> None:
        """Has the device compute synthetic nodes that show what no node of the run could have shown.

        step  that they are said to belong to
        """
        nodes = Synthetic(self._sides.reference, self._alone, self._explainer, self.blindness)
        for found in nodes.judged(step):
            self._asked.seen(found)

    def before(self, address: int, place: int) -> None:
        """Called before the reference computes a node: records what it reads."""
        read = self._reader(address)
        self.order.reference(read)
        if self._leaves is not None:
            self._leaves.reference(read)
        self._spans.before(read, self.step, place)
        self._turn = self._alone.turn(read, self.step, place)

    def partner(self, place: int) -> int | None:
        """Returns the place of the same node in the device's graph of this step; None if that has no such node."""
        return self._asked.pairs.device(self.step, place)

    def between(self) -> str | None:
        """Called after the reference has computed a node. The device computes it from the same inputs, between fences.
        Returns why it must not compute the node in its own run, if it fails or does damage here, else None."""
        self._turn.isolated = found = self._alone.compared(self._turn)
        if found is None:
            return self._erring.unrepaired
        if found.failure is not None:
            return f"{found.node}: {found.failure}"
        outside = found.found is not None and found.found.outside
        return f"{found.node}: writes outside its output" if outside else None

    def own_passes(self, address: int) -> None:
        """Called when the device's own run has come to a node that computes nothing."""
        self.own.passes(address)

    def own_before(self, address: int, place: int) -> bool:
        """Called when the device's own run has come to a node. Returns whether to run it now."""
        runs = self.own.before(address, place)
        if self._leaves is not None and not self.faults:  # else what is read of them may be wrong
            self._leaves.own(self.own.next)
        return runs

    def _about_to_run_own(self, place: int, node: Node) -> None:
        self._footprints.begin("own", self.step, place, node)

    def own_after(self) -> None:
        """Called after the device's own run has computed the nodes up to the last one that it came to."""
        last = self.own.after()
        self._footprints.end()
        dst = last.node.dst
        self.fingerprints[self.step, last.place] = digest_of(dst.address, dst.nbytes, self._device.bytes_at)
        partner = self._asked.pairs.reference(self.step, last.place)
        if partner is None:
            self._has_no_partner(last)
        elif partner != self._turn.place:
            self.own.hold(last)

    @property
    def _has_none_such(self) -> str:
        """Why a node of the reference is not judged if the device's graph does not have it."""
        return _NO_PARTNER.format(self._device.name)

    def _has_no_partner(self, own: OwnNode) -> None:
        """Tells of a node of the own run that the reference's graph does not have."""
        self.own.take(own.place)
        node, why = own.node, _NO_PARTNER.format(self._sides.reference.name)
        if node.dst.n_elements:
            found = NodeResult(
                self.step, own.place, node.op, node.name, types_of(node), node.dst.ne, Verdict.EXACT,
                own.device or CPU, not_judged=why,
            )  # fmt: skip
            self._asked.seen(found)

    def own_ended(self) -> None:
        """Called after the device's own run has computed all nodes of a graph."""
        self.own.ended()
        self.order.own_ended()
        self._footprints.end()

    def ended(self) -> None:
        """Called after the reference has computed all nodes of a graph."""
        self.order.reference_ended()

    def after(self, address: int, place: int) -> None:
        """Called after both runs have computed a node, or after the reference has if the device's run has stopped."""
        self._spans.after(address)
        turn, isolated, node = self._turn, self._turn.isolated, self._turn.node
        partner = self.partner(place)
        own = None if partner is None else self.own.take(partner)
        if node.dst.n_elements == 0:
            return
        self.watch.look(self.step, place, turn.before, node.dst, self._leaf_names())
        cumulative, mirrored, errs = None, None, self._erring.unrepaired
        if own is not None and errs is None:
            cumulative = self._cumulative(own)
            self.strays += [Stray(changed, self.step, place, str(node)) for changed in own.found]
            mirrored = self._mirrored(own, cumulative)
            errs = None if mirrored is None or mirrored else self._erring.found_carefully(partial(_read_again, own))
            cumulative, mirrored = (cumulative, mirrored) if errs is None else (None, None)
        verdict = self._verdict(address, mirrored, cumulative, own)
        self._plant(own, mirrored)
        if own is not None:
            self._look_at_state(own.read)
        found = NodeResult(
            self.step, place, node.op, node.name, types_of(node), node.dst.ne, verdict,
            "" if own is None else own.device or CPU,
            None if isolated is None else isolated.found, cumulative,
            None if mirrored is None else mirrored.found,
            fused="" if own is None else own.fused,
            not_judged=_why_not_judged(own, mirrored, errs) if partner is not None else self._has_none_such,
        )  # fmt: skip
        looked_at = [each for each in (isolated, mirrored) if each is not None]
        wrong = next((each for each in looked_at if not each), None)
        if wrong is not None:
            found = replace(found, failure=wrong.failure, wrong_in=wrong.where)
        else:
            wrong = next((each for each in looked_at if each.found is not None and not each.found), None)
        if verdict not in (Verdict.EXACT, Verdict.ROUNDING):
            found = self._explainer.with_heat(found, wrong, lambda: None if own is None else self._both(own))
        if wrong is not None:
            again = partial(self._alone.once_more, turn) if wrong.where == ISOLATED else None
            found = self._explainer.explained(found, wrong, again)
        self._asked.seen(found)

    def _leaf_names(self) -> Iterator[str]:
        """Yields the names of the sources that no node computes."""
        for source, storage in zip(self._turn.node.src, self._turn.read.src, strict=True):
            if source is not None and storage is not None and convert.is_leaf(storage.address):
                yield source.name

    def _cumulative(self, own: OwnNode) -> Comparison | None:
        node, other = self._turn.node, own.node
        if _key(node, self._asked.pairs) != _key(other, self._asked.pairs):
            raise OtherOrderError(
                f"llama.cpp makes different graphs of the two runs, so that nodes cannot be compared: step {self.step} "
                f"node {self._turn.place} is {node.op} {node.name!r} in one, {other.op} {other.name!r} in the other"
            )
        both = self._both(own)
        return None if both is None else compare(*both)

    def _both(self, own: OwnNode) -> Pair | None:
        """Returns the results of the two runs, laid out alike; None if nothing is left of the device's."""
        dst = self._turn.node.dst
        if own.result is None:
            return None
        reference = own.part_of(dst)
        if reference is not dst:
            return reference, between_gaps_of(reference, own.result)
        return dst, _as_laid_out(own.result, dst)

    def _mirrored(self, own: OwnNode, cumulative: Comparison | None) -> Compared | None:
        """Compares a node of the own run with what the reference computes from what it read."""
        if not own.device:
            return None
        spoilt = own.spoilt[0] if own.spoilt else None
        failure = f"in the own run writes to {spoilt}, beside its output" if spoilt else None
        if own.is_fed_alike and own.result is not None and cumulative is not None:
            turn = self._turn
            actual = _as_laid_out(own.result, turn.before.dst)
            before = None if own.held is None else _as_laid_out(own.held, turn.before.dst)
            alike = Mirrored(own.node, turn.before, turn.node.dst, actual, before)
            return self._compared(alike, cumulative, failure)
        each = self.own.mirrored(own)
        return None if each is None else self._compared(each, compare(each.expected, each.actual), failure)

    def _compared(self, each: Mirrored, found: Comparison, failure: str | None) -> Compared:
        right = bool(found) or self._rules.allows(each.node, each.expected, each.actual, found)
        return Compared(
            OWN_RUN, each.like, each.node, lambda: each.before, each.expected, each.actual, found, right, failure,
            each.whole,
        )  # fmt: skip

    def _look_at_state(self, own: convert.Read) -> None:
        """Compares the tensor that the node wrote to, if no node computes that tensor."""
        read, root = self._turn.read, self._turn.read.view_source
        if root and convert.is_leaf(root):
            by_element = read.node.op == "SET_ROWS" and read.node.dst.ne[0] == 1 != read.dst.tensor.ne[0]
            self._states.written(
                root, read.dst.tensor, own.dst.tensor, self.step, str(read.node), by_element=by_element
            )

    def _plant(self, own: OwnNode | None, mirrored: Compared | None) -> None:
        """Plants known faults into copies of what the device gave and was judged right, as the judge must see them."""
        turn, isolated = self._turn, self._turn.isolated
        if self._erring.unrepaired is not None:
            return
        if isolated:
            self.blindness.look(isolated)
            self.planter.look("alone", isolated, lambda bad: self._planted(self._alone.giving(turn, bad)))
        if mirrored and own is not None:
            way = "in the own run from " + ("the reference's inputs" if own.is_fed_alike else "its own inputs")
            self.planter.look(way, mirrored, lambda bad: self._planted(self._in_own_run(own.giving(bad))))

    def _in_own_run(self, own: OwnNode) -> Compared | None:
        return self._mirrored(own, self._cumulative(own))

    def _planted(self, compared: Compared | None) -> NodeResult:
        """Returns the result of a node that a fault was planted into."""
        turn, node = self._turn, self._turn.node
        verdict = _wrong([] if compared is None else [compared]) or Verdict.EXACT
        return NodeResult(turn.step, turn.place, node.op, node.name, types_of(node), node.dst.ne, verdict)

    def _verdict(
        self, address: int, mirrored: Compared | None, cumulative: Comparison | None, own: OwnNode | None
    ) -> Verdict:
        errors, read, isolated = self._errors, self._turn.read, self._turn.isolated
        inputs = max((errors.get(root, 0.0) for root in read.roots if root), default=0.0)
        # a result that nobody has seen is taken to be as far off as what the node reads; of one that the device's graph
        # does not have nobody knows how far off what comes in its place is
        unseen = inputs if self.partner(self._turn.place) is not None else inf
        error = unseen if cumulative is None else 0.0 if cumulative else max(cumulative.error, _LEAST)
        errors[address] = errors[read.view_source] = error
        looked_at = [each for each in (isolated, mirrored) if each is not None]
        wrong = _wrong(looked_at)
        if wrong is not None:
            return wrong
        exact = all(each.found is None or bool(each.found) for each in looked_at)
        if cumulative is None or cumulative:
            return Verdict.EXACT if exact else Verdict.ROUNDING
        if mirrored is not None and own is not None and own.is_fed_alike:
            return Verdict.ROUNDING
        if inputs == 0 and self._reads_what_is_off():
            return Verdict.INHERITED
        if mirrored is None and inputs == 0:
            return Verdict.INTRODUCED
        if inputs == 0 and own is not None and own.is_ahead:  # whether it was fed alike, nobody has looked
            return Verdict.ROUNDING
        return Verdict.AMPLIFIED if error > _AMPLIFIES * max(inputs, 1e-14) else Verdict.INHERITED

    def _reads_what_is_off(self) -> bool:
        """Whether the node reads or writes a cache or state that differs."""
        states, read = self._states, self._turn.read
        roots = {root for root in read.roots if root} - {read.view_source}
        return states.is_off(read.view_source) or any(states.is_read(root, self.step) for root in roots)


def _key(node: Node, pairs: Pairs) -> tuple[object, ...]:
    """By what a node is known as the same one. Names say nothing more once nodes are paired."""
    return node.op, node.dst.type, node.dst.ne, *([node.name] if pairs.devices is None else [])


def _wrong(looked_at: Collection[Compared]) -> Verdict | None:
    """Returns the verdict of a node that is wrong by its comparisons; None if it is right."""
    if any(each.failure is not None for each in looked_at):
        return Verdict.FAILED
    return None if all(looked_at) else Verdict.INTRODUCED


def _read_again(own: OwnNode) -> None:
    """Reads once more what a node of the own run read and wrote."""
    for tensor in (own.node.dst, *own.node.src):
        if tensor is not None and tensor.nbytes:
            tensor.unpacked()


def _why_not_judged(own: OwnNode | None, mirrored: Compared | None, errs: str | None) -> str:
    """Returns why nobody knows what a node gave in the own run.

    errs  what is wrong with the device's memory, if that is why
    """
    if errs is not None and (own is None or (own.device and own.result is not None)):
        return f"the memory of the device errs: {errs}"
    if own is None:
        return STOPPED
    return own.why_not if own.device and mirrored is None and not own.fused else ""


def _as_laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns the tensor in ggml's layout, or a copy with the strides of `like` if its own are different."""
    plain = tensor.unpacked()
    if plain.nb == like.nb:
        return plain
    laid_out = copy(like)
    OWN["CONT"].define(laid_out, plain)
    return laid_out
