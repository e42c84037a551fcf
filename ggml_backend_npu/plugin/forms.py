"""Plans by form: what differs between two nodes of the same form is where their memory lies.

In a model of 30 layers the same nodes come 30 times, at other addresses, and with each prompt again. So a node, or a
pattern of nodes that may be fused, is bound once, at addresses that do not exist (`plugin.rows.home`). In the words of
its works these are known from afar; the words are then copied for each node of this form, with the node's addresses.

A form is the bytes of all that binding may depend on: op, parameters, types, ne, nb, and what memory the tensors share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.backend.backend import AnyBackend, Backend
from ggml_backend_npu.backend.fusion import FUSIONS
from ggml_backend_npu.backend.plan import Part, Plan, run_step
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.graph_read import GraphRead, GraphReader
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.placing import Bound, Placing, Words, place, take_off
from ggml_backend_npu.plugin.rows import HOME, Pieces, Rows, graph_in
from ggml_backend_npu.registry.calls import KernelError, Watched, are_watched
from ggml_backend_npu.registry.entry import Call
from quant.kernels import region
from quant.kernels.jit import engine, now
from quant.kernels.threads import Job, Team, working_team

Ints = NDArray[np.int64]

_MOST_FORMS = 4096
MOST_PLANS = 4096  # of graphs that come to Python each time


def _arrays(kept: object) -> Iterator[Ints]:
    """The arrays of 8-byte numbers among what a work keeps: they could hold addresses."""
    if isinstance(kept, np.ndarray):
        if kept.dtype.kind in "iu" and kept.dtype.itemsize == 8:
            yield kept
    elif isinstance(kept, list | tuple):
        for each in kept:
            yield from _arrays(each)


@dataclass(frozen=True, eq=False)
class Form:
    """What was bound of nodes at home.

    words  of its works
    kept   the arrays in which they are
    plan   what was bound; it keeps what the works need
    """

    words: Words
    kept: tuple[Ints, ...]
    plan: Plan

    @staticmethod
    def of(plan: Plan, n_groups: int) -> Form | None:
        """A plan that was bound at home, if all that it says of addresses in n_groups groups of memory is known."""
        jobs = [call for _, call in plan.steps if isinstance(call, Job)]
        if len(jobs) < len(plan.steps):
            return None
        works = [work for job in jobs for work in job.works]
        if any((np.abs(each) >= 1 << (HOME - 1)).any() for work in works for each in _arrays(work.kept)):
            return None
        each = [work.words for work in works]
        begins, at = np.cumsum([0, *(words.nbytes for words in each)]), np.array([work.address for work in works])
        words = np.concatenate([np.empty(0, np.int64), *each])
        kept = words, np.empty_like(words), begins
        found = Words(len(words), len(works), *(each.ctypes.data for each in kept))
        of = np.array(Bound(*found, at.ctypes.data, n_groups), np.int64)
        return None if take_off(of.ctypes.data) else Form(found, kept, plan)


@dataclass(frozen=True, eq=False, slots=True)
class Placed:
    """A form where the memory of some nodes lies: its words, and the addresses of its works."""

    form: Form
    words: Ints
    works: Ints

    def calls(self, named: Iterable[Call]) -> Iterator[Call]:
        """Its calls, which fail as those of the same nodes that were bound one by one."""
        begin = 0
        for call in named:
            assert isinstance(call, Job)
            works = []
            for work in call.works:
                works.append(work.placed(self.words[begin : begin + work.words.size]))
                begin += work.words.size
            yield Job(*works)


class Formed(Plan):
    """A plan put together of pieces.

    rows      of the pieces
    forms     where the pieces lie that have one
    which     of each piece the number of its form; -1: none
    alone     the plans of pieces that have none, by their numbers
    of_graph  binds the whole graph node by node: its steps name what is computed
    name      names the nodes of a piece, given by its number, without binding them
    """

    def __init__(
        self,
        rows: Rows,
        forms: Sequence[Form],
        which: Ints,
        alone: dict[int, Plan],
        *,
        of_graph: Callable[[], Plan],
        name: Callable[[int], str],
    ) -> None:
        counts, fused = Counter[str](), Counter[str]()
        times = np.bincount(which[which >= 0], minlength=len(forms)).tolist()
        plans = [*zip((form.plan for form in forms), times, strict=True), *((plan, 1) for plan in alone.values())]
        for plan, n_times in plans:
            for total, part in ((counts, plan.counts), (fused, plan.fused)):
                for what, count in part.items():
                    total[what] += n_times * count
        super().__init__((), counts, fused)
        self._forms, self._which, self._alone = forms, which, alone
        self._of_graph, self._name = of_graph, name
        known = [form.words for form in forms]
        n_words = np.array([*(words.n_words for words in known), 0])[which]
        n_works = np.array([*(words.n_works for words in known), 0])[which]
        for piece, plan in alone.items():
            n_works[piece] = 0 if plan.works is None else len(plan.works)
        self._word_ends, self._ends = np.cumsum(n_words), np.cumsum(n_works)
        self._words, self._works = np.empty(n_words.sum(), np.int64), np.empty(n_works.sum(), np.int64)
        records, memory = np.array(known, np.int64), (rows.bases, rows.base_ends, rows.n_groups)
        lists = records, which, *memory, self._words, self._word_ends, self._works, self._ends
        of = np.array(Placing(len(which), *(each.ctypes.data for each in lists)), np.int64)
        place(of.ctypes.data)
        for piece, plan in alone.items():
            if plan.works is not None:
                self._works[self._ends[piece] - len(plan.works) : self._ends[piece]] = plan.works

    @cached_property
    def _runs(self) -> list[Ints | Plan]:
        """The works that run one after the other without Python, and the plans between them."""
        runs: list[Ints | Plan] = []
        begin = 0
        for piece, plan in sorted(self._alone.items()):
            if plan.works is None:
                end = int(self._ends[piece])
                runs += [self._works[begin:end], plan]
                begin = end
        return [run for run in (*runs, self._works[begin:]) if isinstance(run, Plan) or len(run)]

    @cached_property
    def _pieces(self) -> list[Placed | Plan]:
        """Each piece by itself, in order."""
        found: list[Placed | Plan] = []
        ends = zip(self._which.tolist(), self._word_ends.tolist(), self._ends.tolist(), strict=True)
        for piece, (which, word_end, end) in enumerate(ends):
            if which < 0:
                found.append(self._alone[piece])
            else:
                form = self._forms[which]
                words = self._words[word_end - form.words.n_words : word_end]
                found.append(Placed(form, words, self._works[end - form.words.n_works : end]))
        return found

    @cached_property
    def works(self) -> Ints | None:
        """The addresses of all works, in order; None if a call is Python's own."""
        return None if any(plan.works is None for plan in self._alone.values()) else self._works

    @cached_property
    def steps(self) -> tuple[tuple[object, Call], ...]:
        """What computes something, with its call."""
        named, found = iter(self._of_graph().steps), []
        for piece in self._pieces:
            plan = piece if isinstance(piece, Plan) else piece.form.plan
            whats = [*islice(named, len(plan.steps))]
            own = [call for _, call in (plan.steps if plan is piece else whats)]
            calls = piece.calls(own) if isinstance(piece, Placed) else own
            found += [(what, call) for (what, _), call in zip(whats, calls, strict=True)]
        return tuple(found)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What each of its steps computes, in order, without the nodes themselves."""
        plans = (piece.form.plan if isinstance(piece, Placed) else piece for piece in self._pieces)
        return tuple(part for plan in plans for part in plan.parts)

    def run(self) -> None:
        """Runs it without Python between its works, or if somebody watches between its pieces; unless Python gives work
        to threads. Raises KernelError as any plan."""
        team = working_team()
        if not (team.openmp or team.n_threads == 1):
            super().run()
        elif are_watched():
            for number, piece in enumerate(self._pieces):
                with Watched(self._name(number)):
                    self._run(piece if piece.works is None else piece.works)
        else:
            for run in self._runs:
                self._run(run)

    def timed(self) -> Ints:
        """Runs it as `run` does. Returns the time before, and after each work or call of Python's, in ns."""
        team = working_team()
        if not (team.openmp or team.n_threads == 1):
            return super().timed()
        times = [np.array([now()], np.int64)]
        for run in self._runs:
            if isinstance(run, np.ndarray):
                times.append(np.empty(len(run), np.int64))
                self._run(run, times[-1].ctypes.data)
            else:
                times.append(run.timed()[1:])
        return np.concatenate(times)

    def _run(self, run: Ints | Placed | Plan, times: int = 0) -> None:
        """Runs the works at some addresses, or a plan whose calls are Python's own. `times` as in `run_works`."""
        if isinstance(run, np.ndarray):
            team = working_team()
            done = region.run(run.ctypes.data, len(run), team.n_threads, team.openmp, times)
            if done < len(run):
                self._fail(int(run[done]))
        else:
            assert isinstance(run, Plan)
            run.run()

    def _fail(self, address: int) -> None:
        """Raises what the step says whose work at an address failed."""
        for what, call in self.steps:
            works = call.works if isinstance(call, Job) else ()
            failed = [work for work in works if work.address == address]
            if failed:
                run_step(what, Job(*failed))
                raise KernelError(f"{what}: its kernel failed")


