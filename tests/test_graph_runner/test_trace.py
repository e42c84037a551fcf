"""Traces: what is captured is replayed with the same bytes, anywhere; what is no whole trace is one clear line."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Cli, assert_refused, fresh, kernel_file, process
from gguf import GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from models import WRITERS, Models
from support import assert_same_bytes

from ggml_backend_npu import Graph, Memory, Node, Tensor, default_backend, op
from ggml_backend_npu.abi.plugin import Plugin
from ggml_backend_npu.packed import Packed
from graph_runner.copies import Copied, span
from graph_runner.diff_report import REPLAY_SCHEMA
from graph_runner.errors import TraceError
from graph_runner.results import Verdict
from graph_runner.rules import Rules
from graph_runner.session import Settings
from graph_runner.trace import (
    Origin,
    Recorded,
    Selection,
    capture,
    read_trace,
    replay,
    save_nodes,
    write_trace,
)
from graph_runner.trace.format import DIGEST_AT, digest_of_file
from quant import quantize

PROMPT = "The capital of France is"
ORIGIN = Origin("a model", "a prompt", "CPU", "0.25.3", "simd", 1)
FLASH_OFF = Settings(flash_attention="off", threads=1)
QUANTISED = Settings(flash_attention="on", cache_type_k="q8_0", cache_type_v="q4_0", threads=1)
SETTINGS = {
    "llama": FLASH_OFF,
    "moe": QUANTISED,
    "olmoe": FLASH_OFF,
    "gpt-oss": Settings(flash_attention="auto", threads=1),
    "rwkv7": FLASH_OFF,
    "mamba": FLASH_OFF,
}


def copied(node: Node) -> Node:
    return Copied.of(node).node


def everything(step: int, index: int, node: Node) -> bool:
    return True


@pytest.fixture(scope="session")
def traces(model: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The trace of all nodes of a tiny model, made when first asked for."""
    folder = tmp_path_factory.mktemp("traces")

    def find(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            capture(model(name), PROMPT, path, steps=1, settings=SETTINGS[name], select=everything)
        return path

    return find


@cache
def get_rows() -> Recorded:
    """Three rows of a q8_0 table, the output a view with gaps in a memory of its own."""
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    table = Tensor.of(quantize(x, "q8_0").reshape(8, -1), "q8_0", "table")
    ids = Tensor.of(np.array([7, 0, 7], np.int32), name="ids")
    room = np.full((6, 64), 5, np.float32)
    node = copied(Node("GET_ROWS", Tensor.of(room[1::2], name="rows"), (table, ids)))
    done = copied(node)
    default_backend().bind(done)()
    return Recorded(node, span(done.dst), 2, 17)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of one node."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    write_trace(path, [get_rows()], ORIGIN)
    return path


# what is written is read


def assert_same(found: Recorded, expected: Recorded) -> None:
    assert (found.step, found.index) == (expected.step, expected.index)
    assert (found.node.op, found.node.params) == (expected.node.op, expected.node.params)
    assert_same_bytes(found.expected, expected.expected)
    both = zip((found.node.dst, *found.node.src), (expected.node.dst, *expected.node.src), strict=True)
    for a, b in both:
        if a is None or b is None:
            assert a is b
        else:
            assert (a.name, a.type, a.ne, a.nb) == (b.name, b.type, b.ne, b.nb)
            assert a.nbytes == 0 or a.address % 64 == b.address % 64
            assert_same_bytes(span(a), span(b))


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
    assert (node.isolated.where, node.isolated.max_abs) == ((0, 0, 0, 7), pytest.approx(1))


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
    found = capture(model("llama"), PROMPT, tmp_path / "t.gguf", steps=0, settings=FLASH_OFF)
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


# files that are no whole trace


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as error:
        read_trace(path)
    message = str(error.value)
    assert message.startswith(f"trace {str(path)!r}: ")
    assert "\n" not in message
    return message


@given(data=st.data())
def test_a_file_that_is_cut_off_is_refused(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = small.read_bytes()
    path = tmp_path / "cut.gguf"
    for _ in range(20):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        assert "cut off" in refusal(path) or path.stat().st_size < 4


@given(data=st.data())
def test_a_file_of_which_a_byte_was_changed_is_refused(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(small.read_bytes())
    path = tmp_path / "changed.gguf"
    for _ in range(20):
        at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
        whole[at] ^= 1 << bit
        path.write_bytes(whole)
        assert any(words in refusal(path) for words in ("was changed", "but no trace", "not a GGUF file"))
        whole[at] ^= 1 << bit
    path.write_bytes(whole + b"\0")
    assert "was changed" in refusal(path)


def test_files_of_other_kinds_are_refused(model: Models, tmp_path: Path) -> None:
    assert "a GGUF file, but no trace" in refusal(model("llama"))
    text = tmp_path / "text"
    text.write_text("once upon a time")
    assert "not a GGUF file (begins with b'once')" in refusal(text)
    text.write_text("")
    assert "not a GGUF file" in refusal(text)
    assert "is a directory" in refusal(tmp_path)
    assert "no such file" in refusal(tmp_path / "none")
    assert "no such file" in refusal(Path("/dev/null"))


def crafted(path: Path, change: Callable[[dict[str, Any]], object], without: tuple[str, ...] = (), **keys: Any) -> Path:
    """A trace whose digest is right and whose one node was changed, made by other means than `write_trace`.

    without  keys that are left out
    """
    whole = GGUFReader(path.with_name("small.gguf"))
    writer = GGUFWriter(path, "ggml-npu-trace")
    for name, found in whole.fields.items():
        if name.startswith("trace.") and name != "trace.nodes" and name[6:] not in without:
            writer.add_key_value(name, keys.get(name[6:], found.contents()), found.types[0])
    node = json.loads(whole.fields["trace.nodes"].contents()[0])
    change(node)
    writer.add_array("trace.nodes", [json.dumps(node)])
    for tensor in whole.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = bytearray(path.read_bytes())
    content[DIGEST_AT : DIGEST_AT + 64] = digest_of_file(path)
    path.write_bytes(content)
    return path


def first(entry: dict[str, Any]) -> dict[str, Any]:
    """The first of the nodes of an entry."""
    found: dict[str, Any] = entry["nodes"][0]
    return found


CRAFTED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no output": lambda entry: first(entry).pop("dst"),
    "an output of no bytes": lambda entry: first(entry)["dst"].update(ne=[0, 1, 1, 1]),
    "an unknown type": lambda entry: first(entry)["dst"].update(type="q9_9"),
    "three dimensions": lambda entry: first(entry)["dst"].update(ne=[1, 2, 3]),
    "rows below zero": lambda entry: first(entry)["dst"].update(ne=[64, -3, 1, 1]),
    "dimensions that are words": lambda entry: first(entry)["dst"].update(ne="wide"),
    "more than memory": lambda entry: first(entry)["src"][0].update(ne=[64, 9, 1, 1]),
    "strides beyond memory": lambda entry: first(entry)["src"][0].update(nb=[34, 1 << 40, 1, 1]),
    "an offset beyond memory": lambda entry: first(entry)["src"][1].update(offset=1 << 50),
    "an offset below zero": lambda entry: first(entry)["src"][1].update(offset=-4),
    "no whole blocks": lambda entry: first(entry)["src"][0].update(ne=[65, 1, 1, 1]),
    "a group that is not there": lambda entry: first(entry)["src"][0].update(group=7),
    "bytes that are not there": lambda entry: entry["groups"][0].update(bytes=99),
    "a result of another size": lambda entry: entry.update(expected=entry["groups"][1]["bytes"]),
    "parameters that are no bytes": lambda entry: first(entry).update(params="xyz"),
    "a number for the sources": lambda entry: first(entry).update(src=3),
}


@pytest.mark.parametrize("change", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_file_with_the_right_digest_is_refused_too(
    small: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    assert "cannot be read: " in refusal(crafted(small.with_name("crafted.gguf"), change))


def test_a_file_of_another_format_or_rounding_is_refused(small: Path) -> None:
    path = small.with_name("crafted.gguf")
    assert read_trace(crafted(path, lambda entry: None))
    assert "is of format 3; formats 1 and 2 are read here" in refusal(crafted(path, lambda entry: None, format=3))
    assert "q8_0 rounding 'up'" in refusal(crafted(path, lambda entry: None, rounding="up"))


def as_format_1(entry: dict[str, Any]) -> None:
    """Its one node lies in the entry itself."""
    (node,) = entry.pop("nodes")
    assert entry.pop("wanted") == []
    entry.update(node)


def test_a_file_of_format_1_is_read(backend: Plugin, small: Path) -> None:
    """It has a single node in each entry, and no options."""
    path = crafted(small.with_name("crafted.gguf"), as_format_1, without=("options",), format=1)
    fields = GGUFReader(path).fields
    assert "trace.options" not in fields
    assert json.loads(fields["trace.nodes"].contents()[0])["op"] == "GET_ROWS"
    found = read_trace(path)
    assert found.origin == ORIGIN
    (recorded,) = found
    assert_same(recorded, get_rows())
    assert (recorded.lead, recorded.wanted) == ((), ())
    for device in ("NPU", "CPU"):
        (node,) = replay(path, device).nodes
        assert node.isolated


def test_an_op_of_a_crafted_file_that_calls_an_address_is_not_run(backend: Plugin, small: Path) -> None:
    path = small.with_name("crafted.gguf")
    crafted(path, lambda entry: first(entry).update(op="MAP_CUSTOM1", params="ab" * 64))
    result = replay(path, "CPU")
    assert not result.nodes
    assert list(result.refused) == [("MAP_CUSTOM1", "calls a function of the program that made it")]


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(model: Models, tmp_path: Path) -> None:
    file = tmp_path / "t.gguf"
    for path, words in {
        tmp_path: "is a directory",
        tmp_path / "none" / "t.gguf": "no such directory",
        Path("/dev/full"): "is no file",
    }.items():
        with pytest.raises(TraceError, match=words):
            write_trace(path, [get_rows()], ORIGIN)
    with pytest.raises(TraceError, match="no node to write"):
        write_trace(file, [], ORIGIN)
    with pytest.raises(TraceError, match=r"nodes 'FOO': no node of this run is that"):
        capture(model("llama"), PROMPT, file, steps=0, settings=FLASH_OFF, select=Selection("CONT,FOO"))

    def fails() -> Iterator[Recorded]:
        yield get_rows()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_trace(file, fails(), ORIGIN)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_was_there_stays_where_the_new_one_fails(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    path.write_bytes(small.read_bytes())
    with pytest.raises(TraceError):
        write_trace(path, [], ORIGIN)
    assert replay(path)


# replaying


@pytest.fixture
def own_ops(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(default_backend().ops, "_ops", dict(default_backend().ops._ops))
    backend.forget_plans()
    yield
    backend.forget_plans()


WRONG = """
from ggml_backend_npu import default_backend, op
right = default_backend().ops["GET_ROWS"].define

@op("GET_ROWS")
def get_rows(dst, src, ids):
    right(dst, src, ids)
    {line}
"""
LINES = {
    "dst.view()[0, 0, 0, 0] += 1": "first at [0, 0, 0, 0]",
    "dst.memory.bytes()[dst.offset - 1] = 1": "wrote outside its output",
    "raise ValueError('no')": "failed: GET_ROWS node 'rows': ValueError: no (own.py line ",
}


@pytest.mark.some(1)
@pytest.mark.parametrize(("line", "words"), LINES.items(), ids=LINES)
def test_a_wrong_kernel_is_found(cli: Cli, small: Path, tmp_path: Path, line: str, words: str) -> None:
    outcome = cli("replay", small, "--kernels", kernel_file(tmp_path, WRONG.format(line=line)))
    assert outcome.code == 1
    assert words in outcome.out
    assert "1 of 1 nodes replayed differ from the trace" in outcome.out
    assert cli("replay", small, "--device", "CPU").code == 0


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("line", ["dst.view()[...] += 1", "raise ValueError('no')"])
def test_what_a_trace_names_does_not_reach_the_terminal(cli: Cli, tmp_path: Path, line: str) -> None:
    node, name, path = get_rows().node, "\x1b[2Jname", tmp_path / "trace.gguf"
    recorded = replace(get_rows(), node=replace(node, dst=replace(node.dst, name=name)))
    write_trace(path, [recorded], replace(ORIGIN, model=name, prompt=name))
    outcome = cli("replay", path, "--kernels", kernel_file(tmp_path, WRONG.format(line=line)))
    assert outcome.code == 1
    assert "\x1b" not in outcome.out + outcome.err
    assert outcome.out.count("\\x1b[2Jname") >= 2


@pytest.mark.usefixtures("own_ops")
def test_a_replay_goes_by_the_rules_that_it_is_given(small: Path, tmp_path: Path) -> None:
    right = default_backend().ops["GET_ROWS"].define

    @op("GET_ROWS")
    def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        right(dst, src, ids)
        dst.view()[...] *= np.float32(1 + 1e-4)

    path = tmp_path / "own.toml"
    path.write_text("[GET_ROWS]\nq8_0 = 1e-7\n")
    (node,) = replay(small).nodes
    assert node.verdict is Verdict.INTRODUCED
    (node,) = replay(small, rules=Rules(path)).nodes
    assert node.verdict is Verdict.ROUNDING


@pytest.mark.usefixtures("own_ops")
def test_what_a_kernel_keeps_of_an_earlier_call_shows_in_a_repeated_replay(tmp_path: Path) -> None:
    x = np.arange(8, dtype=np.float32)
    node = copied(Node("CONT", Tensor.of(0 * x), (Tensor.of(x),)))
    write_trace(tmp_path / "t.gguf", [Recorded(node, x.view(np.uint8))], ORIGIN)
    kept: dict[int, np.ndarray] = {}

    @op("CONT", types=[("f32", "f32")])
    def cont(dst: Tensor, src: Tensor) -> None:
        dst.view()[...] = kept.setdefault(src.address, src.view().copy())

    for repeat, right in ((1, True), (3, False)):
        kept.clear()
        result = replay(tmp_path / "t.gguf", repeat=repeat)
        assert bool(result) == right
        assert len(result.nodes) == 1


@pytest.mark.usefixtures("own_ops")
def test_an_output_that_is_not_written_in_full_is_wrong(small: Path) -> None:
    """It begins as NaN in a replay, whatever it held in the run."""

    @op("GET_ROWS")
    def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        pass

    (node,) = replay(small).nodes
    assert node.isolated is not None
    assert node.isolated.nan == (0, 3 * 64)


@pytest.mark.usefixtures("own_ops")
def test_a_source_that_is_changed_is_wrong(small: Path) -> None:
    right = default_backend().ops["GET_ROWS"].define

    @op("GET_ROWS")
    def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        right(dst, src, ids)
        src.memory.bytes()[src.offset] ^= 1

    (node,) = replay(small).nodes
    assert not node


IN_A_FRESH_PROCESS = """
import sys
sys.modules["llama_cpp"] = None
from graph_runner.cli import main
sys.argv = ["ggml-npu", "replay", "--in-process", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    maps = open("/proc/self/maps").read()
    print("libllama" in maps, "libggml" in maps, end.code)
"""


@pytest.mark.slow
def test_the_npu_replays_in_a_fresh_process_without_llama_cpp(traces: Callable[[str], Path]) -> None:
    """Same bytes in another process, where llama-cpp-python is not installed."""
    outcome = process(sys.executable, "-c", IN_A_FRESH_PROCESS, traces("moe"))
    assert outcome.out.splitlines()[-1] == "False False 0", outcome.out + outcome.err
    assert "right within rounding: " in outcome.out


def test_the_rounding_of_q8_0_is_the_one_of_the_trace(backend: Plugin, tmp_path: Path) -> None:
    """A tie that the two quantisers round apart."""
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = 127, 0.5, 2.5
    node = Node("CPY", Tensor.of(np.zeros((1, 34), np.uint8), "q8_0"), (Tensor.of(x),))
    expected = {rounding: quantize(x, "q8_0", rounding).reshape(-1) for rounding in ("reference", "simd")}
    assert (expected["reference"] != expected["simd"]).any()
    for rounding, data in expected.items():
        path = tmp_path / f"{rounding}.gguf"
        write_trace(path, [Recorded(node, data)], replace(ORIGIN, rounding=rounding))
        assert replay(path)
    write_trace(tmp_path / "wrong.gguf", [Recorded(node, expected["simd"])], replace(ORIGIN, rounding="reference"))
    assert not replay(tmp_path / "wrong.gguf")


@pytest.mark.slow
def test_reading_a_trace_again_and_again_takes_no_memory(traces: Callable[[str], Path]) -> None:
    def run(times: int) -> int:
        for _ in range(times):
            assert replay(traces("llama"))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = run(2)
    assert run(8) - before < 16 * 1024  # KiB; a trace has more than 4 MiB


# the command


@pytest.mark.slow
def test_capture_and_replay_on_the_command_line(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    made = cli("capture", "tiny", "-o", path, "-n", 1, "--nodes", "GET_ROWS,1:CONT,Kcur-*", "--threads", 1)
    assert (made.code, made.out) == (0, "")
    assert str(path) in made.err
    nodes = [(recorded.step, recorded.node.op) for recorded in read_trace(path)]
    assert {step for step, op in nodes if op == "CONT"} == {1}
    assert {step for step, op in nodes if op == "GET_ROWS"} == {0, 1}
    replayed = cli("replay", path, "--json", "-")
    assert replayed.code == 0
    found = json.loads(replayed.out)
    assert found["schema"] == REPLAY_SCHEMA
    assert found["passed"]
    assert found["origin"]["prompt"] == PROMPT
    assert {node["op"] for node in found["nodes"]} == {"GET_ROWS", "CONT", "ROPE", "MUL_MAT"}
    assert not found["refused"]
    table = cli("replay", path, "--device", "cpu")
    assert table.code == 0
    assert "MUL_MAT" in table.out
    assert "every byte as in the trace" in table.out


@pytest.mark.slow
def test_bad_input_is_one_line(cli: Cli, small: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small.read_bytes()[:1000])
    assert_refused(cli("replay", cut), cut, "cut off")
    assert_refused(cli("replay", tmp_path), "is a directory")
    assert_refused(cli("replay", small, "--device", "CUDA7"), "no device 'CUDA7'", "ggml has: CPU")
    assert_refused(cli("replay", small, "--json", tmp_path), "is a directory")
    assert_refused(cli("capture", "tiny", "-o", tmp_path), "is a directory")
    assert_refused(cli("capture", "tiny", "-o", tmp_path / "no" / "t.gguf"), "no such directory")
    assert_refused(cli("capture", "tiny", "-o", tmp_path / "t.gguf", "--nodes", "FOO"), "'FOO'", "no node of this run")
    assert_refused(cli("capture", "nowhere.gguf", "-o", tmp_path / "t.gguf"), "no such file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf"]


@pytest.mark.slow
def test_a_full_disk_is_one_line(model: Models, tmp_path: Path) -> None:
    limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    outcome = fresh("capture", model("llama"), "-o", tmp_path / "t.gguf", preexec_fn=limited)
    assert_refused(outcome, "t.gguf")
    assert list(tmp_path.iterdir()) == []
