"""TopKSoftmax, the operator, with the weights of the chosen experts in the other order."""

from dataclasses import replace

from ggml_backend_npu import default_backend, op
from ggml_backend_npu.backend.fusion import FUSIONS, Fused, Span
from ggml_backend_npu.ops import OWN

OPS_OF_IT = ("SOFT_MAX", "ARGSORT", "GET_ROWS", "SUM_ROWS", "CLAMP", "DIV")
RIGHT = next(fusion for fusion in FUSIONS if fusion.op_names == OPS_OF_IT)


def match(span: Span) -> Fused | None:
    found = RIGHT.match(span)
    if found is None:
        return None
    weights = span.nodes[-1].dst

    def call() -> None:
        found.call()
        weights.view()[...] = weights.view()[..., ::-1].copy()

    return replace(found, call=call)


BACKEND = default_backend()
BACKEND.fusions = [replace(RIGHT, match=match) if each is RIGHT else each for each in BACKEND.fusions]
op("SQR", types=OWN["SQR"].types)(OWN["SQR"].define)  # a file of kernels registers one