class Forms:
    """The forms of what one ggml_backend has planned, and its plans of graphs that come to Python each time. Its graphs
    are computed one after another: what kernels keep for themselves is shared by all nodes of a form.

    backend  plans the forms
    """

    def __init__(self, ggml: Ggml, backend: AnyBackend, reader: GraphReader) -> None:
        self._ggml, self._backend, self._reader = ggml, backend, reader
        self._forms: dict[bytes, Form | None] = {}
        self._plans: dict[bytes, Plan] = {}
        self._known_for: object = None
        self._are_formed = False
        self._own: frozenset[str] = frozenset()
        self._patterns: dict[int, list[tuple[int, ...]]] = {}

    def forget(self) -> None:
        """Forgets all forms and plans."""
        self._forms.clear()
        self._plans.clear()
        self._known_for = None

    def plan(self, read: GraphRead, packed: convert.PackedAt, team: Team, *, comes_again: bool) -> Plan:
        """The plan of a graph, which runs in a team. It is kept if it has calls of Python's, or if the graph comes to
        Python again for another reason."""
        now = self._backend.version, self._backend.options, team
        if now != self._known_for:
            self._begin(now)
        plan = self._plans.get(read.digest) if self._plans else None
        if plan is None:
            plan = self._planned(read, packed)
            if comes_again or plan.works is None:
                if len(self._plans) >= MOST_PLANS:
                    self._plans.clear()
                self._plans[read.digest] = plan
        return plan

    def _planned(self, read: GraphRead, packed: convert.PackedAt) -> Plan:
        """A plan by forms, if the backend computes in host memory by kernels of this project."""

        def of_graph() -> Plan:
            return self._backend.plan(read.graph(self._ggml, packed))

        if not self._are_formed:
            return of_graph()
        pieces = Pieces.of(read, self._patterns)
        rows = Rows.read(read, self._reader.blocks, pieces)
        forms: list[Form] = []
        which = np.full(len(rows.ends), -1)
        alone: dict[int, Plan] = {}
        for key, first, numbers in rows.alike:
            if key not in self._forms:
                if len(self._forms) >= _MOST_FORMS:
                    self._forms.clear()
                self._forms[key] = self._form(rows, first, pieces.n_nodes(first))
            form = self._forms[key]
            if form is None:
                for piece in numbers.tolist():
                    alone[piece] = self._backend.plan(pieces.graph(self._ggml, read, piece))
            else:
                which[numbers] = len(forms)
                forms.append(form)
        return Formed(rows, forms, which, alone, of_graph=of_graph, name=partial(pieces.name, self._ggml, read))

    def _form(self, rows: Rows, piece: int, n_nodes: int) -> Form | None:
        """The form of a piece; None if it is bound where it lies, as a user's kernel has to be."""
        graph = graph_in(self._ggml, rows.of(piece), n_nodes)
        if any(node.op not in self._own for node in graph.nodes):
            return None
        try:
            return Form.of(self._backend.plan(graph), int(rows.n_groups[piece]))
        except KernelError:
            return None  # bound where it lies, it names the node

    def _begin(self, now: object) -> None:
        """Drops forms and plans that were bound for something else."""
        backend = self._backend
        self._forms.clear()
        self._plans.clear()
        self._known_for, self._patterns, self._are_formed = now, defaultdict(list), self._may_be_formed()
        self._own = frozenset(name for name, own in OWN.items() if backend.ops.get(name) is own)
        for fusion in backend.fusions if backend.fuses else ():
            numbers = tuple(self._ggml.op_numbers[name][0] for name in fusion.op_names)
            self._patterns[numbers[0]].append(numbers)

    def _may_be_formed(self) -> bool:
        """Whether nodes may be bound at home."""
        backend = self._backend
        if type(backend) is not Backend or backend.options.memory == "device" or engine() != "compiled":
            return False
        return all(fusion in FUSIONS for fusion in backend.fusions)
