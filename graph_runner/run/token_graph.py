"""The graph of one token, taken from llama.cpp once and then run without it.

llama.cpp builds the graph and hands it to the NPU, which keeps it: nodes bound to their calls, over llama.cpp's weights
and caches. For a further token, this module sets the inputs as llama.cpp would (the token, its position, where its key
and value go, the masks), runs the plan and reads the logits. If the cache has grown beyond what the graph reads,
llama.cpp makes a new graph; it first decodes the tokens since the last one, for which the NPU computes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Graph, Plan, Tensor
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.graph_read import GraphReader
from graph_runner.run.session import Session, SessionError

Array = NDArray[Any]


@dataclass(frozen=True)
class Step:
    """A token of a sequence.

    token     its number in the vocabulary
    position  its position in the sequence
    window    how many tokens it sees in layers that have a window, 0 if there are none
    """

    token: int
    position: int
    window: int


Rule = Callable[["Input", Step], Array]


@dataclass
class Input:
    """A tensor that is set before the graph runs.

    seen     what llama.cpp set it to
    n_cells  how many cells the graph reads of the cache that it writes to or that it is a mask of
    rules    the rules that would have set it to the same
    """

    tensor: Tensor
    seen: Array
    n_cells: int
    rules: list[Rule]


def _token(_: Input, now: Step) -> Any:
    return now.token


def _position(found: Input, now: Step) -> Any:
    """One position, or the four of M-RoPE."""
    return np.resize([now.position, now.position, now.position, 0], found.seen.size)


def _always_the_same(found: Input, _: Step) -> Any:
    return found.seen


def _cell(found: Input, now: Step) -> Any:
    """Returns rows of a cache, or elements of one whose values are transposed."""
    return found.seen - found.seen.flat[0] + now.position % found.n_cells


def _mask(value: Callable[[Array, Step], Array]) -> Rule:
    """Returns the rule of a mask.

    value  returns, by position, what is added to a visible position's score
    """

    def rule(found: Input, now: Step) -> Any:
        held = now.position - (now.position - np.arange(found.n_cells)) % found.n_cells  # position that a cell holds
        return np.where(held >= 0, value(held, now), -np.inf)

    return rule


def _all(held: Array, _: Step) -> Any:
    return np.zeros(held.shape)


def _window(held: Array, now: Step) -> Any:
    return np.where(now.position - held < now.window, 0, -np.inf)


def _chunk(held: Array, now: Step) -> Any:
    return np.where(held >= now.position - now.position % max(1, now.window), 0, -np.inf)


def _alibi(held: Array, now: Step) -> Any:
    return held - now.position


# which of some rules a model has is seen in what llama.cpp sets
_RULES: dict[str, tuple[Rule, ...]] = {
    "inp_tokens": (_token,),
    "inp_pos": (_position,),
    "attn_inp_k_idxs": (_cell,),
    "attn_inp_v_idxs": (_cell,),
    "attn_inp_kq_mask": tuple(map(_mask, (_all, _window, _chunk, _alibi))),
    "attn_inp_k_rot": (_always_the_same,),
    "attn_inp_v_rot": (_always_the_same,),
    "out_ids": (_always_the_same,),
    "rs_s_copy": (_always_the_same,),
}


def _n_cells(tensor: Tensor, seen: Array, graph: Graph) -> int:
    if tensor.name == "attn_inp_kq_mask":
        return tensor.ne[0]
    for node in graph.nodes:
        if node.op == "SET_ROWS" and node.src[1] is not None and node.src[1].address == tensor.address:
            return int(seen.flat[1] - seen.flat[0]) if seen.size > 1 else node.dst.ne[1]
    return 0


class TokenGraph:
    """A graph that llama.cpp handed over, and the inputs it had set. Raises SessionError for an input that is set in a
    way that is not known here."""

    def __init__(self, graph: Graph, bound: Plan, inputs: list[tuple[Tensor, Array]], then: Step) -> None:
        self.plan = bound
        self._then = then
        self._inputs = [
            Input(tensor, seen, _n_cells(tensor, seen, graph), [*_RULES.get(tensor.name, ())])
            for tensor, seen in inputs
        ]
        for found in self._inputs:
            found.rules = [rule for rule in found.rules if np.array_equal(_set(found, rule, then), found.seen)]
            if not found.rules:
                raise SessionError(f"input {found.tensor.name!r}: how llama.cpp sets it is not known here")
        outputs = [node.dst for node in graph.nodes if node.name == "result_output"]
        if not outputs:
            raise SessionError("the graph of a token has no node 'result_output'")
        self._output = outputs[-1]

    def set(self, now: Step) -> bool:
        """Sets its inputs for a token. Returns whether they are those that llama.cpp would set."""
        for found in self._inputs:
            is_mask = found.tensor.name == "attn_inp_kq_mask"
            if is_mask and self._then.position < found.n_cells <= now.position:
                return False  # there is more in the cache, or its cells are taken again
            values, *others = (_set(found, rule, now) for rule in found.rules)
            if any(not np.array_equal(values, other) for other in others):
                return False
            found.tensor.view()[...] = values
        return True

    def logits(self) -> NDArray[np.float32]:
        """Returns a copy of the logits of the last run, (n_vocab,)."""
        return np.array(self._output.view(), np.float32).reshape(-1)


def _set(found: Input, rule: Rule, now: Step) -> Array:
    return np.broadcast_to(rule(found, now), found.seen.shape).astype(found.seen.dtype)


class GraphRunner:
    """Decodes with the graph of one token, for a session whose nodes are all on the NPU with host memory.

    n_asked  tokens for which llama.cpp made a graph
    n_run    tokens that were computed without llama.cpp

    Raises SessionError for a session without the NPU, or with the device's own memory, or of a model with an encoder.
    """

    def __init__(self, session: Session) -> None:
        if session.npu is None or session.npu_context is None or session.npu.memory is not None:
            raise SessionError("a graph is run without llama.cpp on the NPU with host memory alone")
        if session.encodes:
            raise SessionError("a graph is run without llama.cpp in models that only decode; this one has an encoder")
        self._session, self._npu, self._context = session, session.npu, session.npu_context
        self._graph: TokenGraph | None = None
        self._position = 0
        self._untold: list[int] = []
        self.n_asked = self.n_run = 0
        self.nodes, self.spans = Counter[str](), Counter[str]()

    def begin(self, tokens: list[int]) -> list[int]:
        """Returns the tokens to decode first: those of the prompt."""
        return tokens

    def decode(self, tokens: list[int]) -> None:
        """Runs tokens through the model, after the previous ones. Raises SessionError if that cannot be done without
        llama.cpp, or if llama.cpp fails."""
        for token in tokens:
            now = Step(token, self._position, self._session.window)
            if self._graph is not None and self._graph.set(now):
                with self._context.team.working():
                    self._graph.plan.run()
                self._count(self._graph.plan)
                self._untold.append(token)
                self.n_run += 1
            else:
                self._ask(now)
                self.n_asked += 1
            self._position += 1

    def logits(self) -> NDArray[np.float32]:
        """Returns a copy of the logits of the last token, (n_vocab,)."""
        if self._graph is None:
            return self._session.logits()
        return self._graph.logits()

    def ends(self, token: int) -> bool:
        """Whether a token ends the text."""
        return self._session.ends(token)

    def _ask(self, now: Step) -> None:
        """Has llama.cpp make a graph for a token, computes it and keeps it."""
        with self._context.computing(lambda _: None):
            for token in self._untold:
                self._session.decode([token])
        self._untold.clear()
        taken: list[tuple[Graph, Plan, list[tuple[Tensor, Array]]]] = []

        def compute(address: int) -> None:
            inputs = [(tensor, tensor.view().copy()) for tensor in convert.inputs(self._npu.ggml, address)]
            graph = GraphReader(self._npu.ggml)(address).graph(self._npu.ggml)
            bound = self._npu.backend.plan(graph)
            bound.run()
            self._count(bound)
            taken.append((graph, bound, inputs))

        before, mine = self._session.nodes, self.nodes.copy()
        with self._context.computing(compute):
            self._session.decode([now.token])
        left = (self._session.nodes - before) - (self.nodes - mine)
        if left:
            op, count = left.most_common(1)[0]
            raise SessionError(f"{count} {op} nodes of a token are left to the CPU: {self._session.why_left(op)}")
        if len(taken) != 1:
            raise SessionError(f"llama.cpp hands a token over as {len(taken)} graphs, not as one")
        found = TokenGraph(*taken[0], now)
        self._graph = found if now.position else None  # at the first token recurrent states are cleared

    def _count(self, bound: Plan) -> None:
        self.nodes.update(bound.counts)
        self.spans.update(bound.fused)
