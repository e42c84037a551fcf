"""Device generations: which nodes each takes, of those that the backend has a kernel for.

A generation is one `Profile`, declared below or in a TOML file of the user's own. To add one: one entry in PROFILES.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ggml_backend_npu.ir import Node, Tensor
from quant import type_names

Types = tuple[str, ...]

ROLES = ("dst", *(f"src{i}" for i in range(10)))

_NUMBER = r"(?:dst|src\d)\.n[eb][0-3]|params\.(?:\d|1[0-5])|-?\d+"
_SIDE = rf"({_NUMBER})(?: ([*%]) ({_NUMBER}))?"
_NUMBERS = re.compile(rf"{_SIDE} (==|!=|<=|>=|<|>) {_SIDE}")
_TYPES = re.compile(r"((?:dst|src\d)\.type) (==|!=) (\w+(?:\.type)?)")
_CONDITIONS = 'such as "src0.ne0 % 16 == 0", "src0.ne0 <= 896", "params.1 == 0" or "dst.type == src0.type"'
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
    "*": operator.mul, "%": lambda a, b: a % b if b else a,
}  # fmt: skip


class ProfileError(Exception):
    """A profile that cannot be: one line. `word` is what is wrong in it."""

    def __init__(self, message: str, word: str = "") -> None:
        super().__init__(message)
        self.word = word


def one_of(what: str, word: str, known: Collection[str]) -> None:
    """Raises ProfileError for a word that is not known; of many known ones it names those that are like it."""
    if word not in known:
        like = get_close_matches(word, known) if len(known) > 50 else []
        hint = f"did you mean {' or '.join(like)}?" if like else f"known: {' '.join(known)}"
        raise ProfileError(f"unknown {what} {word!r}; {hint}", word)


def _tensor(node: Node, role: str) -> Tensor | None:
    if role == "dst":
        return node.dst
    at = int(role[3:])
    return node.src[at] if at < len(node.src) else None


def _number(operand: str, node: Node) -> int:
    role, _, what = operand.partition(".")
    if not what:
        return int(operand)
    if role == "params":
        return int(struct.unpack_from("<i", node.params.ljust(64, b"\0"), 4 * int(what))[0])
    tensor = _tensor(node, role)
    return 0 if tensor is None else (tensor.ne if what.startswith("ne") else tensor.nb)[int(what[2])]


def _type(operand: str, node: Node) -> str:
    role, _, what = operand.partition(".")
    if not what:
        return operand
    tensor = _tensor(node, role)
    return "none" if tensor is None else tensor.type


def _unmet(condition: str, node: Node) -> str | None:
    """What the node has instead where it does not meet the condition."""
    if types := _TYPES.fullmatch(condition):
        left, relation, right = types.groups()
        value: object = _type(left, node)
        met = _OPERATORS[relation](value, _type(right, node))
    else:
        numbers = _NUMBERS.fullmatch(condition)
        assert numbers is not None
        left, *first, relation, right, by, factor = numbers.groups()
        value = _number(left, node)
        sides = [
            _OPERATORS[by](_number(a, node), _number(b, node)) if by else _number(a, node)
            for a, by, b in ((left, *first), (right, by, factor))
        ]
        met = _OPERATORS[relation](*sides)
    return None if met else f"needs {condition}, {left} is {value}"


@dataclass(frozen=True)
class Rule:
    """One form in which a device takes an op. Tensors go by role: "dst", "src0", "src1", ...

    types       types that a tensor may have, by role; any where left out
    contiguous  roles whose tensors must be contiguous
    rows        roles whose rows must have no gaps between elements
    where       further conditions on types, ne, nb and op_params: "src0.ne0 <= 896", "params.1 == 0"; a source that is
                not there has the type "none"
    """

    types: Mapping[str, Types] = field(default_factory=dict)
    contiguous: Types = ()
    rows: Types = ()
    where: Types = ()

    def __post_init__(self) -> None:
        known = type_names()
        for role in (*self.types, *self.contiguous, *self.rows):
            one_of("tensor", role, ROLES)
        for name in (name for names in self.types.values() for name in names):
            one_of("type", name, known)
        for condition in self.where:
            types = _TYPES.fullmatch(condition)
            if not types and not _NUMBERS.fullmatch(condition):
                raise ProfileError(f"condition {condition!r}: must be {_CONDITIONS}", condition)
            if types and "." not in types[3]:
                one_of("type", types[3], (*known, "none"))

    def has_types(self, node: Node) -> bool:
        """Whether the node's tensors have types of this rule."""
        tensors = {role: _tensor(node, role) for role in self.types}
        return all(tensor is not None and tensor.type in self.types[role] for role, tensor in tensors.items())

    def refusal(self, node: Node) -> str | None:
        """Why a node of these types is not taken; None where it is."""
        for role in self.contiguous:
            tensor = _tensor(node, role)
            if tensor is not None and not tensor.is_contiguous():
                return f"{role} is not contiguous: nb {tensor.nb}"
        for role in self.rows:
            tensor = _tensor(node, role)
            if tensor is not None and not tensor.has_contiguous_rows():
                return f"{role} rows have gaps: nb0 {tensor.nb[0]}"
        return next((unmet for condition in self.where if (unmet := _unmet(condition, node))), None)


