"""Which nodes of two graphs are the same, if settings give a model two graphs: flash attention on and off."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import accumulate
from typing import Protocol

from ggml_backend_npu import Tensor
from ggml_backend_npu.ggml.lib import Ggml
from graph_runner.diff.walks import Place, Walk
from graph_runner.judging.results import types_of

_NUMBERED = re.compile(r"(node|leaf)_\d+")  # names that ggml gives by place
_MOST = 8  # ops that are named

Key = tuple[object, ...]


class Keyed(Protocol):
    """Nodes by what each is known by, step by step."""

    @property
    def keys(self) -> Sequence[Sequence[Key]]:
        """The key of each node."""


class Listing(Walk):
    """An observer that observes no node, and notes by what each is known.

    keys  by step: op, name, types and ne of each node; of one without a name of its own what it computes, from what
    is_one_graph  whether the names that ggml gives by place are names too: both sides have the same graph, in which the
                  device has moved nodes
    """

    def __init__(self, ggml: Ggml, *, is_one_graph: bool = False) -> None:
        super().__init__(ggml)
        self._is_one_graph = is_one_graph
        self.keys: list[list[Key]] = [[]]
        self._made: dict[int, int] = {}  # digests of keys, by the nodes' addresses

    def next_step(self) -> None:
        super().next_step()
        self.keys.append([])

    def looks_at(self, place: Place, address: int) -> bool:
        read = self.read(address)
        node = read.node
        name: object = node.dst.name if self._is_one_graph else _name(node.dst)
        if name is None:
            pairs = zip(node.src, read.roots, strict=True)
            name = node.params, *(self._source(source, root) for source, root in pairs)
        key = node.op, name, types_of(node), node.dst.ne
        self.keys[-1].append(key)
        self._made[read.address] = hash(key)
        return False

    def _source(self, source: Tensor | None, root: int) -> object:
        """Returns what a source is known by: its name, or the node that computes it."""
        return None if source is None else (_name(source) or self._made.get(root), source.type, source.ne, source.nb)


def _name(tensor: Tensor) -> str | None:
    """Returns a tensor's name; None if it has none of its own."""
    return None if _NUMBERED.match(tensor.name) else tensor.name


def _moved(a: Sequence[Key], b: Sequence[Key], pairs: Mapping[int, int]) -> dict[int, int]:
    """Returns the places of the nodes that are the same and not yet among the pairs."""
    left = defaultdict[Key, list[int]](list)
    for place in sorted({*range(len(b))} - {*pairs.values()}):
        left[b[place]].append(place)
    return {place: left[key].pop(0) for place, key in enumerate(a) if place not in pairs and left[key]}


def _out_of_order(places: Sequence[int]) -> list[int]:
    """Those before which a larger one comes."""
    return [place for place, most in zip(places, accumulate(places, max), strict=True) if place < most]


@dataclass(frozen=True)
class Pairs:
    """The nodes of two graphs that are the same, by step and place; by default each is that at its own place.

    devices     by step: the place of the device's node, by that of the reference's
    references  the same, the other way round
    alone       the ops of the nodes that have no partner, of the reference's graphs and of the device's
    """

    devices: Sequence[Mapping[int, int]] | None = None
    references: Sequence[Mapping[int, int]] = ()
    alone: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))

    @classmethod
    def of(cls, reference: Keyed, device: Keyed, *, moves: bool = False) -> Pairs:
        """Returns the nodes of two runs that are the same and come in the same order.

        moves  whether those count too that one side has moved
        """
        devices: list[dict[int, int]] = []
        alone = Counter[str](), Counter[str]()
        for a, b in zip(reference.keys, device.keys, strict=True):
            matcher = SequenceMatcher(None, a, b, autojunk=False)
            pairs = {m.a + i: m.b + i for m in matcher.get_matching_blocks() for i in range(m.size)}
            if moves:
                pairs |= _moved(a, b, pairs)
            devices.append(pairs)
            for n, keys, paired in ((0, a, {*pairs}), (1, b, {*pairs.values()})):
                alone[n].update(str(key[0]) for place, key in enumerate(keys) if place not in paired)
        return cls(devices, [{b: a for a, b in pairs.items()} for pairs in devices], alone)

    @property
    def differ(self) -> bool:
        """Whether a node has no partner."""
        return any(self.alone)

    def device(self, step: int, place: int) -> int | None:
        """Returns the place of the device's node that is the reference's at a place; None if there is none."""
        return place if self.devices is None else self.devices[step].get(place)

    def reference(self, step: int, place: int) -> int | None:
        """Returns the place of the reference's node that is the device's at a place; None if there is none."""
        return place if self.devices is None else self.references[step].get(place)

    def notes(self, reference: str, device: str) -> list[str]:
        """Returns what can be compared, and whether the device runs nodes in another order, a line each."""
        moved = sum(len(_out_of_order([pairs[place] for place in sorted(pairs)])) for pairs in self.references)
        lines = [self._said(reference, device)] if self.differ else []
        if moved:
            lines.append(f"{device} runs {moved:,} nodes later than {reference}; each is compared with the same one")
        return lines

    def _said(self, reference: str, device: str) -> str:
        n = sum(map(len, self.devices or ()))
        sides = (
            f"{ops.total():,} nodes of {name} ({', '.join(f'{count:,} {op}' for op, count in ops.most_common(_MOST))})"
            for name, ops in zip((reference, device), self.alone, strict=True)
        )
        return (
            f"llama.cpp makes other graphs of the two: {' and '.join(sides)} have no partner and are not judged; "
            f"{n:,} of the same name, op, types and ne are compared, and what each step gives"
        )
