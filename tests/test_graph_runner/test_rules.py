"""Which differences are right: every bound between what it must let through and what it must catch; sets and orders."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from kit import rounding
from kit.paper import copy_of
from kit.rounding import FAULTS, in_halves, right, rounds, written, wrong
from kit.support import examples, seeds
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.backend.fusion import FUSIONS
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.attention import FlashAttn
from ggml_backend_npu.ops.deepseek import HcPre
from ggml_backend_npu.ops.kernels.products import VEC_DOT
from ggml_backend_npu.ops.norms import Norm
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.replica import Replica
from ggml_backend_npu.registry.checks import Types
from ggml_backend_npu.registry.exact import values
from ggml_backend_npu.registry.probes import node, tensor
from graph_runner.judging import noise
from graph_runner.judging.compare import compare
from graph_runner.judging.rules import Rules, ToleranceError, errors, type_of
from graph_runner.judging.spans import copied

NODES = {name: op.makes for name, op in OWN.items() if op.bound}

# of ops that take many types, those of the other sources that are tried by default
COMMON: dict[str, set[Types]] = {
    "MUL_MAT": {("f32", "f32"), ("f16", "f32"), ("f16", "f16"), ("bf16", "f32"), ("q4_1", "f32"), ("q4_K", "f32")},
    "OUT_PROD": {("f32", "f32"), ("f16", "f32"), ("q4_1", "f32"), ("q4_K", "f32")},
    "MUL_MAT_ID": {("f16", "f32", "i32"), ("q8_0", "f32", "i32")},
    "FLASH_ATTN_EXT": {("f32", "f32", "f32"), ("f32", "f16", "f16"), ("f32", "q8_0", "f16"), ("f32", "q8_0", "q8_0")},
    "LIGHTNING_INDEXER": {("f32", "f16", "f32", "f16"), ("f32", "q8_0", "f32", "f16")},
}

PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")

# what has one rounding or none, and is to keep it: float32 arithmetic that any device has, and what moves data
SAME_BYTES = {
    *("ADD", "SUB", "MUL", "DIV", "ADD_ID", "SQR", "SQRT", "ABS", "NEG", "SGN", "STEP", "RELU", "REGLU", "CLAMP"),
    *("FLOOR", "CEIL", "ROUND", "TRUNC", "FILL", "ARGMAX", "TRI", "PAD", "SET", "IM2COL", "CONCAT", "REPEAT"),
    *("IM2COL_3D", "PAD_REFLECT_1D", "ROLL", "WIN_PART", "WIN_UNPART", "GET_REL_POS"),
    *("CONT", "CPY", "DUP", "GET_ROWS", "SET_ROWS", "ADD1", "ACC", "LEAKY_RELU", "DIAG", "DIAG_MASK_INF"),
    *("DIAG_MASK_ZERO", "COUNT_EQUAL"),
}
SETS = {name for name, op in OWN.items() if op.order is not None}

# what a device of half floats must not do
GROSS = {
    *("no mask", "no slopes", "swapped", "heads mixed up", "ids off by one", "another column"),
    *("positions off by one", "k and v swapped", "q and k swapped", "comb transposed", "no post", "no B", "MEAN"),
    *("the last weight left out", "as RMS_NORM", "one group", "the maximum", "SIGMOID", "SILU", "a stream left out"),
}


@pytest.fixture(scope="module")
def cpu(backend: Plugin) -> Iterator[Replica]:
    with Replica(backend.ggml, "CPU") as replica:
        yield replica


def combinations(op: str) -> list[Types]:
    """What ggml's CPU computes of what the op takes."""
    return sorted(
        types for types in OWN[op].types or () if op not in PRODUCTS or types[2] in ("f32", VEC_DOT[types[1]])
    )


def is_common(op: str, types: Types) -> bool:
    return op not in COMMON or types[1:] in COMMON[op]


