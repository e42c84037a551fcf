"""What a profile says: its rules and conditions, who reads them, and how one is chosen."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.bare import ROW, STRIDED_F32, node, tensor
from kit.commands import Outcome, fresh
from kit.recipes import Copy, GetRows, SetRows
from kit.support import choose, supported

from ggml_backend_npu import Backend, DeviceError, Graph, KernelError, Op, default_backend
from ggml_backend_npu.backend.options import Options
from ggml_backend_npu.ops.rope import Rope
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.profiles import load
from ggml_backend_npu.profiles.generations import PROFILES
from ggml_backend_npu.profiles.rules import FULL, Profile, ProfileError, Rule
from graph_runner.base.tiny import write_tiny_llama
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.run.session import Session, Settings

# rules


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        ({"types": {"dest": ("f32",)}}, "unknown tensor 'dest'; known: dst src0"),
        ({"types": {"dst": ("fp32",)}}, "unknown type 'fp32'; known: q8_0"),
        ({"contiguous": ("src10",)}, "unknown tensor 'src10'"),
        ({"rows": ("rows",)}, "unknown tensor 'rows'"),
        ({"where": ("src0.ne4 == 1",)}, "condition 'src0.ne4 == 1': must be such as"),
        ({"where": ("params.16 == 0",)}, "condition 'params.16 == 0'"),
        ({"where": ("src0.ne0 = 1",)}, "condition 'src0.ne0 = 1'"),
        ({"where": ("params.n-dims == 1",)}, "condition 'params.n-dims == 1'"),
        ({"where": ("src0.type == f23",)}, "unknown type 'f23'"),
    ],
)
def test_a_rule_refuses_words_that_it_does_not_know(rule: dict[str, Any], what: str) -> None:
    with pytest.raises(ProfileError) as error:
        Rule(**rule)
    assert str(error.value).startswith(what)


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("src0.ne0 % 32 == 0", True),
        ("src0.ne0 % 48 == 0", False),
        ("src0.nb1 == 256", True),
        ("src0.ne1 > 3", True),
        ("src0.ne1 > 4", False),
        ("src0.ne1 >= 4", True),
        ("src0.ne1 < 4", False),
        ("src0.ne1 != 4", False),
        ("params.3 == -7", True),
        ("src5.ne0 == 0", True),
        ("src5.type != none", False),
        ("src0.type != dst.type", True),
    ],
)
def test_conditions_compare_types_sizes_strides_and_parameters(condition: str, holds: bool) -> None:
    assert (Rule(where=(condition,)).refusal(node("CPY", "f16", "f32", i3=-7)) is None) == holds


@pytest.mark.parametrize(
    ("op", "condition", "holds"),
    [
        ("ROPE", "params.n_dims == 64", True),
        ("ROPE", "params.n_dims == src0.ne0", True),
        ("ROPE", "src0.ne0 == params.mode * 32", True),
        ("ROPE", "params.n_offs % 2 == 1", False),
        ("CLAMP", "params.min < 0", True),
        ("CLAMP", "params.max > 0", True),
        ("CLAMP", "params.max >= 1", False),
        ("RMS_NORM", "params.eps != 0", False),
    ],
)
def test_conditions_name_parameters(op: str, condition: str, holds: bool) -> None:
    """Of the backend's own op, floats as floats; what op_params are too short for is 0."""
    known: dict[str, dict[str, float]] = {"ROPE": {"i1": 64, "i2": 2}, "CLAMP": {"f0": -0.5, "f1": 0.5}}
    numbers: dict[str, Any] = known.get(op, {})
    named = Profile("named", "", "", {op: (Rule(where=(condition,)),)})
    of = node(op, "f32", "f32", **numbers)
    of = replace(of, params=of.params if numbers else b"")
    assert (named.refusal(of) is None) == holds
    with default_backend().ops.having(Op(op, lambda dst, x: None)):
        assert (named.refusal(of) is None) == holds


