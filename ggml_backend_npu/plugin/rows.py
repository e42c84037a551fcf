"""Rows of nodes: what a node's binding may depend on, in numbers that do not say where its memory lies.

Nodes whose rows are equal are of one form (`plugin.forms`). What memory they share with each other is in the rows;
where that begins is apart from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.graph_read import (
    DATA,
    LOW,
    N_SRC,
    NB,
    NE,
    OP,
    PARAMS_END,
    ROW,
    VIEW_OFFS,
    VIEW_SRC,
    GraphRead,
    int64s,
)
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ir import PARAMS_BYTES, Graph, Memory, Node, Tensor
from ggml_backend_npu.ir.graph import Dims
from ggml_backend_npu.ir.sharing import group_spans
from quant.kernels.jit import callback, inlined
from quant.kernels.late import types
from quant.kernels.records import shared_record_at

Ints = NDArray[np.int64]

# words of a row of a form: of a tensor its type, ne, nb, the group of memory that it lies in, where its memory begins
# there, how long that is, where the tensor begins in it, and the place of the node in the form that makes it; of a node
# the words of its op and params, and how many sources it has
_WORDS = 14
_GROUP, _AT, _SIZE, _OFFSET, _MADE = 9, 10, 11, 12, 13
_PARAMS = PARAMS_END - OP + 1
_NONE = -1  # type of a source that a node leaves out, and group of a tensor without memory


class _Forming(NamedTuple):
    """What `_form` is given, and gives. Lists are addresses of int64.

    n_pieces    pieces, each [begin, end) of the computing nodes
    n_slots     a power of 2
    pieces      begin and end of each
    computing, src, made, root, tensors  as in `GraphRead`
    places      of each tensor its place among the computing nodes, or -1
    blocks      of each type, the elements and the bytes of a block
    extra       tensors that are read of pieces of more than one node, or of one that may be fused: number, and the
                place of the node in its piece
    extra_ends  of each piece, where its extras end
    rows        the rows of all pieces
    row_ends    of each piece, where its rows end
    bases       where the groups of all pieces begin
    base_ends   of each piece, where its groups end
    like        of each piece the first one that has the same rows
    spans       begin, end, group, order for each row of a piece: memory to work in
    slots       a hash table of pieces that have no like before them: 1 + their number, or 0
    """

    n_pieces: int
    n_slots: int
    pieces: int
    computing: int
    src: int
    made: int
    root: int
    tensors: int
    places: int
    blocks: int
    extra: int
    extra_ends: int
    rows: int
    row_ends: int
    bases: int
    base_ends: int
    like: int
    spans: int
    slots: int


@inlined
def _nbytes(blocks: int, tensor: Any) -> Any:
    """ggml_nbytes of a tensor, by its words."""
    block = int64s(blocks + 16 * (tensor[0] & LOW), 2)
    for k in range(4):
        if tensor[NE + k] <= 0:
            return types.int64(0)
    n = block[1] + (tensor[NE] // block[0] - 1) * tensor[NB]
    for k in range(1, 4):
        n += (tensor[NE + k] - 1) * tensor[NB + k]
    return n


@inlined
def _put(of: Any, number: int, row: int, spans: int, n: int) -> Any:
    """Writes the row of a tensor, but for its group and its maker, and its memory as span n; -1 has none."""
    into, span = int64s(row, _WORDS), int64s(spans + 32 * n, 4)
    for k in range(_WORDS):
        into[k] = 0
    if number < 0:
        into[0] = into[_GROUP] = into[_MADE] = _NONE
        span[0] = span[1] = 0
        return
    tensor = int64s(of.tensors + 8 * ROW * number, ROW)
    lies = int64s(of.tensors + 8 * ROW * int64s(of.root, number + 1)[number], ROW)
    for k in range(8):
        into[1 + k] = tensor[NE + k]
    into[0], into[_MADE] = tensor[0] & LOW, _NONE
    offset = tensor[VIEW_OFFS] if tensor[VIEW_SRC] != 0 else types.int64(0)
    if tensor[DATA] == 0:
        into[_OFFSET] = offset
        span[0] = span[1] = 0
    elif lies[DATA] != 0 and lies[DATA] + offset == tensor[DATA]:
        span[0], into[_SIZE], into[_OFFSET] = lies[DATA], _nbytes(of.blocks, lies), offset
    else:
        span[0], into[_SIZE] = tensor[DATA], _nbytes(of.blocks, tensor)
    span[1] = span[0] + into[_SIZE]


@inlined
def _group(spans: int, n: int, bases: int) -> Any:
    """Groups n spans of memory that overlap; groups are numbered as they appear, and spans without memory have none.
    Writes where each group begins; returns how many there are."""
    group_spans(spans, n)
    span, begins, n_groups = int64s(spans, 4 * n), int64s(bases, n), 0
    for i in range(n):
        span[4 * i + 3] = _NONE
    for i in range(n):
        if span[4 * i] != 0:
            known = 4 * span[4 * i + 2] + 3
            if span[known] == _NONE:
                span[known], begins[n_groups] = n_groups, span[4 * i]
                n_groups += 1
            begins[span[known]] = min(begins[span[known]], span[4 * i])
    for i in range(n):
        span[4 * i + 2] = _NONE if span[4 * i] == 0 else span[4 * span[4 * i + 2] + 3]
    return n_groups


@inlined
def _first_like(of: Any, piece: int, first: int, n: int) -> Any:
    """The first piece with the n words of rows that begin at `first`: those of a piece."""
    words, slots = int64s(first, n), int64s(of.slots, of.n_slots)
    ends = int64s(of.row_ends, of.n_pieces)
    slot = n
    for k in range(n):
        slot = (slot ^ words[k]) * 0x9E3779B97F4A7C1
    slot = (slot >> 24) & (of.n_slots - 1)
    while slots[slot] != 0:
        other = slots[slot] - 1
        begin = ends[other - 1] if other > 0 else types.int64(0)
        others = int64s(of.rows + 8 * _WORDS * begin, _WORDS * (ends[other] - begin))
        if len(others) == n:
            k = 0
            while k < n and others[k] == words[k]:
                k += 1
            if k == n:
                return other
        slot = (slot + 1) & (of.n_slots - 1)
    slots[slot] = piece + 1
    return types.int64(piece)


@callback(types.int64(types.int64))
def _form(p: int) -> Any:
    """Fills the lists of the `_Forming` at an address. Returns 0."""
    of = shared_record_at(p, _Forming)
    pieces, extra_ends = int64s(of.pieces, 2 * of.n_pieces), int64s(of.extra_ends, of.n_pieces)
    ends, base_ends = int64s(of.row_ends, of.n_pieces), int64s(of.base_ends, of.n_pieces)
    like = int64s(of.like, of.n_pieces)
    row, base, extra = of.rows, of.bases, types.int64(0)
    for piece in range(of.n_pieces):
        begin, end = pieces[2 * piece], pieces[2 * piece + 1]
        first, n = row, 0
        computing = int64s(of.computing, end)
        for place in range(begin, end):
            node = computing[place]
            src = int64s(of.src + 8 * N_SRC * node, N_SRC)
            n_src = N_SRC
            while n_src > 0 and src[n_src - 1] < 0:
                n_src -= 1
            head, words = int64s(row, _WORDS), int64s(of.tensors + 8 * (ROW * node + OP), _PARAMS)
            for k in range(_WORDS):
                head[k] = words[k] if k < _PARAMS else 0
            head[_PARAMS - 1] &= LOW
            head[_PARAMS] = n_src
            row += 8 * _WORDS
            span = int64s(of.spans + 32 * n, 2)
            span[0] = span[1] = 0
            n += 1
            for k in range(-1, n_src):
                number = node if k < 0 else src[k]
                _put(of, number, row, of.spans, n)
                if k >= 0 and number >= 0:
                    maker = int64s(of.places, number + 1)[int64s(of.made, number + 1)[number]]
                    if begin <= maker < end:
                        int64s(row, _WORDS)[_MADE] = maker - begin
                row += 8 * _WORDS
                n += 1
        while extra < extra_ends[piece]:
            number_and_place = int64s(of.extra + 16 * extra, 2)
            _put(of, number_and_place[0], row, of.spans, n)
            int64s(row, _WORDS)[_MADE] = number_and_place[1]
            row += 8 * _WORDS
            n += 1
            extra += 1
        n_groups = _group(of.spans, n, base)
        begins, spans = int64s(base, n_groups), int64s(of.spans, 4 * n)
        for i in range(n):
            if spans[4 * i] != 0:
                here, group = int64s(first + 8 * _WORDS * i, _WORDS), spans[4 * i + 2]
                here[_GROUP], here[_AT] = group, spans[4 * i] - begins[group]
        base += 8 * n_groups
        ends[piece], base_ends[piece] = (row - of.rows) // (8 * _WORDS), (base - of.bases) // 8
        like[piece] = _first_like(of, piece, first, (row - first) // 8)
    return types.int64(0)


@dataclass(frozen=True, eq=False)
class Pieces:
    """How a graph is cut.

    cuts        (piece, 2): begin and end of each among the computing nodes. Nodes that may be fused stay together
    extra       (extra, 2): of pieces that may be fused, the number of a tensor that is read of a node after the piece,
                and the place of that node in the piece
    extra_ends  of each piece, where its extras end
    """

    cuts: Ints
    extra: Ints
    extra_ends: Ints

    def n_nodes(self, piece: int) -> int:
        """How many nodes a piece has."""
        begin, end = self.cuts[piece]
        return int(end - begin)

    def name(self, ggml: Ggml, read: GraphRead, piece: int) -> str:
        """Names the nodes of a piece, as a node and a span name themselves. The graph that was read must still be
        there."""
        nodes = read.at[read.computing[slice(*self.cuts[piece])]].tolist()
        ops, last = [convert.op_name(ggml, node) for node in nodes], convert.name_of(nodes[-1])
        return f"{' '.join(ops)} {'node' if len(ops) == 1 else 'up to'} {last!r}"

    def graph(self, ggml: Ggml, read: GraphRead, piece: int) -> Graph:
        """A piece as a graph of its own, where its memory lies. The graph that was read must still be there."""
        begin, end = self.cuts[piece].tolist()
        extra = self.extra[self.extra_ends[piece - 1] if piece else 0 : self.extra_ends[piece]]
        return read.part(ggml, (begin, end), extra)

    @staticmethod
    def of(read: GraphRead, patterns: Mapping[int, Sequence[tuple[int, ...]]]) -> Pieces:
        """Cuts a graph.

        patterns  by the number of their first op, the numbers of the ops that may be fused
        """
        ops: list[int] = (read.tensors[read.computing, OP] & LOW).tolist()
        begins, fusible = np.ones(len(ops), np.bool_), np.zeros(len(ops), np.bool_)
        for start, op in enumerate(ops):
            for pattern in patterns.get(op, ()):
                end = start + len(pattern)
                if tuple(ops[start:end]) == pattern:
                    begins[start + 1 : end] = False
                    fusible[start:end] = True
        first = np.flatnonzero(begins)
        cuts = np.stack([first, np.append(first[1:], len(ops))[: len(first)]], axis=1)
        extra, extra_ends = [np.empty((0, 2), np.int64)], np.zeros(len(cuts), np.int64)
        if fusible.any():
            src = read.src[read.computing]
            maker = np.where(src < 0, -1, read.made[src])
            for piece in np.flatnonzero(fusible[first]).tolist():
                begin, end = cuts[piece].tolist()
                for place in range(begin, end):
                    reader, which = np.nonzero(maker == read.computing[place])
                    outside = (reader < begin) | (reader >= end)
                    after = read.read_beyond[read.made[read.read_beyond] == read.computing[place]]
                    found = np.unique(np.concatenate([src[reader[outside], which[outside]], after]))
                    extra.append(np.stack([found, np.full(len(found), place - begin)], axis=1))
                    extra_ends[piece] += len(found)
        return Pieces(cuts, np.concatenate(extra), np.cumsum(extra_ends))


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of pieces.

    rows       of all pieces, (row, word)
    ends       of each piece, where its rows end
    bases      the addresses at which the groups of memory of all pieces begin
    base_ends  of each piece, where its groups end
    n_groups   of each piece, how many groups of memory it has
    alike      pieces that have the same rows: the bytes of these, the first piece, and all
    """

    rows: Ints
    ends: Ints
    bases: Ints
    base_ends: Ints
    n_groups: Ints
    alike: list[tuple[bytes, int, Ints]]

    def of(self, piece: int) -> Ints:
        """The rows of a piece."""
        return self.rows[self.ends[piece - 1] if piece else 0 : self.ends[piece]]

    @staticmethod
    def read(read: GraphRead, blocks: Ints, pieces: Pieces) -> Rows:
        """The rows of the pieces of a graph. `blocks`: of each type, the elements and the bytes of a block."""
        n, computing = len(pieces.cuts), read.computing
        of_a_piece = np.diff(pieces.cuts)[:, 0] * (2 + N_SRC) + np.diff(pieces.extra_ends, prepend=0)
        most = int(of_a_piece.sum())
        rows, ends = np.empty((most, _WORDS), np.int64), np.empty(n, np.int64)
        bases, base_ends = np.empty(most, np.int64), np.empty(n, np.int64)
        like, spans = np.empty(n, np.int64), np.empty((of_a_piece.max(initial=1), 4), np.int64)
        slots = np.zeros(2 << n.bit_length(), np.int64)
        lists = (
            pieces.cuts, computing, read.src, read.made, read.root, read.tensors, read.places, blocks, pieces.extra,
            pieces.extra_ends, rows, ends, bases, base_ends, like, spans, slots,
        )  # fmt: skip
        of = np.array(_Forming(n, slots.size, *(each.ctypes.data for each in lists)), np.int64)
        _form(of.ctypes.data)
        alike = []
        for first in np.unique(like).tolist():
            text = rows[ends[first - 1] if first else 0 : ends[first]].tobytes()
            alike.append((text, first, np.flatnonzero(like == first)))
        return Rows(rows[: ends[-1] if n else 0], ends, bases, base_ends, np.diff(base_ends, prepend=0), alike)


