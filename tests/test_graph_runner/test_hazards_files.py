"""Files of graphs: what is written is read again, and what is wrong with others is said in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.simulated import random_graph

from graph_runner.base.errors import BadInputError
from graph_runner.hazards import Graph, check
from graph_runner.hazards.files import graphs_json, read_graphs


def file_of(folder: Path, *graphs: Graph) -> Path:
    path = folder / "graphs.json"
    path.write_text(json.dumps(graphs_json(graphs)))
    return path


def test_graphs_are_read_as_they_were_written(tmp_path: Path) -> None:
    graphs = [random_graph(seed) for seed in range(300)]
    read = read_graphs(file_of(tmp_path, *graphs))
    for one, other in zip(graphs, read, strict=True):
        assert check(one) == check(other)


def test_what_a_program_may_leave_out(tmp_path: Path) -> None:
    tensor = {"name": "a", "type": "f32", "ne": [8, 1, 1, 1], "nb": [4, 32, 32, 32], "address": 64, "root": 1}
    other = tensor | {"name": "b", "root": 2, "address": 80}
    nodes = [{"op": "SQR", "name": "b", "reads": [0], "writes": [1]}]
    path = tmp_path / "own.json"
    data = {"schema": "ggml-npu graphs 1", "graphs": [{"tensors": [tensor, other], "nodes": nodes, "inputs": [0]}]}
    path.write_text(json.dumps(data))
    (graph,) = read_graphs(path)
    assert "overwritten while it is read: SQR 'b' (at 0) writes over" in str(check(graph).findings[0])


def changed(key: str, value: object, *within: str | int) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for each in within:
            data = data[each]
        data[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed("schema", "other"), "schema: must be 'ggml-npu graphs 1'"),
        (changed("graphs", 1), "graphs: 1 is no list"),
        (changed("graphs", [7]), "tensors: must be in an object, not in 7"),
        (changed("nodes", [[]], "graphs", 0), "op: must be in an object, not in []"),
        (changed("op", None, "graphs", 0, "nodes", 0), "op: None is no str"),
        (changed("reads", [10**6], "graphs", 0, "nodes", 0), "reads: 1000000 is no number from 0 to"),
        (changed("writes", [True], "graphs", 0, "nodes", 0), "writes: True is no number from 0 to"),
        (changed("in_place", 1, "graphs", 0, "nodes", 0), "in_place: 1 is no bool"),
        (changed("type", "f33", "graphs", 0, "tensors", 0), "type: 'f33' is no type of ggml"),
        (changed("type", "q8_0", "graphs", 0, "tensors", 0), "is no multiple of the blocks of q8_0"),
        (changed("ne", [1, 2], "graphs", 0, "tensors", 0), "ne or nb: [1, 2] are no four numbers"),
        (changed("nb", [1, 2, 3, -1], "graphs", 0, "tensors", 0), "ne or nb: [1, 2, 3, -1] are no four numbers"),
        (changed("ne", [1 << 61] * 4, "graphs", 0, "tensors", 0), "is larger than memory can be"),
        (changed("address", 1 << 63, "graphs", 0, "tensors", 0), "address: must be from 0 to 2^62"),
        (changed("root", "x", "graphs", 0, "tensors", 0), "root: 'x' is no int"),
        (changed("steps", [{"nodes": [0]}] * 2, "graphs", 0), "steps: a node is in two"),
        (changed("steps", [{"nodes": [-1]}], "graphs", 0), "nodes: -1 is no number from 0 to"),
        (changed("written", [], "graphs", 0, "steps", 0), "written: [] is no dict or null"),
        (changed("group", "a", "graphs", 0, "steps", 0), "group: 'a' is no int or null"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, change: Callable[[Any], None], says: str) -> None:
    path = file_of(tmp_path, random_graph(2))
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(BadInputError) as error:
        read_graphs(path)
    assert str(error.value).startswith(f"graphs {str(path)!r}: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b"{", b"[1]", b'"text"', b"null", b"NaN"])
def test_a_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "none.json"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=r"is no JSON|must be in an object"):
        read_graphs(path)