@pytest.mark.parametrize(
    ("op", "condition", "says"),
    [
        ("CLAMP", "params.low == 0", "unknown parameter of CLAMP 'low'; known: min max"),
        ("RMS_NORM", "src0.ne0 == params.width * 2", "unknown parameter of RMS_NORM 'width'; known: eps"),
        ("ROPE", "params.sections == 0", f"unknown parameter of ROPE 'sections'; known: {' '.join(Rope.names())}"),
        ("DIAG", "params.n == 0", f"unknown parameter of DIAG 'n'; known: {' '.join(map(str, range(16)))}"),
    ],
)
def test_a_parameter_that_an_op_does_not_have_is_refused_when_the_profile_is_made(
    op: str, condition: str, says: str
) -> None:
    with pytest.raises(ProfileError) as error:
        Profile("wrong", "", "", {op: (Rule(), Rule(where=(condition,)))})
    assert str(error.value) == says


def test_one_of_several_forms_is_enough() -> None:
    either = Profile("either", "", "", {"CPY": (Rule(contiguous=("src0",)), Rule(where=("src0.ne0 == 64",)))})
    narrow = tensor("f32", (32, 4, 1, 1), gap=2)
    assert either.refusal(node("CPY", "f32", "f32")) is None
    assert either.refusal(node("CPY", "f32", STRIDED_F32)) is None
    assert either.refusal(node("CPY", narrow, narrow)) == (
        "profile either: src0 is not contiguous: nb (4, 256, 1024, 1024)"
    )


# who reads them


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What a test does to the default backend's options is undone after it."""
    choose(monkeypatch, profile=FULL)
    return monkeypatch


def test_the_scheduler_and_the_plan_read_the_profile(backend: Plugin, options: pytest.MonkeyPatch) -> None:
    to_bf16, to_f16 = Copy(("f32", "bf16"), ROW), Copy(("f32", "f16"), ROW)
    assert supported(backend, to_bf16)
    graph = Graph((node("CPY", "bf16", "f32"),))
    assert default_backend().plan(graph).counts == {"CPY": 1}
    choose(options, profile=load("ascend-310p"))
    assert not supported(backend, to_bf16)
    assert supported(backend, to_f16)
    with pytest.raises(KernelError, match="CPY node 'bf16': profile ascend-310p: types f32 -> bf16"):
        default_backend().plan(graph)


def test_a_kernel_that_is_missing_comes_before_the_profile(options: pytest.MonkeyPatch) -> None:
    choose(options, profile=load("ascend-310p"))
    assert default_backend().refusal(node("FLASH_ATTN_BACK", "f32", "f32")) == "no kernel"
    assert default_backend().refusal(node("CPY", "i64", "f32")) == "types f32 -> i64"


def test_a_new_generation_is_one_profile(backend: Plugin, options: pytest.MonkeyPatch) -> None:
    mine = Profile("mine", "", "", {"GET_ROWS": (Rule({"src0": ("f16",)}, where=("src0.ne0 % 16 == 0",)),)})
    choose(options, profile=mine)
    assert supported(backend, GetRows("f16", (32, 3, 1, 1), 2))
    assert not supported(backend, GetRows("f16", (24, 3, 1, 1), 2))
    assert not supported(backend, GetRows("f32", (32, 3, 1, 1), 2))
    assert not supported(backend, SetRows(("f16", "f32", "i64"), (32, 3, 1, 1), 2))