FAR = 60  # no memory lies from 2^60 on
HOME = 48  # bits of what a group of memory may span there


def home(group: int) -> int:
    """The address at which a group of memory lies in `graph_in`: one that does not exist."""
    return (1 << FAR) + (group << HOME)


def _node_in(ggml: Ggml, rows: list[list[int]]) -> tuple[Node, tuple[int | None, ...]]:
    """The node of its rows, at home, and the place of the node that makes each of its sources."""
    head, dst, *src = rows
    words = np.array(head[:_PARAMS], np.int64).tobytes()
    op, params = int.from_bytes(words[:4], "little"), words[4 : 4 + PARAMS_BYTES]
    into = _tensor_in(ggml, dst, writable=True)
    assert into is not None
    node = convert.node_of(ggml, op, params, into, [_tensor_in(ggml, each) for each in src])
    return node, tuple(each[_MADE] if each[_MADE] >= 0 else None for each in src)


def _tensor_in(ggml: Ggml, row: list[int], *, writable: bool = False) -> Tensor | None:
    if row[0] == _NONE:
        return None
    group, at, size, offset = row[_GROUP : _OFFSET + 1]
    memory = Memory(0 if group == _NONE else home(group) + at, size, writable)
    return Tensor("", ggml.types[row[0]].name, _dims(row[1:5]), _dims(row[5:9]), memory, offset)


def _dims(four: Sequence[int]) -> Dims:
    a, b, c, d = four
    return a, b, c, d


def graph_in(ggml: Ggml, rows: Ints, n_nodes: int) -> Graph:
    """The nodes of a form as a graph of their own, at home. What others read of them is read after its end."""
    lists: list[list[int]] = rows.tolist()
    nodes, producers, at = [], [], 0
    for _ in range(n_nodes):
        end = at + 2 + lists[at][_PARAMS]
        node, makers = _node_in(ggml, lists[at:end])
        nodes.append(node)
        producers.append(makers)
        at = end
    beyond: list[list[Tensor]] = [[] for _ in nodes]
    for row in lists[at:]:
        tensor = _tensor_in(ggml, row)
        assert tensor is not None
        beyond[row[_MADE]].append(tensor)
    return Graph(tuple(nodes), tuple(producers), tuple(map(tuple, beyond)))
