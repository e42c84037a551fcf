"""Random nodes of all sizes and strides on a device, beside ggml's CPU: the bytes of what moves data, else within
rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from kit.drawn import drawn

from ggml_backend_npu import Device, DeviceBackend
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.plugin.replica import Replica
from graph_runner.judging.compare import compare
from graph_runner.judging.copies import Copied
from graph_runner.judging.rules import Rules

MOVERS = ("GET_ROWS", "SET_ROWS", "CPY", "DUP", "CONT")


@dataclass
class Found:
    """How many nodes were computed, and a line for each that is wrong."""

    n: int = 0
    wrong: list[str] = field(default_factory=list)


def differing(of: Device, ops: Sequence[str], n: int, seed: int = 0) -> Found:
    """Computes n nodes that a device and ggml's CPU take, the ops by turns."""
    device, found, rules = DeviceBackend(of), Found(), Rules()
    device.memory()
    with Replica(lib.ggml(), "CPU", threads=1) as cpu:
        place = -1
        while found.n < n:
            place += 1
            op = ops[place % len(ops)]
            node = drawn(np.random.default_rng((seed, place, *op.encode())), op)
            types = [x and x.type for x in node.src]
            if op == "MUL_MAT_ID" and types[:2] == ["f32", "bf16"]:  # ggml's CPU says that it takes it, and aborts
                continue
            if device.refusal(node) is not None or cpu.refusal(node) is not None:
                continue
            found.n += 1
            expected, actual = (Copied.of(node, blanks=True) for _ in range(2))
            cpu.compute(expected.node)
            device.compute(actual.node)
            result = compare(expected.node.dst, actual.node.dst, actual.outside())
            within = op not in MOVERS and rules.allows(node, expected.node.dst, actual.node.dst, result)
            if result.outside or not (result or within):
                tensors = "; ".join(f"{x.type} {x.ne} {x.nb}" for x in (node.dst, *node.src) if x is not None)
                found.wrong.append(f"{op} {place} of seed {seed}: {result.n_different} bytes differ: {tensors}")
    return found
