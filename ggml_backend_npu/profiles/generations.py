"""The device generations that come with the backend; each is one `Profile` of declared rules.

To add one, add one entry to PROFILES.
"""

from __future__ import annotations

from ggml_backend_npu.profiles.rules import ANY, FULL, Profile, Rule, Types

_CANN_IN_ANY_FORM = (
    "ABS", "NEG", "GELU", "SILU", "RELU", "SIGMOID", "HARDSIGMOID", "HARDSWISH", "GELU_QUICK", "TANH", "EXP",
    "ELU", "SGN", "STEP", "GELU_ERF", "SOFTPLUS",
    "REGLU", "GEGLU", "SWIGLU", "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU_CLAMP",
    "L2_NORM", "CROSS_ENTROPY_LOSS", "DUP", "IM2COL", "CONCAT", "REPEAT", "NORM", "ADD", "ADD1", "SUB", "MUL",
    "DIV", "RMS_NORM", "SQR", "SQRT", "CLAMP",
    "DIAG_MASK_INF", "SUM_ROWS", "ARGSORT", "ACC", "SET", "GROUP_NORM", "ARANGE", "TIMESTEP_EMBEDDING",
    "LEAKY_RELU", "ARGMAX", "COS", "SIN", "LOG", "MEAN",
    "PAD_REFLECT_1D", "COUNT_EQUAL", "GATED_LINEAR_ATTN", "CONV_TRANSPOSE_1D", "SSM_CONV",
)  # fmt: skip
_CANN_OF_F32 = ("CUMSUM", "TRI", "FILL", "DIAG", "SOLVE_TRI")
_HALF = ("f32", "f16")
_FLOATS = (*_HALF, "bf16")
_CANN_QUANTIZED = Rule({"src0": ("q8_0", "q4_0")}, contiguous=("src0", "src1"))


def _cann(floats: Types, **others: tuple[Rule, ...]) -> dict[str, tuple[Rule, ...]]:
    """ggml_backend_cann_supports_op, case by case: what all its builds take, with the float types of one of them."""
    return {
        **dict.fromkeys(_CANN_IN_ANY_FORM, ANY),
        **dict.fromkeys(_CANN_OF_F32, (Rule({"src0": ("f32",)}),)),
        "GET_ROWS": (Rule({"src0": (*floats, "q8_0")}),),
        "SET_ROWS": (Rule({"dst": floats}),),
        "CPY": (Rule({"src0": floats, "dst": floats}),),
        "CONT": (Rule({"src0": floats}),),
        "MUL_MAT": (Rule({"src0": floats}),),
        "MUL_MAT_ID": (Rule({"src0": _HALF}),),
        "ROPE": (Rule(where=("params.n_offs == 0", "src0.ne0 <= 896")),),
        "UPSCALE": (Rule(where=("src0.ne2 * dst.ne3 == src0.ne3 * dst.ne2", "params.mode == 0")),),
        "POOL_2D": (Rule(where=("params.p0 * 2 <= params.k0", "params.p1 * 2 <= params.k1")),),
        "SUM": (Rule(rows=("src0",)),),
        "PAD": (Rule(where=("params.circular == 0",)),),
        "SCALE": (Rule(where=("params.bias == 0",)),),
        "SOFT_MAX": (Rule(where=("src2.type == none",)),),
        **others,
    }


_CANN_SOURCE = "ggml_backend_cann_supports_op in ggml-cann.cpp of llama-cpp-python 0.3.36"

ASCEND_910B = Profile(
    "ascend-910b",
    "Ascend 910B as ggml-cann drives it",
    _CANN_SOURCE,
    _cann(
        _FLOATS,
        MUL_MAT=(Rule({"src0": _FLOATS}), _CANN_QUANTIZED),
        MUL_MAT_ID=(Rule({"src0": _HALF}), _CANN_QUANTIZED),
        OUT_PROD=(Rule({"src0": _HALF}),),
        FLASH_ATTN_EXT=(
            Rule(
                {"src1": ("f16",), "src2": ("f16",), "dst": _FLOATS},
                where=("src4.type == none", "src1.ne0 == src2.ne0", "params.logit_softcap == 0"),
            ),
        ),
    ),
)

ASCEND_310P = Profile(
    "ascend-310p",
    "Ascend 310P as ggml-cann drives it",
    f"{_CANN_SOURCE}, under ASCEND_310P",
    _cann(
        _HALF,
        ROPE=(
            Rule(contiguous=("src0",), where=("params.n_offs == 0", "src0.ne0 <= 896", "src0.ne0 == params.n_dims")),
        ),
        POOL_2D=(Rule(where=("params.op != 0", "params.p0 * 2 <= params.k0", "params.p1 * 2 <= params.k1")),),
    ),
)

_BLOCKS = ("q8_0", "q4_0")
_REQUIRED_COPIES = (
    *(Rule({"src0": (name,), "dst": (name,)}) for name in (*_BLOCKS, "i32")),
    Rule({"src0": _HALF, "dst": _HALF}),
    Rule({"src0": _HALF, "dst": _BLOCKS}, contiguous=("dst",)),
    Rule({"src0": _BLOCKS, "dst": ("f32",)}),
)

ASCEND_REQUIRED = Profile(
    "ascend-required",
    "Ascend 310P and 910B as the requirement of aclnn operators for llama.cpp asks: GET_ROWS, CPY, DUP",
    "the type tables of that requirement",
    {
        "GET_ROWS": (
            Rule({"src0": (*_HALF, *_BLOCKS), "src1": ("i32",), "dst": ("f32",)}),
            Rule({"src0": ("i32",), "src1": ("i32",), "dst": ("f32", "i32")}),
        ),
        "CPY": _REQUIRED_COPIES,
        "DUP": _REQUIRED_COPIES,
    },
)

PROFILES = {profile.name: profile for profile in (FULL, ASCEND_910B, ASCEND_310P, ASCEND_REQUIRED)}
