"""The command timeline as users see it, and its tables, `graph_runner.reports.timeline`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from kit.backends import rpc_library, served
from kit.commands import Cli, assert_refused, fresh, strict_json
from kit.perfetto import answers, missing

from graph_runner.timeline.events import COPY, LLAMA, NODE, SPLIT, STEP, read_timeline

ABOUT = {
    "schema", "model", "description", "device", "settings", "tokens", "steps", "machine", "processors", "ggml",
    "llama-cpp-python", "ggml-backend-npu", "with_clocks", "without_clocks", "times_as_long",
    "nodes_without_times", "measured", "roofline",
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The file of a timeline, and what the command printed."""
    path = tmp_path_factory.mktemp("timeline") / "t.json"
    done = fresh("timeline", "tiny", "--all", "-n", 1, "--threads", 1, "-o", path)
    assert done.code == 0, done.err
    return path, done.out


def test_the_table_has_every_op_and_all_of_the_time(written: tuple[Path, str]) -> None:
    out = written[1]
    assert re.search(r"(?m)^NPU +MUL_MAT +\d+ +[\d.]+ +[\d.]+ +[\d.]+ +\d+% +[\d.]+%$", out)
    shares = [float(each) for each in re.findall(r"(?m)([\d.]+)%$", out)[:-1]]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert "27 tokens in 2 steps, 2 splits, 0 of them after copies" in out
    assert "NPU: inside of the graph's one call" in out
    assert "times as long (by processor time" in out


def test_the_file_says_what_ran(written: tuple[Path, str]) -> None:
    assert strict_json(written[0].read_text())["otherData"].keys() == ABOUT


@pytest.mark.slow
def test_perfetto_reads_the_trace(written: tuple[Path, str]) -> None:
    if missing():
        pytest.skip(f"missing: {missing()}")
    timeline = read_timeline(written[0])
    errors, slices, ids = answers(
        written[0],
        "select name, value from stats where value > 0 and severity in ('error', 'data_loss')",
        "select t.name, s.category, count(*), sum(s.dur) from slice s "
        "join thread_track on s.track_id = thread_track.id join thread t using (utid) group by 1, 2",
        "select display_value from args where key = 'args.id'",
    )
    assert not errors
    expected = []
    for kind, track in ((NODE, "NPU"), (SPLIT, "NPU"), (STEP, LLAMA)):
        events = timeline.of(kind)
        expected.append([track, kind, len(events), sum(event.duration for event in events)])
    assert sorted(slices) == sorted(expected)
    assert sorted(ids) == sorted([event.args["id"]] for event in timeline.of(NODE))


def test_the_table_of_a_file_is_that_of_the_run(cli: Cli, written: tuple[Path, str]) -> None:
    assert cli("timeline", written[0]).out == written[1]


def test_two_files(cli: Cli, written: tuple[Path, str], tmp_path: Path) -> None:
    data = json.loads(written[0].read_text())
    for event in data["traceEvents"]:
        if event.get("cat") == "node" and event["name"] == "MUL_MAT":
            event["dur"] *= 2
    data["otherData"]["settings"]["threads"] = "7"
    (tmp_path / "slow.json").write_text(json.dumps(data))
    done = cli("timeline", written[0], tmp_path / "slow.json")
    assert done.code == 0
    assert re.search(r"(?m)^NPU +MUL_MAT +\d+ +\d+ +[\d.]+ +[\d.]+ +2\.00$", done.out)
    assert re.search(r"(?m)^NPU +ROPE .* 1\.00$", done.out)
    assert "differs: settings.threads: 1, 7" in done.out


@pytest.mark.slow
def test_stdout_is_for_the_trace_alone(tmp_path: Path) -> None:
    done = fresh("timeline", "tiny", "-n", 0, "--threads", 1, "--device", "cpu", "-o", "-")
    assert strict_json(done.out)["otherData"]["device"] == "CPU"
    assert "CPU: each node runs alone" in done.err


def test_what_cannot_be_is_refused(cli: Cli, written: tuple[Path, str], tmp_path: Path) -> None:
    path = written[0]
    (tmp_path / "other.json").write_text("{}")
    for words, text in (
        ((path, "-o", tmp_path / "new.json"), "--output"),
        ((path, "-o", path), "is what MODEL reads"),
        ((tmp_path / "other.json",), "is JSON, but no 'ggml-npu timeline 1'"),
        (("tiny", tmp_path / "none.json"), "no such file"),
        (("tiny", "--device", "cpu", "--all"), "--all: applies to the NPU"),
        (("tiny", "--device", "NONE0"), "there is none of this name"),
    ):
        assert_refused(cli("timeline", *words), text)
    assert not (tmp_path / "new.json").exists()


@pytest.mark.slow
def test_a_device_of_an_rpc_server(tmp_path: Path) -> None:
    """In a process of its own: ggml aborts if a server is gone that its registry still has."""
    written = tmp_path / "t.json"
    with served(tmp_path / "log") as (address, _):
        asked = "-n", 1, "--device", "RPC0", "--backend", rpc_library(), "--rpc", address, "-o", written
        done = fresh("timeline", "tiny", *asked)
    assert done.code == 0, done.err
    timeline = read_timeline(written)
    assert {("RPC0", "MUL_MAT"), ("CPU", "GET_ROWS")} <= {(event.track, event.name) for event in timeline.of(NODE)}
    copies = timeline.of(COPY)
    assert {event.track for event in copies} == {"RPC0"}
    assert all("embd" in copy.args["tensors"] for copy in copies)
    assert "RPC0: each node runs alone" in done.out
