"""Runs the tokens of a diff again: does the device give the same results each time, and also if no node is observed?
How far does rounding alone move the CPU's result?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from ggml_backend_npu import Node
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.lib import Ggml
from graph_runner.base.limits import refuse_where_memory_is_limited
from graph_runner.base.settings import Gives
from graph_runner.diff.lockstep import Batch
from graph_runner.diff.logits import Ending, Endings, Outputs, nmse
from graph_runner.diff.side import CPU, Side
from graph_runner.diff.together import Computer, Grouped, ends_of
from graph_runner.diff.walks import Course, Place, Walk
from graph_runner.elsewhere.session import AnySession
from graph_runner.judging.results import OWN_RUN, NodeResult, Verdict, types_of
from graph_runner.judging.spans import Chain
from graph_runner.run.session import Observer, SessionError, Settings
from quant import codec, type_names

Opened = Callable[[Settings, Observer | None], AnySession]
_FAR = 100.0  # times what is natural, which the end of a run may be off by
_FEW_ULP = 1e-6  # of float32, in parts of an element
_DRAWS = 4  # of errors, at most, to find out what is natural
_NOTHING = 1e-9  # an nmse that is small whatever is natural
_SIZES = (2, 8, 64)  # of groups of nodes that run together; what larger ones change shows at the end of the run
_ONE_BY_ONE = "the run ends right if the prompt's tokens come one by one: it takes a graph of another shape before"
_TOGETHER = "gives other bytes when nodes run together, not one by one"


class _One(Walk):
    """Observes one node alone; the nodes before it run as they do without an observer, or only those after `cut`
    together with it."""

    def __init__(self, ggml: Ggml, place: Place, cut: Place | None = None) -> None:
        super().__init__(ggml)
        self._wanted, self._cut = place, cut
        self.found: tuple[int, Node] | None = None  # the digest of its result, and the node
        self.began: Node | None = None  # the first node after the cut

    def looks_at(self, place: Place, address: int) -> bool:
        if self._cut is not None and place == (self._cut[0], self._cut[1] + 1):
            self.began = self.read(address).node
        return place in (self._wanted, self._cut)

    def saw(self, place: Place, address: int) -> None:
        if place == self._wanted:
            self.found = self.digest(address), self.read(address).node


class _Noise(Walk):
    """Adds rounding errors to nodes: for each node of the given size, relative to the node's values. The indices that
    TOP_K gives come in another order, which means nothing, though what is added up in that order is rounded
    otherwise."""

    def __init__(self, ggml: Ggml, errors: Mapping[Place, float], seed: int) -> None:
        super().__init__(ggml)
        self._errors, self._random = errors, np.random.default_rng(seed)

    def saw(self, place: Place, address: int) -> None:
        error = self._errors.get(place, 0.0)
        dst = convert.tensor(self.ggml, address, writable=True)
        if error > 0 and self.read(address).node.op == "TOP_K":
            self._random.permuted(dst.view(), axis=-1, out=dst.view())
        elif error > 0 and dst.type in ("f32", "f16") and dst.nbytes:
            values = dst.view()
            size = float(np.sqrt(np.square(values, dtype=np.float64).mean()))
            noise = self._random.standard_normal(values.shape) * error * size
            with np.errstate(invalid="ignore"):
                values[...] += noise.astype(values.dtype)


@dataclass(frozen=True)
class Watched:
    """The device's run while each node was observed.

    outputs, reference  what both runs gave, after each step
    fingerprints        digests of the nodes' results
    nodes               the results of the nodes
    gives               what each step gave
    """

    outputs: Sequence[Outputs]
    reference: Sequence[Outputs]
    fingerprints: Mapping[Place, int]
    nodes: Collection[NodeResult]
    gives: Sequence[Gives]

    @property
    def left_to_the_cpu(self) -> set[Place]:
        """The nodes that the CPU computed in the device's run."""
        return {(node.step, node.index) for node in self.nodes if node.on == CPU}


