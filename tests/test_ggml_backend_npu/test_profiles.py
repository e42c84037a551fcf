"""Profiles: what each device generation takes and refuses, who reads them, and a user's own with its mistakes."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from recipes import Copy, GetRows, SetRows
from support import choose, supported

from ggml_backend_npu import Backend, DeviceError, Graph, KernelError, Memory, Node, Op, Tensor, default_backend
from ggml_backend_npu.abi import lib
from ggml_backend_npu.abi.plugin import Plugin
from ggml_backend_npu.generations import PROFILES
from ggml_backend_npu.ops.rope import Rope
from ggml_backend_npu.options import Options
from ggml_backend_npu.profiles import ANY, FULL, Profile, ProfileError, Rule, load
from graph_runner.diff import diff
from graph_runner.session import Session, Settings
from graph_runner.tiny import write_tiny_llama
from quant import codec

ROW = (64, 4, 1, 1)


def tensor(type: str, ne: tuple[int, ...] = ROW, gap: int = 0) -> Tensor:
    """A tensor without memory, whose dimension `gap` has a gap behind each of its elements, rows, ..."""
    of = codec(type)
    units = [of.block_bytes, ne[0] // of.block_size, *ne[1:3]]
    nb = [prod(units[: i + 1]) * (2 if gap and i >= gap - 1 else 1) for i in range(4)]
    return Tensor(type, type, ne, tuple(nb), Memory(0, 0))


def node(op: str, dst: str | Tensor, *src: str | Tensor | None, **params: int | float) -> Node:
    """A node over tensors, or over contiguous ones of types; i2 = 5: word 2 of its op_params is 5, f2: as a float."""
    tensors = [tensor(t) if isinstance(t, str) else t for t in (dst, *src)]
    assert tensors[0] is not None
    words = bytearray(64)
    for word, value in params.items():
        struct.pack_into(word[0], words, 4 * int(word[1:]), value)
    return Node(op, tensors[0], tuple(tensors[1:]), bytes(words))


CANN = ("ascend-910b", "ascend-310p")
STRIDED_F32, STRIDED_Q8 = tensor("f32", gap=2), tensor("q8_0", gap=2)
WIDE, NARROW = tensor("f32", (1024, 2, 1, 1)), tensor("f16", (32, 4, 1, 1))
IMAGE, TALL = tensor("f32", (64, 4, 2, 3)), tensor("f32", (64, 4, 2, 1))
POOLED = {"i0": 1, "i1": 3, "i2": 3, "i5": 1, "i6": 1}

TAKEN: list[tuple[tuple[str, ...], Node]] = [
    *((CANN, node("GET_ROWS", "f32", src, "i32")) for src in ("f32", "f16", "q8_0")),
    *((CANN, node("SET_ROWS", dst, "f32", "i64")) for dst in ("f32", "f16")),
    *((CANN, node("CPY", dst, src)) for src in ("f32", "f16") for dst in ("f32", "f16")),
    *((CANN, node("CONT", src, STRIDED_F32 if src == "f32" else src)) for src in ("f32", "f16")),
    *((CANN, node("MUL_MAT", "f32", src, "f32")) for src in ("f32", "f16")),
    *((CANN, node("MUL_MAT_ID", "f32", src, "f32", "i32")) for src in ("f32", "f16")),
    (CANN, node("ROPE", "f32", "f32", "i32", i1=64)),
    (CANN, node("UPSCALE", IMAGE, IMAGE)),
    (CANN, node("POOL_2D", "f32", "f32", **POOLED)),
    (CANN, node("SUM", "f32", STRIDED_F32)),
    (CANN, node("PAD", "f32", "f32")),
    (CANN, node("SCALE", "f32", "f32", f0=0.5)),
    (CANN, node("SOFT_MAX", "f32", "f32", "f32")),
    *((CANN, node(op, "f32", "f32")) for op in ("CUMSUM", "TRI", "FILL", "DIAG", "SOLVE_TRI")),
    (CANN, node("DUP", "q4_0", "q4_0")),
    (CANN[:1], node("GET_ROWS", "f32", "bf16", "i32")),
    (CANN[:1], node("SET_ROWS", "bf16", "f32", "i64")),
    (CANN[:1], node("CPY", "bf16", "f32")),
    (CANN[:1], node("CONT", "bf16", "bf16")),
    (CANN[:1], node("MUL_MAT", "f32", "bf16", "f32")),
    (CANN[:1], node("MUL_MAT", "f32", "q4_0", "f32")),
    (CANN[:1], node("MUL_MAT_ID", "f32", "q8_0", "f32", "i32")),
    (CANN[:1], node("OUT_PROD", "f32", "f16", "f32")),
    (CANN[:1], node("FLASH_ATTN_EXT", "f32", "f32", "f16", "f16", "f16")),
    (CANN[:1], node("ROPE", "f32", STRIDED_F32, "i32", i1=32)),
    (CANN[:1], node("POOL_2D", "f32", "f32", **POOLED | {"i0": 0})),
    *((("ascend-required",), node("GET_ROWS", "f32", src, "i32")) for src in ("f32", "f16", "q8_0", "q4_0", "i32")),
    (("ascend-required",), node("GET_ROWS", "i32", "i32", "i32")),
    *((("ascend-required",), node(op, t, t)) for t in ("f32", "f16", "q8_0", "q4_0", "i32") for op in ("CPY", "DUP")),
    *((("ascend-required",), node(op, dst, STRIDED_F32)) for dst in ("f16", "q8_0", "q4_0") for op in ("CPY", "DUP")),
    *((("ascend-required",), node(op, STRIDED_F32, src)) for src in ("f16", "q8_0", "q4_0") for op in ("CPY", "DUP")),
    (("full",), node("CPY", "q4_0", "q8_1")),
]

REFUSED: list[tuple[tuple[str, ...], Node, str]] = [
    (CANN, node("GET_ROWS", "f32", "q4_0", "i32"), "types q4_0 i32 -> f32"),
    (CANN, node("GET_ROWS", "i32", "i32", "i32"), "types i32 i32 -> i32"),
    (CANN, node("SET_ROWS", "q8_0", "f32", "i64"), "types f32 i64 -> q8_0"),
    (CANN, node("CPY", "q8_0", "f32"), "types f32 -> q8_0"),
    (CANN, node("CPY", "f32", "i32"), "types i32 -> f32"),
    (CANN, node("CONT", "q8_0", "q8_0"), "types q8_0 -> q8_0"),
    (CANN, node("MUL_MAT", "f32", "q4_1", "f32"), "types q4_1 f32 -> f32"),
    (CANN, node("MUL_MAT_ID", "f32", "bf16", "f32", "i32"), "types bf16 f32 i32 -> f32"),
    (CANN, node("ROPE", WIDE, WIDE, "i32", i1=1024), "needs src0.ne0 <= 896, src0.ne0 is 1024"),
    (CANN, node("ROPE", "f32", "f32", "i32", i1=64, i15=4), "needs params.n_offs == 0, params.n_offs is 4"),
    (CANN, node("UPSCALE", IMAGE, TALL), "needs src0.ne2 * dst.ne3 == src0.ne3 * dst.ne2, src0.ne2 is 2"),
    (CANN, node("UPSCALE", IMAGE, IMAGE, i0=1), "needs params.mode == 0, params.mode is 1"),
    (CANN, node("POOL_2D", "f32", "f32", **POOLED | {"i5": 2}), "needs params.p0 * 2 <= params.k0, params.p0 is 2"),
    (CANN, node("POOL_2D", "f32", "f32", **POOLED | {"i6": 2}), "needs params.p1 * 2 <= params.k1, params.p1 is 2"),
    (CANN, node("SUM", "f32", tensor("f32", gap=1)), "src0 rows have gaps: nb0 8"),
    (CANN, node("PAD", "f32", "f32", i8=1), "needs params.circular == 0, params.circular is 1"),
    (CANN, node("SCALE", "f32", "f32", f1=1.0), "needs params.bias == 0, params.bias is 1.0"),
    (CANN, node("SOFT_MAX", "f32", "f32", None, "f32"), "needs src2.type == none, src2.type is f32"),
    *((CANN, node(op, "f16", "f16"), "types f16 -> f16") for op in ("CUMSUM", "TRI", "FILL", "DIAG", "SOLVE_TRI")),
    (CANN, node("SSM_SCAN", "f32", "f32"), "no SSM_SCAN"),
    (CANN, node("SWIGLU_OAI", "f32", "f32"), "no SWIGLU_OAI"),
    (CANN[:1], node("MUL_MAT", "f32", STRIDED_Q8, "f32"), "src0 is not contiguous: nb (34, 136, 544, 544)"),
    (CANN[:1], node("MUL_MAT", "f32", "q8_0", STRIDED_F32), "src1 is not contiguous: nb (4, 512, 2048, 2048)"),
    (CANN[:1], node("MUL_MAT_ID", "f32", STRIDED_Q8, "f32", "i32"), "src0 is not contiguous: nb (34, 136, 544, 544)"),
    (CANN[:1], node("OUT_PROD", "f32", "bf16", "f32"), "types bf16 f32 -> f32"),
    (
        CANN[:1],
        node("FLASH_ATTN_EXT", "f32", "f32", "q8_0", "f16", "f16"),
        "types f32 q8_0 f16 f16 -> f32",
    ),
    (
        CANN[:1],
        node("FLASH_ATTN_EXT", "f32", "f32", "f16", "f16", "f16", "f32"),
        "needs src4.type == none, src4.type is f32",
    ),
    (
        CANN[:1],
        node("FLASH_ATTN_EXT", "f32", "f32", "f16", NARROW, "f16"),
        "needs src1.ne0 == src2.ne0, src1.ne0 is 64",
    ),
    (
        CANN[:1],
        node("FLASH_ATTN_EXT", "f32", "f32", "f16", "f16", "f16", f2=30.0),
        "needs params.logit_softcap == 0, params.logit_softcap is 30.0",
    ),
    (CANN[1:], node("GET_ROWS", "f32", "bf16", "i32"), "types bf16 i32 -> f32"),
    (CANN[1:], node("SET_ROWS", "bf16", "f32", "i64"), "types f32 i64 -> bf16"),
    (CANN[1:], node("CPY", "bf16", "f32"), "types f32 -> bf16"),
    (CANN[1:], node("CONT", "bf16", "bf16"), "types bf16 -> bf16"),
    (CANN[1:], node("MUL_MAT", "f32", "bf16", "f32"), "types bf16 f32 -> f32"),
    (CANN[1:], node("MUL_MAT", "f32", "q8_0", "f32"), "types q8_0 f32 -> f32"),
    (CANN[1:], node("MUL_MAT_ID", "f32", "q8_0", "f32", "i32"), "types q8_0 f32 i32 -> f32"),
    (CANN[1:], node("OUT_PROD", "f32", "f16", "f32"), "no OUT_PROD"),
    (CANN[1:], node("FLASH_ATTN_EXT", "f32", "f32", "f16", "f16", "f16"), "no FLASH_ATTN_EXT"),
    (
        CANN[1:],
        node("ROPE", STRIDED_F32, STRIDED_F32, "i32", i1=64),
        "src0 is not contiguous: nb (4, 512, 2048, 2048)",
    ),
    (CANN[1:], node("ROPE", "f32", "f32", "i32", i1=32), "needs src0.ne0 == params.n_dims, src0.ne0 is 64"),
    (CANN[1:], node("POOL_2D", "f32", "f32", **POOLED | {"i0": 0}), "needs params.op != 0, params.op is 0"),
    (("ascend-required",), node("GET_ROWS", "f32", "bf16", "i32"), "types bf16 i32 -> f32"),
    (("ascend-required",), node("GET_ROWS", "f16", "f16", "i32"), "types f16 i32 -> f16"),
    (("ascend-required",), node("GET_ROWS", "i32", "i32", "i64"), "types i32 i64 -> i32"),
    *(
        (("ascend-required",), node(op, dst, src), f"types {src} -> {dst}")
        for dst, src in (("i32", "f32"), ("f32", "i32"), ("f16", "q8_0"), ("q4_0", "q8_0"), ("bf16", "bf16"))
        for op in ("CPY", "DUP")
    ),
    *(
        (("ascend-required",), node(op, STRIDED_Q8, src), "dst is not contiguous: nb (34, 136, 544, 544)")
        for src in ("f32", "f16")
        for op in ("CPY", "DUP")
    ),
    (("ascend-required",), node("CONT", "f32", "f32"), "no CONT"),
    (("ascend-required",), node("SET_ROWS", "f16", "f32", "i64"), "no SET_ROWS"),
]

taken = pytest.mark.parametrize(("name", "of"), [pytest.param(p, n, id=f"{p} {n.op}") for ps, n in TAKEN for p in ps])
refused = pytest.mark.parametrize(
    ("name", "of", "why"), [pytest.param(p, n, why, id=f"{p} {n.op} {why}") for ps, n, why in REFUSED for p in ps]
)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What a test does to the default backend's options is undone after it."""
    choose(monkeypatch, profile=FULL)
    return monkeypatch


