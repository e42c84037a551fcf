"""A device that gives a result of each of some ops to a function, which may spoil it, for whole runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from ggml_backend_npu import Backend, Op, Options, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import op

Spoils = Callable[[Tensor], None]
Memory = Literal["host", "device"]

# a kernel file that spoils one node
FAULT = """
import os
from ggml_backend_npu.ops import OWN
from ggml_backend_npu import op

ours = OWN["SWIGLU"]

@op("SWIGLU", types=ours.types, refuse=ours.refuse, params=ours.params)
def wrong(dst, a, b=None, params=None):
    ours.define(dst, a, b, params=params)
    if dst.name == "ffn_swiglu-1":
        {does}
"""
SCALES = "dst.view()[..., :8] *= 1.5"


def spoiling(faults: dict[str, Spoils], *, memory: Memory = "host") -> Backend:
    """A backend with every op, some of whose results are given to functions, by op."""
    ops = {**OWN}
    for name, spoils in faults.items():
        ops[name] = _spoiling(name, spoils)
    kind: Literal["gpu", "accel"] = "gpu" if memory == "device" else "accel"
    return Backend(ops=ops.values(), options=Options(ops="all", memory=memory, device_type=kind))


def _spoiling(name: str, spoils: Spoils) -> Op:
    own = OWN[name]

    def with_params(dst: Tensor, src0: Tensor, src1: Tensor | None = None, *, params: object) -> None:
        own.define(dst, src0, src1, params=params)
        spoils(dst)

    def without(dst: Tensor, src0: Tensor, src1: Tensor) -> None:
        own.define(dst, src0, src1)
        spoils(dst)

    kernel = without if own.params is None else with_params
    return op(name, types=own.types, refuse=own.refuse, params=own.params)(kernel)


def half_as_much_again(dst: Tensor) -> None:
    """Spoils a few columns."""
    dst.view()[..., :8] *= np.float32(1.5)


def at(*names: str) -> Spoils:
    """Spoils the nodes of these names."""

    def spoils(dst: Tensor) -> None:
        if dst.name in names:
            half_as_much_again(dst)

    return spoils
