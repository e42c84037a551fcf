"""The nodes of a run's graphs, without what they hold. Graphs that differ by sizes alone, such as the number of cells
that a token sees, are of one form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.lib import Ggml
from graph_runner.record.measures import ENTRY_BYTES

_TENSOR = np.dtype(
    {
        "names": ["address", "type", "ne", "op", "params", "src", "name"],
        "formats": ["<u8", "<i4", ("<i8", 4), "<i4", "S64", ("<u8", structs.N_SRC), "S64"],
        "offsets": [0, 8, 24, 88, 92, 160, 264],
        "itemsize": ENTRY_BYTES,
    }
)


@dataclass(frozen=True)
class FormNode:
    """A node that computes something.

    params   its op_params in hexadecimal, without the zeros at the end
    sources  what each source is, or is a view of: the place of a node, or -1 - the place of a leaf; None if missing
    """

    op: str
    name: str
    type: str
    params: str
    sources: tuple[int | None, ...]


@dataclass(frozen=True)
class Leaf:
    """What no node computes: a weight, a cache, an input."""

    name: str
    type: str


@dataclass(frozen=True)
class Form:
    """Graphs that differ by sizes alone.

    pattern  which of a graph's sizes are the ne of its nodes: node by node, four numbers each
    """

    nodes: tuple[FormNode, ...]
    leaves: tuple[Leaf, ...]
    pattern: tuple[int, ...]

    def ne(self, sizes: Sequence[int]) -> NDArray[np.int64]:
        """Returns the ne of each node of a graph with these sizes, (nodes, 4)."""
        shapes: NDArray[np.int64] = np.asarray(sizes, np.int64)[list(self.pattern)].reshape(-1, 4)
        return shapes


def form_of(ggml: Ggml, noted: NDArray[np.uint8]) -> tuple[Form, tuple[int, ...]]:
    """Returns the form of a graph and its sizes, from what `measures.note` has copied."""
    entries = noted.view(_TENSOR)
    addresses = entries["address"].tolist()
    params = [each.ljust(64, b"\0") for each in entries["params"].tolist()]
    names = [
        ggml.op_name(op, int.from_bytes(text[:4], "little", signed=True))
        for op, text in zip(entries["op"].tolist(), params, strict=True)
    ]
    sources, labels, types = entries["src"].tolist(), entries["name"].tolist(), entries["type"].tolist()
    known: dict[int, int | None] = {0: None}  # what a tensor is, by its address
    at: dict[int, NDArray[np.int64]] = {}  # the ne of a tensor
    nodes, leaves, shapes = list[FormNode](), list[Leaf](), list[Any]()
    for i, address in enumerate(addresses):
        shape = at[address] = entries["ne"][i]
        label, type = labels[i].split(b"\0", 1)[0].decode(errors="replace"), ggml.types[types[i]].name
        if names[i] == "NONE":
            if address not in known:
                known[address] = -1 - len(leaves)
                leaves.append(Leaf(label, type))
        elif convert.computes(names[i]):
            found = [known.get(each) for each in sources[i]]
            while found and found[-1] is None:
                found.pop()
            known[address] = len(nodes)
            nodes.append(FormNode(names[i], label, type, params[i].rstrip(b"\0").hex(), tuple(found)))
            shapes.append(_written(names[i], shape, at.get(sources[i][0], shape)))
        else:
            known[address] = known.get(sources[i][0])
    return _with_pattern(tuple(nodes), tuple(leaves), np.array(shapes, np.int64).reshape(-1))


def _written(op: str, ne: NDArray[np.int64], source: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the ne of what a node writes: SET_ROWS has as many rows as its source, not as its output."""
    return np.concatenate([ne[:1], source[1:]]) if op == "SET_ROWS" else ne


def _with_pattern(
    nodes: tuple[FormNode, ...], leaves: tuple[Leaf, ...], ne: NDArray[np.int64]
) -> tuple[Form, tuple[int, ...]]:
    values, first, inverse = np.unique(ne, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.argsort(order)
    return Form(nodes, leaves, tuple(place[inverse].tolist())), tuple(values[order].tolist())


def form_json(form: Form) -> dict[str, Any]:
    """Returns a form as data for JSON."""
    return {
        "nodes": [[each.op, each.name, each.type, each.params, each.sources] for each in form.nodes],
        "leaves": [[each.name, each.type] for each in form.leaves],
        "pattern": form.pattern,
    }


def form_from(data: Any) -> Form:
    """Returns the form of `form_json`. Raises what wrong data raises."""
    nodes = tuple(
        FormNode(str(op), str(name), str(type), str(params), tuple(sources))
        for op, name, type, params, sources in data["nodes"]
    )
    leaves = tuple(Leaf(str(each[0]), str(each[1])) for each in data["leaves"])
    pattern = tuple(map(int, data["pattern"]))
    if len(pattern) != 4 * len(nodes):
        raise ValueError(f"{len(nodes)} nodes have {len(pattern)} sizes")
    for place, node in enumerate(nodes):
        if any(each is not None and not -len(leaves) <= each < place for each in node.sources):
            raise ValueError(f"node {place} has no such sources: {node.sources}")
    return Form(nodes, leaves, pattern)
