"""RMS_NORM with its sum of squares in float16."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("RMS_NORM", types=OWN["RMS_NORM"].types, refuse=OWN["RMS_NORM"].refuse, params=OWN["RMS_NORM"].params)
def rms_norm(dst: Tensor, x: Tensor, params: Params) -> None:
    squares = np.square(x.view().astype(np.float16))
    total = np.add.accumulate(squares, axis=-1, dtype=np.float16)[..., -1:].astype(np.float32)
    dst.view()[...] = x.view() / np.sqrt(total / np.float32(x.ne[0]) + np.float32(params.eps))
