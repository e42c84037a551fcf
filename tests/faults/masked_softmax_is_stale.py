"""masked_softmax, the operator, that gives its first result of each shape for ever."""

from dataclasses import replace

import numpy as np

from ggml_backend_npu import OPS
from ggml_backend_npu.fusion import FUSIONS, Fused, Span
from ggml_backend_npu.ops import OWN

RESULTS: dict[object, np.ndarray] = {}
PLACE = next(i for i, fusion in enumerate(FUSIONS) if fusion.name == "masked_softmax")
RIGHT = FUSIONS[PLACE]


def match(span: Span) -> Fused | None:
    found = RIGHT.match(span)
    if found is None:
        return None
    dst = span.nodes[0].dst

    def call() -> None:
        found.call()
        dst.view()[...] = RESULTS.setdefault(dst.ne, dst.view().copy())

    return replace(found, call=call)


FUSIONS[PLACE] = replace(RIGHT, match=match)
OPS.add(replace(OWN["SQR"]))  # a file of kernels registers one