def test_a_model_runs_the_same_with_less_of_it_on_the_device(
    backend: Plugin, options: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, results = write_tiny_llama(tmp_path / "tiny.gguf"), {}
    for name in ("full", "ascend-required"):
        choose(options, profile=load(name))
        with Session(file, Settings(device="npu", flash_attention="off")) as session:
            session.decode(session.tokenize("once"))
            results[name] = (session.npu_nodes, session.logits())
    full, required = results["full"], results["ascend-required"]
    assert full[0] == {"GET_ROWS": 3, "SET_ROWS": 4, "CONT": 2}
    assert required[0] == {"GET_ROWS": 3}
    assert (full[1] == required[1]).all()


def test_a_diff_lists_nodes_outside_the_profile_as_refused(options: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choose(options, profile=load("ascend-required"))
    result = diff(write_tiny_llama(tmp_path / "tiny.gguf"), "once", DiffOptions(steps=0))
    assert result
    assert {node.op for node in result.compared} == {"GET_ROWS"}
    counts = {"SET_ROWS": 4, "CONT": 2, "ADD": 4, "MUL": 5, "ROPE": 4, "SOFT_MAX": 2}
    counts |= {"MUL_MAT": 19, "RMS_NORM": 5, "SWIGLU": 2}
    assert result.refused == {(op, f"profile ascend-required: no {op}"): n for op, n in counts.items()}


@pytest.mark.slow
def test_what_a_profile_refuses_in_the_devices_memory_fails_and_does_not_abort() -> None:
    caches = ("--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0")
    done = npu("run", "tiny", "--memory", "device", "--device-type", "gpu", "--profile", "ascend-310p", *caches)
    reason = "SET_ROWS node 'cache_k_l0 (view)': profile ascend-310p: types f32 i64 q8_0 -> q8_0"
    assert (done.code, done.err) == (2, f"ggml-npu: {reason}\n")


# how one is chosen


def test_the_environment_is_read_once_and_options_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NPU_PROFILE", "ascend-910b")
    monkeypatch.setenv("GGML_NPU_MEMORY_LIMIT", "2G")
    assert Options().profile is FULL
    backend = Backend()
    backend.options = backend.options.updated({"profile": "ascend-310p", "memory": None})
    assert (backend.options.profile.name, backend.options.memory_limit) == ("ascend-310p", 2 << 30)
    monkeypatch.setenv("GGML_NPU_MEMORY_LIMIT", "3G")
    assert (backend.options.profile.name, backend.options.memory_limit) == ("ascend-310p", 2 << 30)
    assert Options.from_environment().profile.name == "ascend-910b"


def test_a_name_that_is_unknown_is_answered_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    known = f"must be one of {', '.join(PROFILES)}, or FILE.toml"
    with pytest.raises(DeviceError) as error:
        Options().updated({"memory": "device", "profile": "ascend"})
    assert str(error.value) == f"profile='ascend': {known}"
    monkeypatch.setenv("GGML_NPU_PROFILE", "910b")
    with pytest.raises(DeviceError) as error:
        Options.from_environment()
    assert str(error.value) == f"GGML_NPU_PROFILE='910b': {known}"


def npu(*arguments: str, **environment: str) -> Outcome:
    """The command in a process of its own, with no other GGML_NPU_ variables than these."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GGML_NPU_")}
    return fresh(*arguments, env=inherited | {"COLUMNS": "200"} | environment)


@pytest.mark.slow
def test_the_command_takes_the_environment_and_options_before_it() -> None:
    run = npu("run", "tiny", "-n", "1", "-p", "a", GGML_NPU_PROFILE="ascend-required")
    assert run.code == 0
    assert re.search(r"^SET_ROWS +0 +4 *$", run.err, re.MULTILINE)
    assert re.search(r"^GET_ROWS +3 +0 *$", run.err, re.MULTILINE)
    devices = npu("devices", "--profile", "ascend-910b", "--device-type", "gpu", GGML_NPU_PROFILE="ascend-required")
    assert re.search(r"^NPU +GPU +NPU ", devices.out, re.MULTILINE)
    assert "profile ascend-910b: Ascend 910B as ggml-cann drives it" in devices.out
    diff = npu("diff", "tiny", "-n", "0", "--profile", "ascend-required")
    assert diff.code == 0
    assert "SET_ROWS: 4 nodes left to the CPU: profile ascend-required: no SET_ROWS" in diff.out