EVERY = [
    pytest.param(op, i, types, id=f"{op}-{i}-{'-'.join(types)}", marks=[] if is_common(op, types) else pytest.mark.slow)
    for op, makes in NODES.items()
    for types in combinations(op)
    for i in range(len(makes) if is_common(op, types) else 1)
]


def made(cpu: Replica, op: str, i: int, types: Types) -> tuple[Node, Tensor]:
    """A node and what ggml's CPU makes of it."""
    found = NODES[op][i](np.random.default_rng(1), types)
    expected = copied(found)
    cpu.compute(expected)
    return found, expected.dst


def allows(rules: Rules, of: Node, expected: Tensor, actual: Tensor) -> bool:
    found = compare(expected, actual)
    return bool(found) or rules.allows(of, expected, actual, found)


@pytest.mark.some(60)
@pytest.mark.daily(6)
@pytest.mark.parametrize(("op", "i", "types"), EVERY)
def test_what_is_right_is_let_through_and_what_is_wrong_is_caught(cpu: Replica, op: str, i: int, types: Types) -> None:
    rules = Rules()
    of, expected = made(cpu, op, i, types)
    for name, actual in right(of):
        assert allows(rules, of, expected, actual), f"{name}: {min(errors(of, expected, actual)):.1e}"
    for name, actual in wrong(of):
        assert not allows(rules, of, expected, actual), f"{name}: {how_wrong(of, expected, actual)}"


def how_wrong(of: Node, expected: Tensor, actual: Tensor) -> str:
    error = min(errors(of, expected, actual))
    return f"{error:.1e}" if error else "no error: give the op a node of which this changes the result"


@pytest.mark.parametrize("op", NODES)
def test_a_node_of_an_op_with_a_bound_rounds(op: str) -> None:
    """Others may be exact: nothing shows of those whether the bound is too wide."""
    types = combinations(op)[-1]
    nodes = [make(np.random.default_rng(1), types) for make in NODES[op]]
    assert any(rounds(of) for of in nodes), (
        f"the nodes of {op} are exact in fewer bits than {types[0]}: give one that rounds (a mean, not a maximum), "
        "or no bound"
    )


@pytest.mark.some(24)
@pytest.mark.daily(2)
@pytest.mark.parametrize("op", NODES)
def test_devices_of_half_floats(cpu: Replica, op: str) -> None:
    rules = Rules("gpu")
    types = next(types for types in reversed(combinations(op)) if set(types) <= {"f32", "f16", "i32"})
    of, expected = made(cpu, op, 0, types)
    rough = replace(of, src=tuple(in_bfloat16(x) for x in of.src))
    result = rounding.exact(rough).astype(ml_dtypes.bfloat16).astype(np.float64)
    for actual in (in_halves(of), written(of, result), *(actual for _, actual in right(of))):
        assert allows(rules, of, expected, actual), f"{min(errors(of, expected, actual)):.1e}"
    for name in GROSS & FAULTS.get(op, {}).keys():
        fault = FAULTS[op][name](of)
        actual = written(of, rounding.exact(fault) if isinstance(fault, Node) else fault)
        assert not allows(rules, of, expected, actual), f"{name}: {min(errors(of, expected, actual)):.1e}"
    assert not allows(rules, of, expected, written(of, values(expected) * 1.05))


