"""ROPE whose table of angles ends at position 26."""

import numpy as np

from ggml_backend_npu import Node, Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("ROPE", types=OWN["ROPE"].types, refuse=OWN["ROPE"].refuse, params=OWN["ROPE"].params)
def rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Params) -> None:
    OWN["ROPE"].bind(Node("ROPE", dst, (x, Tensor.of(np.minimum(positions.view(), 26)), factors), params.packed))()
