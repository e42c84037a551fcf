"""Diffs of devices of other ggml backends, from their libraries and from RPC servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import vulkan
from kit.backends import blas, rpc_library, served
from kit.commands import Cli, Outcome, assert_refused, fresh
from tools.architectures import models

from ggml_backend_npu.ggml.lib import DeviceInfo, ggml
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin import foreign
from ggml_backend_npu.plugin.foreign import ForeignDevice, ForeignError
from graph_runner.judging.rules import Rules
from graph_runner.run.devices import Devices
from graph_runner.run.session import Session, SessionError
from graph_runner.tools.suites import folder
from quant.errors import UserError

TOOLS = Path(__file__).parents[1] / "tools"
PROMPT = "The capital of France is a city that many people visit each year, and its name is"  # 32 tokens and more
FAULTY = """
import numpy as np
from ggml_backend_npu.ops import OWN
from ggml_backend_npu import op

ours = OWN["{op}"]

@op("{op}", types=ours.types, refuse=ours.refuse, params=ours.params)
def wrong(dst, {takes}):
    ours.define(dst, {gives})
    {does}
"""
SCALED = "dst.view()[...] = (dst.view() * np.float32(1.01)).astype(dst.view().dtype)"
ROW = "dst.view()[0, 0, -1] = 0"
WRONG = {
    "SOFT_MAX": ("src0, mask=None, sinks=None", SCALED),
    "RMS_NORM": ("src0", SCALED),
    "ADD": ("a, b", ROW),
    "MUL": ("a, b", SCALED),
    "SWIGLU": ("a, b=None", ROW),
    "GET_ROWS": ("src0, ids", SCALED),
}


def faulty(path: Path, name: str, does: str = "") -> Path:
    """Writes a file of a kernel that is wrong as WRONG says, or that does something else once it has computed."""
    ours, (sources, wrong) = OWN[name], WRONG[name]
    taken = [sources, *(["params"] if ours.params else []), *(["numerics"] if ours.wants_numerics else [])]
    given = [sources.replace("=None", ""), *(f"{word}={word}" for word in taken[1:])]
    signature = ", ".join([taken[0], *(f"{word}=None" for word in taken[1:])])
    path.write_text(FAULTY.format(op=name, takes=signature, gives=", ".join(given), does=does or wrong))
    return path


def diff(tmp_path: Path, *arguments: object, node_timeout: int = 300) -> tuple[Outcome, dict[str, Any]]:
    """What the command and its JSON say of the tiny model. A server may compile its kernels while it is asked."""
    result = tmp_path / "result.json"
    options = ["--json", result, "--reproducers", tmp_path, "--node-timeout", node_timeout]
    outcome = fresh("diff", "tiny", *arguments, *options)
    return outcome, json.loads(result.read_text()) if result.exists() else {}


# bad input


def test_a_device_that_there_is_not(cli: Cli) -> None:
    outcome = cli("diff", "tiny", "--device", "Vulkan0", "--in-process")
    assert_refused(outcome, "device 'Vulkan0': there is none of this name; there are: CPU NPU")


def test_a_library_that_is_none(cli: Cli, tmp_path: Path) -> None:
    text = tmp_path / "libggml-blas.so"
    text.write_text("no library")
    assert_refused(cli("diff", "tiny", "--device", "BLAS", "--backend", text, "--in-process"), "cannot be loaded")
    missing = tmp_path / "libggml-vulkan.so"
    outcome = cli("diff", "tiny", "--device", "Vulkan0", "--backend", missing, "--in-process")
    assert_refused(outcome, f"--backend {str(missing)!r}: no such file")


def test_a_server_without_its_library(cli: Cli) -> None:
    outcome = cli("diff", "tiny", "--device", "RPC0", "--rpc", "127.0.0.1:1", "--in-process")
    assert_refused(outcome, "--rpc '127.0.0.1:1': needs --backend libggml-rpc.so")


def test_a_server_is_not_asked_for_a_device_that_comes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that is gone would spoil all cells of a matrix."""
    library = ForeignDevice(DeviceInfo("BLAS", "ACCEL", "BLAS", "in a test"), 0, 0)
    monkeypatch.setattr(foreign, "of_library", lambda ggml, path: [library])
    where = Devices((Path("libggml-blas.so"), Path("libggml-rpc.so")), ("127.0.0.1:1",))
    assert where.named(ggml(), "blas") is library
    with pytest.raises(ForeignError, match="no server answers"):
        where.named(ggml(), "RPC0")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("GPU0,BLAS", "device 'BLAS': takes no layers of a model"),
        ("GPU0,NPU", "device 'GPU0,NPU': NPU shares no layers"),
        ("cpu,GPU0", "device 'cpu,GPU0': cpu shares no layers"),
        ("GPU0,", "device '': there is none of this name"),
    ],
)
def test_devices_that_share_no_layers(names: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [ForeignDevice(DeviceInfo(*each, "in a test", ""), 0, 0) for each in (("GPU0", "GPU"), ("BLAS", "ACCEL"))]
    monkeypatch.setattr(foreign, "of_library", lambda ggml, path: made)
    where = Devices((Path("libggml-some.so"),))
    assert [each.name for each in where.named(ggml(), "gpu0,GPU0").each] == ["GPU0", "GPU0"]
    with pytest.raises(UserError, match=why):
        where.named(ggml(), names)


def test_options_of_the_npu_are_not_for_others(cli: Cli) -> None:
    assert_refused(cli("diff", "tiny", "--device", "BLAS", "--all"), "--all: applies to the NPU, but --device is BLAS")


# a library: BLAS


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return blas(tmp_path_factory.mktemp("blas"))


@pytest.mark.conformance
def test_a_library_is_right(library: Path, tmp_path: Path) -> None:
    outcome, result = diff(tmp_path, "--device", "blas", "--backend", library, "--prompt", PROMPT, "-n", 1)
    assert outcome.code == 0, outcome.out + outcome.err
    assert (result["reference"], result["device"]) == ("CPU", "BLAS")
    assert {node["op"] for node in result["nodes"] if node["device"] == "BLAS"} == {"MUL_MAT"}
    assert "own run of the BLAS" in outcome.out
    assert {planted["way"] for planted in result["canary"]["planted"] if planted["op"] == "MUL_MAT"} >= {"alone"}
    n = sum(node["device"] == "BLAS" for node in result["nodes"])
    assert f"; by where results lie BLAS computed {n} nodes, as it has no counter" in outcome.out


@pytest.mark.conformance
def test_a_library_runs_whole_graphs_alone(library: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Session.decode

    def watched_is_refused(session: Session, *tokens: list[int]) -> None:
        if session.settings.device == "foreign" and session._observed is not None:
            raise SessionError("takes whole graphs")
        decode(session, *tokens)

    monkeypatch.setattr(Session, "decode", watched_is_refused)
    outcome = cli("diff", "tiny", "--device", "BLAS", "--backend", library, "--prompt", PROMPT, "-n", 1, "--in-process")
    assert outcome.code == 1, outcome.out + outcome.err
    lines = outcome.out.splitlines()
    at = lines.index("own run of the BLAS: stopped after 0 nodes: takes whole graphs")
    assert lines[at + 1] == "BLAS runs to the end if no node is observed; what follows is of such a run"
    assert lines[at + 2].startswith("logits: NMSE ")
    assert ", the limit is " in lines[at + 2]
    assert lines[-1].startswith("wrong: the BLAS stopped: takes whole graphs")


@pytest.mark.conformance
def test_a_blind_judge_of_a_library_is_caught(library: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rules, "allows", lambda *_: True)
    outcome = cli("diff", "tiny", "--device", "BLAS", "--backend", library, "--prompt", PROMPT, "-n", 0, "--in-process")
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.startswith("ggml-npu: the judge is blind: it calls right what is wrong: MUL_MAT '")


@pytest.mark.conformance
@pytest.mark.parametrize("fault", ["STRIDE_IGNORED", "SHORT", "SCALED", "SELDOM", "ROW_LEFT_OUT", "SWAPPED"])
def test_a_library_is_wrong(fault: str, tmp_path: Path) -> None:
    library = blas(tmp_path, fault)
    outcome, result = diff(tmp_path, "--device", "BLAS", "--backend", library, "--prompt", PROMPT, "-n", 1)
    assert outcome.code == 1, outcome.out + outcome.err
    first = result["nodes"][result["first_introduced"]]
    assert (first["op"], first["device"]) == ("MUL_MAT", "BLAS")
    if fault != "SELDOM":
        assert first["replay"].endswith(f"--device BLAS --backend {library}"), first["replay"]
        replayed = fresh(*first["replay"].split()[1:])
        assert replayed.code == 1, replayed.out + replayed.err


@pytest.mark.conformance
@pytest.mark.parametrize(("fault", "said"), [("CRASHES", "ended by SIGSEGV"), ("HANGS", "was not done after 20 s")])
def test_a_library_ends_the_process(fault: str, said: str, tmp_path: Path) -> None:
    library = blas(tmp_path, fault)
    arguments = ["--device", "BLAS", "--backend", library, "--prompt", PROMPT, "-n", 1]
    outcome, result = diff(tmp_path, *arguments, node_timeout=20)
    assert outcome.code == 1, outcome.out + outcome.err
    assert said in result["nodes"][-1]["failure"]
    assert result["nodes"][-1]["op"] == "MUL_MAT"


@pytest.mark.conformance
def test_a_library_is_the_reference(library: Path, tmp_path: Path) -> None:
    """ggml's CPU rounds the second factor to f16 first: it is further from the exact value."""
    arguments = ["--reference", "BLAS", "--device", "CPU", "--backend", library, "--prompt", PROMPT, "-n", 1]
    outcome, result = diff(tmp_path, *arguments)
    assert outcome.code == 1, outcome.out + outcome.err
    assert {node["op"] for node in result["nodes"] if node["verdict"] == "introduced"} == {"MUL_MAT"}
    assert (result["reference"], result["device"]) == ("BLAS", "CPU")


@pytest.mark.conformance
def test_a_library_is_compared_with_a_server(library: Path, tmp_path: Path) -> None:
    """Neither side is the CPU or the NPU. What BLAS does not take, the CPU computes in its place."""
    with served(tmp_path / "log") as (address, _):
        devices = ["--backend", library, "--backend", rpc_library(), "--rpc", address]
        outcome, result = diff(tmp_path, "--reference", "BLAS", "--device", "RPC0", *devices, "--steps", 1)
    assert outcome.code == 0, outcome.out + outcome.err
    assert (result["reference"], result["device"]) == ("BLAS", "RPC0")


# a server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with served(tmp_path / "log") as (address, _):
        yield address


@pytest.mark.conformance
def test_a_server_is_right(server: str, tmp_path: Path) -> None:
    outcome, result = diff(tmp_path, "--device", "RPC0", "--backend", rpc_library(), "--rpc", server)
    assert outcome.code == 0, outcome.out + outcome.err
    assert result["device"] == "RPC0"
    assert "own run of RPC0: 250 nodes (245 on RPC0, 5 on the CPU)" in outcome.out
    ways = {planted["way"].partition(" from")[0] for planted in result["canary"]["planted"]}
    assert ways == {"alone", "in the own run"}
    assert "; by where results lie RPC0 computed 245 nodes, as it has no counter" in outcome.out
    listed = fresh("devices", "--backend", rpc_library(), "--rpc", server).out
    assert "RPC0" in listed


@pytest.mark.conformance
def test_a_server_gives_the_same_each_time(server: str, tmp_path: Path) -> None:
    options = ["--device", "RPC0", "--backend", rpc_library(), "--rpc", server, "--steps", 1, "--repeat", 3, "--strict"]
    outcome, _ = diff(tmp_path, *options)
    assert outcome.code == 0, outcome.out + outcome.err


@pytest.mark.conformance
@pytest.mark.parametrize("op", sorted(WRONG))
def test_a_server_is_wrong(op: str, tmp_path: Path) -> None:
    kernels = faulty(tmp_path / "faulty.py", op)
    with served(tmp_path / "log", "NPU", GGML_NPU_KERNELS=str(kernels), GGML_NPU_OPS="all") as (address, _):
        outcome, result = diff(tmp_path, "--device", "RPC0", "--backend", rpc_library(), "--rpc", address)
    assert outcome.code == 1, outcome.out + outcome.err
    first = result["nodes"][result["first_introduced"]]
    on = "CPU" if op == "GET_ROWS" else "RPC0"  # embeddings are looked up on the CPU, so that is wrong alone
    assert (first["op"], first["device"], first["failure"]) == (op, on, None)


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("op", "source", "node", "spoilt"),
    [("MUL", "b", "ffn_norm-1", "'blk.1.ffn_norm.weight'"), ("RMS_NORM", "src0", "norm-1", "'l_out-0', which ADD ")],
)
def test_a_node_that_writes_into_a_source_is_named(
    op: str, source: str, node: str, spoilt: str, tmp_path: Path
) -> None:
    """A server's memory is looked at before a node, its weights before the first one and at the end. What is found then
    has the diff run again, strictly."""
    spoils = f"import ctypes; dst.name == {node!r} and ctypes.memset({source}.address, 0, 64)"
    kernels = faulty(tmp_path / "spoils.py", op, spoils)
    with served(tmp_path / "log", "NPU", GGML_NPU_KERNELS=str(kernels), GGML_NPU_OPS="all") as (address, _):
        outcome, result = diff(tmp_path, "--device", "RPC0", "--backend", rpc_library(), "--rpc", address)
    assert outcome.code == 1, outcome.out + outcome.err
    first = next(node for node in result["nodes"] if node["failure"])
    assert (result["strict"], first["step"], first["name"]) == (True, 0, node)
    assert first["failure"].startswith(f"in the own run writes to {spoilt}")
    assert first["failure"].endswith(", beside its output")


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("limit", "code", "said"),
    [("2500K", 0, ""), ("2240K", 1, "device RPC0 has no memory for "), ("1M", 2, "failed to allocate RPC0")],
)
def test_a_server_with_little_memory(limit: str, code: int, said: str, tmp_path: Path) -> None:
    """It has room for a node with its weights, if in turns; or for the run alone: then the node is named; or for
    nothing."""
    options = {"GGML_NPU_MEMORY": "device", "GGML_NPU_OPS": "all", "GGML_NPU_FALLBACK": "none"}
    with served(tmp_path / "log", "NPU", GGML_NPU_MEMORY_LIMIT=limit, **options) as (address, _):
        outcome, result = diff(tmp_path, "--device", "RPC0", "--backend", rpc_library(), "--rpc", address)
    failures = [node["failure"] for node in result.get("nodes", ()) if node["failure"]]
    assert outcome.code == code, outcome.out + outcome.err
    assert said in (failures[0] if failures else outcome.err)
    assert bool(failures) == (code == 1)