ANY = (Rule(),)


@dataclass(frozen=True)
class Profile:
    """A device generation.

    ops     the ops it takes, each in any of the forms of its rules; None: all ops in any form
    source  where this is known from
    """

    name: str
    description: str
    source: str
    ops: Mapping[str, tuple[Rule, ...]] | None

    def refusal(self, node: Node) -> str | None:
        """Why the generation does not take the node, in a few words; None where it does."""
        if self.ops is None:
            return None
        reason = _refusal(self.ops.get(node.op, ()), node)
        return None if reason is None else f"profile {self.name}: {reason}"


def _refusal(rules: tuple[Rule, ...], node: Node) -> str | None:
    if not rules:
        return f"no {node.op}"
    fitting = [rule for rule in rules if rule.has_types(node)]
    if not fitting:
        return f"types {' '.join(t.type for t in node.src if t is not None)} -> {node.dst.type}"
    reasons = [rule.refusal(node) for rule in fitting]
    return None if None in reasons else reasons[0]


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
    """ggml_backend_cann_supports_op, case by case: what all its builds take, over the float types of one of them."""
    return {
        **dict.fromkeys(_CANN_IN_ANY_FORM, ANY),
        **dict.fromkeys(_CANN_OF_F32, (Rule({"src0": ("f32",)}),)),
        "GET_ROWS": (Rule({"src0": (*floats, "q8_0")}),),
        "SET_ROWS": (Rule({"dst": floats}),),
        "CPY": (Rule({"src0": floats, "dst": floats}),),
        "CONT": (Rule({"src0": floats}),),
        "MUL_MAT": (Rule({"src0": floats}),),
        "MUL_MAT_ID": (Rule({"src0": _HALF}),),
        "ROPE": (Rule(where=("params.15 == 0", "src0.ne0 <= 896")),),
        "UPSCALE": (Rule(where=("src0.ne2 * dst.ne3 == src0.ne3 * dst.ne2", "params.0 == 0")),),
        "POOL_2D": (Rule(where=("params.5 * 2 <= params.1", "params.6 * 2 <= params.2")),),
        "SUM": (Rule(rows=("src0",)),),
        "PAD": (Rule(where=("params.8 == 0",)),),
        "SCALE": (Rule(where=("params.1 == 0",)),),
        "SOFT_MAX": (Rule(where=("src2.type == none",)),),
        **others,
    }


_CANN_SOURCE = "ggml_backend_cann_supports_op in ggml-cann.cpp of llama-cpp-python 0.3.36"

FULL = Profile("full", "whatever the backend has a kernel for", "the registry", None)

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
                where=("src4.type == none", "src1.ne0 == src2.ne0", "params.2 == 0"),
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
        ROPE=(Rule(contiguous=("src0",), where=("params.15 == 0", "src0.ne0 <= 896", "src0.ne0 == params.1")),),
        POOL_2D=(Rule(where=("params.0 != 0", "params.5 * 2 <= params.1", "params.6 * 2 <= params.2")),),
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


def load(name: str) -> Profile:
    """The profile of a name, or of a TOML file. Raises ProfileError where there is none."""
    if name in PROFILES:
        return PROFILES[name]
    if not name.endswith(".toml"):
        raise ProfileError(f"must be one of {', '.join(PROFILES)}, or FILE.toml")
    from ggml_backend_npu.profile_file import read

    return read(Path(name))
