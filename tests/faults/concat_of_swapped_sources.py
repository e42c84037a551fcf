"""CONCAT with its sources swapped."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("CONCAT", types=OWN["CONCAT"].types, refuse=OWN["CONCAT"].refuse, params=OWN["CONCAT"].params)
def concat(dst: Tensor, a: Tensor, b: Tensor, params: Params) -> None:
    dst.view()[...] = np.concatenate([b.view(), a.view()], axis=3 - params.dim)
