"""Runs a model with the NPU and tells which of its nodes the NPU computes, why the CPU computes the others, what that
costs in graph splits and copies, and which ops to write next."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import ggml_backend_npu
from ggml_backend_npu import Op
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.judging.results import types_of
from graph_runner.run.session import LEFT_BY_THE_SCHEDULER, Session, Settings, context_for
from graph_runner.tools.prediction import Prediction, Timer

Splits = tuple[int, int]

TAKEN_WITH_ALL = "taken with --all"

_VIEWS = frozenset({"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})


@dataclass(frozen=True)
class RanNode:
    """A node of a graph, as it ran.

    types     of its sources and of its output: "q8_0 i32 -> f32"
    on_npu    whether the NPU computed it
    why       why the CPU computed it
    wants     whether a kernel would bring it to the NPU: no kernel takes it, but the profile does
    computes  whether there was anything to compute; an empty node only counts in splits
    """

    op: str
    types: str
    on_npu: bool
    why: str | None
    wants: bool
    computes: bool


@dataclass
class RanGraph:
    """A graph, as it ran.

    nodes   every node but views, in order
    timer   their times, if the profile has a clock
    splits  the number of splits of such a graph, as reported by llama.cpp's scheduler
    copied  bytes copied while it ran, by direction; empty with host memory
    """

    nodes: list[RanNode] = field(default_factory=list)
    splits: int = 0
    copied: dict[str, int] = field(default_factory=dict)
    timer: Timer | None = None

    @property
    def n_nodes(self) -> int:
        """How many nodes had something to compute."""
        return sum(node.computes for node in self.nodes)

    @property
    def n_on_npu(self) -> int:
        """How many of them the NPU computed."""
        return sum(node.computes and node.on_npu for node in self.nodes)

    def splits_with(self, ops: Collection[str] = ()) -> int:
        """Returns the number of splits by the scheduler's rule: neighbours on one device are one split.

        ops  ops that the NPU could compute as well
        """
        return 1 + sum(a != b for a, b in pairwise(self._on_npu(ops)))

    def _on_npu(self, ops: Collection[str]) -> list[bool]:
        return [node.on_npu or (node.wants and node.op in ops) for node in self.nodes]

    def predicted(self, ops: Collection[str] = ()) -> Prediction | None:
        """Returns the time by the profile's clock, None without one; `ops` as in `splits_with`."""
        if self.timer is None:
            return None
        return self.timer.predict([node.op for node in self.nodes], self._on_npu(ops))

    def saves(self, ops: Collection[str]) -> float:
        """Returns the seconds that kernels for some ops would save; 0 without a clock."""
        now, then = self.predicted(), self.predicted(ops)
        return 0.0 if now is None or then is None else now.total - then.total


@dataclass(frozen=True)
class Gain:
    """What kernels for some ops would bring, each for a prompt and for a single token: the splits then, how many fewer
    that is, and the seconds saved by the profile's clock (0 without one)."""

    ops: tuple[str, ...]
    splits: Splits
    removes: Splits
    saves: tuple[float, float] = (0.0, 0.0)

    @property
    def rank(self) -> tuple[float, ...]:
        """The sort key: seconds saved, then splits removed, those of a token before those of a prompt."""
        return *self.saves[::-1], *self.removes[::-1]


@dataclass
class Coverage:
    """Which nodes of one model the NPU computes.

    prompt    the graph of the prompt's first batch
    token     the graph of one token after it
    missing   ops that a kernel could bring to the NPU, each with the types that the kernel would have to take
    with_all  missing ops that have a kernel already, which --all turns on
    single    what each missing op would bring by itself, the best first; below zero it adds splits
    joint     sets of missing ops, each the smallest found that removes so many splits
    """

    model: str
    description: str
    ggml: str
    profile: str
    memory: str
    device_type: str
    settings: Settings
    text: str
    n_prompt: int
    prompt: RanGraph
    token: RanGraph
    missing: dict[str, list[str]]
    with_all: list[str]
    single: list[Gain]
    joint: list[Gain]

    def groups(self) -> dict[RanNode, tuple[int, int]]:
        """Returns nodes that are alike, those on the NPU first, with their number in the prompt's and in the token's
        graph."""
        prompt, token = (Counter(node for node in graph.nodes if node.computes) for graph in (self.prompt, self.token))
        order = sorted(prompt | token, key=lambda node: (not node.on_npu, -prompt[node], -token[node], node.op))
        return {node: (prompt[node], token[node]) for node in order}

    @property
    def write_next(self) -> Gain | None:
        """The set of `joint` that saves the most seconds of a token per op by the clock, or without a clock removes the
        most splits; None if there is none."""
        timed = self.token.timer is not None

        def per_op(gain: Gain) -> float:
            return (gain.saves[1] if timed else gain.removes[1]) / len(gain.ops)

        best = max(self.joint, key=per_op, default=None)
        return None if best is None or (timed and per_op(best) <= 0) else best


