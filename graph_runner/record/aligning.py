"""Which nodes of two graphs are the same: by names, by what they compute from what, and of the same shape."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml import convert
from graph_runner.diff.pairs import Key, Pairs
from graph_runner.record.forms import Form, FormNode, Leaf

_NUMBERED = re.compile(r"(node|leaf)_\d+| \(")  # names that ggml gives by place, and of a view of what has no name
_BY_PLACE = re.compile(r"\b(node|leaf)_\d+")
_COPIES = "CONT"
_LAYER = re.compile(r"(?:-|_l)(\d+)\b")

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Aligned:
    """The nodes of two graphs that are the same, by place.

    a, b     of the same type and shape, in the order of the first graph
    shapes   pairs of nodes that are the same but have another type or shape
    alone_a, alone_b  nodes that have no partner
    """

    a: Places
    b: Places
    shapes: tuple[tuple[int, int], ...]
    alone_a: tuple[int, ...]
    alone_b: tuple[int, ...]


@dataclass(frozen=True)
class _Keys:
    keys: Sequence[Sequence[Key]]


def aligned(a: Form, sizes_a: Sequence[int], b: Form, sizes_b: Sequence[int]) -> Aligned:
    """Returns which nodes of two graphs are the same."""
    if a.nodes == b.nodes:
        pairs = {place: place for place in range(len(a.nodes))}
    else:
        shared = {named(leaf.name) for leaf in a.leaves} & {named(leaf.name) for leaf in b.leaves}
        found = Pairs.of(_Keys([_keys(a, shared)]), _Keys([_keys(b, shared)]), moves=True).devices
        pairs = _by_dataflow(a, b, dict(found[0]) if found else {}, shared)
        pairs = _by_dataflow(a, b, pairs | _by_name(a, b, pairs), shared)
    ne_a, ne_b = a.ne(sizes_a), b.ne(sizes_b)
    same, shapes = list[tuple[int, int]](), list[tuple[int, int]]()
    for i, j in sorted(pairs.items()):
        is_same = a.nodes[i].type == b.nodes[j].type and bool((ne_a[i] == ne_b[j]).all())
        (same if is_same else shapes).append((i, j))
    places = np.array(same, np.int64).reshape(-1, 2)
    alone_a, alone_b = ({*range(len(form.nodes))} - {*paired} for form, paired in ((a, pairs), (b, pairs.values())))
    return Aligned(places[:, 0], places[:, 1], tuple(shapes), tuple(sorted(alone_a)), tuple(sorted(alone_b)))


def _keys(form: Form, shared: AbstractSet[str]) -> list[Key]:
    """Returns by what each node is known: op and name, or what it computes from what if ggml has named it by place."""
    keys: list[Key] = []
    for node in form.nodes:
        name: object = None if _NUMBERED.match(node.name) else _BY_PLACE.sub(r"\1", node.name)
        if name is None:
            name = node.params, *(_source(form, keys, each, shared) for each in node.sources)
        keys.append((node.op, name))
    return keys


def _source(form: Form, keys: Sequence[Key], source: int | None, shared: AbstractSet[str]) -> object:
    if source is None:
        return None
    return _leaf(form.leaves[-1 - source], shared) if source < 0 else hash(keys[source])


def _leaf(leaf: Leaf, shared: AbstractSet[str]) -> object:
    """Returns by what a leaf is known: its name, or its type if only one of two graphs has a leaf of that name. An
    older llama.cpp has not named all that it reads."""
    name = named(leaf.name)
    return name if name in shared else (leaf.type,)


def named(leaf: str) -> str:
    """Returns the name of a leaf, also of a scheduler's copy of it."""
    return convert.copied_name(leaf) or leaf


def _by_dataflow(a: Form, b: Form, pairs: dict[int, int], shared: AbstractSet[str]) -> dict[int, int]:
    """Returns the pairs, and those nodes besides that have no partner of their name, but one that computes the same op
    from the same sources. A copy that only one graph makes is taken for what it copies."""
    numbers = {place: place_a for place_a, place in pairs.items()}  # those of a, for the nodes of b
    while True:
        left = defaultdict[Key, list[int]](list)
        of_a = {place: place for place in numbers.values()}
        for place in range(len(a.nodes)):
            if place not in of_a:
                left[_read_by(a, place, of_a, shared)].append(place)
        n = len(numbers)
        for place in range(len(b.nodes)):
            if place not in numbers and left[found := _read_by(b, place, numbers, shared)]:
                numbers[place] = left[found].pop(0)
        if n == len(numbers):
            return {place_a: place for place, place_a in numbers.items()}


def _by_name(a: Form, b: Form, pairs: Mapping[int, int]) -> dict[int, int]:
    """Returns those nodes without a partner that have the same name and type, though another op: one graph computes in
    several nodes what the other does in one. The last node of a name has what the name stands for."""
    last = [
        {
            (node.name, node.type): place
            for place, node in enumerate(form.nodes)
            if place not in paired and not _NUMBERED.match(node.name)
        }
        for form, paired in ((a, {*pairs}), (b, {*pairs.values()}))
    ]
    return {last[0][key]: place for key, place in last[1].items() if key in last[0]}


def _read_by(form: Form, place: int, numbers: Mapping[int, int], shared: AbstractSet[str]) -> Key:
    """Returns the op and the type of a node, and what it reads, in numbers that nodes of both graphs have."""
    node, read = form.nodes[place], list[object]()
    for source in node.sources:
        while source is not None and source >= 0 and source not in numbers and form.nodes[source].op == _COPIES:
            source = form.nodes[source].sources[0]
        if source is None or source >= 0:
            read.append(None if source is None else numbers.get(source, ("no partner", id(form), source)))
        else:
            read.append(_leaf(form.leaves[-1 - source], shared))
    return node.op, node.type, *read


def layers(names: Iterable[str]) -> list[int | None]:
    """Returns the layer of each node of a graph, from the names in order: by the number in its name; of one that ggml
    has named by place, that of the node before; None outside of layers."""
    found: list[int | None] = []
    for name in names:
        if number := _LAYER.search(name):
            found.append(int(number[1]))
        else:
            found.append(found[-1] if found and _NUMBERED.match(name) else None)
    return found


def kind_of(node: FormNode) -> str:
    """Returns the op and the name of a node, with * in place of its layer: the same in all layers."""
    if _NUMBERED.match(node.name):
        return node.op
    return f"{node.op} {_LAYER.sub(lambda found: f'{found[0].removesuffix(found[1])}*', node.name)}"
