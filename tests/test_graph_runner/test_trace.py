"""Traces: what is captured comes back as it was, and is replayed with the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from kit.diffs import FLASH_OFF, PROMPT
from kit.models import WRITERS, Models
from kit.traced import ORIGIN, assert_same, copied, get_rows

from ggml_backend_npu import Graph, Memory, Node, Tensor, default_backend
from ggml_backend_npu.ir.packed import Packed
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.errors import TraceError
from graph_runner.judging.copies import span
from graph_runner.judging.results import Verdict
from graph_runner.judging.rules import Rules
from graph_runner.trace import CaptureOptions, Recorded, Selection, capture, read_trace, replay, save_nodes, write_trace
from quant import quantize

# what is written is read


def test_a_node_comes_back_as_it_was(small: Path) -> None:
    found = read_trace(small)
    assert found.origin == ORIGIN
    assert len(found) == 1
    assert_same(found[0], get_rows())
    assert found[0].node.dst.memory.writable
    assert not small.with_name("small.gguf.part").exists()


def test_what_overlapped_overlaps_and_what_is_left_out_is_none(tmp_path: Path) -> None:
    whole = np.arange(64, dtype=np.float32)
    memory = Memory.of(whole)
    a = Tensor("a", "f32", (8, 2, 1, 1), (4, 64, 128, 128), memory, 4)
    b = replace(a, name="b", offset=36)
    empty = Tensor.of(np.zeros((0, 8), np.float32), name="empty")
    node = copied(Node("ADD", replace(a, name="dst"), (a, None, b, empty)))
    assert node.dst.address % 64 == a.address % 64
    write_trace(tmp_path / "t.gguf", [Recorded(node, span(node.dst))], ORIGIN)
    (found,) = read_trace(tmp_path / "t.gguf")
    assert_same(found, Recorded(node, span(node.dst)))
    first, none, second, nothing = found.node.src
    assert none is None
    assert first is not None
    assert second is not None
    assert nothing is not None
    assert first.address == found.node.dst.address
    assert second.address - first.address == 32
    assert nothing.ne == empty.ne
    found.node.dst.view()[...] = -1
    assert (first.view() == -1).all()
    (again,) = read_trace(tmp_path / "t.gguf")
    assert_same(again, Recorded(node, span(node.dst)))


def test_equal_bytes_are_stored_once(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    write_trace(path, [get_rows()] * 5, ORIGIN)
    assert len(GGUFReader(path).tensors) == 4  # table, ids, the output before, the output
    assert all(replay(path).nodes)


def test_the_same_nodes_give_the_same_file(tmp_path: Path, small: Path) -> None:
    write_trace(tmp_path / "t.gguf", [get_rows()], ORIGIN)
    assert (tmp_path / "t.gguf").read_bytes() == small.read_bytes()


def test_a_reproducer_of_one_node(tmp_path: Path) -> None:
    recorded = get_rows()
    path = tmp_path / "t.gguf"
    save_nodes(path, Graph((recorded.node,)), {0: recorded.reference}, ORIGIN, step=3, index=4)
    (found,) = replay(path).nodes
    assert (found.step, found.index, bool(found.isolated)) == (3, 4, True)
    assert found.types == "q8_0 i32 -> f32"


def test_the_origin_has_the_options_of_the_device(tmp_path: Path) -> None:
    origin = replace(ORIGIN, options={"matmul": "fast", "kernels": "own.py sha256:00"})
    write_trace(tmp_path / "t.gguf", [get_rows()], origin)
    assert read_trace(tmp_path / "t.gguf").origin == origin


def cache_row(type: str = "q8_0") -> Recorded:
    """A row that is set in a cache in the device's layout."""
    x = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32)
    blocks = quantize(x, type).reshape(4, -1)
    plain = Tensor.of(blocks.copy(), type, "cache")
    cache = replace(plain, packed=Packed.of(type, plain.address, plain.memory.bytes()))
    rows, ids = Tensor.of(x[:1] * 2, name="rows"), Tensor.of(np.array([2], np.int64), name="ids")
    blocks[2] = quantize(x[0] * 2, type).reshape(-1)
    return Recorded(Node("SET_ROWS", cache, (rows, ids, cache)), blocks.reshape(-1))


@pytest.mark.parametrize("type", ["q8_0", "q4_0"])
def test_a_packed_tensor_comes_back_packed(backend: Plugin, tmp_path: Path, type: str) -> None:
    recorded, path = cache_row(type), tmp_path / "t.gguf"
    write_trace(path, [recorded], ORIGIN)
    (found,) = read_trace(path)
    assert found.node.dst.packed is not None
    assert found.node.src[2] is not None
    assert found.node.src[2].packed is found.node.dst.packed
    assert_same(found, recorded)
    (node,) = replay(path).nodes
    assert node.isolated
    refused = replay(path, "CPU").refused
    assert list(refused) == [("SET_ROWS", "its output is packed")]


