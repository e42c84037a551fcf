"""Benchmarks at small sizes: what they measure, what they refuse, and how they are printed, written and drawn."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from kit.commands import Cli, assert_refused, strict_json
from matplotlib.text import Text

from ggml_backend_npu import Op, Tensor, default_backend
from ggml_backend_npu.ggml.lib import ggml
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.tiny import write_tiny_llama
from graph_runner.bench import (
    BENCH_SCHEMA,
    BenchResult,
    Header,
    Measurement,
    calls,
    codecs,
    geometric_mean,
    in_turns,
    memcpy,
    models,
    movers,
    operators,
    ops,
    plot,
    run,
    splits,
    worst,
)
from graph_runner.bench.measure import GGML, GGML_CPU, count
from graph_runner.bench.operators import bench_operators
from quant import folders

ELEMENTS = 1 << 16
PATTERNS = (operators.token_shift(64, 8), operators.routing(16, 4, 8))


@pytest.fixture(autouse=True)
def threads_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark sets how many threads the device may use."""
    monkeypatch.setattr(default_backend(), "team", default_backend().team)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's benchmarks at small sizes."""
    monkeypatch.setattr(run, "ELEMENTS", ELEMENTS)
    monkeypatch.setattr(run, "bench_operators", partial(bench_operators, patterns=PATTERNS))


def assert_sane(found: list[Measurement], others: list[str], unit: str, rounds: int) -> None:
    """As many positive values as rounds on each side, against everyone."""
    for measurement in found:
        assert measurement.unit == unit
        assert [*measurement.others] == others
        for values in (measurement.values, *measurement.others.values()):
            assert len(values) == rounds
            assert min(values) > 0
        assert all(measurement.ratio(other) > 0 for other in others)


# measurements


def test_a_ratio_is_the_median_of_paired_rounds() -> None:
    times = {"slow": [2.0, 30.0, 4.0]}
    assert Measurement("x", "ms", [1.0, 10.0, 4.0], times).ratio("slow") == 2.0
    assert Measurement("x", "tokens/s", [1.0, 10.0, 4.0], times).ratio("slow") == 0.5
    assert Measurement("x", "ms", [1.0, 10.0, 4.0]).median == 4.0
    with pytest.raises(ValueError, match="shorter"):
        Measurement("x", "ms", [1.0, 2.0], {"one": [1.0]}).ratio("one")


@pytest.mark.parametrize(("unit", "value"), [("s", 2e-3), ("ms", 2.0), ("us", 2000.0)])
def test_a_bandwidth_is_in_bytes_per_second_whatever_the_unit(unit: str, value: float) -> None:
    found = Measurement("x", unit, [value], {"half": [2 * value]}, nbytes=1 << 20)
    assert found.bandwidth() == pytest.approx((1 << 20) / 2e-3)
    assert found.bandwidth("half") == pytest.approx((1 << 20) / 4e-3)


def test_the_geometric_mean_and_the_worst() -> None:
    found = [Measurement(str(ratio), "ms", [1.0], {"other": [ratio]}) for ratio in (4.0, 0.25, 8.0)]
    assert geometric_mean(found, "other") == pytest.approx(2.0)
    assert worst(found, "other").what == "0.25"


def test_jobs_take_turns_that_turn_around() -> None:
    ran: list[str] = []
    times = in_turns({name: partial(ran.append, name) for name in "abc"}, 2, quiet=0)
    assert "".join(ran) == "abccbaabc"
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2, "c": 2}


def test_a_turn_is_the_median_of_its_calls_in_the_unit() -> None:
    waits = iter([0, 0, 0, 0, 0.003, 0.3])
    times = in_turns({"job": lambda: time.sleep(next(waits))}, 1, unit="us", calls=3, quiet=0)
    assert 3000 <= times["job"][0] < 300_000


def test_counts_are_words() -> None:
    assert [count(n, "round") for n in (1, 2)] == ["1 round", "2 rounds"]


# benchmarks


@pytest.mark.usefixtures("backend")
def test_movers_run_every_case_on_both_devices() -> None:
    found = [*movers.bench_movers(rounds=1, threads=2, elements=ELEMENTS)]
    assert [measurement.what for measurement in found] == [case.what for case in movers.CASES]
    assert {measurement.group for measurement in found} == {"GET_ROWS", "SET_ROWS", "CPY", "CONT", "DUP"}
    assert all(measurement.what.startswith(f"{measurement.group} ") for measurement in found)
    assert_sane(found, [GGML_CPU], "ms", rounds=1)


