"""Coverage: what ran where and why agrees with llama.cpp, and a kernel brings what was said that it would bring."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kit.models import WRITERS, Models
from kit.support import choose

from ggml_backend_npu import Op, Tensor, default_backend
from ggml_backend_npu.profiles import load
from ggml_backend_npu.profiles.generations import PROFILES
from ggml_backend_npu.profiles.rules import Profile, Rule
from graph_runner.cli import main
from graph_runner.reports.report import COVERAGE_SCHEMA
from graph_runner.run.session import Sampler, Session, Settings
from graph_runner.tools.coverage import Coverage, Gain, RanGraph, RanNode, Splits, cover

PROMPT = "once upon"
COMMAND = Path(sys.executable).with_name("ggml-npu")
FLASH_OFF, FLASH_ON = Settings(flash_attention="off"), Settings(flash_attention="on")

pytestmark = pytest.mark.usefixtures("backend")


def nothing(dst: Tensor) -> None:
    """A kernel that leaves its output as it is."""


def splits_in_llama_cpp(file: Path, settings: Settings, ops: tuple[str, ...], *, weights: bool = True) -> Splits:
    """The splits that llama.cpp reports where the device has kernels for more ops."""
    settings = Settings(device="npu", flash_attention=settings.flash_attention, weights=weights)
    with default_backend().ops.having(*(Op(name, nothing) for name in ops)), Session(file, settings) as session:
        first, *others = (int(n) for n in (session.splits or "").split(" / "))
        return first, others[0] if others else first


# what ran where


@pytest.mark.parametrize("settings", [FLASH_OFF, FLASH_ON], ids=["flash off", "flash on"])
@pytest.mark.parametrize("name", WRITERS)
def test_numbers_are_those_of_a_session(model: Models, name: str, settings: Settings) -> None:
    found = cover(model(name), PROMPT, settings=settings)
    with Session(model(name), Settings(device="npu", flash_attention=settings.flash_attention)) as session:
        session.decode(session.tokenize(PROMPT))
        prompt = session.npu_nodes, session.nodes
        session.decode([Sampler()(session.logits())])
        both = session.npu_nodes, session.nodes
        splits = session.splits or ""
    for graph, (on_npu, nodes) in ((found.prompt, prompt), (found.token, (both[0] - prompt[0], both[1] - prompt[1]))):
        assert Counter(n.op for n in graph.nodes if n.computes and n.on_npu) == on_npu
        assert Counter(n.op for n in graph.nodes if n.computes) == nodes
        assert (graph.n_on_npu, graph.n_nodes) == (on_npu.total(), nodes.total())
        assert str(graph.splits) in splits.split(" / ")
        assert graph.copied == {}
    groups = found.groups()
    assert sum(n for n, _ in groups.values()) == found.prompt.n_nodes
    assert sum(n for _, n in groups.values()) == found.token.n_nodes


@pytest.mark.some(4)
@pytest.mark.daily(2)
@pytest.mark.parametrize("settings", [FLASH_OFF, FLASH_ON], ids=["flash off", "flash on"])
@pytest.mark.parametrize("name", [*WRITERS, "demo"])
def test_the_rule_cuts_a_graph_as_llama_cpp_does(model: Models, name: str, settings: Settings) -> None:
    found = cover(model(name), PROMPT, settings=settings)
    assert found.prompt.splits_with() == found.prompt.splits > 1
    assert found.token.splits_with() == found.token.splits > 1


def test_only_the_first_batch_of_a_long_prompt_counts(model: Models) -> None:
    found = cover(model("llama"), "a" * 600, settings=FLASH_ON)
    assert found.n_prompt == 512
    assert found.prompt.n_nodes == found.token.n_nodes


# why not


def why(found: Coverage, op: str) -> set[str | None]:
    return {node.why for node in found.prompt.nodes if node.op == op}


def test_each_reason_is_told(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def gap(dst: Tensor, x: Tensor, w: Tensor) -> str:
        return f"src0 has nb1 {x.nb[1]}"

    mine = Profile("mine", "", "", {name: (Rule(),) for name in ("GET_ROWS", "RMS_NORM", "MUL", "ADD", "CONT")})
    choose(monkeypatch, profile=mine)
    monkeypatch.setattr(
        default_backend().ops, "_ops", {name: op for name, op in default_backend().ops.items() if name != "MUL_MAT"}
    )
    with default_backend().ops.having(
        Op("RMS_NORM", lambda dst, x: None, frozenset({("f16", "f16")})),
        Op("MUL", lambda dst, x, w: None, refuse=gap),
    ):
        found = cover(model("llama"), PROMPT, settings=FLASH_OFF)
    assert why(found, "GET_ROWS") == why(found, "CONT") == {None}
    assert why(found, "RMS_NORM") == {"types f32 -> f32"}
    assert why(found, "MUL") == {"src0 has nb1 256"}
    assert why(found, "ADD") == {"taken with --all"}
    assert why(found, "SET_ROWS") == {"profile mine: no SET_ROWS"}
    assert why(found, "SOFT_MAX") == {"profile mine: no SOFT_MAX"}
    assert why(found, "MUL_MAT") == {"no kernel; profile mine: no MUL_MAT"}
    assert found.with_all == ["ADD"]
    assert found.missing == {"ADD": ["f32 f32 -> f32"], "MUL": ["f32 f32 -> f32"], "RMS_NORM": ["f32 -> f32"]}


def test_ops_that_the_profile_refuses_are_not_to_be_written(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    full = cover(model("gpt-oss"), PROMPT, settings=FLASH_ON)
    choose(monkeypatch, profile=load("ascend-310p"))
    found = cover(model("gpt-oss"), PROMPT, settings=FLASH_ON)
    assert found.profile == "ascend-310p"
    assert full.missing.keys() - found.missing.keys() == {"ADD_ID", "FLASH_ATTN_EXT", "SWIGLU_OAI"}
    assert full.joint[-1].splits == (1, 1)
    assert found.joint[-1].splits > (1, 1)


# which op next


def ran(*devices: str) -> RanGraph:
    """A graph of nodes: NPU, or the name of a missing op, small where the profile refuses it."""
    return RanGraph([RanNode(d.upper(), "", d == "NPU", None, d.isupper() and d != "NPU", True) for d in devices])


@pytest.mark.parametrize(
    ("devices", "ops", "splits"),
    [
        ((), (), 1),
        (("NPU",), (), 1),
        (("A", "NPU", "B"), (), 3),
        (("A", "NPU", "B"), ("A",), 2),
        (("A", "NPU", "B"), ("A", "B"), 1),
        (("A", "B", "A"), ("B",), 3),
        (("NPU", "a", "NPU"), ("A",), 3),
    ],
)
def test_the_rule(devices: tuple[str, ...], ops: tuple[str, ...], splits: int) -> None:
    assert ran(*devices).splits_with(ops) == splits


@pytest.mark.some(1)
@pytest.mark.parametrize("settings", [FLASH_OFF, FLASH_ON], ids=["flash off", "flash on"])
@pytest.mark.parametrize("name", ["llama", "moe"])
def test_kernels_remove_as_many_splits_as_was_said(model: Models, name: str, settings: Settings) -> None:
    found = cover(model(name), PROMPT, settings=settings)
    assert {op for gain in found.single for op in gain.ops} == set(found.missing)
    assert found.single == sorted(found.single, key=lambda gain: gain.rank, reverse=True)
    now = found.prompt.splits, found.token.splits
    for gain in (*found.single, *found.joint):
        splits = splits_in_llama_cpp(model(name), settings, gain.ops, weights=False)
        assert gain.splits == splits
        assert gain.removes == (now[0] - splits[0], now[1] - splits[1])
    best = found.write_next
    assert best in found.joint
    assert best is not None
    assert splits_in_llama_cpp(model(name), settings, best.ops) == best.splits == (1, 1)


def test_sets_grow_only_where_they_remove_more(model: Models) -> None:
    gains = cover(model("moe"), PROMPT, settings=FLASH_OFF).joint
    assert len(gains) > 1
    assert all(a.rank < b.rank and len(a.ops) < len(b.ops) for a, b in pairwise(gains))


def test_the_op_that_one_kernel_is_missing_from(model: Models) -> None:
    """Of all ops but one, that one."""
    missing = cover(model("llama"), PROMPT, settings=FLASH_ON).missing
    with default_backend().ops.having(*(Op(name, nothing) for name in missing if name != "SWIGLU")):
        found = cover(model("llama"), PROMPT, settings=FLASH_ON)
    assert found.write_next == found.single[0] == Gain(("SWIGLU",), (1, 1), (4, 4))


def test_splits_without_weights_are_those_with_them(model: Models) -> None:
    for ops in ((), ("MUL_MAT", "ROPE")):
        with_weights = splits_in_llama_cpp(model("moe"), FLASH_OFF, ops)
        assert splits_in_llama_cpp(model("moe"), FLASH_OFF, ops, weights=False) == with_weights


def test_kernels_that_are_pretended_are_gone_afterwards() -> None:
    before = dict(default_backend().ops)
    with default_backend().ops.having(Op("NO_SUCH_OP", nothing), Op("GET_ROWS", nothing)):
        assert default_backend().ops["GET_ROWS"] is not before["GET_ROWS"]
        assert default_backend().ops.keys() - before.keys() == {"NO_SUCH_OP"}
    assert dict(default_backend().ops) == before


# the command


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GGML_NPU_")}
    return subprocess.run(
        [COMMAND, "coverage", *map(str, arguments)],
        capture_output=True, text=True, env=environment | {"COLUMNS": "200"}, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_the_command_prints_a_table_and_json(model: Models) -> None:
    done = command(model("llama"), "-p", PROMPT, "--flash-attn", "on", "--profile", "ascend-310p", "--json", "-")
    assert done.returncode == 0
    data: dict[str, Any] = json.loads(done.stdout)
    assert data["schema"] == COVERAGE_SCHEMA
    assert (data["profile"], data["memory"], data["device_type"]) == ("ascend-310p", "host", "accel")
    assert data["graphs"]["token"] == {"nodes": 44, "on_npu": 7, "splits": 8, "copied": {}}
    nodes = {(n["op"], n["on"]): n for n in data["nodes"]}
    row = {"types": "f32 i64 -> f16", "prompt": 4, "token": 4, "why": None}
    assert nodes["SET_ROWS", "NPU"] == {"op": "SET_ROWS", "on": "NPU", **row}
    assert nodes["FLASH_ATTN_EXT", "CPU"]["why"] == "profile ascend-310p: no FLASH_ATTN_EXT"
    assert data["missing"]["MUL_MAT"] == ["f16 f32 -> f32"]
    swiglu = {"ops": ["SWIGLU"], "splits": {"prompt": 12, "token": 12}, "removes": {"prompt": -4, "token": -4}}
    assert swiglu in data["single"]
    assert re.search(r"^SET_ROWS +f32 i64 -> f16 +NPU +4 +4 *$", done.stderr, re.MULTILINE)
    assert "token: 7 of 44 nodes on the NPU, 8 graph splits, copied nothing" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("device_type", ["accel", "gpu"])
def test_with_its_own_memory_llama_cpp_is_asked_what_kernels_bring(
    model: Models, tmp_path: Path, device_type: str
) -> None:
    file = tmp_path / "coverage.json"
    device = ("--memory", "device", "--device-type", device_type)
    done = command(model("llama"), "--flash-attn", "on", *device, "--json", file)
    assert done.returncode == 0, done.stderr
    data = json.loads(file.read_text())
    assert (data["memory"], data["device_type"]) == ("device", device_type)
    token = data["graphs"]["token"]
    assert (token["on_npu"], token["splits"]) == {"accel": (1, 2), "gpu": (4, 5)}[device_type]
    assert token["copied"]["host to device"] >= 4  # at least the token's number
    assert token["copied"]["device to host"] >= 256
    together = {tuple(gain["ops"]): gain["splits"] for gain in data["joint"]}
    if device_type == "gpu":
        assert together[tuple(data["missing"])] == {"prompt": 1, "token": 1}  # token_embd goes there too
    else:
        assert not together  # caches stay on the CPU: kernels would only cut the graph up
    assert "graph splits, copied " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--profile 910b", f"profile='910b': must be one of {', '.join(PROFILES)}, or FILE.toml"),
        ("--profile no.toml", "profile='no.toml': No such file or directory"),
        ("--memory hosts", "memory='hosts': must be one of host, device"),
        ("--memory-limit lots", "memory_limit='lots': must be a size such as 512M or 2G"),
        ("--device-type npu", "device_type='npu': must be one of accel, gpu"),
        ("--json no/folder.json", "--json 'no/folder.json': no such directory"),
    ],
)
def test_mistakes_are_one_line(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ggml-npu", "coverage", "tiny", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capfd.readouterr() == ("", f"ggml-npu: {message}\n")