class _Recorder:
    """The observer of a coverage: records every node and which device computed it."""

    def __init__(self, npu: Plugin) -> None:
        self._npu = npu
        self._n_graphs = 0
        self.begin()

    def begin(self) -> None:
        """Called before a graph."""
        clock = self._npu.backend.options.profile.clock
        self.nodes: list[RanNode] = []
        self.timer = None if clock is None else Timer(*clock)

    def before(self, address: int) -> bool:
        self._n_graphs = self._npu.statistics.graphs
        return True

    def after(self, address: int) -> None:
        op = convert.op_name(self._npu.ggml, address)
        if op in _VIEWS:
            return
        node = convert.node(self._npu.ggml, address)
        on_npu = self._npu.statistics.graphs != self._n_graphs
        backend = self._npu.backend
        kernel, profile = backend.kernel_refusal(node), backend.options.profile.refusal(node)
        if kernel is None and profile is None and not backend.offers(op):
            kernel = TAKEN_WITH_ALL
        why = "; ".join(filter(None, (kernel, profile))) or LEFT_BY_THE_SCHEDULER
        computes = convert.is_to_be_computed(self._npu.ggml, address) and node.dst.n_elements > 0
        if self.timer is not None:
            self.timer.add(node, computes=computes)
        wants = kernel is not None and profile is None
        self.nodes.append(RanNode(op, types_of(node), on_npu, None if on_npu else why, wants and not on_npu, computes))


def cover(model: Path, prompt: str, *, settings: Settings | None = None) -> Coverage:
    """Runs a prompt and one token with the default backend.

    settings  of the context; device and n_ctx are set here

    A prompt longer than one batch is cut off. Raises SessionError for a model or settings that llama.cpp refuses.
    """
    npu = ggml_backend_npu.register()
    recorder = _Recorder(npu)
    settings = replace(settings or Settings(), device="npu", n_ctx=context_for(prompt, 1))
    graphs = []
    with Session(model, settings, observer=recorder) as session:
        tokens = session.tokenize(prompt)[: session.n_batch]
        for place, part in enumerate(([tokens], None)):
            recorder.begin()
            before = _copied(npu)
            session.decode(*(part or _next(session, tokens)))
            copied = {direction: n - before[direction] for direction, n in _copied(npu).items()}
            graphs.append(RanGraph(recorder.nodes, _splits(session)[place], copied, recorder.timer))
        description = session.description
    missing: dict[str, set[str]] = defaultdict(set)
    with_all = set()
    for node in (*graphs[0].nodes, *graphs[1].nodes):
        if node.wants:
            missing[node.op].add(node.types)
        if node.why == TAKEN_WITH_ALL:
            with_all.add(node.op)

    def gain(*ops: str) -> Gain:
        """With host memory, applies the scheduler's rule. With the device's own memory, the scheduler also considers
        where weights and caches lie, so llama.cpp is asked."""
        if npu.memory is None:
            after = graphs[0].splits_with(ops), graphs[1].splits_with(ops)
        else:
            with (
                npu.backend.ops.having(*(Op(name, lambda dst: None) for name in ops)),
                Session(model, replace(settings, weights=False)) as session,
            ):
                after = _splits(session)
        removes = graphs[0].splits - after[0], graphs[1].splits - after[1]
        return Gain(tuple(sorted(ops)), after, removes, (graphs[0].saves(ops), graphs[1].saves(ops)))

    single, joint = _gains(tuple(sorted(missing)), gain)
    return Coverage(
        model=str(model),
        description=description,
        ggml=npu.ggml.version,
        profile=npu.backend.options.profile.name,
        memory="host" if npu.memory is None else "device",
        device_type=npu.backend.options.device_type,
        settings=settings,
        text=prompt,
        n_prompt=len(tokens),
        prompt=graphs[0],
        token=graphs[1],
        missing={op: sorted(types) for op, types in sorted(missing.items())},
        with_all=sorted(with_all),
        single=single,
        joint=joint,
    )


def _gains(ops: tuple[str, ...], gain: Callable[..., Gain]) -> tuple[list[Gain], list[Gain]]:
    """Returns the gain of each op by itself; and that of sets: the best op, the best pair with it, and all ops with the
    least important one removed, again and again."""
    single = sorted((gain(op) for op in ops), key=_rank, reverse=True)
    found = single[:1]
    if len(ops) > 1:
        best = single[0].ops
        found.append(max((gain(*best, op) for op in ops if op not in best), key=_rank))
    larger = []
    while len(ops) > 2:
        larger.append(gain(*ops))
        ops = max((gain(*(op for op in ops if op != without)) for without in ops), key=_rank).ops
    joint: list[Gain] = []
    most: tuple[float, ...] = (0.0,) * 4
    for each in [*found, *reversed(larger)]:
        if each.rank > most:
            most = each.rank
            joint.append(each)
    return single, joint


def _rank(gain: Gain) -> tuple[float, ...]:
    return gain.rank


def _next(session: Session, tokens: list[int]) -> list[list[int]]:
    """Returns the token after a prompt; the prompt's last one, if the model makes embeddings."""
    return session.next_tokens() if session.n_steps(1) > 1 else [tokens[-1:]]


def _splits(session: Session) -> Splits:
    """Returns the splits of the prompt's graph and of a token's; llama.cpp gives one number if they are equal."""
    first, *others = (int(n) for n in (session.splits or "0").split(" / "))
    return first, others[0] if others else first


def _copied(npu: Plugin) -> dict[str, int]:
    return dict(npu.memory.transfers.bytes) if npu.memory is not None else {}