# what they say


@taken
def test_a_generation_takes(name: str, of: Node) -> None:
    assert PROFILES[name].refusal(of) is None


@refused
def test_a_generation_refuses(name: str, of: Node, why: str) -> None:
    assert PROFILES[name].refusal(of) == f"profile {name}: {why}"


@pytest.mark.parametrize("profile", [p for p in PROFILES.values() if p.ops is not None], ids=lambda p: p.name)
def test_every_rule_has_a_node_it_takes_and_one_it_refuses(profile: Profile) -> None:
    """Of this file: so no rule goes untested."""
    good = [n for names, n in TAKEN if profile.name in names]
    bad = [n for names, n, _ in REFUSED if profile.name in names]
    for op, rules in (profile.ops or {}).items():
        for rule in rules if rules != ANY else ():
            assert any(n.op == op and rule.has_types(n) and rule.refusal(n) is None for n in good), (op, rule)
            assert any(n.op == op and not (rule.has_types(n) and rule.refusal(n) is None) for n in bad), (op, rule)
            for condition in rule.where:
                needs = f"needs {condition},"
                assert any(needs in why for names, n, why in REFUSED if profile.name in names and n.op == op), condition


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda p: p.name)
def test_every_profile_says_what_it_is_and_names_ops_of_ggml(profile: Profile) -> None:
    assert profile.description
    assert profile.source
    assert set(profile.ops or ()) <= lib.ggml().op_names


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
        ("src0.ne0 % 0 == 64", True),
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
    numbers = {"ROPE": {"i1": 64, "i2": 2}, "CLAMP": {"f0": -0.5, "f1": 0.5}}.get(op, {})
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
    result = diff(write_tiny_llama(tmp_path / "tiny.gguf"), "once", steps=0)
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
    assert (done.returncode, done.stderr) == (2, f"ggml-npu: {reason}\n")


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
    known = "must be one of full, ascend-910b, ascend-310p, ascend-required, or FILE.toml"
    with pytest.raises(DeviceError) as error:
        Options().updated({"memory": "device", "profile": "ascend"})
    assert str(error.value) == f"profile='ascend': {known}"
    monkeypatch.setenv("GGML_NPU_PROFILE", "910b")
    with pytest.raises(DeviceError) as error:
        Options.from_environment()
    assert str(error.value) == f"GGML_NPU_PROFILE='910b': {known}"