def token_shift() -> tuple[Graph, dict[int, Tensor]]:
    """SUB REPEAT MUL ADD, as of one token and two mixes; what SUB and ADD give."""
    rng = np.random.default_rng(4)
    x, before = (Tensor.of(rng.standard_normal((1, 64)).astype(np.float32)) for _ in range(2))
    mu = Tensor.of(rng.standard_normal((2, 1, 1, 64)).astype(np.float32))
    sub, wide = (Tensor.of(np.zeros(shape, np.float32)) for shape in ((1, 64), (2, 1, 1, 64)))
    mul, add = (Tensor.of(np.zeros((2, 1, 1, 64), np.float32)) for _ in range(2))
    nodes = (
        Node("SUB", sub, (before, x)), Node("REPEAT", wide, (sub,)), Node("MUL", mul, (wide, mu)),
        Node("ADD", add, (mul, x)),
    )  # fmt: skip
    graph = Graph(nodes, ((None, None), (0,), (1, None), (2, None)), ((), (), (), (add,)))
    shifted = before.view() - x.view()
    results = {0: shifted, 3: shifted * mu.view() + x.view()}
    return graph, {place: Tensor.of(result) for place, result in results.items()}


@pytest.mark.parametrize(("device", "places"), [("NPU", {3}), ("CPU", {3}), ("CPU", {0, 3})])
def test_a_reproducer_of_nodes_that_run_together(
    backend: Plugin, tmp_path: Path, device: str, places: set[int]
) -> None:
    """The NPU runs them as one operator, which leaves out what SUB gives."""
    path = tmp_path / "t.gguf"
    graph, expected = token_shift()
    save_nodes(path, graph, {place: expected[place] for place in places}, ORIGIN, step=1, index=9)
    trace = read_trace(path)
    (found,) = trace
    assert [node.op for node in trace.outlines()] == ["SUB", "REPEAT", "MUL", "ADD"]
    assert found.graph.producers == graph.producers
    assert [tensor.nbytes for tensor, _ in found.wanted] == [256] * (len(places) - 1)
    (node,) = replay(path, device).nodes
    assert (node.step, node.index, node.op, bool(node.isolated)) == (1, 9, "ADD", True)


@pytest.mark.parametrize("place", [0, 3], ids=["of a node before the last", "of the last node"])
def test_of_nodes_that_run_together_each_result_is_compared(backend: Plugin, tmp_path: Path, place: int) -> None:
    path = tmp_path / "t.gguf"
    graph, expected = token_shift()
    expected[place].view()[0, 0, 0, 7] += 1
    save_nodes(path, graph, expected, ORIGIN)
    result = replay(path, "CPU")
    assert not result
    (node,) = result.nodes
    assert node.verdict is Verdict.INTRODUCED
    assert node.isolated is not None
    assert node.isolated.where == (0, 0, 0, 7)
    assert node.isolated.max_abs == pytest.approx(1)


# models


@pytest.mark.some(2)
@pytest.mark.parametrize("name", WRITERS)
def test_every_node_of_a_model_is_replayed_with_the_same_bytes(
    backend: Plugin, traces: Callable[[str], Path], name: str
) -> None:
    cpu = replay(traces(name), "cpu")
    assert cpu
    assert cpu.device == "CPU"
    assert all(node.isolated for node in cpu.nodes), cpu.wrong[:1]
    assert not cpu.refused
    assert len(cpu.nodes) == len(read_trace(traces(name)))
    npu = replay(traces(name))
    assert npu, npu.wrong[:1]
    assert all(node.isolated for node in npu.nodes if not Rules().bound(node.op, node.types.split()[0]))
    assert {node.op for node in npu.nodes} == {node.op for node in cpu.nodes} & set(default_backend().ops)
    assert len(npu.nodes) + npu.refused.total() == len(cpu.nodes)


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_the_traces_hold_what_is_hard(traces: Callable[[str], Path]) -> None:
    nodes = [recorded.node for name in WRITERS for recorded in read_trace(traces(name))]
    assert all(node.dst.n_elements for node in nodes)
    in_place = [node for node in nodes if any(source and source.overlaps(node.dst) for source in node.src)]
    assert {"ADD", "MUL", "SET_ROWS"} <= {node.op for node in in_place}
    strided = [node for node in nodes if any(source and not source.is_contiguous() for source in node.src)]
    assert {"CONT", "GET_ROWS", "CPY"} <= {node.op for node in strided}
    assert {"q8_0", "q4_0", "f16"} <= {node.dst.type for node in nodes if node.op == "SET_ROWS"}


def test_of_a_run_without_a_selection_the_nodes_of_the_npu_are_kept(model: Models, tmp_path: Path) -> None:
    found = capture(model("llama"), PROMPT, tmp_path / "t.gguf", CaptureOptions(steps=0, settings=FLASH_OFF))
    arithmetic = {"MUL_MAT", "RMS_NORM", "ADD", "MUL", "ROPE", "SOFT_MAX", "SWIGLU"}
    assert set(found.ops) == {"GET_ROWS", "SET_ROWS", "CONT", *arithmetic}
    assert found.n_bytes < (tmp_path / "t.gguf").stat().st_size
    assert found.origin.prompt == PROMPT
    assert len(read_trace(tmp_path / "t.gguf")) == found.ops.total()


def test_a_selection_takes_ops_names_and_places() -> None:
    node = get_rows().node
    assert Selection("get_rows")(0, 9, node)
    assert Selection("CPY, rows")(0, 9, node)
    assert Selection("r?w*")(0, 9, node)
    assert Selection("3,8-10")(0, 9, node)
    assert Selection("2:9")(2, 9, node)
    for other in ("CPY", "ro", "10", "0-8", "1:9", "1:GET_ROWS", "GET"):
        selection = Selection(other)
        assert not selection(2, 9, node)
        assert selection.without_node == [other]
    for empty in ("", ",", "CPY,", "1:"):
        with pytest.raises(TraceError, match="an item is empty"):
            Selection(empty)