@pytest.mark.conformance
def test_two_servers_share_the_layers(server: str, tmp_path: Path) -> None:
    """They are right; and the report says which of them is not."""
    kernels = faulty(tmp_path / "faulty.py", "MUL")
    options = ["--device", "RPC0,RPC1", "--backend", rpc_library(), "--rpc", server, "--rpc"]
    with served(tmp_path / "right") as (address, _):
        outcome, result = diff(tmp_path, *options, address)
        assert outcome.code == 0, outcome.out + outcome.err
        assert {node["device"] for node in result["nodes"]} == {"RPC0", "RPC1", "CPU"}
        outcome = fresh("hazards", "tiny", *options, address)
        assert (outcome.code, outcome.out.splitlines()[-1][:9]) == (0, "no hazard"), outcome.out + outcome.err
    with served(tmp_path / "wrong", "NPU", GGML_NPU_KERNELS=str(kernels), GGML_NPU_OPS="all") as (address, _):
        outcome, result = diff(tmp_path, *options, address)
    assert outcome.code == 1, outcome.out + outcome.err
    first = result["nodes"][result["first_introduced"]]
    assert (first["op"], first["device"]) == ("MUL", "RPC1")


@pytest.mark.conformance
def test_a_server_that_is_gone(tmp_path: Path) -> None:
    kernels = faulty(tmp_path / "ends.py", "SWIGLU", "import os; os._exit(1)")
    with served(tmp_path / "log", "NPU", GGML_NPU_KERNELS=str(kernels), GGML_NPU_OPS="all") as (address, _):
        outcome, result = diff(tmp_path, "--device", "RPC0", "--backend", rpc_library(), "--rpc", address)
    assert outcome.code == 1, outcome.out + outcome.err
    assert result["nodes"][-1]["op"] == "SWIGLU"
    assert "ended by SIGABRT" in result["nodes"][-1]["failure"]


