"""ADD that sleeps for years."""

import time

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("ADD", types=OWN["ADD"].types, refuse=OWN["ADD"].refuse)
def add(dst: Tensor, a: Tensor, b: Tensor) -> None:
    time.sleep(1e9)