@pytest.mark.usefixtures("backend")
def test_the_bytes_of_a_mover_are_those_of_its_wider_side() -> None:
    nbytes = {case.what: case.nbytes(1024) for case in movers.CASES}
    assert nbytes["CPY f32 -> f16"] == nbytes["CPY f16 -> f32"] == nbytes["GET_ROWS q4_0 -> f32"] == 4096
    assert nbytes["CONT f16 transposed"] == nbytes["CPY f16 -> q8_0"] == 2048
    assert nbytes["CPY q8_0 -> q8_0"] == 1024 // 32 * 34
    (found,) = movers.bench_movers(rounds=2, threads=1, elements=ELEMENTS, only="DUP f16")
    assert found.nbytes == 2 * ELEMENTS
    assert_sane([found], [GGML_CPU], "ms", rounds=2)


def test_codecs_stand_beside_ggml_and_gguf_py() -> None:
    found = [*codecs.bench_codecs(rounds=1, threads=2, elements=ELEMENTS)]
    whats = ["quantize q8_0", "dequantize q8_0", "quantize q4_0", "dequantize q4_0"]
    assert [measurement.what for measurement in found] == whats
    assert {measurement.nbytes for measurement in found} == {4 * ELEMENTS}
    assert_sane(found, [GGML, "gguf-py"], "ms", rounds=1)


@pytest.mark.parametrize(("threads", "whats"), [(1, ["1 thread"]), (3, ["1 thread", "3 threads"])])
def test_memcpy_is_measured_on_one_thread_and_on_all(threads: int, whats: list[str]) -> None:
    found = [*memcpy.bench_memcpy(rounds=1, threads=threads, elements=ELEMENTS)]
    assert [measurement.what for measurement in found] == whats
    assert all(measurement.bandwidth() > 0 for measurement in found)


@pytest.mark.usefixtures("backend")
def test_calls_are_small_graphs_of_each_op() -> None:
    found = [*calls.bench_calls(rounds=1, threads=2, calls=3)]
    assert [measurement.what for measurement in found][:2] == [
        "GET_ROWS q8_0 -> f32, 1 x 576",
        "GET_ROWS q8_0 -> f32, 1 x 4096",
    ]
    assert len(found) == 16
    assert_sane(found, [GGML_CPU], "us", rounds=1)


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_operators_run_as_one() -> None:
    found = [*operators.bench_operators(rounds=1, threads=2, patterns=PATTERNS)]
    assert [measurement.what for measurement in found] == [pattern.what for pattern in PATTERNS]
    assert_sane(found, [GGML_CPU], "ms", rounds=1)


SMALL_OPS = [
    ops.Case("convolutions", "CONV_2D 3x3", "conv_2d_direct", (("f16", (3, 3, 4, 5)), ("f32", (9, 9, 4)), *[1] * 6)),
    ops.Case("images", "ROLL", "roll", (("f32", (8, 8, 3)), 3, 5, 0, 0)),
]


@pytest.mark.usefixtures("backend")
def test_ops_are_measured_on_both_devices() -> None:
    found = [*ops.bench_ops(rounds=1, threads=2, cases=SMALL_OPS)]
    assert [(measurement.group, measurement.what) for measurement in found] == [
        (case.group, case.what) for case in SMALL_OPS
    ]
    assert_sane(found, [GGML_CPU], "ms", rounds=1)


@pytest.mark.daily(4)
@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_every_op_of_the_benchmark_can_be_measured() -> None:
    assert_sane([*ops.bench_ops(rounds=1, threads=2)], [GGML_CPU], "ms", rounds=1)


@pytest.mark.usefixtures("backend")
def test_splits_are_measured_on_a_device_that_is_gone_afterwards() -> None:
    before = ggml().ggml_backend_dev_count()
    found = [*splits.bench_splits(rounds=1, threads=1, calls=3)]
    assert [measurement.what for measurement in found] == ["a split of a node", "a split of 300 nodes"]
    assert_sane(found, [], "us", rounds=1)
    assert ggml().ggml_backend_dev_count() == before


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_decoding_is_measured_in_tokens_a_second(tmp_path: Path) -> None:
    tiny = write_tiny_llama(tmp_path / "tiny.gguf")
    before = default_backend().version
    *speeds, memory = models.bench_decode(tiny, rounds=1, threads=1, n=3, long=80)
    assert default_backend().version == before, "plans became void while they were measured"
    whats = ["prompt of a new length", "prompt of 80", "prompt", "generation"]
    expected = [f"{what}, {name}" for name in (models.MOVERS, models.EVERY_NODE) for what in whats]
    expected += [f"{n} sequences, {models.EVERY_NODE}" for n in (4, 16)]
    assert [measurement.what for measurement in speeds] == expected
    assert_sane(speeds, [GGML_CPU], "tokens/s", rounds=1)
    assert_sane([memory], [GGML_CPU], "MB", rounds=1)
    assert memory.ratio(GGML_CPU) == memory.others[GGML_CPU][0] / memory.median


