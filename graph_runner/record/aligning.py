"""Which nodes of two graphs are the same: by names, by what they compute from what, and of the same shape."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graph_runner.diff.pairs import Key, Pairs
from graph_runner.record.forms import Form, FormNode

_NUMBERED = re.compile(r"(node|leaf)_\d+")  # names that ggml gives by place
_COPIED = re.compile(r"[^#]+#(.+)#\d+")  # what a scheduler calls a copy for another device
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
        found = Pairs.of(_Keys([_keys(a)]), _Keys([_keys(b)]), moves=True).devices
        pairs = _by_dataflow(a, b, dict(found[0]) if found else {})
    ne_a, ne_b = a.ne(sizes_a), b.ne(sizes_b)
    same, shapes = list[tuple[int, int]](), list[tuple[int, int]]()
    for i, j in sorted(pairs.items()):
        is_same = a.nodes[i].type == b.nodes[j].type and bool((ne_a[i] == ne_b[j]).all())
        (same if is_same else shapes).append((i, j))
    places = np.array(same, np.int64).reshape(-1, 2)
    alone_a, alone_b = ({*range(len(form.nodes))} - {*paired} for form, paired in ((a, pairs), (b, pairs.values())))
    return Aligned(places[:, 0], places[:, 1], tuple(shapes), tuple(sorted(alone_a)), tuple(sorted(alone_b)))


def _keys(form: Form) -> list[Key]:
    """Returns by what each node is known: op and name, or what it computes from what if ggml has named it by place."""
    keys: list[Key] = []
    for node in form.nodes:
        name: object = None if _NUMBERED.match(node.name) else node.name
        if name is None:
            name = node.params, *(_source(form, keys, each) for each in node.sources)
        keys.append((node.op, name))
    return keys


def _source(form: Form, keys: Sequence[Key], source: int | None) -> object:
    if source is None:
        return None
    return named(form.leaves[-1 - source].name) if source < 0 else hash(keys[source])


def named(leaf: str) -> str:
    """Returns the name of a leaf, also of a scheduler's copy of it."""
    copied = _COPIED.fullmatch(leaf)
    return copied[1] if copied else leaf


def _by_dataflow(a: Form, b: Form, pairs: dict[int, int]) -> dict[int, int]:
    """Returns the pairs, and those nodes besides that have no partner of their name, but one that computes the same op
    from the same sources."""
    numbers = {place: place_a for place_a, place in pairs.items()}  # those of a, for the nodes of b

    def key(form: Form, place: int, numbers: dict[int, int] | None) -> Key:
        node = form.nodes[place]
        sources = (
            named(form.leaves[-1 - each].name)
            if each is not None and each < 0
            else each if each is None or numbers is None else numbers.get(each, ("no partner", each))
            for each in node.sources
        )  # fmt: skip
        return node.op, node.type, *sources

    left = defaultdict[Key, list[int]](list)
    for place in range(len(a.nodes)):
        if place not in pairs:
            left[key(a, place, None)].append(place)
    for place in range(len(b.nodes)):
        if place not in numbers and left[found := key(b, place, numbers)]:
            numbers[place] = left[found].pop(0)
    return {place_a: place for place, place_a in numbers.items()}


def layers(form: Form) -> list[int | None]:
    """Returns the layer of each node: by the number in its name; of one that ggml has named by place, that of the node
    before; None outside of layers."""
    found: list[int | None] = []
    for node in form.nodes:
        if number := _LAYER.search(node.name):
            found.append(int(number[1]))
        else:
            found.append(found[-1] if found and _NUMBERED.match(node.name) else None)
    return found


def kind_of(node: FormNode) -> str:
    """Returns the op and the name of a node, with * in place of its layer: the same in all layers."""
    if _NUMBERED.match(node.name):
        return node.op
    return f"{node.op} {_LAYER.sub(lambda found: f'{found[0].removesuffix(found[1])}*', node.name)}"
