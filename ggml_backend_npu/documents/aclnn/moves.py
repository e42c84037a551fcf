"""The kernels that both calls run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ggml_backend_npu.documents.aclnn.executors import Call
from ggml_backend_npu.documents.aclnn.operands import Operand
from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.kernels import strided
from quant.kernels.jit import engine


def with_copies(call: Call, inputs: Sequence[Operand], *outputs: Operand) -> Call:
    """The call, with copies of the tensors that run backwards."""
    if all(operand.lent is None for operand in (*inputs, *outputs)):
        return call

    def run() -> None:
        for operand in inputs:
            operand.load()
        call()
        for operand in outputs:
            operand.store()

    return run


def compiled_move(dst: Tensor, src: Tensor, src_ids: Tensor | None = None) -> Call | None:
    """The compiled move of elements; None where there is none, or kernels are not compiled."""
    return strided.bind_move(dst, src, src_ids, numerics=reference_numerics()) if engine() == "compiled" else None


def reference_numerics() -> Numerics:
    """q8_0 is rounded as the reference functions round it."""
    return replace(codecs.bound(), rounding="reference")
