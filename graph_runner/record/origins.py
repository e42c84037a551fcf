"""Where differences begin: at nodes that differ though all that they read is equal."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml import structs
from graph_runner.record.aligning import Aligned, Places, kind_of, named
from graph_runner.record.forms import Form

MUCH = 100  # times as large as what a node reads has it: more than the estimates of two NMSE can be apart
_EQUAL, _UNKNOWN, _DIFFERS = 0, 1, 2  # what is known of a node or a leaf, in the order in which it counts


@dataclass
class Origin:
    """Nodes of one op and name, in all layers and steps: how many, and the worst NMSE."""

    nodes: int = 0
    nmse: float = 0.0


def _of_kinds() -> defaultdict[str, Origin]:
    return defaultdict(Origin)


@dataclass
class Origins:
    """How nodes came to differ, step by step.

    begins    differ, though all that they read is equal; by op and name
    unknown   differ, and read what a node without a partner gives or has left in a cache, which is not compared
    grows     differ, and read what differs, but their NMSE is more than MUCH times as large
    inherits  how many others differ, and read what differs
    absorbs   are equal, though they read what differs: it was rounded away
    """

    begins: dict[str, Origin] = field(default_factory=_of_kinds)
    unknown: dict[str, Origin] = field(default_factory=_of_kinds)
    grows: dict[str, Origin] = field(default_factory=_of_kinds)
    inherits: int = 0
    absorbs: dict[str, Origin] = field(default_factory=_of_kinds)
    _leaves: dict[str, tuple[int, float]] = field(default_factory=dict)  # of caches, by name: what is known, the NMSE
    _known: dict[int, _Reads] = field(default_factory=dict)

    def add(self, form: Form, pairs: Aligned, differs: NDArray[np.bool_], errors: NDArray[np.float64]) -> None:
        """Adds a step: which of the pairs differ, and their NMSE, both by pair."""
        reads = self._known.get(id(form)) or self._known.setdefault(id(form), _Reads.of(form))
        n = len(form.nodes)
        known, apart = np.full(n + len(reads.leaves) + 1, _UNKNOWN, np.int8), np.zeros(n + len(reads.leaves) + 1)
        known[pairs.a], apart[pairs.a] = np.where(differs, _DIFFERS, _EQUAL), errors
        leaves = [*(self._leaves.get(name, (_EQUAL, 0.0)) for name in reads.leaves), (_EQUAL, 0.0)]
        known[n:], apart[n:] = zip(*leaves, strict=True)
        for each in (known, apart):
            np.maximum.at(each, reads.written, each[reads.writers])
        self._leaves |= {reads.leaves[at - n]: (int(known[at]), float(apart[at])) for at in reads.written.tolist()}
        worst, most = known[reads.sources].max(axis=1)[pairs.a], apart[reads.sources].max(axis=1)[pairs.a]
        inherits = differs & (worst == _DIFFERS)
        grows = inherits & (errors > MUCH * most)
        self.inherits += int((inherits & ~grows).sum())
        for found, chosen in (
            (self.begins, differs & (worst == _EQUAL)),
            (self.unknown, differs & (worst == _UNKNOWN)),
            (self.grows, grows),
            (self.absorbs, ~differs & (worst == _DIFFERS)),
        ):
            for place, error in zip(pairs.a[chosen].tolist(), errors[chosen].tolist(), strict=True):
                origin = found[reads.kinds[place]]
                origin.nodes, origin.nmse = origin.nodes + 1, max(origin.nmse, error)


@dataclass(frozen=True)
class _Reads:
    """What the nodes of a form read and write, as places: those of nodes, then of leaves, then one of nothing.

    sources  (nodes, 10)
    writers, written  nodes that write into a leaf, and which one
    leaves   their names
    kinds    of nodes: op and name
    """

    sources: Places
    writers: Places
    written: Places
    leaves: tuple[str, ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, form: Form) -> _Reads:
        n = len(form.nodes)
        sources = np.full((n, structs.N_SRC), n + len(form.leaves), np.int64)
        leaves = tuple(named(leaf.name) for leaf in form.leaves)
        writers, written = list[int](), list[int]()
        for place, node in enumerate(form.nodes):
            for i, source in enumerate(node.sources):
                if source is None:
                    continue
                at = source if source >= 0 else n - 1 - source
                # what SET_ROWS and CPY write into is their last source, of which they are named as a view
                if at >= n and 0 < i == len(node.sources) - 1 and node.name.startswith(f"{leaves[at - n]} ("):
                    writers.append(place)
                    written.append(at)
                else:
                    sources[place, i] = at
        return cls(
            sources, np.array(writers, np.int64), np.array(written, np.int64), leaves, tuple(map(kind_of, form.nodes))
        )
