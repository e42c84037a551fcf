"""Which nodes of two graphs are the same, if settings give a model two graphs: flash attention on and off."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from ggml_backend_npu import Tensor
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.lib import Ggml
from graph_runner.diff.walks import Place, Walk
from graph_runner.judging.results import types_of

_NUMBERED = re.compile(r"(node|leaf)_\d+")  # names that ggml gives by place
_MOST = 8  # ops that are named

Key = tuple[object, ...]


class Listing(Walk):
    """An observer that observes no node, and notes by what each is known.

    keys  by step: op, name, types and ne of each node; of one without a name of its own what it computes, from what
    """

    def __init__(self, ggml: Ggml) -> None:
        super().__init__(ggml)
        self.keys: list[list[Key]] = [[]]
        self._made: dict[int, int] = {}  # digests of keys, by the nodes' addresses

    def next_step(self) -> None:
        super().next_step()
        self.keys.append([])

    def looks_at(self, place: Place, address: int) -> bool:
        node = convert.node(self.ggml, address)
        name: object = _name(node.dst)
        if name is None:
            pairs = zip(node.src, convert.roots(self.ggml, address), strict=True)
            name = node.params, *(self._source(source, root) for source, root in pairs)
        key = node.op, name, types_of(node), node.dst.ne
        self.keys[-1].append(key)
        self._made[address] = hash(key)
        return False

    def _source(self, source: Tensor | None, root: int) -> object:
        """Returns what a source is known by: its name, or the node that computes it."""
        return None if source is None else (_name(source) or self._made.get(root), source.type, source.ne, source.nb)


def _name(tensor: Tensor) -> str | None:
    """Returns a tensor's name; None if it has none of its own."""
    return None if _NUMBERED.match(tensor.name) else tensor.name


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
    def of(cls, reference: Listing, device: Listing) -> Pairs:
        """Returns the nodes of two runs that are the same and come in the same order."""
        devices: list[dict[int, int]] = []
        alone = Counter[str](), Counter[str]()
        for a, b in zip(reference.keys, device.keys, strict=True):
            matcher = SequenceMatcher(None, a, b, autojunk=False)
            pairs = {m.a + i: m.b + i for m in matcher.get_matching_blocks() for i in range(m.size)}
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

    def said(self, reference: str, device: str) -> str:
        """Returns in one line what can be compared."""
        n = sum(map(len, self.devices or ()))
        sides = (
            f"{ops.total():,} nodes of {name} ({', '.join(f'{count:,} {op}' for op, count in ops.most_common(_MOST))})"
            for name, ops in zip((reference, device), self.alone, strict=True)
        )
        return (
            f"llama.cpp makes other graphs of the two: {' and '.join(sides)} have no partner and are not judged; "
            f"{n:,} of the same name, op, types and ne are compared, and the logits after each step"
        )
