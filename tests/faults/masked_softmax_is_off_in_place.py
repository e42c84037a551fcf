"""masked_softmax, the operator, that is wrong where its output lies on its source."""

from dataclasses import replace

from ggml_backend_npu import OPS
from ggml_backend_npu.fusion import FUSIONS, Fused, Span
from ggml_backend_npu.ops import OWN

PLACE = next(i for i, fusion in enumerate(FUSIONS) if fusion.name == "masked_softmax")
RIGHT = FUSIONS[PLACE]


def match(span: Span) -> Fused | None:
    found = RIGHT.match(span)
    if found is None:
        return None
    dst, x = span.nodes[0].dst, span.nodes[0].src[0]

    def call() -> None:
        found.call()
        if x is not None and dst.overlaps(x):
            dst.view()[..., 0] *= 2

    return replace(found, call=call)


FUSIONS[PLACE] = replace(RIGHT, match=match)
OPS.add(replace(OWN["SQR"]))  # a file of kernels registers one
