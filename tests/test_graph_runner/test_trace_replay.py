"""Replays of a trace: wrong kernels are found, in any process; capture and replay on the command line."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from kit.commands import Cli, assert_refused, fresh, kernel_file, process
from kit.diffs import PROMPT
from kit.models import Models
from kit.traced import ORIGIN, copied, get_rows

from ggml_backend_npu import Node, Tensor, default_backend, op
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.judging.results import Verdict
from graph_runner.judging.rules import Rules
from graph_runner.reports.replay import REPLAY_SCHEMA
from graph_runner.trace import Recorded, read_trace, replay, write_trace
from quant import ROUNDINGS, quantize

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


@pytest.mark.slow
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
    expected = {rounding: quantize(x, "q8_0", rounding).reshape(-1) for rounding in ROUNDINGS}
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
