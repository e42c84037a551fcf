"""What each device generation takes and refuses, with a node on either side of each of its rules."""

from __future__ import annotations

import pytest
from kit.bare import STRIDED_F32, STRIDED_Q8, node, tensor

from ggml_backend_npu import Node
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.profiles.generations import PROFILES
from ggml_backend_npu.profiles.rules import ANY, Profile

CANN = ("ascend-910b", "ascend-310p")
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


@taken
def test_a_generation_takes(name: str, of: Node) -> None:
    assert PROFILES[name].refusal(of) is None


@refused
def test_a_generation_refuses(name: str, of: Node, why: str) -> None:
    assert PROFILES[name].refusal(of) == f"profile {name}: {why}"


@pytest.mark.parametrize("profile", [p for p in PROFILES.values() if p.ops is not None], ids=lambda p: p.name)
def test_every_rule_has_a_node_it_takes_and_one_it_refuses(profile: Profile) -> None:
    """Of this file: so no rule goes untested."""
    name = profile.name
    good = [n for names, n in TAKEN if name in names]
    bad = [n for names, n, _ in REFUSED if name in names]
    for op, rules in (profile.ops or {}).items():
        for rule in rules if rules != ANY else ():
            assert any(n.op == op and rule.has_types(n) and rule.refusal(n) is None for n in good), (
                f"add to TAKEN a node {op} that {name} takes by {rule}"
            )
            assert any(n.op == op and not (rule.has_types(n) and rule.refusal(n) is None) for n in bad), (
                f"add to REFUSED a node {op}, and why {name} refuses it by {rule}"
            )
            for condition in rule.where:
                needs = f"needs {condition},"
                assert any(needs in why for names, n, why in REFUSED if name in names and n.op == op), (
                    f"add to REFUSED a node {op} that {name} refuses with {needs!r}"
                )


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda p: p.name)
def test_every_profile_says_what_it_is_and_names_ops_of_ggml(profile: Profile) -> None:
    assert profile.description
    assert profile.source
    assert set(profile.ops or ()) <= lib.ggml().op_names
