"""SWIGLU that is killed."""

import os
import signal

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("SWIGLU", types=OWN["SWIGLU"].types, refuse=OWN["SWIGLU"].refuse, params=OWN["SWIGLU"].params)
def swiglu(dst: Tensor, a: Tensor, b: Tensor | None, params: Params) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
