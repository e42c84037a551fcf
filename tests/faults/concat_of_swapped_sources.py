"""CONCAT with its sources swapped."""

import struct

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("CONCAT", types=OWN["CONCAT"].types, refuse=OWN["CONCAT"].refuse)
def concat(dst: Tensor, a: Tensor, b: Tensor, params: bytes) -> None:
    (axis,) = struct.unpack_from("i", params)
    dst.view()[...] = np.concatenate([b.view(), a.view()], axis=3 - axis)
