"""Nodes over which the CPU backend of an older ggml ends the process, or which it computes in part, though its
supports_op takes them."""

from __future__ import annotations

from ggml_backend_npu.ggml.lib import Ggml, numbers
from ggml_backend_npu.ir import Node

_OF_F32_AND_F16 = (
    *("GELU", "GELU_ERF", "GELU_QUICK", "SILU"),
    *("GEGLU", "GEGLU_ERF", "GEGLU_QUICK", "REGLU", "SWIGLU"),
)


def why(ggml: Ggml, node: Node) -> str | None:
    """Why a valid node cannot be given to this ggml's CPU backend; None where it can."""
    version, tensors = numbers(ggml.version), [node.dst, *(source for source in node.src if source is not None)]
    if version < (0, 15) and node.op in ("NORM", "L2_NORM") and any(t.nb[0] != t.codec.block_bytes for t in tensors):
        return f"has rows with gaps, at which ggml {ggml.version} aborts"
    if version < (0, 20) and node.op == "CONCAT" and node.dst.codec.block_size > 1:
        return f"is of blocks, at which ggml {ggml.version} crashes"
    if version < (0, 20) and node.op in ("IM2COL_BACK", "OUT_PROD") and any(t.type == "f16" for t in tensors):
        return f"is of f16, at which ggml {ggml.version} aborts"
    if version < (0, 25):
        return _before_0_25(ggml, node)
    return None


def _before_0_25(ggml: Ggml, node: Node) -> str | None:
    type, sources = node.dst.type, [source and source.type for source in node.src]
    if (node.op == "SCALE" and type != "f32") or (node.op in _OF_F32_AND_F16 and type == "bf16"):
        return f"is {type}, at which ggml {ggml.version} aborts"
    if node.op == "MUL_MAT" and "f32" == sources[0] != sources[1]:
        return f"has columns of {sources[1]}, at which ggml {ggml.version} aborts"
    if node.op in ("ROPE", "ROPE_BACK") and any(node.params[60:]):
        return f"rotates from an element after the first on, which ggml {ggml.version} does not know"
    if node.op == "DSV4_HC_PRE" and any(node.params[4:8]):
        return f"has gates, which ggml {ggml.version} does not have"
    if node.op == "DSV4_HC_POST" and not any(sources[3:]):
        return f"has no comb, at which ggml {ggml.version} aborts"
    if node.op == "CONV_TRANSPOSE_2D" and node.dst.ne[3] > 1:
        return f"has several images, of which ggml {ggml.version} computes the first"
    return None
