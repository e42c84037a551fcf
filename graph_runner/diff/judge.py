"""Judges for each node of two runs in step whether the device computes it right, and where an error comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Protocol

from ggml_backend_npu import Graph, Memory, Node, Tensor
from ggml_backend_npu.device.faults import MemoryFault
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ops import OWN
from graph_runner.diagnosis import diagnose, quantised_values
from graph_runner.diff.blindness import Blindness
from graph_runner.diff.canary import Planter
from graph_runner.diff.contents import Changed, digest_of
from graph_runner.diff.leaves import Leaves
from graph_runner.diff.own import Mirrored, OwnNode, OwnRun
from graph_runner.diff.pairs import Pairs
from graph_runner.diff.sides import Sides
from graph_runner.diff.state import StateResult, States
from graph_runner.diff.turns import Compared, Known, Turn
from graph_runner.judging.blocks import compare_blocks
from graph_runner.judging.compare import Comparison, Heat, compare, heat
from graph_runner.judging.copies import Copied, Kept, Layout, blank, continues_dst, copy, put, restored
from graph_runner.judging.footprints import Footprints
from graph_runner.judging.noise import noise_multiple
from graph_runner.judging.reproduce import backend_ops_line
from graph_runner.judging.results import ISOLATED, OWN_RUN, STOPPED, NodeResult, Verdict, failure_of, types_of
from graph_runner.judging.rules import Rules
from graph_runner.judging.spans import Spans, between_gaps_of
from graph_runner.judging.spoilt import Watch
from graph_runner.run.session import SessionError

_LEAST = 1e-300  # of an error that shows in no number: another zero, another NaN
_AMPLIFIES = 10.0  # times the error of its inputs
_MOST_KNOWN = 8192  # nodes of the reference
_HEATS = 200  # nodes that differ of which a heat map is kept
_ANOTHER = 0x3F  # each byte of dst: 0.747 as f32, 1.81 as f16
_NO_PARTNER = "the graph of {} has no such node"
_READ = "copy_out", "copy_out_async", "synchronize"  # methods that, if they err, leave nothing that can be read
_CARELESS = 16  # careful looks in vain: then wrong nodes are the kernels' fault
_EXPLANATIONS = 3  # nodes of an op, its types and a verdict that are explained


class Keeper(Protocol):
    """Saves nodes so that they can be computed again. Each method returns the path, or None if nothing is saved."""

    def node(self, node: Node, expected: Tensor, found: NodeResult) -> str | None:
        """Saves a node as it was before it ran, with its expected output."""

    def span(self, graph: Graph, expected: dict[int, Tensor], found: NodeResult) -> str | None:
        """Saves nodes that run as one operator, as they were before, with the expected outputs by place."""


@dataclass(frozen=True)
class Stray:
    """A tensor that was changed although no node writes there.

    what  the tensor that was found to hold something else
    step, index  when: before which node
    seen  that node, which was about to read it
    """

    what: Changed
    step: int
    index: int
    seen: str

    def __str__(self) -> str:
        comma = "," if self.what.written else ""
        return f"step {self.step}: before {self.seen}, {self.what}{comma} holds something else than it did"


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


class Judge:
    """Judges each node of two runs in step: whether the device computes it as the reference does."""

    def __init__(self, ggml: Ggml, sides: Sides, asked: Asked) -> None:
        self._sides, self._device, self._asked = sides, sides.device, asked
        self._rules, self._footprints, self._checks = asked.rules, asked.footprints, sides.device.checks
        self.refused: Counter[tuple[str, str]] = Counter()
        self.step = 0
        self._reader = convert.Reader(ggml)
        self._turn: Turn
        self._known: dict[convert.Read, Known] = {}
        self._copies = Kept()
        self._errors: dict[int, float] = {}  # of results in the device's own run, by the reference's tensor
        self._careless = 0  # careful looks that have found nothing
        self._heats = 0
        self._explanations: Counter[tuple[str, str, Verdict]] = Counter()
        self.state_results: list[StateResult] = []
        self._states = States(self.state_results.append)
        self.faults: list[MemoryFault] = [] if self._checks is None else self._checks.faults
        self._leaves: Leaves | None = None
        if sides.reference.is_cpu and not sides.device.is_cpu:
            self._leaves = Leaves(ggml, self.faults.append, lambda own: self._states.begins(own, self.step))
        self.strays: list[Stray] = []
        self.planter = Planter(asked.rules, asked.seed)
        self.blindness = Blindness(asked.rules)
        self.watch = Watch()  # for NaN in the reference's run
        self.fingerprints: dict[tuple[int, int], int] = {}  # of what nodes of the own run gave, by step and place
        self.own = OwnRun(
            ggml, sides, lambda: (self._turn.before, self.partner(self._turn.place)), self._about_to_run_own,
            strict=asked.strict,
        )  # fmt: skip
        ops = asked.ops
        fusions = [fusion for fusion in sides.device.fusions if ops is None or fusion.name in ops]
        self._spans = Spans(sides.device.backend, fusions, asked.rules, asked.seen, asked.keeper.span, asked.footprints)

    def next_step(self, *, stopped: bool = False) -> None:
        """Finishes the current step and begins the next one.

        stopped  whether the device's own run ended before
        """
        self.finish(stopped=stopped)
        self.step += 1

    def finish(self, *, stopped: bool = False) -> None:
        """Called after the last node of a step.

        stopped  whether the device's own run ended before
        """
        self._spans.finish()
        if not stopped:
            self._states.finish(self.step)

    def before(self, address: int, place: int) -> None:
        """Called before the reference computes a node: records what it reads."""
        read = self._reader(address)
        if self._leaves is not None:
            self._leaves.reference(read)
        node = read.node
        self._spans.before(read, self.step, place)
        if read not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
                self._copies = Kept()
            self._known[read] = self._seen_first(read)
        known = self._known[read]
        overlapped = {id(source): _over_root(source) for source in known.overlapped}
        sources = tuple([overlapped.get(id(source), source) for source in node.src]) if overlapped else node.src
        before = Node(node.op, copy(node.dst), sources, node.params)
        copied = None
        if known.refusal is not None:
            self.refused[node.op, known.refusal] += 1
        elif known.layout is not None:
            copied = known.layout.copied(blanks=True)
        self._turn = Turn(self.step, place, read, before, copied)

    def _seen_first(self, read: convert.Read) -> Known:
        """Returns what is the same each time a node comes."""
        node = read.node
        overlapped = tuple(source for source in node.src if source is not None and source.overlaps(node.dst))
        if node.dst.n_elements == 0 or (self._asked.ops is not None and node.op not in self._asked.ops):
            return Known(overlapped)
        refusal = self._device.refusal(node)
        if refusal is not None:
            return Known(overlapped, refusal)
        packed = self._in_device_layout(read) if self._device.packs else set()
        weights = {
            id(tensor)
            for tensor, storage in zip(node.src, read.src, strict=True)
            if tensor is not None and tensor.apart is None and storage is not None and storage.is_weight
        }
        return Known(overlapped, layout=Layout(node, lambda tensor: id(tensor) in packed, weights, self._copies))

    def _in_device_layout(self, read: convert.Read) -> set[int]:
        """Returns the tensors of a node that the device's memory may have in its own layout: those that no op
        computes."""
        pairs = [(read.node.dst, read.dst), *zip(read.node.src, read.src, strict=True)]
        return {
            id(tensor)
            for tensor, storage in pairs
            if tensor is not None and storage is not None and convert.is_leaf(storage.address) and not storage.is_set
        }

    def partner(self, place: int) -> int | None:
        """Returns the place of the same node in the device's graph of this step; None if that has no such node."""
        return self._asked.pairs.device(self.step, place)

    def between(self) -> str | None:
        """Called after the reference has computed a node. The device computes it from the same inputs, between fences.
        Returns why it must not compute the node in its own run, if it fails or does damage here, else None."""
        self._turn.isolated = found = self._recompute() if self._memory_errs is None else None
        if found is None:
            return self._memory_errs
        if found.failure is not None:
            return f"{found.node}: {found.failure}"
        outside = found.found is not None and found.found.outside
        return f"{found.node}: writes outside its output" if outside else None

    @property
    def _memory_errs(self) -> str | None:
        """What the device's memory does not hold as it was set; then what is computed from it says nothing."""
        return None if self._checks is None else self._checks.unrepaired

    def _found_carefully(self, again: Callable[[], object]) -> str | None:
        """Does again what has shown a wrong result, now also with copies that the device makes of what is read. Returns
        the fault of the device's memory that is found so, if there is one."""
        if self._checks is None:
            return None
        if (known := next((each for each in self.faults if each.method in _READ), None)) is not None:
            return str(known)
        if self._careless >= _CARELESS:
            return None
        n = len(self.faults)
        with self._checks.carefully():
            again()
        if len(self.faults) > n:
            return str(self.faults[n])
        self._careless += 1
        return None

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
        if self._asked.pairs.reference(self.step, last.place) is None:
            self._has_no_partner(last)

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
                self._device.on(own.on_device), not_judged=why,
            )  # fmt: skip
            self._asked.seen(found)

    def own_ended(self) -> None:
        """Called after the device's own run has computed all nodes of a step."""
        self.own.ended()
        self._footprints.end()

    def after(self, address: int, place: int) -> None:
        """Called after both runs have computed a node, or after the reference has if the device's run has stopped."""
        self._spans.after(address)
        turn, isolated, node = self._turn, self._turn.isolated, self._turn.node
        partner = self.partner(place)
        own = None if partner is None else self.own.take(partner)
        if node.dst.n_elements == 0:
            return
        self.watch.look(self.step, place, turn.before, node.dst, self._leaf_names())
        cumulative, mirrored, errs = None, None, self._memory_errs
        if own is not None and errs is None:
            cumulative = self._cumulative(own)
            self.strays += [Stray(changed, self.step, place, str(node)) for changed in own.found]
            mirrored = self._mirrored(own, cumulative)
            errs = None if mirrored is None or mirrored else self._found_carefully(partial(_read_again, own))
            cumulative, mirrored = (cumulative, mirrored) if errs is None else (None, None)
        verdict = self._verdict(address, mirrored, cumulative, own)
        self._plant(own, mirrored)
        if own is not None:
            self._look_at_state(own.read)
        found = NodeResult(
            self.step, place, node.op, node.name, types_of(node), node.dst.ne, verdict,
            "" if own is None else self._device.on(own.on_device),
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
        if verdict not in (Verdict.EXACT, Verdict.ROUNDING) and self._heats < _HEATS:
            self._heats += 1
            found = replace(found, heat=self._heat(wrong, own))
        if wrong is not None:
            found = self._explained(found, wrong)
        self._asked.seen(found)

    def _leaf_names(self) -> Iterator[str]:
        """Yields the names of the sources that no node computes."""
        for source, storage in zip(self._turn.node.src, self._turn.read.src, strict=True):
            if source is not None and storage is not None and convert.is_leaf(storage.address):
                yield source.name

    def _cumulative(self, own: OwnNode) -> Comparison | None:
        node, other = self._turn.node, own.node
        if (other.op, other.dst.type, other.dst.ne) != (node.op, node.dst.type, node.dst.ne):
            raise SessionError(
                f"llama.cpp makes different graphs of the two runs, so that nodes cannot be compared: step {self.step} "
                f"node {self._turn.place} is {node.op} {node.name!r} in one, {other.op} {other.name!r} in the other"
            )
        both = self._both(own)
        return None if both is None else compare(*both)

    def _both(self, own: OwnNode) -> tuple[Tensor, Tensor] | None:
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
        if not own.on_device:
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

    def _explained(self, found: NodeResult, wrong: Compared) -> NodeResult:
        """Returns the result with details that take time to find, for the first nodes of each op, type and verdict."""
        kind = (found.op, found.types, found.verdict)
        self._explanations[kind] += 1
        if self._explanations[kind] > _EXPLANATIONS:
            return found
        node, result = wrong.node, wrong.actual
        blocks, diagnosis, line, kept = None, None, None, None
        if not found:
            kept = self._kept(wrong, found)
            line = backend_ops_line(node)
        if wrong.found is None:
            return replace(found, test=line, reproducer=kept)
        if wrong.expected.codec.is_quantized:
            blocks = compare_blocks(wrong.expected, result, quantised_values(node))
        if found.verdict is Verdict.INTRODUCED:
            again = self._once_more if wrong.where == ISOLATED else None
            diagnosis = diagnose(node, wrong.expected, result, wrong.before(), wrong.found.outside, again)
        return replace(
            found, blocks=blocks, diagnosis=diagnosis, test=line, reproducer=kept,
            judged=self._rules.judged(node, wrong.expected, result),
            noise=noise_multiple(node, wrong.expected, result),
        )  # fmt: skip

    def _kept(self, wrong: Compared, found: NodeResult) -> str | None:
        if wrong.whole is not None:
            return self._asked.keeper.span(wrong.whole.graph, wrong.whole.expected, found)
        held = replace(wrong.node, dst=wrong.before() or wrong.node.dst)
        return self._asked.keeper.node(restored(wrong.like, held), wrong.expected, found)

    def _look_at_state(self, own: convert.Read) -> None:
        """Compares the tensor that the node wrote to, if no node computes that tensor."""
        read, root = self._turn.read, self._turn.read.view_source
        if root and convert.is_leaf(root):
            by_element = read.node.op == "SET_ROWS" and read.node.dst.ne[0] == 1 != read.dst.tensor.ne[0]
            self._states.written(
                root, read.dst.tensor, own.dst.tensor, self.step, str(read.node), by_element=by_element
            )

    def _heat(self, wrong: Compared | None, own: OwnNode | None) -> Heat | None:
        if wrong is not None and wrong.found is not None and not wrong.found:
            return heat(wrong.expected, wrong.actual)
        both = None if own is None else self._both(own)
        return None if both is None else heat(*both)

    def _recompute(self) -> Compared | None:
        """Has the device compute the node from copies. If that is wrong since memory errs, what it gives when each
        reading is compared with a copy within the device counts."""
        copied = self._turn.copied
        if copied is None:
            return None
        found = [self._computed(copied)]
        if not found[0]:
            self._known[self._turn.read].forget()
        if found[0] or found[0] is None:
            return found[0]

        def again() -> None:
            copied.reset()
            found.append(self._computed(copied))

        errs = self._found_carefully(again)
        if errs is None and not self._is_late:
            return found[0]
        return found[-1] if found[-1] else None  # what memory that errs shows blames no kernel

    @property
    def _is_late(self) -> bool:
        """Whether the device was seen to return from calls before they are done."""
        return self._checks is not None and self._checks.is_late

    def _computed(self, copied: Copied) -> Compared | None:
        turn, node = self._turn, self._turn.node
        failure = None
        try:
            with self._footprints.about_to("isolated", turn.step, turn.place, node):
                if copied.call is None:
                    copied.call = self._device.bound(copied.node)
                copied.call()
        except Exception as error:
            failure = failure_of(error)
        return self._judged_alone(copied, failure) if self._memory_errs is None else None

    def _judged_alone(self, copied: Copied, failure: str | None) -> Compared:
        """Compares what the device has computed from copies with the reference's result.

        failure  why it could not
        """
        turn, node = self._turn, self._turn.node
        found, right = None, False
        result = copied.result
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

    def _plant(self, own: OwnNode | None, mirrored: Compared | None) -> None:
        """Plants known faults into copies of what the device gave and was judged right, as the judge must see them."""
        turn, isolated = self._turn, self._turn.isolated
        if self._memory_errs is not None:
            return

        def judged(compared: Compared | None) -> NodeResult:
            node = turn.node
            verdict = _wrong([] if compared is None else [compared]) or Verdict.EXACT
            return NodeResult(turn.step, turn.place, node.op, node.name, types_of(node), node.dst.ne, verdict)

        def alone(bad: Tensor) -> NodeResult:
            assert turn.copied is not None
            good = copy(turn.copied.result)
            put(bad, turn.copied.node.dst)
            try:
                return judged(self._judged_alone(turn.copied, None))
            finally:
                put(good, turn.copied.node.dst)

        def in_the_own_run(bad: Tensor) -> NodeResult:
            assert own is not None
            other = own.giving(bad)
            return judged(self._mirrored(other, self._cumulative(other)))

        if isolated:
            self.blindness.look(isolated)
            self.planter.look("alone", isolated, alone)
        if mirrored and own is not None:
            how = "from the reference's inputs" if own.is_fed_alike else "from its own inputs"
            self.planter.look(f"in the own run {how}", mirrored, in_the_own_run)

    def _once_more(self) -> tuple[Tensor, Tensor] | None:
        """Has the device compute the node again, over another content of dst than a blank one. Returns that content and
        the result; None if the node continues from what dst held, or fails."""
        turn = self._turn
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
    if errs is not None and (own is None or (own.on_device and own.result is not None)):
        return f"the memory of the device errs: {errs}"
    if own is None:
        return STOPPED
    return own.why_not if own.on_device and mirrored is None and not own.fused else ""


def _name(tensor: Tensor | None) -> str:
    return repr(tensor.name) if tensor is not None else "nothing"


def _over_root(tensor: Tensor) -> Tensor:
    """Returns the tensor over a copy of all the memory that it is a view of."""
    return replace(tensor, memory=Memory.of(tensor.memory.bytes().copy()))


def _as_laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns the tensor in ggml's layout, or a copy with the strides of `like` if its own are different."""
    plain = tensor.unpacked()
    if plain.nb == like.nb:
        return plain
    laid_out = copy(like)
    OWN["CONT"].define(laid_out, plain)
    return laid_out
