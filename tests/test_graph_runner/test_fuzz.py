"""Random nodes of every op, by the backend's kernels and by ggml's CPU: `tests/tools/fuzz.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kit.drawn import drawn
from kit.support import with_avx2
from tools.fuzz import Judge, judged, outcomes, series

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.im2col import Im2col
from ggml_backend_npu.registry.entry import Call
from ggml_backend_npu.registry.probes import node, normal
from graph_runner.judging import promises

OPS = sorted(OWN)


@with_avx2
def test_random_nodes() -> None:
    with Judge() as judge:
        found = [(str(each), judged(each, judge)[1]) for each in series(0, 0, 2 * len(OPS), OPS, special=False)]
    assert [each for each in found if each[1]] == []


@with_avx2
@pytest.mark.daily(10)
@pytest.mark.conformance
@pytest.mark.parametrize("seed", range(20))
def test_many_random_nodes(seed: int) -> None:
    assert_right(seed, special=False)


@with_avx2
@pytest.mark.daily(2)
@pytest.mark.conformance
@pytest.mark.parametrize("seed", range(2))
def test_many_random_nodes_of_special_values(seed: int) -> None:
    assert_right(seed, special=True)


def assert_right(seed: int, *, special: bool) -> None:
    """5,000 nodes are."""
    found = outcomes([*series(seed, 0, 5_000, OPS, special=special)])
    assert [(str(each), wrong) for each, (_, wrong) in found if wrong] == []


@with_avx2
@pytest.mark.fuzz
@pytest.mark.parametrize("op", OPS)
def test_bytes_of_random_nodes_where_they_are_promised(op: str) -> None:
    """200 nodes for each probe of the op."""
    rng, n = np.random.default_rng(200), 200 * max(1, sum(probe.op == op for probe in promises._probes().values()))
    wrong = []
    with Judge() as judge:
        for of in (drawn(rng, op) for _ in range(n)):
            if judge.takes(of) and promises.promised(of):
                wrong += [judge.wrong(of)]
    assert [each for each in wrong if each] == []


@pytest.mark.parametrize(
    ("place", "said"), [("after", "writes outside"), ("source", "changes sources [0]"), ("dst", "are promised")]
)
def test_a_kernel_that_writes_where_it_should_not_is_found(
    place: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = OWN["CONT"].bind

    def bind(node: Node, numerics: Numerics) -> Call:
        def run() -> None:
            right(node, numerics)()
            at = {"after": node.dst.end, "source": (node.src[0] or node.dst).address, "dst": node.dst.address}[place]
            Memory(at, 1).bytes()[0] ^= 1

        return run

    monkeypatch.setattr(OWN["CONT"], "bind", bind)
    with Judge() as judge:
        assert said in (judge.wrong(drawn(np.random.default_rng(1), "CONT")) or "")


def test_an_image_whose_rows_lie_apart_is_refused() -> None:
    """ggml's CPU reads them side by side."""
    x = normal(np.random.default_rng(0), "f32", 1, 1, 3, 4)
    kernel = normal(np.random.default_rng(0), "f16", 1, 1, 1, 2)
    of = node("IM2COL", "f32", (1, 3, 2, 2), kernel, x, params=Im2col(1, 1, 0, 0, 1, 1, is_2d=1))
    part = replace(x, ne=(3, 3, 1, 1))
    assert "lie apart" in (OWN["IM2COL"].refusal(replace(of, src=(kernel, part))) or "")


@pytest.mark.parametrize(("tokens", "few"), [(7, True), (8, False)])
def test_experts_are_promised_by_how_many_tokens_one_gets(tokens: int, few: bool) -> None:
    """Not by how many tokens there are: 4 of a token's experts may be the same one."""
    rng = np.random.default_rng(0)
    weights, x = normal(rng, "q4_K", 1, 2, 24, 256), normal(rng, "f32", 1, 1, 1, 256)
    ids = Tensor.of(np.zeros((1, tokens), np.int32))
    of = node("MUL_MAT_ID", "f32", (1, 1, tokens, 24), weights, x, ids)
    assert promises.promised(of) <= few
    with Judge() as judge:
        assert judge.wrong(of) is None