# what cannot be compared


@pytest.mark.usefixtures("backend")
def test_a_pattern_that_does_not_run_as_one_raises() -> None:
    token_shift = operators.token_shift(64, 8)
    wrong = operators.Pattern("wrong", "TopKSoftmax", token_shift.build)
    with pytest.raises(RuntimeError, match="wrong: the NPU did not run it as TopKSoftmax"):
        [*operators.bench_operators(rounds=1, threads=1, patterns=(wrong,))]


@pytest.mark.usefixtures("backend")
def test_an_op_whose_result_is_another_raises() -> None:
    wrong = default_backend().ops.having(Op("ROLL", doubled))
    with wrong, pytest.raises(RuntimeError, match="ROLL: the NMSE of the NPU to the CPU"):
        [*ops.bench_ops(rounds=1, threads=1, cases=SMALL_OPS[1:])]


def doubled(dst: Tensor, x: Tensor) -> None:
    """A wrong kernel."""
    dst.view()[...] = 2 * x.view().reshape(dst.view().shape)


def raising(dst: Tensor, x: Tensor) -> None:
    """A kernel that fails."""
    raise ValueError("no rows today")


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (doubled, "CONT f32 transposed: the bytes of the NPU are not the CPU's"),
        (raising, "CONT f32 transposed on NPU failed: .*no rows today"),
    ],
)
def test_a_wrong_or_failing_node_raises(backend: Plugin, kernel: Callable[..., None], says: str) -> None:
    with default_backend().ops.having(Op("CONT", kernel)), pytest.raises(RuntimeError, match=says):
        [*movers.bench_movers(rounds=1, threads=1, elements=ELEMENTS, only="CONT f32 transposed")]
    backend.forget_plans()


def test_a_codec_whose_bytes_differ_raises() -> None:
    jobs = {"quant": lambda: np.zeros(4, np.float32), GGML: lambda: -np.zeros(4, np.float32)}
    with pytest.raises(RuntimeError, match="dequantize q8_0: the bytes of ggml are not those of quant"):
        codecs.check_equal("dequantize q8_0", jobs)


# the command


@pytest.mark.usefixtures("small")
def test_bench_prints_medians_ratios_and_what_they_come_to(cli: Cli) -> None:
    outcome = cli("bench", "movers", "--rounds", "1", "--threads", "1")
    assert (outcome.code, outcome.err) == (0, "")
    header, *_ = outcome.out.splitlines()
    assert re.search(r"\d+ cores?; Python 3\.\d+\.\d+, numpy [\d.]+, numba [\d.]+, ggml [\d.]+ ", header)
    assert header.endswith("; 1 thread, 1 round")
    assert re.search(r"^memcpy +median +GB/s$", outcome.out, re.MULTILINE)
    assert re.search(r"^movers +ggml-npu +ggml CPU +to ggml CPU +GB/s$", outcome.out, re.MULTILINE)
    number = r"[\d,.]+"
    assert (
        len(re.findall(rf"^[A-Z_]+ .* {number} ms +{number} +[\d,.e-]+x +{number}$", outcome.out, re.MULTILINE)) == 28
    )
    assert len(re.findall(r"^  geometric mean +[\d,.e-]+x *$", outcome.out, re.MULTILINE)) == 5
    assert re.search(r"^all: geometric mean +[\d,.e-]+x *\nall: worst +[\d,.e-]+x *$", outcome.out, re.MULTILINE)


