"""Nodes over which the CPU backend of an older ggml ends the process, though its supports_op takes them."""

from __future__ import annotations

from ggml_backend_npu.abi.lib import Ggml, numbers
from ggml_backend_npu.ir import Node


def why(ggml: Ggml, node: Node) -> str | None:
    """Why a valid node cannot be given to this ggml's CPU backend; None where it can."""
    version, tensors = numbers(ggml.version), [node.dst, *(source for source in node.src if source is not None)]
    if version < (0, 15) and node.op in ("NORM", "L2_NORM") and any(t.nb[0] != t.codec.block_bytes for t in tensors):
        return f"has rows with gaps, at which ggml {ggml.version} aborts"
    if version < (0, 20) and node.op == "CONCAT" and node.dst.codec.block_size > 1:
        return f"is of blocks, at which ggml {ggml.version} crashes"
    if version < (0, 25) and node.op == "SCALE" and node.dst.type != "f32":
        return f"is {node.dst.type}, at which ggml {ggml.version} aborts"
    return None