# ggml-vulkan, with memory and an order of its own


@pytest.fixture(scope="module")
def lavapipe() -> list[object]:
    """The options of a diff with it."""
    if vulkan.missing():
        pytest.skip(f"ggml-vulkan needs {vulkan.missing()}")
    library = vulkan.library()
    os.environ.update(vulkan.environment())
    return ["--device", vulkan.DEVICE, "--backend", library]


@pytest.mark.conformance
def test_vulkan_is_right(lavapipe: list[object], tmp_path: Path) -> None:
    outcome, result = diff(tmp_path, *lavapipe, "--tolerances", "gpu", "--steps", 1)
    assert outcome.code == 0, outcome.out + outcome.err
    assert (result["own_run"]["judged"], result["own_run"]["on_cpu"], len(result["nodes"])) == (98, 2, 100)
    assert "order of an unobserved run checked" in outcome.out


@pytest.mark.conformance
def test_no_hazard_on_vulkan_and_the_same_each_time(lavapipe: list[object]) -> None:
    for command in ("hazards", "flaky"):
        outcome = fresh(command, "tiny", *lavapipe)
        assert outcome.code == 0, outcome.out + outcome.err


@pytest.mark.conformance
def test_a_layer_that_computes_nothing_changes_no_graph(
    lavapipe: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, variables in {"real": {}, "idle": vulkan.idle(tmp_path)}.items():
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        assert fresh("hazards", "tiny", *lavapipe, "--graphs", tmp_path / f"{name}.json").code == 0
        graphs = json.loads((tmp_path / f"{name}.json").read_text())["graphs"]
        addresses = [[each["space"] and each["address"] for each in graph["tensors"]] for graph in graphs]
        found.append((addresses, [(graph["nodes"], graph.get("steps")) for graph in graphs]))
    assert any(address for graph in found[0][0] for address in graph)
    assert found[0] == found[1]


@pytest.mark.slow
def test_no_hazard_on_vulkan_in_contexts_that_cover_pairs_of_settings(tmp_path: Path) -> None:
    """With a layer on the CPU too, on which llama.cpp lets the device compute large products."""
    if vulkan.missing():
        pytest.skip(f"ggml-vulkan needs {vulkan.missing()}")
    for model in models(folder().with_name("models")):
        if model.stem == "llama-moe":
            shutil.copy(model, tmp_path)
    command: list[str | Path] = [sys.executable, TOOLS / "hazards.py", tmp_path, "--device", vulkan.DEVICE]
    done = subprocess.run([*command, "--models", "llama-moe"], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"Vulkan0, llama-moe: 0 found \(29 contexts, \d+ graphs, [1-9]\d* reordered, ", done.stdout)
