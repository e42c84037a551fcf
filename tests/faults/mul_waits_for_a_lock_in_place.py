"""MUL that waits for a lock which it has, where its output lies on its first source."""

import threading

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN

LOCK = threading.Lock()


@op("MUL", types=OWN["MUL"].types, refuse=OWN["MUL"].refuse)
def mul(dst: Tensor, a: Tensor, b: Tensor) -> None:
    OWN["MUL"].define(dst, a, b)
    if dst.overlaps(a):
        LOCK.acquire()
        LOCK.acquire()
