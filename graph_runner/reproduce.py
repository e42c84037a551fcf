"""The cases of ggml's own test-backend-ops that are nearest to a node, as the line that runs them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops.movers import Concat
from ggml_backend_npu.ops.rope import Rope
from ggml_backend_npu.ops.routing import Argsort
from ggml_backend_npu.ops.softmax import SoftMax

Conditions = list[str]  # what stands in a case's parameters, in their order, as regular expressions

_MORE_THAN_ONE = r"([2-9]|\d\d+)"
# of broadcasts, those that ggml's cases of ADD, SUB, MUL and DIV have: which dimensions repeat; the last two not of a
# second source that is permuted
_BROADCASTS = ["1111", "n111", "1n11", "11n1", "111n", "11nn", "1nnn", "nnnn", "nn11", "1nn1"]
_REPEATS = {"f32": _BROADCASTS[:5], "f16": ["n111"], "i32": ["n111"], "i16": ["111n"], "bf16": ["n111"]}
_PERMUTED_DUP = ("f32", "f16", "i16")


def backend_ops_line(node: Node) -> str:
    """The call of test-backend-ops (`graph_runner.suites.build` makes it) with ggml's cases nearest to a node: of its
    op, types and, where its cases have them, its kind of layout. Of an op that is not known here it is all cases."""
    words = ["test-backend-ops", "test", "-o", node.op]
    find = _CONDITIONS.get(node.op)
    conditions = find(node) if find is not None and _complete(node) else []
    if conditions:
        words += ["-p", pattern(conditions)]
    return shlex.join(words)


def pattern(conditions: Conditions) -> str:
    """The regular expression of parameters that have these, in this order."""
    return "^" + ".*".join(rf"\b{condition}(,|$)" for condition in conditions)


def _complete(node: Node) -> bool:
    return node.src[:1] != () and node.src[0] is not None and (node.op not in _TWO or _second(node) is not None)


def _second(node: Node) -> Tensor | None:
    return node.src[1] if len(node.src) > 1 else None


def _sources(node: Node) -> tuple[Tensor, Tensor]:
    first, second = node.src[0], _second(node)
    assert first is not None
    return first, second if second is not None else first


def _is(name: str, value: str | int | bool) -> str:
    return f"{name}={re.escape(str(int(value) if isinstance(value, bool) else value))}"


def is_permuted(tensor: Tensor) -> bool:
    """Whether its dimensions lie in memory in another order than they are counted."""
    strides = [stride for n, stride in zip((tensor.n_blocks, *tensor.ne[1:]), tensor.nb, strict=True) if n > 1]
    return strides != sorted(strides)


def _repeats(ne: tuple[int, ...], of: tuple[int, ...]) -> str:
    return "".join("1" if a == b else "n" for a, b in zip(ne, of, strict=True))


def _nr(repeats: str) -> str:
    return rf"nr=\[{','.join('1' if kind == '1' else _MORE_THAN_ONE for kind in repeats)}\]"


def _get_rows(node: Node) -> Conditions:
    table, ids = _sources(node)
    batch = "be1=1" if table.ne[2] == 1 else f"be1={_MORE_THAN_ONE}"
    return [
        _is("type", table.type),
        batch,
        _is("v", not ids.is_contiguous()),
        _is("vs0", not table.is_contiguous()),
    ]


def _set_rows(node: Node) -> Conditions:
    rows, ids = _sources(node)
    types = [_is("type_src", rows.type), _is("type_dst", node.dst.type), _is("type_idx", ids.type)]
    view = not (rows.is_contiguous() and ids.is_contiguous()) and ids.type == "i64"
    return [*types, _is("v", view)]


def _cpy(node: Node) -> Conditions:
    src, _ = _sources(node)
    types = [_is("type_src", src.type), _is("type_dst", node.dst.type)]
    if "i32" in (src.type, node.dst.type):
        return types
    if is_permuted(src):
        return [*types, r"permute_src=\[(0,[1-3]|[1-3],\d),\d,\d\]"]
    if src.ne != node.dst.ne and src.type == node.dst.type and src.type in ("f32", "f16", "q4_0"):
        return [*types, r"ne_dst=\[\d+,\d+,\d+,\d+\]"]
    return [*types, r"permute_src=\[0,0,0,0\]", "_src_transpose=0"]


def _cont(node: Node) -> Conditions:
    src, _ = _sources(node)
    return [_is("type", src.type), _is("use_view_slice", not is_permuted(src) and src.type in ("f32", "i32"))]


def _dup(node: Node) -> Conditions:
    src, _ = _sources(node)
    permuted = is_permuted(src) and src.type in _PERMUTED_DUP
    return [_is("type", src.type), *([r"permute=\[\d,\d,\d,\d\]"] if permuted else [])]


def _binary(node: Node) -> Conditions:
    a, b = _sources(node)
    if a.type != b.type:
        return [_is("type", a.type), _is("type_b", b.type)]
    repeats, permuted = _repeats(b.ne, a.ne), is_permuted(b)
    overlap = a.overlaps(b) and not permuted and repeats == "1111"
    known = repeats in (_BROADCASTS[:-2] if permuted else _BROADCASTS)
    flags = [_is("nf", 1), _is("perm1", permuted), _is("src_overlap", overlap)]
    return [_is("type", a.type), *([_nr(repeats)] if known else []), *flags]


def _soft_max(node: Node) -> Conditions:
    src, _ = _sources(node)
    mask, sinks = _second(node), len(node.src) > 2 and node.src[2] is not None
    bias = r"max_bias=[1-9][\d.]*" if mask is not None and SoftMax.of(node.params).max_bias > 0 else r"max_bias=0\.0*"
    mask_type = mask.type if mask is not None else "f32"
    return [_is("type", src.type), _is("mask", mask is not None), _is("sinks", sinks), _is("m_prec", mask_type), bias]


def _rope(node: Node) -> Conditions:
    src, _ = _sources(node)
    mode, factors = Rope.of(node.params).mode, len(node.src) > 2 and node.src[2] is not None
    conditions = [_is("type", src.type), _is("mode", mode), _is("ff", factors)]
    if src.type == "f32" or mode in (0, 2):
        conditions.append("v=0" if src.is_contiguous() else "v=[12]")
    return conditions


def _rms_norm(node: Node) -> Conditions:
    src, _ = _sources(node)
    view = not src.is_contiguous()
    return [_is("type", src.type), _is("v", view), _is("inplace", not view and src.overlaps(node.dst))]


def _mul_mat(node: Node) -> Conditions:
    a, b = _sources(node)
    types = [_is("type_a", a.type), _is("type_b", b.type)]
    if is_permuted(a) and a.type in ("f32", "f16") and b.type in ("f32", "f16"):
        return [*types, r"per=\[0,[23],\d,\d\]"]
    return [*types, "n=1" if b.ne[1] == 1 else f"n={_MORE_THAN_ONE}"]


def _types(node: Node) -> Conditions:
    a, b = _sources(node)
    return [_is("type_a", a.type), _is("type_b", b.type)]


def _concat(node: Node) -> Conditions:
    a, b = _sources(node)
    bits = (4, 8) if a.codec.is_quantized else (1, 2)
    views = sum(bit for bit, tensor in zip(bits, (a, b), strict=True) if not tensor.is_contiguous())
    return [_is("type", a.type), _is("dim", Concat.of(node.params).dim), _is("v", views)]


def _repeat(node: Node) -> Conditions:
    src, _ = _sources(node)
    repeats = _repeats(src.ne, node.dst.ne)
    return [_is("type", src.type), *([_nr(repeats)] if repeats in _REPEATS.get(src.type, []) else [])]


def _argsort(node: Node) -> Conditions:
    src, _ = _sources(node)
    return [_is("type", src.type), _is("order", Argsort.of(node.params).order)]


def _sum_rows(node: Node) -> Conditions:
    src, _ = _sources(node)
    permuted = is_permuted(src)
    return [
        _is("type", src.type),
        _is("permute", permuted),
        _is("slice", not src.is_contiguous() and not permuted),
    ]


def _scale(node: Node) -> Conditions:
    src, _ = _sources(node)
    return [_is("type", src.type), _is("inplace", src.overlaps(node.dst))]


def _type(node: Node) -> Conditions:
    src, _ = _sources(node)
    return [_is("type", src.type)]


_CONDITIONS: dict[str, Callable[[Node], Conditions]] = {
    "GET_ROWS": _get_rows,
    "SET_ROWS": _set_rows,
    "CPY": _cpy,
    "CONT": _cont,
    "DUP": _dup,
    **dict.fromkeys(("ADD", "SUB", "MUL", "DIV"), _binary),
    "SOFT_MAX": _soft_max,
    "ROPE": _rope,
    "RMS_NORM": _rms_norm,
    "MUL_MAT": _mul_mat,
    "MUL_MAT_ID": _types,
    "CONCAT": _concat,
    "REPEAT": _repeat,
    "ARGSORT": _argsort,
    "SUM_ROWS": _sum_rows,
    "SCALE": _scale,
    "CLAMP": _type,
}
_TWO = frozenset({"GET_ROWS", "SET_ROWS", "ADD", "SUB", "MUL", "DIV", "ROPE", "MUL_MAT", "MUL_MAT_ID", "CONCAT"})