class Again:
    """Runs the same model on the same tokens again.

    opened    opens a new session
    device    the side that runs again
    computer  the reference and the rules
    watched   the run before
    remarks   what was found that is not wrong: results that are rounded otherwise than in the run before
    """

    def __init__(
        self,
        ggml: Ggml,
        opened: Opened,
        device: Side,
        computer: Computer,
        settings: Settings,
        batches: Sequence[Batch],
        watched: Watched,
    ) -> None:
        self._ggml, self._opened, self._device, self._computer = ggml, opened, device, computer
        self._batches, self._watched = batches, watched
        self._course = Course()
        self._errors: dict[Place, float] = {}  # NMSE of results in runs of several nodes together, or in repeated runs
        self._on_device = device.runs_with(settings)
        self._on_cpu = replace(settings, device="cpu")
        if computer.reference.is_cpu:
            self._on_cpu = computer.reference.runs_with(settings)
        self.remarks: list[str] = []

    def _run(
        self, settings: Settings, observer: Walk | None = None, batches: Sequence[Batch] | None = None
    ) -> list[Outputs]:
        found = []
        with self._opened(settings, observer) as session:
            if observer is not None and settings.device != "cpu":
                observer.side = self._device
            for step, tokens in enumerate(batches or self._batches):
                if step and observer is not None:
                    observer.next_step()
                session.decode(*tokens)
                found.append(session.outputs())
        return found

    def repeated(self, times: int) -> NodeResult | None:
        """Returns the first node whose result on the device changes between runs, and is not right each time. None if
        all runs are the same, or each result is right: then a remark says that the runs are not the same.

        times  the number of runs, the first one included
        """
        for run in range(2, times + 1):
            chain = Chain(self._device.backend, self._device.fusions)
            found = self._grouped(lambda place, node, chain=chain: chain.is_at_end(node.op, lambda: node))  # type: ignore[misc]
            self._course = found.course
            text = f"is not the same each time: run {run} of {times} gives other bytes"
            wrong = self._first_wrong(found, text, remarks=not self.remarks)
            if wrong is not None:
                return wrong
        return None

    def unwatched(self) -> NodeResult | None:
        """Returns the first node whose result is wrong if the device's run is not observed node by node. Returns None
        if the run ends the same, or if ggml's CPU shows such a difference too, or if results are rounded otherwise: a
        remark says so."""
        watched = self._watched
        try:
            outputs = self._run(self._on_device)
        except SessionError:
            wrong = self.repeated(2) or self._in_groups()
            if wrong is None:
                raise
            return wrong
        if _alike(outputs, watched.outputs) or not _alike(self._run(self._on_cpu), watched.reference):
            return None
        wrong = None if self._course.ops else self.repeated(2)
        if wrong is None:
            wrong = self._in_groups()
        if wrong is None:
            wrong = self._ends_wrong(outputs)
        if wrong is not None and self._needs_another_shape(outputs):
            return replace(wrong, failure=f"{wrong.failure}; {_ONE_BY_ONE}")
        return wrong

    def _needs_another_shape(self, outputs: Sequence[Outputs]) -> bool:
        """Whether a run that nobody observed is right as far as the prompt, and goes wrong only if the prompt's tokens
        come together: with all tokens one by one, each graph has the shape of the one before. They come together where
        they are encoded, or make embeddings.

        outputs  of the run
        """
        watched, (prompt, *rest) = self._watched, self._batches
        n = len(prompt[0])
        limit = max(_FAR * _apart(watched.reference, watched.outputs), _NOTHING)
        if n < 2 or watched.gives[0] != "logits" or any(len(each) != n for each in prompt):
            return False
        if not _apart(outputs[:1], watched.outputs[:1]) <= limit or _apart(outputs, watched.outputs) <= limit:
            return False
        one_by_one = [*([each[i : i + 1] for each in prompt] for i in range(n)), *rest]
        with suppress(SessionError):
            runs = (self._run(settings, batches=one_by_one) for settings in (self._on_device, self._on_cpu))
            return _apart(*runs) <= limit
        return False

    def _in_groups(self) -> NodeResult | None:
        """Returns the first node whose result is wrong when a group of nodes runs together, by the smallest groups in
        which one is."""
        varies = bool(self.remarks)
        for size in _SIZES:
            wrong = self._of_size(size, remarks=not varies)
            if wrong is not None:
                return wrong
        return None

    def _of_size(self, size: int, *, remarks: bool) -> NodeResult | None:
        """Returns the first node whose result is wrong when groups of a size run together."""
        found = []
        for shift in (0, size // 2):
            ends = ends_of(self._course, size, shift, self._watched.left_to_the_cpu)
            grouped = self._grouped(lambda place, _, ends=ends: place in ends, self._course)  # type: ignore[misc]
            found.append(self._first_wrong(grouped, _TOGETHER, remarks=remarks and not self.remarks))
        wrong = [each for each in found if each is not None]
        return min(wrong, key=lambda each: (each.step, each.index), default=None)

    def _ends_wrong(self, outputs: Sequence[Outputs]) -> NodeResult | None:
        """Returns the first node that changes if what a run that nobody observed gives is off by more than rounding
        explains."""
        watched, endings = self._watched, Endings()
        for reference, device, of in zip(watched.reference, outputs, watched.gives, strict=True):
            endings.add(reference, device, of)
        if self.natural(endings.ending()):
            self.remarks = self.remarks or [f"the run ends otherwise: it {_TOGETHER}, within rounding"]
            return None
        places = sorted(watched.fingerprints)
        low, high = 0, len(places) - 1
        while low < high:
            middle = (low + high) // 2
            if self._is_same(places[middle]):
                low = middle + 1
            else:
                high = middle
        found = self._alone(places[low])
        if found is None:
            return None
        return self._unlike(places[low], found[1], _TOGETHER, self._since(places[low]))

    def _since(self, place: Place) -> str:
        """Returns the first of the fewest nodes that must run together up to a node for its result to change; "" if it
        is that node."""
        step, last = place
        low, high, first = -1, last - 1, ""
        while low < high:  # the result changes with a cut after `low`, and not after `high`
            middle = (low + high + 1) // 2
            one = self._alone_after(place, (step, middle))
            if one.found is not None and one.found[0] != self._watched.fingerprints[place] and one.began is not None:
                low, first = middle, _named((step, middle + 1), one.began)
            else:
                high = middle - 1
        return "" if low + 1 == last else first or f"the begin of step {step}"

    def _is_same(self, place: Place) -> bool:
        """Whether a node gives the same result when only this node is observed."""
        found = self._alone(place)
        return found is not None and found[0] == self._watched.fingerprints[place]

    def _alone(self, place: Place) -> tuple[int, Node] | None:
        """Returns the digest of a node's result and the node, when only this node is observed."""
        return self._alone_after(place, None).found

    def _alone_after(self, place: Place, cut: Place | None) -> _One:
        """Runs the tokens with one node observed, and the node at `cut`, if there is one."""
        one = _One(self._ggml, place, cut)
        with suppress(SessionError):
            self._run(self._on_device, one)
        return one

    def _grouped(self, ends: Callable[[Place, Node], bool], course: Course | None = None) -> Grouped:
        """Runs the tokens on the device in groups of nodes; without a course as they ran when they were observed."""
        watched = self._watched
        left_out = watched.left_to_the_cpu if course is not None else ()
        grouped = Grouped(
            self._ggml, self._device, self._computer, ends, left_out=left_out, before=watched.fingerprints,
            course=course,
        )  # fmt: skip
        try:
            self._run(self._on_device, grouped)
        except SessionError as error:
            refuse_where_memory_is_limited(error)
            failed = grouped.failed()
            if failed is None:
                raise
            grouped.found.append(replace(failed, why=str(error)))
        return grouped

    def _first_wrong(self, grouped: Grouped, text: str, *, remarks: bool) -> NodeResult | None:
        """Returns the wrong result, if there is one. Otherwise remarks on the first that has changed."""
        for each in grouped.found:
            if not each:
                since = "" if each.since is None else _named(*each.since)
                return self._unlike(each.place, each.node, f"{text}: {each.why}" if each.why else text, since)
            self._errors[each.place] = max(self._errors.get(each.place, 0.0), each.error)
        if grouped.changed is not None and remarks:
            (step, index), node = grouped.changed
            self.remarks.append(f"step {step} node {index}: {node.op} {node.name!r} {text}, within rounding")
        return None

    def _unlike(self, place: Place, node: Node, failure: str, since: str) -> NodeResult:
        """A node that gives other bytes; or one of several since an earlier one does, and which is not known."""
        step, index = place
        failure = f"one of these nodes {failure}; which is not known" if since else failure
        return NodeResult(
            step, index, node.op, node.name, types_of(node), node.dst.ne, Verdict.FAILED, self._device.name,
            failure=failure, wrong_in=OWN_RUN, since=since,
        )  # fmt: skip

    def natural(self, ending: Ending) -> Ending:
        """Returns the ending with `natural` and `limit` set: how far rounding alone moves the reference from itself.
        The reference is run with errors as large as those of the device's nodes, and with flash attention switched. If
        values are quantised, errors are at least a few units in the last place, since it is chance which of two quants
        a value at the edge gets. So errors are drawn again, a few times, while the ending is too far off."""
        nodes, reference = self._watched.nodes, self._watched.reference
        least = _FEW_ULP if any(map(_quantises, nodes)) else 0.0
        errors = {place: max(float(np.sqrt(error)), least) for place, error in self._errors.items() if error > 0}
        for node in nodes:
            found = [each.error for each in (node.isolated, node.mirrored) if each is not None and not each]
            if found and np.isfinite(max(found)):
                place = node.step, node.index
                errors[place] = max(float(np.sqrt(max(found))), least, errors.get(place, 0.0))
        on_cpu = self._on_cpu
        switched = replace(on_cpu, flash_attention="off" if on_cpu.flash_attention == "on" else "on")
        runs: list[tuple[Settings, Walk | None]] = [(switched, None)]
        runs += [(on_cpu, _Noise(self._ggml, errors, seed)) for seed in range(_DRAWS)]
        natural = 0.0
        for settings, observer in runs:
            with suppress(SessionError):
                apart = _apart(reference, self._run(settings, observer))
                is_other = observer is None and not np.isfinite(apart)  # another algorithm may give NaN elsewhere
                natural = natural if is_other else max(natural, apart)
            judged = replace(ending, natural=natural, limit=max(_FAR * natural, _NOTHING))
            if observer is not None and judged:
                break
        return judged


def _quantises(node: NodeResult) -> bool:
    """Whether a node reads or writes quantised blocks."""
    return node.op != "GET_ROWS" and any(codec(type).is_quantized for type in {*node.types.split()} & {*type_names()})


def _alike(a: Sequence[Outputs], b: Sequence[Outputs]) -> bool:
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def _apart(a: Sequence[Outputs], b: Sequence[Outputs]) -> float:
    return max((nmse(x, y) for x, y in zip(a, b, strict=True)), default=0.0)


def _named(place: Place, node: Node) -> str:
    return f"step {place[0]} node {place[1]}: {node}"