def in_bfloat16(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.type not in ("f32", "f16") else tensor("bf16", values(x))


def test_every_op_has_a_rule_and_every_bound_a_right_and_a_wrong_case() -> None:
    rules = Rules()
    bounds = {op for op in rules.ops if rules.bound(op, "f32")}
    assert bounds - {fusion.name for fusion in FUSIONS} == {op for op in NODES if OWN[op].bound}
    assert bounds.isdisjoint(SETS | SAME_BYTES)
    assert {"TOP_K", "ARGSORT"} <= SETS
    assert {rules.describe(op, "f32") for op in SAME_BYTES} == {"same bytes"}
    assert rules.ops <= Rules("gpu").ops


@pytest.mark.parametrize("op", sorted(SAME_BYTES))
def test_one_bit_is_too_much_for_the_others(op: str) -> None:
    x = tensor("f32", np.ones((1, 1, 2, 8)))
    off = tensor("f32", np.full((1, 1, 2, 8), 1 + 2.0**-23))
    assert not allows(Rules(), Node(op, x, (x, x, x)), x, off)


# what the reference itself rounds


def test_a_row_that_is_wrong_among_many_right_ones(cpu: Replica) -> None:
    rng = np.random.default_rng(0)
    x = 100 * rng.standard_normal((1, 1, 2000, 64))
    x[..., 1234, :] *= 1e-5
    of = node("RMS_NORM", "f32", x.shape, tensor("f32", x), params=Norm(1e-6))
    cpu.compute(of)
    off = copy_of(of.dst)
    off.view()[0, 0, 1234] *= np.float32(1 + 1e-4)
    assert compare(of.dst, off).nmse < 1e-11
    assert not allows(Rules(), of, of.dst, off)


def test_an_element_that_is_wrong_beside_a_much_larger_one(cpu: Replica) -> None:
    x = np.random.default_rng(0).standard_normal((1, 1, 1, 4096))
    x[..., 7] = 3e4
    of = node("SILU", "f32", x.shape, tensor("f32", x))
    cpu.compute(of)
    for factor, is_right in ((1 + 1e-7, True), (1 + 1e-4, False)):
        off = copy_of(of.dst)
        off.view()[..., 100] *= np.float32(factor)
        assert allows(Rules(), of, of.dst, off) == is_right


@examples(20)
@given(seed=seeds)
def test_terms_that_cancel(cpu: Replica, seed: int) -> None:
    rng = np.random.default_rng(seed)
    half = rng.standard_normal((1, 1, 3, 300))
    x = np.concatenate([half, -half[..., ::-1] * (1 + 1e-6)], axis=-1)
    for op in ("SUM_ROWS", "MEAN"):
        of = node(op, "f32", (1, 1, 3, 1), tensor("f32", x))
        cpu.compute(of)
        for name, actual in right(of):
            assert allows(Rules(), of, of.dst, actual), name
        assert not allows(Rules(), of, of.dst, written(of, values(of.dst) + 1e-2 * (1 if op == "SUM_ROWS" else 1e-2)))
    weights, columns = tensor("f32", x), tensor("f32", np.ones((1, 1, 5, 600)))
    of = node("MUL_MAT", "f32", (1, 1, 5, 3), weights, columns)
    cpu.compute(of)
    assert allows(Rules(), of, of.dst, rounding.computed(of, rounding.compiled))
    assert not allows(Rules(), of, of.dst, written(of, values(of.dst) + 1e-2))


def test_what_is_no_finite_number(cpu: Replica) -> None:
    x = np.linspace(-3, 3, 64)
    x[[1, 2, 3, 4]] = -np.inf, np.inf, np.nan, 100
    of = node("EXP", "f32", (1, 1, 1, 64), tensor("f32", x.reshape(1, 1, 1, -1)))
    cpu.compute(of)
    values = of.dst.view()[0, 0, 0]
    assert values[1] == 0
    assert np.isinf(values[[2, 4]]).all()
    assert np.isnan(values[3])
    near = written(of, rounding.exact(of))
    near.view()[..., 10] *= np.float32(1 + 1e-7)
    assert allows(Rules(), of, of.dst, near)
    for place, value in ((2, 1e38), (3, 1.0), (10, np.inf), (10, np.nan), (4, -np.inf)):
        off = copy_of(near)
        off.view()[..., place] = value
        assert not allows(Rules(), of, of.dst, off), (place, value)


LARGE = 3e38


@pytest.mark.parametrize("op", ["MUL_MAT", "MUL_MAT_ID", "SOLVE_TRI"])
def test_what_overflows_depends_on_the_order_of_the_terms(cpu: Replica, op: str) -> None:
    """Four columns: one that is small, two whose terms are too large for float32, and one that holds an infinity."""
    k = 8
    x = np.ones((4, k))
    x[1], x[2], x[3, 5] = LARGE, np.tile([LARGE, -LARGE], k // 2), np.inf
    if op == "SOLVE_TRI":
        lower = np.tril(np.full((k, k), -1.0), -1) + np.eye(k)
        x[2] = LARGE * np.eye(k)[0]
        sources: tuple[Tensor, ...] = tensor("f32", lower[None, None]), tensor("f32", x.T.copy()[None, None])
        of = node(op, "f32", (1, 1, k, 4), *sources)
    else:
        weights, ids = tensor("f32", np.ones((1, 1, 2, k))), tensor("i32", np.zeros((1, 1, 4, 1)))
        shape = (1, 1, 4, k) if op == "MUL_MAT" else (1, 4, 1, k)
        sources = weights, tensor("f32", x.reshape(shape)), *([ids] if op == "MUL_MAT_ID" else [])
        of = node(op, "f32", (*shape[:3], 2), *sources)
    cpu.compute(of)
    by_column = of.dst.view()[0, 0].T if op == "SOLVE_TRI" else of.dst.view().reshape(4, -1)
    assert np.isfinite(by_column[0]).all()
    assert not np.isfinite(by_column[1]).all()

    def is_right(column: int, value: float) -> bool:
        other = copy_of(of.dst)
        to = other.view()[0, 0].T if op == "SOLVE_TRI" else other.view().reshape(4, -1)
        to[column, -1] = value
        return allows(Rules(), of, of.dst, other)

    assert all(is_right(column, value) for column in (1, 2) for value in (np.inf, -np.inf, np.nan))
    assert [is_right(0, value) for value in (np.inf, np.nan, 0.0)] == [False] * 3
    assert [is_right(3, value) for value in (1.0, -np.inf)] == [False] * 2


@pytest.mark.parametrize("op", ["DSV4_HC_PRE", "DSV4_HC_POST", "MUL_MAT"])
def test_a_product_that_overflows_may_be_rounded_before_it_is_added(cpu: Replica, op: str) -> None:
    """Elements that are small, LARGE + LARGE - LARGE, and infinity less 10 * LARGE: this is infinite where a compiler
    fuses product and sum, else NaN."""
    x = np.array([[1, LARGE, np.inf], [1, LARGE, 1], [1, LARGE, LARGE]])  # (terms, elements)
    by = np.array([1.0, 1.0, -1.0])
    by[2] = -10 if op != "DSV4_HC_PRE" else -2
    shape: tuple[int, ...] = 1, 1, 1, 3
    if op == "MUL_MAT":
        of = node(op, "f32", (1, 1, 3, 1), tensor("f32", by.reshape(shape)), tensor("f32", x.T.copy()[None, None]))
    elif op == "DSV4_HC_PRE":
        sources = tensor("f32", x[None, None]), tensor("f32", by.reshape(shape))
        of = node(op, "f32", shape, *sources, params=HcPre(0.25, 0))
    else:
        arrays = x[:1], x[1:], np.full((1, 2), by[0]), np.tile(by[1:, None], (1, 2))
        of = node(op, "f32", (1, 1, 2, 3), *(tensor("f32", each[None, None]) for each in arrays))
    cpu.compute(of)

    def is_right(element: int, value: float) -> bool:
        other = copy_of(of.dst)
        other.view().reshape(-1, 3)[-1, element] = value
        return allows(Rules(), of, of.dst, other)

    assert [is_right(0, value) for value in (np.inf, np.nan)] == [False] * 2
    assert [is_right(1, value) for value in (np.inf, np.nan)] == [True] * 2
    assert [is_right(2, value) for value in (np.inf, np.nan, -np.inf, 1.0)] == [True, True, False, False]


@pytest.mark.some(2)
@pytest.mark.daily(4)
@pytest.mark.parametrize("cells", [64, 600, 4800])
@pytest.mark.parametrize("seed", range(5))
def test_float32_sums_over_many_cells_round_as_often(cpu: Replica, cells: int, seed: int) -> None:
    """The first cell has nearly all of the weight, as in models whose first token takes what no other one needs."""
    rng = np.random.default_rng(seed)
    q = np.sign(rng.standard_normal(64)) + 0.1 * rng.standard_normal((1, 4, 64, 64))
    k, v = rng.standard_normal((2, 1, 1, cells, 64))
    k[0, 0, 0] = np.sign(q[0, 0, 0]) * np.log(800 * cells) / 8
    sources = (tensor(type, x) for type, x in (("f32", q), ("q5_1", k), ("q5_1", v)))
    params = FlashAttn(scale=0.125, max_bias=0.0, logit_softcap=0.0, prec=10, n_kv_max=0)
    of = node("FLASH_ATTN_EXT", "f32", (1, 64, 4, 64), *sources, None, None, params=params)
    cpu.compute(of)
    sums = rounding.computed(of, rounding.compiled)
    assert allows(Rules(), of, of.dst, sums)
    assert not allows(Rules(), of, of.dst, written(of, values(of.dst) * (1 + 1e-3)))


def test_bytes_between_the_elements_are_judged(cpu: Replica) -> None:
    x = tensor("f32", np.random.default_rng(0).standard_normal((1, 1, 4, 8)))
    wide = np.zeros((1, 1, 4, 16), np.float32)
    of = Node("SILU", replace(Tensor.of(wide), ne=(8, 4, 1, 1)), (x,), bytes(64))
    cpu.compute(of)
    near = copy_of(of.dst)
    near.view()[...] *= np.float32(1 + 1e-7)
    assert not compare(of.dst, near)
    assert allows(Rules(), of, of.dst, near)
    assert not Rules().allows(of, of.dst, near, compare(of.dst, near, outside=True))
    off = copy_of(near)
    off.memory.bytes()[off.offset + 4 * 9] = 1
    assert not allows(Rules(), of, of.dst, off)
    only = copy_of(of.dst)
    only.memory.bytes()[only.offset + 4 * 9] = 1
    assert not allows(Rules(), of, of.dst, only)


def test_sources_that_lie_where_the_output_does(cpu: Replica) -> None:
    x = tensor("f32", np.random.default_rng(0).standard_normal((1, 1, 4, 64)))
    of = Node("SILU", x, (x,), bytes(64))
    apart = replace(of, dst=copy_of(x))
    cpu.compute(apart)
    assert allows(Rules(), of, apart.dst, written(of, rounding.exact(of)))
    assert not allows(Rules(), of, apart.dst, written(of, rounding.fewer_bits(rounding.exact(of), "f32")))


# what is as near to the exact value as the reference


@pytest.mark.parametrize(
    ("op", "types"),
    [
        ("FLASH_ATTN_EXT", ("f32", "f32", "q8_0", "q8_0")),
        ("FLASH_ATTN_EXT", ("f32", "f32", "q4_0", "q4_0")),
        ("MUL_MAT", ("f32", "q4_1", "f32")),
    ],
)
def test_a_row_is_right_that_differs_by_a_hundredth_of_the_references_own_error(
    cpu: Replica, op: str, types: Types
) -> None:
    """The CPU rounds the other source of quantised weights: two results that add it up otherwise are equally near."""
    of, expected = made(cpu, op, 0, types)
    own = values(expected) - rounding.exact(of)
    turned = own[..., ::-1]  # as large in each row, but another error
    for part, is_right in ((0.003, True), (0.1, False)):
        actual = written(of, values(expected) + part * turned)
        assert min(errors(of, expected, actual)) > Rules().bound(op, type_of(of)), (
            "the bound alone does not let it through"
        )
        assert allows(Rules(), of, expected, actual) == is_right, part


def test_an_op_that_the_reference_computes_exactly_has_its_bound_alone(cpu: Replica) -> None:
    of, expected = made(cpu, "RMS_NORM", 0, ("f32", "f32"))
    for factor, is_right in ((1 + 1e-7, True), (1 + 1e-5, False)):
        assert allows(Rules(), of, expected, written(of, values(expected) * factor)) == is_right


def test_the_row_is_told_that_decides(cpu: Replica) -> None:
    """Of 2,000 rows the one that is off, though the whole is within the bound."""
    x = 100 * np.random.default_rng(0).standard_normal((1, 1, 2000, 64))
    x[..., 1234, :] *= 1e-5
    of = node("RMS_NORM", "f32", x.shape, tensor("f32", x), params=Norm(1e-6))
    cpu.compute(of)
    off = copy_of(of.dst)
    off.view()[0, 0, 1234] *= np.float32(1 + 1e-4)
    judged = Rules().judged(of, of.dst, off)
    assert judged is not None
    assert not judged
    assert (judged.row, judged.n_rows) == (1234, 2000)
    assert 1e-9 < judged.error < 2e-8
    assert judged.limit == Rules().bound("RMS_NORM", "f32") < judged.error
    assert judged.against in ("the reference", "the exact value")
    assert Rules().judged(Node("CONT", of.dst, of.src, bytes(64)), of.dst, off) is None


def test_a_right_row_is_told_by_the_first_measure(cpu: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of terms take several more products of a large matrix."""
    monkeypatch.setattr(noise, "size", lambda *_: pytest.fail("the sizes of terms are computed"))
    x = np.random.default_rng(0).standard_normal((1, 1, 2, 64))
    of = node("RMS_NORM", "f32", x.shape, tensor("f32", x), params=Norm(1e-6))
    cpu.compute(of)
    off = copy_of(of.dst)
    off.view()[0, 0, 0] *= np.float32(1 + 1e-6)
    judged = Rules().judged(of, of.dst, off)
    assert judged
    assert judged.against == "the reference"


# sets and orders


def scored(op: str, scores: NDArray[Any], ids: NDArray[Any], params: bytes = b"") -> tuple[Node, Tensor]:
    actual = Tensor.of(ids.astype(np.int32).reshape((1,) * (4 - ids.ndim) + ids.shape))
    x = Tensor.of(scores.astype(np.float32).reshape((1,) * (4 - scores.ndim) + scores.shape))
    return Node(op, actual, (x,), params), actual


SCORES = np.array([[3, 1, 3, 0, -1, 2], [0, 0, 0, 0, 5, 9]])


@pytest.mark.parametrize(
    ("ids", "is_right"),
    [
        ([[0, 2, 5], [5, 4, 0]], True),
        ([[5, 2, 0], [1, 5, 4]], True),  # another order; another one of equals
        ([[0, 2, 1], [5, 4, 0]], False),  # not the largest
        ([[0, 0, 2], [5, 4, 0]], False),  # one twice
        ([[0, 2, 6], [5, 4, 0]], False),  # none of the row
        ([[0, 2, -1], [5, 4, 0]], False),
        ([[5, 4, 0], [0, 2, 5]], False),  # of the other row
    ],
)
def test_a_set_has_no_order(ids: list[list[int]], is_right: bool) -> None:
    of, actual = scored("TOP_K", SCORES, np.array(ids))
    _, expected = scored("TOP_K", SCORES, np.array([[2, 0, 5], [4, 5, 3]]))
    assert allows(Rules(), of, expected, actual) == is_right
    assert Rules().describe("TOP_K", "f32") == "the same set in any order"


@pytest.mark.parametrize("descending", [0, 1])
@pytest.mark.parametrize(
    ("ids", "is_right"),
    [
        ([[4, 3, 1, 5, 0, 2], [0, 1, 2, 3, 4, 5]], True),
        ([[4, 3, 1, 5, 2, 0], [3, 1, 2, 0, 4, 5]], True),  # among equals
        ([[4, 3, 5, 1, 2, 0], [3, 1, 2, 0, 4, 5]], False),
        ([[4, 3, 1, 5, 2, 2], [3, 1, 2, 0, 4, 5]], False),
    ],
)
def test_an_order_is_free_among_equals_alone(ids: list[list[int]], is_right: bool, descending: int) -> None:
    order = slice(None, None, -1 if descending else 1)
    params = struct.pack("i", descending)
    of, actual = scored("ARGSORT", SCORES, np.array(ids)[:, order], params)
    _, expected = scored("ARGSORT", SCORES, np.array([[4, 3, 1, 5, 0, 2], [0, 1, 3, 2, 4, 5]])[:, order], params)
    assert allows(Rules(), of, expected, actual) == is_right
    if descending:
        wrong_way = replace(of, params=struct.pack("i", 0))
        assert not allows(Rules(), wrong_way, expected, actual)


@examples(20)
@given(seed=seeds)
def test_sets_and_orders_of_the_kernels(cpu: Replica, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 9, (3, 40)).astype(np.float32)
    for op, k, params in (
        ("TOP_K", 7, b""),
        ("ARGSORT", 40, struct.pack("i", 1)),
        ("ARGSORT", 40, struct.pack("i", 0)),
    ):
        of, _ = scored(op, scores, np.zeros((3, k)), params + bytes(60))
        expected, actual = (replace(of, dst=copy_of(of.dst)) for _ in range(2))
        cpu.compute(expected)
        rounding.compiled(actual)
        assert allows(Rules(), of, expected.dst, actual.dst)


# tables


def test_rules_in_words() -> None:
    rules = Rules()
    assert rules.describe("CONT", "f32") == "same bytes"
    assert rules.describe("MUL_MAT", "q4_0") == "within NMSE 1e-10 of the reference or of the exact value"
    assert rules.describe("FLASH_ATTN_EXT", "f16") == "within NMSE 1e-06 of the reference or of the exact value"
    assert rules.describe("FLASH_ATTN_EXT", "q8_0") == "within NMSE 1e-11 of the reference or of the exact value"
    assert rules.describe("ARGSORT", "f32") == "the same order, but of equal elements"
    x = tensor("f32", np.zeros((1, 1, 1, 32)))
    half = tensor("f16", np.zeros((1, 1, 1, 32)))
    assert type_of(Node("FLASH_ATTN_EXT", x, (x, x, half))) == "f16"
    assert type_of(Node("MUL_MAT", x, (half, x))) == "f16"
    assert type_of(Node("ARANGE", x, ())) == "f32"


def test_a_file_lies_over_the_table(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[MUL_MAT]\nf32 = 0.5\n[GET_ROWS]\n"*" = 1\n[CONV_2D]\nf16 = 0\n[TopKSoftmax]\nf32 = 1e-3\n')
    rules = Rules(path)
    assert [rules.bound("MUL_MAT", type) for type in ("f32", "f16")] == [0.5, 1e-10]
    assert rules.bound("GET_ROWS", "q8_0") == 1
    assert rules.bound("TopKSoftmax", "f32") == 1e-3
    assert Rules().bound("GET_ROWS", "q8_0") == 0
    x, y = tensor("f32", np.ones((1, 1, 2, 8))), tensor("f32", np.full((1, 1, 2, 8), 1.5))
    assert allows(rules, Node("GET_ROWS", x, (x, x)), x, y)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[MULMAT]\nf32 = 1", "MULMAT: no such op"),
        ("[UNARY]\nf32 = 1", "UNARY: no such op"),
        ("[MUL_MAT]\nfp32 = 1", "MUL_MAT.fp32: no such type; known: "),
        ("[TOP_K]\ni32 = 1", "TOP_K has no bound: its rule is 'the same set in any order'"),
    ],
)
def test_a_file_of_what_nobody_has(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ToleranceError) as refused:
        Rules(path)
    assert f"tolerances {str(path)!r}: {message}" in str(refused.value)
    assert "\n" not in str(refused.value)
