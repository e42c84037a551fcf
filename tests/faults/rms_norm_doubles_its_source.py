"""RMS_NORM that doubles its source after it has read it."""

import numpy as np

from ggml_backend_npu import Memory, Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("RMS_NORM", types=OWN["RMS_NORM"].types, refuse=OWN["RMS_NORM"].refuse, params=OWN["RMS_NORM"].params)
def rms_norm(dst: Tensor, x: Tensor, params: Params) -> None:
    OWN["RMS_NORM"].define(dst, x, params=params)
    if not dst.overlaps(x):
        Memory(x.address, x.nbytes).bytes().view(np.float32)[...] *= 2
