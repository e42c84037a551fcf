"""Runs of the same tokens are compared with each other, and the first node at which two part is found:
`graph_runner.bisect.flaky`."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.commands import Cli, assert_refused, fresh, strict_json
from kit.diffs import PROMPT
from kit.models import Models
from kit.whole import FAULT, Memory, half_as_much_again, spoiling

from ggml_backend_npu import Tensor
from graph_runner.base.settings import Settings
from graph_runner.bisect.flakiness import Flakiness, Parting, Repeat, Way, planned, ways_of
from graph_runner.bisect.flaky import Repeats
from graph_runner.bisect.whole import WholeOptions
from graph_runner.reports.flaky import flaky_json, verdict

OPTIONS = WholeOptions(steps=1, settings=Settings(flash_attention="off", threads=1))
WAY = Way("as it is")


def result_of(*repeats: Repeat, parting: Parting | None = None) -> Flakiness:
    return Flakiness("m", "NPU", 3, 1, OPTIONS.settings, [*repeats], parting)


def repeat(*digests: str, way: Way = WAY, error: str = "") -> Repeat:
    return Repeat(way, 0, digests, 0.1, error)


@pytest.mark.parametrize("memory", ["host", pytest.param("device", marks=pytest.mark.slow)])
def test_a_node_that_errs_now_and_then_is_found(model: Models, memory: Memory) -> None:
    calls = 0

    def spoils(dst: Tensor) -> None:
        nonlocal calls
        calls += dst.name == "ffn_swiglu-1"
        if dst.name == "ffn_swiglu-1" and calls % 3 == 0:
            half_as_much_again(dst)

    repeats = Repeats(model("llama"), PROMPT, OPTIONS, spoiling({"SWIGLU": spoils}, memory=memory))
    result = result_of(*[repeats.run(WAY, 0) for _ in range(4)])
    assert not result
    parting = repeats.parting(WAY, OPTIONS.steps, rate=2 / 3)
    assert parting.place is not None
    assert str(parting).endswith("SWIGLU 'ffn_swiglu-1'")
    assert parting.place[0] == 0


@pytest.mark.parametrize("name", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mamba2", "moe"))])
def test_a_right_device_gives_the_same_in_every_way(model: Models, name: str) -> None:
    """Whatever other tokens left in memory, wherever buffers lie."""
    repeats = Repeats(model(name), PROMPT, OPTIONS, spoiling({}))
    ways = [way for way in ways_of(1, is_npu=True) if not way.threads]
    assert len({repeats.run(way, 0).digests for way in ways}) == 1
    assert len(repeats.run(ways[0], 0).digests) == OPTIONS.steps + 2  # the last is that of the states


def test_runs_are_compared_with_those_of_as_many_threads() -> None:
    other = Way("1 thread", threads=1)
    assert result_of(repeat("a", "s"), repeat("a", "s"), repeat("b", "s", way=other), repeat("b", "s", way=other))
    result = result_of(repeat("a", "x", "s"), repeat("a", "x", "s"), repeat("a", "y", "s"), repeat("a", "x", "t"))
    assert [result.first_apart(each) for each in result.apart] == [1, 2]
    assert result.rate == 0.5


def test_a_run_that_does_not_end_is_apart() -> None:
    result = result_of(repeat("a", "s"), repeat(error="ended by SIGSEGV"))
    assert [each.error for each in result.apart] == ["ended by SIGSEGV"]
    assert flaky_json(result)["runs"][1]["first_step"] is None


def test_the_bound_is_that_of_equal_runs() -> None:
    result = result_of(*[repeat("a", "s")] * 20)
    assert verdict(result) == (
        "the same: 20 runs on NPU are equal; a fault of more than 1 in 7 runs would have been seen with 95%"
    )
    assert (1 - result.bound) ** 20 == pytest.approx(0.05)


def test_every_way_comes_and_one_with_threads_of_its_own_has_a_partner() -> None:
    ways = ways_of(2, is_npu=True)
    assert {way.name for way in planned(ways, 20)} == {way.name for way in ways}
    for times in (2, 7, 9, 20):
        plan = planned(ways, times)
        assert len(plan) == times
        assert all(plan.count(way) > 1 for way in plan if way.threads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("import random; dst.view()[...] *= 1 + (random.random() < 0.5)", "SWIGLU 'ffn_swiglu-1'"),
        ("seen.append(1); len(seen) == 3 and os.kill(os.getpid(), 11)", "runs on NPU are apart"),
    ],
)
def test_the_command(does: str, said: str, tmp_path: Path) -> None:
    kernels, written = tmp_path / "wrong.py", tmp_path / "result.json"
    kernels.write_text(f"seen = []\n{FAULT.format(does=does)}")
    outcome = fresh("flaky", "tiny", "--all", "--kernels", kernels, "-n", 0, "--repeat", 8, "--json", written)
    assert outcome.code == 1, outcome.err
    assert said in outcome.out.splitlines()[-1]
    data = strict_json(written.read_text())
    assert len(data["runs"]) == 8
    assert 0 < data["rate"] < 1


def test_the_cpu_is_refused(cli: Cli) -> None:
    assert_refused(cli("flaky", "tiny", "--device", "cpu"), "--device 'cpu'")