@pytest.mark.usefixtures("small")
def test_bench_writes_every_round_as_json(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("bench", "codecs", "--rounds", "2", "--threads", "2", "--json", "-")
    assert outcome.code == 0
    assert "geometric mean" in outcome.err
    data = strict_json(outcome.out)
    assert (data["schema"], data["rounds"], data["threads"]) == (BENCH_SCHEMA, 2, 2)
    assert data.keys() >= {
        "machine",
        "cores",
        "python",
        "numpy",
        "numba",
        "ggml",
        "llama_cpp_python",
        "gguf",
    }
    assert [line["benchmark"] for line in data["measurements"]] == ["memcpy"] * 2 + ["codecs"] * 4
    line = data["measurements"][2]
    assert (line["what"], line["group"], line["unit"], line["nbytes"]) == (
        "quantize q8_0",
        "quantize",
        "ms",
        4 * ELEMENTS,
    )
    assert line["median"] == pytest.approx(sum(line["values"]) / 2)
    assert line["bytes_per_second"] == pytest.approx(line["nbytes"] / (line["median"] / 1e3))
    for other in (GGML, "gguf-py"):
        ratios = [b / a for a, b in zip(line["values"], line["others"][other]["values"], strict=True)]
        assert line["others"][other]["ratio"] == pytest.approx(sum(ratios) / 2)
    summaries = [(found["group"], found["to"]) for found in data["summaries"]]
    assert summaries == [(group, to) for group in (None, "quantize", "dequantize") for to in (GGML, "gguf-py")]
    assert all(found["worst"]["ratio"] <= found["geometric_mean"] for found in data["summaries"])


@pytest.mark.usefixtures("small")
def test_bench_of_what_has_no_bandwidth(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    outcome = cli("bench", "operators", "--rounds", "1", "--json", file)
    assert (outcome.code, outcome.err) == (0, "")
    assert "GB/s" not in outcome.out
    data = strict_json(file.read_text())
    assert {line["benchmark"] for line in data["measurements"]} == {"operators"}
    assert {line["bytes_per_second"] for line in data["measurements"]} == {None}


@pytest.mark.usefixtures("small")
def test_bench_draws_what_has_a_bandwidth(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "bench.png"
    outcome = cli("bench", "codecs", "--rounds", "1", "--plot", file)
    assert (outcome.code, outcome.err) == (0, "")
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack_from(">II", data, 16)
    assert width == 1600
    assert 400 < height < 1000
    assert 10_000 < len(data) < 500_000
    assert [*tmp_path.iterdir()] == [file]


def made(what: str, group: str, *others: str) -> Measurement:
    """A measurement of 1 GB/s, and of 0.5 of each other."""
    return Measurement(what, "s", [1.0], {other: [2.0] for other in others}, 10**9, group)


def test_a_drawing_says_what_it_shows() -> None:
    head = Header("Made-up CPU", 3, "3.12", "2.0", "0.62", "0.25", "0.3.36", "0.19", threads=3, rounds=5)
    movers = [made("CPY f32 -> f16", "CPY", GGML_CPU), made("CPY f16 -> f32", "CPY", GGML_CPU)]
    memcpy = [Measurement(f"{n} threads", "s", [0.5 / n], nbytes=10**9) for n in (1, 3)]
    quantize = [made("quantize q8_0", "quantize", GGML, "gguf-py")]
    result = BenchResult(head, {"memcpy": memcpy, "movers": movers, "codecs": quantize})
    text = {found.get_text() for found in plot.figure_of(result).findobj(Text)}
    assert "ggml-npu bench on Made-up CPU, 3 cores, 3 threads" in text
    assert {"CPY", "f32 -> f16", "f16 -> f32", "quantize", "q8_0"} < text
    assert {"ggml-npu", GGML_CPU, GGML, "gguf-py", "memcpy, 1 threads", "memcpy, 3 threads"} < text
    assert {"2.00x", "2.00x ggml   2.00x gguf-py"} < text


@pytest.mark.parametrize(
    ("what", "file", "reason"),
    [
        ("movers", "none/bench.png", "no such directory"),
        ("codecs", "folder", "is a directory"),
        ("all", "bench.bmp", "must end with one of .png"),
        ("movers", "-", "must end with one of .png"),
        ("calls", "bench.png", "calls has no bandwidth to draw; movers and codecs do"),
        ("start", "bench.png", "start has no bandwidth to draw"),
    ],
)
def test_a_plot_that_cannot_be_made(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    file: str,
    reason: str,
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert_refused(cli("bench", what, "--plot", file), "plot", repr(file), reason)
    assert [*tmp_path.rglob("*")] == [tmp_path / "folder"]


def test_json_and_plot_into_one_file_are_refused(cli: Cli) -> None:
    assert_refused(cli("bench", "movers", "--json", "x.png", "--plot", "x.png"), "--plot", "--json writes there")


def test_a_missing_matplotlib(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert_refused(cli("bench", "movers", "--plot", "x.png"), "pip install 'ggml-backend-npu[plot]'")


def test_a_missing_model_is_found_before_anything_is_measured(cli: Cli) -> None:
    assert_refused(cli("bench", "--model", "none.gguf"), "none.gguf", "no such file")


@pytest.mark.parametrize("arguments", [["walk"], ["movers", "--rounds", "0"], ["movers", "--threads", "-1"]])
def test_usage_errors(cli: Cli, arguments: list[str]) -> None:
    outcome = cli("bench", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert "Traceback" not in outcome.err


def test_a_user_without_a_home_measures_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(folders, "_home_of_the_user", lambda: "")
    monkeypatch.setattr(models, "in_turns", lambda jobs, rounds, unit: dict.fromkeys(jobs, [1.0] * rounds))
    found = [each.what for each in models.bench_start(Path("model"), rounds=1, threads=1)]
    assert found == ["import and register", "diff", "Python itself"]