def npu(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GGML_NPU_")}
    return subprocess.run(
        [Path(sys.executable).with_name("ggml-npu"), *arguments],
        capture_output=True, text=True, env=inherited | {"COLUMNS": "200"} | environment, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_the_command_takes_the_environment_and_options_before_it() -> None:
    run = npu("run", "tiny", "-n", "1", "-p", "a", GGML_NPU_PROFILE="ascend-required")
    assert run.returncode == 0
    assert re.search(r"^SET_ROWS +0 +4 *$", run.stderr, re.MULTILINE)
    assert re.search(r"^GET_ROWS +3 +0 *$", run.stderr, re.MULTILINE)
    devices = npu("devices", "--profile", "ascend-910b", "--device-type", "gpu", GGML_NPU_PROFILE="ascend-required")
    assert re.search(r"^NPU +GPU +NPU ", devices.stdout, re.MULTILINE)
    assert "profile ascend-910b: Ascend 910B as ggml-cann drives it" in devices.stdout
    diff = npu("diff", "tiny", "-n", "0", "--profile", "ascend-required")
    assert diff.returncode == 0
    assert "SET_ROWS: 4 nodes left to the CPU: profile ascend-required: no SET_ROWS" in diff.stdout


# a user's own

OWN = """\
name = "mine"
description = "an NPU of mine"
base = "ascend-310p"
ops = ["SSM_SCAN", "ADD"]

[op.GET_ROWS]
src0 = ["f32", "q4_0"]  # comment
contiguous = [
    "src0",
]
where = ["src0.ne0 % 32 == 0"]

[[op.CPY]]
src0 = ["f32"]
dst = ["f32"]

[[op.CPY]]
src0 = ["q8_0"]
dst = [
    "f32",
    "f16",
]
rows = ["dst"]

[op]
CONT = []
"""


def own(folder: Path, text: str) -> str:
    """A file of a profile."""
    path = folder / "own.toml"
    path.write_text(text)
    return str(path)


def test_a_users_own_profile(tmp_path: Path) -> None:
    mine = load(own(tmp_path, OWN))
    assert (mine.name, mine.description) == ("mine", "an NPU of mine")
    for n in (
        node("SSM_SCAN", "f32", "f32"),
        node("GET_ROWS", "f32", "q4_0", "i32"),
        node("CPY", "f32", "f32"),
        node("CPY", "f16", "q8_0"),
        node("SET_ROWS", "f16", "f32", "i64"),  # of the base
    ):
        assert mine.refusal(n) is None
    for n, why in (
        (node("GET_ROWS", "f32", "f16", "i32"), "types f16 i32 -> f32"),
        (node("GET_ROWS", "f32", STRIDED_F32, "i32"), "src0 is not contiguous: nb (4, 512, 2048, 2048)"),
        (node("CPY", "f16", "f32"), "types f32 -> f16"),
        (node("CPY", tensor("f16", gap=1), "q8_0"), "dst rows have gaps: nb0 4"),
        (node("CONT", "f32", "f32"), "no CONT"),
        (node("OUT_PROD", "f32", "f32", "f32"), "no OUT_PROD"),
    ):
        assert mine.refusal(n) == f"profile mine: {why}"


def test_the_least_that_a_file_says_is_nothing(tmp_path: Path) -> None:
    empty = load(own(tmp_path, ""))
    assert (empty.name, empty.source) == ("own", str(tmp_path / "own.toml"))
    assert empty.refusal(node("CPY", "f32", "f32")) == "profile own: no CPY"


@pytest.mark.parametrize(
    ("right", "wrong", "line", "what"),
    [
        ("contiguous", "contigous", 8, "unknown key 'contigous'; known: dst src0 "),
        ("ops", "op_s", 4, "unknown key 'op_s'; known: name description source base ops op"),
        ("op.GET_ROWS", "op.GET_ROW", 6, "unknown op 'GET_ROW'; did you mean GET_ROWS"),
        ('"SSM_SCAN"', '"SSMSCAN"', 4, "unknown op 'SSMSCAN'; did you mean SSM_SCAN"),
        ("CONT =", "KONT =", 26, "unknown op 'KONT'; did you mean CONT"),
        ('"q4_0"', '"q4_O"', 7, "src0: unknown type 'q4_O'; known: q8_0 q4_0 "),
        ('"f16",', '"f61",', 21, "dst: unknown type 'f61'; known: q8_0 "),
        ('    "src0"', '    "scr0"', 9, "contiguous: unknown tensor 'scr0'; known: dst src0 "),
        ("src0.ne0 % 32", "params.width", 11, "where: unknown parameter of GET_ROWS 'width'; known: 0 1 2 "),
        ("% 32", "& 32", 11, "where: condition 'src0.ne0 & 32 == 0': must be such as "),
        ("ascend-310p", "ascend-310", 3, "unknown base 'ascend-310'; known: ascend-910b ascend-310p ascend-required"),
        ("ascend-310p", "full", 3, "unknown base 'full'; known: ascend-910b "),
        ('["q8_0"]', '"q8_0"', 18, 'src0: must be a list of texts, such as ["..."]'),
        ('"mine"', "3", 1, "name: must be a text"),
        ("CONT = []", "CONT = 1", 26, "CONT: must be a table [op.CONT]"),
        ('["f32", "q4_0"]', '["f32", "q4_0"', 8, "Unclosed array: contiguous = ["),
        ("dst = [\n", "dst [\n", 19, "Expected '=' after a key in a key/value pair: dst ["),
        ("rows = ", "src0 = ", 23, 'Cannot overwrite a value: src0 = ["dst"]'),
    ],
)
def test_a_typo_is_named_with_its_line(tmp_path: Path, right: str, wrong: str, line: int, what: str) -> None:
    assert right in OWN
    file = own(tmp_path, OWN.replace(right, wrong))
    with pytest.raises(DeviceError) as error:
        Options().updated({"profile": file})
    message = str(error.value)
    assert message.startswith(f"profile={file!r}: line {line}: {what}")
    assert "\n" not in message


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file"):
        load(str(tmp_path / "missing.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileError, match="is not text"):
        load(str(tmp_path / "binary.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ProfileError, match="Is a directory"):
        load(str(tmp_path / "folder.toml"))
    with pytest.raises(ProfileError, match=r"line 1: .*: name = \"open"):
        load(own(tmp_path, 'name = "open'))
