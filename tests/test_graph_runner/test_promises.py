"""What is promised on this machine is measured: on the bound ggml, for each op, and kept."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from kit.support import with_avx2

from ggml_backend_npu import Node
from ggml_backend_npu.ggml import codecs, lib
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.replica import Replica
from ggml_backend_npu.registry.entry import Call, Op
from ggml_backend_npu.registry.probes import node, normal
from graph_runner.judging import promises
from graph_runner.judging.compare import compare
from graph_runner.judging.copies import copy
from graph_runner.judging.rules import Rules
from quant import codec

PROBES = promises._probes()


@pytest.fixture(autouse=True)
def kept_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(promises, "kept_in", lambda: tmp_path)
    monkeypatch.setattr(promises, "holds", cache(promises.holds.__wrapped__))
    return tmp_path


class WithoutAnEnd:
    """An op whose kernel does not see what is left of the rows of a source after whole eights."""

    def __init__(self, name: str) -> None:
        self._op, self._place = OWN[name], 1 if name == "MUL_MAT" else 0

    def bind(self, node: Node, numerics: Numerics) -> Call:
        x = node.src[self._place]
        assert x is not None
        cut = copy(x)
        cut.view()[..., x.ne[0] // 8 * 8 :] = 0
        return self._op.bind(replace(node, src=(*node.src[: self._place], cut, *node.src[self._place + 1 :])), numerics)


TAILED = ["SSM_CONV", "DSV4_HC_PRE with gates", "MUL_MAT of f32, other rows", "MUL_MAT of f16", "SILU", "RMS_NORM"]


@pytest.mark.some(2)
@pytest.mark.daily(2)
@pytest.mark.parametrize("name", TAILED)
def test_a_wrong_end_of_a_row_is_no_promise_and_beyond_the_bound(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = PROBES[name]
    kernel = WithoutAnEnd(probe.op)
    monkeypatch.setattr(promises, "OWN", {probe.op: kernel})
    assert not promises.holds(name)
    cut = [of for of in probe.nodes() if (of.src[0] or of.dst).ne[0] % 8]
    assert cut
    assert not any(is_allowed(of, kernel) for of in cut)


@pytest.mark.slow
def test_right_kernels_are_within_the_bounds_where_bytes_are_not_promised() -> None:
    unequal = [probe for name, probe in PROBES.items() if probe.op in OWN and not promises.holds(name)]
    assert not [str(of) for probe in unequal for of in probe.nodes() if not is_allowed(of)]


def is_allowed(of: Node, kernel: Op | WithoutAnEnd | None = None) -> bool:
    """Whether a diff takes what a kernel gives, by default the op's own, for right."""
    expected, actual = copy(of.dst), copy(of.dst)
    with Replica(lib.ggml(), "CPU") as cpu:
        cpu.compute(replace(of, dst=expected))
        (kernel or OWN[of.op]).bind(replace(of, dst=actual), replace(codecs.bound(), matmul="exact"))()
    found = compare(expected, actual)
    return bool(found) or Rules().allows(of, expected, actual, found)


@with_avx2
def test_where_the_source_says_what_every_bit_is_bytes_are_promised() -> None:
    fixed = [name for name, probe in PROBES.items() if probe.fixed or (probe.fused and codecs.bound().contracts)]
    assert [name for name in fixed if not promises.holds(name)] == []


def test_what_was_measured_is_kept(kept_elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = promises.holds("SILU")
    (file,) = kept_elsewhere.iterdir()
    assert json.loads(file.read_text()) == {"SILU": before}
    promises.holds.cache_clear()
    file.write_text(json.dumps({"SILU": not before}))
    assert promises.holds("SILU") is not before
    promises.holds.cache_clear()
    file.write_text('{"SILU": tr')
    assert promises.holds("SILU") is before


@pytest.mark.daily(3)
@pytest.mark.slow
def test_every_op_has_a_promise() -> None:
    found = promises.promises()
    assert {each.op for each in found} == {*OWN}
    assert all(each.why for each in found)


@pytest.mark.slow
def test_what_is_measured_is_not_nothing() -> None:
    """Of nodes whose results are all zero any kernel gives the same."""
    with Replica(lib.ggml(), "CPU") as cpu:
        for name, probe in PROBES.items():
            results = []
            for of in probe.nodes():
                result = copy(of.dst)
                cpu.compute(replace(of, dst=result))
                results.append(bool(result.view().any()))
            assert np.mean(results) > 0.9, name


def drawn(rng: np.random.Generator, type: str) -> Node:
    """A MUL_MAT of weights of a type with 1 to 600 columns, of any k, rows, matrices and strides."""
    block = codec(type).block_size
    k = block * int(rng.integers(1, 9 if block > 1 else 300))
    columns = int(rng.choice([1, *(int(rng.integers(*ends)) for ends in ((2, 8), (8, 64), (64, 601)))]))
    rows, n, shared = int(rng.integers(1, 40)), int(rng.integers(1, 3)), int(rng.integers(1, 3))
    weights, x = normal(rng, type, 1, n, rows, k), normal(rng, "f32", 1, n * shared, columns, k)
    return node("MUL_MAT", "f32", (1, n * shared, columns, rows), weights, x)


MULTIPLIED = ("f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_K", "q6_K", "q5_K", "mxfp4")


@with_avx2
@pytest.mark.parametrize("n", [3, pytest.param(200, marks=pytest.mark.conformance)])
@pytest.mark.parametrize("type", MULTIPLIED)
def test_where_bytes_are_promised_they_are_given(type: str, n: int) -> None:
    rng = np.random.default_rng(n)
    found = []
    with Replica(lib.ggml(), "CPU") as cpu:
        for of in (drawn(rng, type) for _ in range(n)):
            if promises.promised(of) and not promises._is_equal(cpu, replace(codecs.bound(), matmul="exact"), of):
                found.append(str(of))
    assert found == []


@pytest.mark.parametrize(("type", "columns", "few"), [("q4_K", 7, True), ("q4_K", 8, False), ("bf16", 1, False)])
def test_a_promise_is_of_what_decides(type: str, columns: int, few: bool) -> None:
    weights, x = (normal(np.random.default_rng(0), each, 1, 1, columns, 256) for each in (type, "f32"))
    assert not promises.promised(node("MUL_MAT", "f32", (1, 1, columns, columns), weights, x)) or few
