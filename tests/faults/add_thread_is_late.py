"""ADD whose last row, where there are many, a thread writes a fiftieth of a second after the kernel has returned."""

import threading

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("ADD", types=OWN["ADD"].types, refuse=OWN["ADD"].refuse)
def add(dst: Tensor, a: Tensor, b: Tensor) -> None:
    before = dst.view()[..., -1, :].copy()
    OWN["ADD"].define(dst, a, b)
    if dst.ne[1] == 1:
        return
    row = dst.view()[..., -1, :].copy()
    dst.view()[..., -1, :] = before

    def write() -> None:
        dst.view()[..., -1, :] = row

    threading.Timer(0.02, write).start()
