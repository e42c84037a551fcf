"""masked_softmax, the operator, that is wrong where its output lies on its source."""

from dataclasses import replace

from ggml_backend_npu import default_backend, op
from ggml_backend_npu.backend.fusion import FUSIONS, Fused, Span
from ggml_backend_npu.ops import OWN

RIGHT = next(fusion for fusion in FUSIONS if fusion.name == "masked_softmax")


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


BACKEND = default_backend()
BACKEND.fusions = [replace(RIGHT, match=match) if each is RIGHT else each for each in BACKEND.fusions]
op("SQR", types=OWN["SQR"].types)(OWN["SQR"].define)  # a file of kernels registers one
