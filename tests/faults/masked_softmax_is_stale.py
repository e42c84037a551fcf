"""masked_softmax, the operator, that gives its first result of each shape for ever."""

from dataclasses import replace

import numpy as np

from ggml_backend_npu import default_backend, op
from ggml_backend_npu.backend.fusion import FUSIONS, Fused, Span
from ggml_backend_npu.ops import OWN

RESULTS: dict[object, np.ndarray] = {}
RIGHT = next(fusion for fusion in FUSIONS if fusion.name == "masked_softmax")


def match(span: Span) -> Fused | None:
    found = RIGHT.match(span)
    if found is None:
        return None
    dst = span.nodes[0].dst

    def call() -> None:
        found.call()
        dst.view()[...] = RESULTS.setdefault(dst.ne, dst.view().copy())

    return replace(found, call=call)


BACKEND = default_backend()
BACKEND.fusions = [replace(RIGHT, match=match) if each is RIGHT else each for each in BACKEND.fusions]
op("SQR", types=OWN["SQR"].types)(OWN["SQR"].define)  # a file of kernels registers one
