"""Traces to try: where they come from, a node to record, and what an equal record is."""

from __future__ import annotations

from functools import cache

import numpy as np
from kit.diffs import FLASH_OFF, QUANTISED
from kit.nodes import bind
from kit.support import assert_same_bytes

from ggml_backend_npu import Node, Tensor
from graph_runner.judging.copies import Copied, span
from graph_runner.run.session import Settings
from graph_runner.trace import Origin, Recorded
from quant import quantize

ORIGIN = Origin("a model", "a prompt", "CPU", "0.25.3", "simd", 1)
SETTINGS = {
    "llama": FLASH_OFF,
    "moe": QUANTISED,
    "olmoe": FLASH_OFF,
    "gpt-oss": Settings(flash_attention="auto", threads=1),
    "rwkv7": FLASH_OFF,
    "mamba": FLASH_OFF,
}


def copied(node: Node) -> Node:
    return Copied.of(node).node


def everything(step: int, index: int, node: Node) -> bool:
    return True


@cache
def get_rows() -> Recorded:
    """Three rows of a q8_0 table, the output a view with gaps in a memory of its own."""
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    table = Tensor.of(quantize(x, "q8_0").reshape(8, -1), "q8_0", "table")
    ids = Tensor.of(np.array([7, 0, 7], np.int32), name="ids")
    room = np.full((6, 64), 5, np.float32)
    node = copied(Node("GET_ROWS", Tensor.of(room[1::2], name="rows"), (table, ids)))
    done = copied(node)
    bind(done)()
    return Recorded(node, span(done.dst), 2, 17)


def assert_same(found: Recorded, expected: Recorded) -> None:
    assert (found.step, found.index) == (expected.step, expected.index)
    assert (found.node.op, found.node.params) == (expected.node.op, expected.node.params)
    assert_same_bytes(found.expected, expected.expected)
    both = zip((found.node.dst, *found.node.src), (expected.node.dst, *expected.node.src), strict=True)
    for a, b in both:
        if a is None or b is None:
            assert a is b
        else:
            assert (a.name, a.type, a.ne, a.nb) == (b.name, b.type, b.ne, b.nb)
            assert a.nbytes == 0 or a.address % 64 == b.address % 64
            assert_same_bytes(span(a), span(b))
