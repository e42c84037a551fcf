"""TopKSoftmax, the operator, with the weights of the chosen experts in the other order."""

from dataclasses import replace

from ggml_backend_npu import OPS
from ggml_backend_npu.fusion import FUSIONS, Fused, Span
from ggml_backend_npu.ops import OWN

OPS_OF_IT = ("SOFT_MAX", "ARGSORT", "GET_ROWS", "SUM_ROWS", "CLAMP", "DIV")
PLACE = next(i for i, fusion in enumerate(FUSIONS) if fusion.op_names == OPS_OF_IT)
RIGHT = FUSIONS[PLACE]


def match(span: Span) -> Fused | None:
    found = RIGHT.match(span)
    if found is None:
        return None
    weights = span.nodes[-1].dst

    def call() -> None:
        found.call()
        weights.view()[...] = weights.view()[..., ::-1].copy()

    return replace(found, call=call)


FUSIONS[PLACE] = replace(RIGHT, match=match)
OPS.add(replace(OWN["SQR"]))  # a file of kernels registers one
