"""The lines of test-backend-ops that belong to nodes: their pattern finds cases of ggml's wherever it has them."""

from __future__ import annotations

import itertools
import re
import shlex
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kit.nodes import dims
from tools.conformance import backend_ops_cases

from ggml_backend_npu import Memory, Node, Tensor
from graph_runner.judging.reproduce import backend_ops_line
from graph_runner.tools import suites
from quant import codec

CONTIGUOUS, PERMUTED, SLICED = "contiguous", "permuted", "sliced"
LAYOUTS = (CONTIGUOUS, PERMUTED, SLICED)


def tensor(type: str, ne: tuple[int, ...] = (256, 4, 3, 2), layout: str = CONTIGUOUS) -> Tensor:
    """A tensor over bytes of its own: as ggml lays it out, or with two dimensions swapped, or with rows left out."""
    kind = codec(type)
    lengths = [(ne[0] // kind.block_size), *ne[1:]]
    order = [1, 0, 2, 3] if layout == PERMUTED and kind.dtype is not None else [0, 2, 1, 3]
    nb, stride = [0] * 4, kind.block_bytes
    for axis in order if layout == PERMUTED else range(4):
        nb[axis] = stride
        stride *= lengths[axis] + (layout == SLICED and axis == 1)
    memory = Memory.of(np.zeros(stride, np.uint8))
    return Tensor("t", type, (ne[0], ne[1], ne[2], ne[3]), (nb[0], nb[1], nb[2], nb[3]), memory)


def types(op: str, cases: dict[str, list[str]], *names: str) -> set[tuple[str, ...]]:
    """The combinations of types that ggml has cases of."""
    found = (tuple(re.search(rf"\b{name}=(\w+)", case) for name in names) for case in cases[op])
    return {tuple(match[1] for match in matches if match) for matches in found if all(matches)}


def nodes(cases: dict[str, list[str]]) -> Iterator[Node]:
    """Nodes of all types that ggml has cases of and of all layouts, of every op that has a pattern."""
    for (kind,), a, b, batch in itertools.product(types("GET_ROWS", cases, "type"), LAYOUTS, LAYOUTS, (1, 3)):
        table, ids = tensor(kind, (256, 4, batch, 1), a), tensor("i32", (2, batch, 1, 1), b)
        yield Node("GET_ROWS", tensor("f32", (256, 2, batch, 1)), (table, ids))
    for (src, dst, index), a in itertools.product(
        types("SET_ROWS", cases, "type_src", "type_dst", "type_idx"), LAYOUTS
    ):
        yield Node("SET_ROWS", tensor(dst), (tensor(src, layout=a), tensor(index, (4, 3, 1, 1))))
    for (src, dst), a, ne in itertools.product(
        types("CPY", cases, "type_src", "type_dst"), LAYOUTS, ((256, 4, 3, 2), (512, 12, 1, 1))
    ):
        yield Node("CPY", tensor(dst, ne), (tensor(src, layout=a),))
    for op, a in itertools.product(("CONT", "DUP", "SUM_ROWS", "CLAMP", "SCALE", "RMS_NORM"), LAYOUTS):
        for (kind,) in types(op, cases, "type"):
            source = tensor(kind, layout=a)
            yield Node(op, tensor(kind), (source,))
            if op in ("SCALE", "RMS_NORM"):
                yield Node(op, source, (source,))
    for op, repeats, a in itertools.product(("ADD", "SUB", "MUL", "DIV"), itertools.product((1, 2), repeat=4), LAYOUTS):
        ne = dims(n // r for n, r in zip((256, 4, 6, 2), repeats, strict=True))
        for kind in ("f32", "f16", "bf16"):
            whole = tensor(kind, (256, 4, 6, 2))
            yield Node(op, whole, (whole, tensor(kind, ne, a)))
        yield Node(op, tensor("bf16"), (tensor("bf16"), tensor("f32")))
        yield Node(op, whole, (whole, whole))
    for mask, sinks, bias in itertools.product((None, "f16", "f32"), (None, "f32"), (0.0, 8.0)):
        sources = (tensor("f32"), tensor(mask) if mask else None, tensor(sinks) if sinks else None)
        yield Node("SOFT_MAX", tensor("f32"), sources, struct.pack("<2f", 1.0, bias))
    for (kind, mode), a, factors in itertools.product(types("ROPE", cases, "type", "mode"), LAYOUTS, (None, "f32")):
        sources = (tensor(kind, layout=a), tensor("i32"), tensor(factors) if factors else None)
        yield Node("ROPE", tensor(kind), sources, struct.pack("<3i", 0, 64, int(mode)))
    for (a, b), layout, n in itertools.product(types("MUL_MAT", cases, "type_a", "type_b"), LAYOUTS, (1, 5)):
        if (a, b) != ("f32", "bf16") or layout == CONTIGUOUS:
            yield Node("MUL_MAT", tensor("f32"), (tensor(a, layout=layout), tensor(b, (256, n, 3, 2))))
    for a, b in types("MUL_MAT_ID", cases, "type_a", "type_b"):
        yield Node("MUL_MAT_ID", tensor("f32"), (tensor(a), tensor(b), tensor("i32")))
    for (kind,), a, b, dim in itertools.product(types("CONCAT", cases, "type"), LAYOUTS, LAYOUTS, range(4)):
        pair = (tensor(kind, layout=a), tensor(kind, layout=b))
        yield Node("CONCAT", tensor(kind), pair, struct.pack("<i", dim))
    for (kind,), repeats in itertools.product(types("REPEAT", cases, "type"), itertools.product((1, 2), repeat=4)):
        ne = dims(n // r for n, r in zip((256, 4, 6, 2), repeats, strict=True))
        yield Node("REPEAT", tensor(kind, (256, 4, 6, 2)), (tensor(kind, ne),))
    for order in (0, 1):
        yield Node("ARGSORT", tensor("i32"), (tensor("f32"),), struct.pack("<i", order))


@pytest.mark.conformance
def test_every_line_finds_a_case_where_ggml_has_one_of_the_types() -> None:
    """Over all types and layouts at once, by the list that the program prints of its cases."""
    cases = backend_ops_cases()
    tried = 0
    for node in nodes(cases):
        words = shlex.split(backend_ops_line(node))
        assert words[:5] == ["test-backend-ops", "test", "-o", node.op, "-p"]
        assert any(re.search(words[5], case) for case in cases[node.op]), (
            node,
            words[5],
            [t.nb for t in node.src if t],
        )
        tried += 1
    assert tried > 1000


@pytest.mark.conformance
@pytest.mark.parametrize(
    "node",
    [
        Node("GET_ROWS", tensor("f32"), (tensor("q4_0", (256, 8, 1, 1)), tensor("i32", (2, 1, 1, 1)))),
        Node("ADD", tensor("f32"), (tensor("f32"), tensor("f32", (256, 1, 1, 1)))),
        Node("CPY", tensor("f16"), (tensor("f32", layout=PERMUTED),)),
        Node("CONT", tensor("f32"), (tensor("f32", layout=SLICED),)),
        Node("REPEAT", tensor("f32", (256, 4, 3, 4)), (tensor("f32"),)),
    ],
    ids=lambda node: node.op,
)
def test_the_program_itself_reads_the_pattern(node: Node) -> None:
    _, *words = shlex.split(backend_ops_line(node))
    command: list[str | Path] = [suites.build() / "test-backend-ops", *words, "-b", "CPU"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    found = re.search(r"(\d+)/(\d+) tests passed", printed)
    assert found, printed
    assert int(found[2]) > 0


def test_the_line_says_types_and_layout() -> None:
    node = Node("GET_ROWS", tensor("f32"), (tensor("q8_0", (256, 8, 1, 1)), tensor("i32", (2, 1, 1, 1))))
    line = backend_ops_line(node)
    assert line.startswith("test-backend-ops test -o GET_ROWS -p '")
    (found,) = re.findall("'(.*)'", line)
    assert re.search(found, "type=q8_0,n=256,m=5,r=4,be1=1,be2=1,v=0,vs0=0,offset_cols=0")
    for other in ("type=q8_0,n=256,m=5,r=4,be1=1,be2=1,v=1,vs0=0", "type=q8_K,n=256,m=5,r=4,be1=1,be2=1,v=0,vs0=0"):
        assert not re.search(found, other)


def test_of_an_op_without_a_pattern_all_cases_are_run() -> None:
    assert backend_ops_line(Node("SQR", tensor("f32"), (tensor("f32"),))) == "test-backend-ops test -o SQR"
    assert backend_ops_line(Node("ADD", tensor("f32"), (tensor("f32"), None))) == "test-backend-ops test -o ADD"
