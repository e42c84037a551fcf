"""Whole runs with some nodes on the device find those with which the run is wrong: `graph_runner.bisect.running`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kit.backends import blas
from kit.commands import Cli, assert_refused, fresh, strict_json
from kit.whole import FAULT, Memory, Spoils, at, half_as_much_again, spoiling

from ggml_backend_npu import Tensor
from graph_runner.base.settings import Settings
from graph_runner.base.tiny import write_tiny_llama
from graph_runner.bisect.result import Bisection
from graph_runner.bisect.running import BisectOptions, Runs
from graph_runner.reports.bisect import verdict

PROMPT = "The capital of France is"
OPTIONS = BisectOptions(settings=Settings(flash_attention="off"), steps=2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "llama.gguf")


def bisected(
    model: Path, faults: dict[str, Spoils], options: BisectOptions = OPTIONS, *, memory: Memory = "host"
) -> Bisection:
    return Runs(model, PROMPT, options, spoiling(faults, memory=memory)).bisected()


def names(result: Bisection) -> list[str]:
    return [result.units[number].name for number in result.needed]


@pytest.mark.parametrize("memory", ["host", "device"])
def test_a_node_of_one_layer_is_found(llama: Path, memory: Memory) -> None:
    result = bisected(llama, {"SWIGLU": at("ffn_swiglu-1")}, memory=memory)
    assert not result
    assert names(result) == ["ffn_swiglu-1"]
    assert result.units[result.needed[0]].op == "SWIGLU"
    assert result.rate == 1
    assert len(result.trials) <= 2 * np.log2(len(result.units)) + 10


def test_nodes_that_are_wrong_together_alone_are_found(llama: Path) -> None:
    """The device keeps something from one node to the other."""
    seen: list[str] = []

    def first(dst: Tensor) -> None:
        seen.append(dst.name)

    def second(dst: Tensor) -> None:
        if dst.name == "ffn_swiglu-1" and "ffn_norm-0" in seen:
            half_as_much_again(dst)
        if dst.name == "ffn_swiglu-1":
            seen.clear()

    result = bisected(llama, {"MUL": first, "SWIGLU": second})
    assert names(result) == ["ffn_norm-0", "ffn_swiglu-1"]
    assert result.is_whole


def test_a_device_that_is_right_is_right(llama: Path) -> None:
    result = bisected(llama, {})
    assert result
    assert result.trials[0].nmse == 0
    assert len(result.trials) == OPTIONS.repeat


@pytest.mark.slow
@pytest.mark.daily(2)
def test_a_fault_that_comes_in_every_third_run_is_found(llama: Path) -> None:
    calls = 0

    def spoils(dst: Tensor) -> None:
        nonlocal calls
        if dst.name == "ffn_swiglu-0" and dst.ne[1] > 1:
            calls += 1
        if dst.name == "ffn_swiglu-0" and calls % 3 == 0:
            half_as_much_again(dst)

    result = bisected(llama, {"SWIGLU": spoils}, replace(OPTIONS, repeat=6))
    assert 0 < result.rate < 1
    assert names(result) == ["ffn_swiglu-0"]


def test_a_limit_says_what_is_wrong(llama: Path) -> None:
    def spoils(dst: Tensor) -> None:
        dst.view()[..., :8] *= np.float32(1.001)

    assert not bisected(llama, {"SWIGLU": spoils}, replace(OPTIONS, limit=0.0))
    assert bisected(llama, {"SWIGLU": spoils}, replace(OPTIONS, limit=0.5))


# the command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "error"), [("dst.view()[...] = 0", ""), ("os.kill(os.getpid(), 11)", "ended by SIGSEGV")]
)
def test_the_command(does: str, error: str, tmp_path: Path) -> None:
    kernels, result = tmp_path / "wrong.py", tmp_path / "result.json"
    kernels.write_text(FAULT.format(does=does))
    words = ("--all", "--kernels", kernels, "-n", 1, "--repeat", 1, "--json", result)
    outcome = fresh("bisect", "tiny", *words)
    assert outcome.code == 1, outcome.err
    last = outcome.out.splitlines()[-1]
    assert last.startswith("wrong: SWIGLU 'ffn_swiglu-1': with it alone on NPU the run is wrong; ")
    data = strict_json(result.read_text())
    assert [data["nodes"][number]["name"] for number in data["needed"]] == ["ffn_swiglu-1"]
    assert data["runs"][0]["error"] == error
    assert data["passed"] is False
    assert outcome.err.count("kernels of") == 1


def test_another_token_is_what_makes_a_run_wrong(llama: Path) -> None:
    """Not an NMSE that is large."""
    faults = {"SWIGLU": at("ffn_swiglu-1")}
    result = bisected(llama, faults, replace(OPTIONS, by_token=True, ends=True, repeat=1, steps=0))
    assert result
    assert (result.trials[0].nmse or 0) > result.limit
    assert "the same tokens" in verdict(result)


def test_ends_look_for_no_node(llama: Path) -> None:
    result = bisected(llama, {"SWIGLU": at("ffn_swiglu-1")}, replace(OPTIONS, ends=True, repeat=2))
    assert not result
    assert len(result.trials) == 2
    assert verdict(result).startswith(f"wrong: all {len(result.units)} nodes on NPU, NMSE ")


@pytest.mark.slow
def test_a_bisection_goes_on_where_it_stopped(tmp_path: Path) -> None:
    kernels, runs = tmp_path / "wrong.py", tmp_path / "runs.json"
    kernels.write_text(FAULT.format(does="dst.view()[...] = 0"))
    words = ("--all", "--kernels", kernels, "-n", 0, "--repeat", 1, "--resume", runs)
    first = fresh("bisect", "tiny", *words)
    data = strict_json(runs.read_text())
    made = data["runs"]
    runs.write_text(json.dumps(data | {"runs": made[:4]}))
    again = fresh("bisect", "tiny", *words)
    assert (first.code, again.code) == (1, 1)
    assert first.out == again.out
    after = strict_json(runs.read_text())["runs"]
    assert after[:4] == made[:4]
    assert [each["nodes"] for each in after] == [each["nodes"] for each in made]
    assert_refused(fresh("bisect", "tiny", *words, "-p", "another"), "prompt", "'another'")


@pytest.mark.slow
def test_a_run_that_hangs_is_wrong(tmp_path: Path) -> None:
    kernels = tmp_path / "hangs.py"
    kernels.write_text(FAULT.format(does="import time; time.sleep(1000)"))
    words = ("--all", "--kernels", kernels, "-n", 0, "--repeat", 1, "--run-timeout", 2)
    outcome = fresh("bisect", "tiny", *words)
    assert outcome.code == 1, outcome.err
    assert "was not done after 2 s" in outcome.out
    assert "SWIGLU 'ffn_swiglu-1'" in outcome.out.splitlines()[-1]


def test_the_cpu_is_no_device_to_bisect(cli: Cli) -> None:
    assert_refused(cli("bisect", "tiny", "--device", "cpu"), "--device 'cpu'", "compared with")


@pytest.mark.conformance
def test_a_library_is_bisected(tmp_path: Path) -> None:
    library = blas(tmp_path, "SCALED")
    prompt = "The capital of France is a city that many people visit each year, and its name is"
    words = ("--device", "BLAS", "--backend", library, "-p", prompt, "-n", 1, "--repeat", 1, "--nmse", 1e-12)
    outcome = fresh("bisect", "tiny", *words)
    assert outcome.code == 1, outcome.out + outcome.err
    assert outcome.out.splitlines()[-1].startswith("wrong: MUL_MAT ")
