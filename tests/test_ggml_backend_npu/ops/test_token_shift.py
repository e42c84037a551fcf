"""token_shift: the numbers of its document, a step-by-step definition, ggml's own nodes, and what it refuses."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.support import assert_same_bytes, examples, seeds
from numpy.typing import NDArray

from ggml_backend_npu import default_backend
from ggml_backend_npu.documents.rwkv import token_shift
from ggml_backend_npu.plugin.build import Builder
from ggml_backend_npu.plugin.plugin import Plugin
from quant.kernels import threads

Array = NDArray[Any]
NAMES = ("xr", "xw", "xk", "xv", "xa", "xg", "ht")
F32, F16, I8 = np.float32, np.float16, np.int8


def f32(*numbers: Any) -> Array:
    return np.array(numbers, F32)


# the definition


def interpolated(x: Array, mu: Array, h0: Array) -> list[Array]:
    """Six times x + (previous - x) * mu, each step rounded to float32."""
    previous = np.concatenate([h0, x[:, :-1]], axis=1)
    with np.errstate(all="ignore"):
        return [(previous - x) * row + x for row in mu.reshape(6, 1, 1, -1)]


def defined(
    x: Array, mu: Array, h0: Array, x_scale: float = 1, mu_scale: float = 1, out_scale: Any = 1
) -> tuple[Array, ...]:
    """The seven outputs: in float32, rounded once."""
    real = x.astype(F32) * F32(x_scale)
    mixed = interpolated(real, mu.astype(F32) * F32(mu_scale if mu.dtype == I8 else 1), h0.astype(F32))
    with np.errstate(all="ignore"):
        if x.dtype == I8:
            steps = np.broadcast_to(np.float32(out_scale), 6)
            codes = [np.clip(np.rint(y / step), -128, 127) for y, step in zip(mixed, steps, strict=True)]
            mixed = [np.nan_to_num(code, nan=0).astype(I8) for code in codes]
        return (*(y.astype(x.dtype) for y in mixed), real[:, -1:].astype(h0.dtype))


def assert_same(actual: tuple[Array, ...], expected: tuple[Array, ...]) -> None:
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype), name
        if e.dtype != I8:
            a, e = (np.where(np.isnan(array), array.dtype.type(np.nan), array) for array in (a, e))
        assert_same_bytes(a, e, name)


# worked numbers


def test_the_worked_example() -> None:
    mu = f32([0, 0.25], [0.5, 0.5], [1, 0], [0.25, 0.75], [1, 1], [0, 0])
    *mixed, ht = token_shift(f32([[1, 2], [3, 5], [-1, 4]]), mu.reshape(6, 1, 1, 2), f32([[10, -2]]))
    assert [y[0].tolist() for y in mixed] == [
        [[1, 1], [3, 4.25], [-1, 4.25]],
        [[5.5, 0], [2, 3.5], [1, 4.5]],
        [[10, 2], [1, 5], [3, 4]],
        [[3.25, -1], [2.5, 2.75], [0, 4.75]],
        [[10, -2], [1, 2], [3, 5]],
        [[1, 2], [3, 5], [-1, 4]],
    ]
    assert ht.tolist() == [[[-1, 4]]]


def test_half_floats_are_rounded_once() -> None:
    """300.16 exactly; 300.5 where each step is a half float."""
    x, h0, mu = np.full((1, 1, 1), 1000.5, F16), np.full((1, 1, 1), 0.3, F16), np.full((6, 1), 0.7, F16)
    assert [float(y[0, 0, 0]) for y in token_shift(x, mu, h0)] == [300.25] * 6 + [1000.5]


def test_int8_with_scales() -> None:
    x, mu = np.array([[[40, -100]]], I8), np.tile(np.array([64, 127], I8), (6, 1))
    *mixed, ht = token_shift(x, mu, f32([[1, 2]]), x_scale=0.05, mu_scale=1 / 127, out_scale=0.05)
    assert [y.tolist() for y in mixed] == [[[[30, 40]]]] * 6
    assert ht == pytest.approx(f32([[2, -5]]))
    assert ht.dtype == F32


def test_int8_with_scales_of_1_is_about_integers() -> None:
    """To nearest, ties to even; what does not fit saturates, and does not wrap."""
    x, h0 = np.array([[[-100, 100, 1, -1, 2, 0]]], I8), f32([[100, -128, 0, 0, 5, 1e9]])
    mu = np.tile(f32(2, 1, 0.5, 0.5, 0.5, 1), (6, 1))
    xr, *_, ht = token_shift(x, mu, h0, x_scale=1, out_scale=1)
    assert xr.tolist() == [[[127, -128, 0, 0, 4, 127]]]
    assert ht.tolist() == [[[-100, 100, 1, -1, 2, 0]]]


@pytest.mark.parametrize(("state", "code"), [(np.nan, 0), (np.inf, 127), (-np.inf, -128), (3e38, 127), (-3e38, -128)])
def test_what_int8_makes_of_what_is_no_number(state: float, code: int) -> None:
    """A column of it on its own: int8 is a vector of many columns in the kernel."""
    x, h0 = np.zeros((1, 1, 40), I8), np.zeros((1, 1, 40), F32)
    h0[0, 0, 17] = state
    xr = token_shift(x, np.ones((6, 40), F32), h0, x_scale=1, out_scale=0.5)[0]
    expected = np.zeros(40, I8)
    expected[17] = code
    assert xr.tolist() == [[expected.tolist()]]


def test_a_scale_for_each_output() -> None:
    x, steps = np.full((1, 1, 3), 50, I8), f32(1, 2, 4, 5, 10, 100)
    outputs = token_shift(x, np.zeros((6, 3), F32), np.zeros((1, 1, 3), F16), x_scale=2, out_scale=steps)
    assert [int(y[0, 0, 1]) for y in outputs[:6]] == [100, 50, 25, 20, 10, 1]
    assert outputs[6].dtype == F16
    assert outputs[6].tolist() == [[[100] * 3]]


# against the definition


@dataclass(frozen=True)
class Case:
    """Inputs of a size and of types; `layouts` says how x, rwkvag and h0 lie in memory."""

    size: tuple[int, int, int]
    types: tuple[Any, Any, Any]  # of x, rwkvag and h0
    layouts: tuple[str, str, str] = ("plain", "plain", "plain")
    special: bool = False
    seed: int = 0

    def inputs(self) -> tuple[Array, Array, Array]:
        rng = np.random.default_rng(self.seed)
        batch, n_tokens, width = self.size
        shapes = ((batch, n_tokens, width), (6, 1, 1, width), (batch, 1, width))
        arrays = []
        for shape, dtype, layout in zip(shapes, self.types, self.layouts, strict=True):
            if dtype == I8:
                array = rng.integers(-128, 128, shape).astype(I8)
            else:
                array = (rng.standard_normal(shape) * rng.choice([1e-6, 1, 300], shape)).astype(dtype)
                if self.special:
                    some = rng.random(shape) < 0.1
                    array[some] = rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0, np.finfo(dtype).max], dtype))
            arrays.append(LAYOUTS[layout](array))
        return arrays[0], arrays[1], arrays[2]

    @property
    def scales(self) -> dict[str, Any]:
        rng = np.random.default_rng(self.seed)
        scales = {"x_scale": 0.037, "out_scale": rng.uniform(0.01, 0.1, 6) if self.seed % 2 else 0.05}
        return {
            **(scales if self.types[0] == I8 else {}),
            **({"mu_scale": 1 / 127} if self.types[1] == I8 else {}),
        }


def apart(array: Array) -> Array:
    """Every second row of every second sequence of a larger array."""
    whole = np.full([2 * n + 1 for n in array.shape[:-1]] + [array.shape[-1] + 3], 77, array.dtype)
    view = whole[(*[slice(1, 2 * n, 2) for n in array.shape[:-1]], slice(2, 2 + array.shape[-1]))]
    view[...] = array
    return view


def gaps(array: Array) -> Array:
    return np.repeat(array, 3, axis=-1)[..., 1::3]


def backwards(array: Array) -> Array:
    return np.ascontiguousarray(array[..., ::-1, ::-1])[..., ::-1, ::-1]


def upside_down(array: Array) -> Array:
    return np.ascontiguousarray(array[::-1])[::-1]


def swapped(array: Array) -> Array:
    return np.ascontiguousarray(array.swapaxes(0, -1)).swapaxes(0, -1)


def one_row(array: Array) -> Array:
    """The first row for all of them: strides of 0."""
    return np.broadcast_to(array[(slice(1),) * (array.ndim - 1)], array.shape)


def one_element(array: Array) -> Array:
    return np.broadcast_to(array[..., :1], array.shape)


def unaligned(array: Array) -> Array:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    view = memory[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "plain": lambda array: array,
    **{f.__name__: f for f in (apart, gaps, backwards, upside_down, swapped, one_row, one_element, unaligned)},
}
layouts = st.sampled_from(list(LAYOUTS))
TYPES = [*product((F32, F16, I8), (F32, F16, I8), (F32, F16))]  # all that the document's table has


def named(types: tuple[Any, ...]) -> str:
    return "-".join(np.dtype(type).name for type in types)


widths = st.integers(1, 40) | st.sampled_from([511, 512, 513, 1100])


@pytest.mark.parametrize("types", TYPES, ids=named)
@given(
    size=st.tuples(st.integers(1, 3), st.integers(1, 6), widths),
    layouts=st.tuples(layouts, layouts, layouts),
    special=st.booleans(),
    seed=seeds,
)
@examples(35)
def test_it_equals_the_definition_bit_for_bit(
    types: tuple[Any, Any, Any],
    size: tuple[int, int, int],
    layouts: tuple[str, str, str],
    special: bool,
    seed: int,
) -> None:
    case = Case(size, types, layouts, special, seed)
    inputs = case.inputs()
    before = [array.copy() for array in inputs]
    assert_same(token_shift(*inputs, **case.scales), defined(*inputs, **case.scales))
    for array, copy in zip(inputs, before, strict=True):
        assert_same_bytes(array, copy, "an input")


@pytest.mark.parametrize("dtype", [F32, F16])
def test_it_is_near_what_float64_gives(dtype: Any) -> None:
    """An error of a few units of the larger operand: the result itself may be small by cancellation."""
    x, mu, h0 = Case((3, 9, 65), (dtype, dtype, dtype), seed=5).inputs()
    exact = interpolated(*(array.astype(np.float64) for array in (x, mu, h0)))
    difference = np.abs(np.concatenate([h0, x[:, :-1]], axis=1).astype(np.float64) - x)
    for i, (y, wanted) in enumerate(zip(token_shift(x, mu, h0), exact, strict=False)):
        size = np.abs(x) + difference * np.abs(mu[i].astype(np.float64)) + np.abs(wanted)
        with np.errstate(invalid="ignore"):
            bound = 4 * np.finfo(F32).eps * size + np.spacing(np.abs(y)).astype(np.float64)
        error = np.abs(y.astype(np.float64) - wanted)
        assert (error <= bound)[np.isfinite(y)].all()
        assert (np.abs(wanted)[np.isinf(y)] >= np.finfo(dtype).max).all()


@given(
    size=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 70)),
    special=st.booleans(),
    seed=seeds,
)
@examples(40)
def test_it_equals_ggmls_nodes_bit_for_bit(
    backend: Plugin, size: tuple[int, int, int], special: bool, seed: int
) -> None:
    """CONCAT, SUB, REPEAT, MUL, ADD, as llama.cpp builds them; of one token too, where CONCAT gets none."""
    batch, n_tokens, width = size
    x, mu, h0 = inputs = Case(size, (F32, F32, F32), special=special, seed=seed).inputs()
    with Builder(backend.ggml, "CPU") as build:
        now = build.tensor("f32", (width, n_tokens, batch))
        weights = build.tensor("f32", (width, 1, 1, 6))
        state = build.tensor("f32", (width, 1, batch))
        row = 4 * width
        nb = (row, n_tokens * row, batch * n_tokens * row)
        previous = build.op("concat", state, build.view(now, (width, n_tokens - 1, batch, 1), nb), 1)
        difference = build.op("sub", previous, now)
        repeated = build.op("repeat", difference, build.tensor("f32", (width, n_tokens, batch, 6)))
        mixed = build.op("add", build.op("mul", repeated, weights), now)
        for tensor, data in ((now, x), (weights, mu), (state, h0)):
            build.set(tensor, data)
        assert build.compute(mixed) == 0
        expected = build.get(mixed).view(F32).reshape(6, batch, n_tokens, width)
    assert_same(token_shift(*inputs), (*expected, x[:, -1:]))


@pytest.mark.parametrize("types", TYPES, ids=named)
@given(cuts=st.sets(st.integers(1, 8)), in_place=st.booleans(), seed=seeds)
@examples(8)
def test_a_sequence_in_chunks_gives_the_bits_of_one_call(
    types: tuple[Any, Any, Any], cuts: set[int], in_place: bool, seed: int
) -> None:
    """The last token of one chunk is the state of the next, be it written where the state was.

    A state of half floats loses what x has in float32, so there x has no more.
    """
    case = Case((2, 9, 21), types, seed=seed)
    x, mu, h0 = case.inputs()
    if types[2] == F16 and types[0] != F16:
        x = (x // 16 * 16).astype(x.dtype)
        case_scales = {**case.scales, **({"x_scale": 0.125} if types[0] == I8 else {})}
        x = x if types[0] == I8 else x.astype(F16).astype(F32)
    else:
        case_scales = case.scales
    whole = token_shift(x, mu, h0, **case_scales)
    state, parts = h0.copy(), []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), 9], strict=True):
        chunk = x[:, begin:end]
        out = [np.empty(chunk.shape, x.dtype) for _ in range(6)]
        *mixed, ht = token_shift(chunk, mu, state, out=[*out, state if in_place else np.empty_like(h0)], **case_scales)
        assert (ht is state) == in_place
        parts.append(mixed)
        state = ht
    joined = [np.concatenate([part[i] for part in parts], axis=1) for i in range(6)]
    assert_same((*joined, state), whole)


def test_a_state_may_be_part_of_a_larger_one() -> None:
    """[B, 2, C]: one row for time-mixing, one for channel-mixing; the first is replaced, the second stays."""
    x, mu, h0 = Case((3, 4, 10), (F32, F32, F32)).inputs()
    states = np.stack([h0[:, 0], np.full_like(h0[:, 0], 7)], axis=1)
    outputs = token_shift(x, mu, states[:, :1], out=[*np.empty((6, 3, 4, 10), F32), states[:, :1]])
    assert_same(outputs, token_shift(x, mu, h0))
    assert (states[:, :1] == x[:, -1:]).all()
    assert (states[:, 1] == 7).all()


@pytest.mark.parametrize("types", [(F32, F32, F32), (F16, F32, F16), (I8, I8, F32)], ids=named)
@pytest.mark.parametrize("layout", ["apart", "upside_down", "swapped rows", "alternating"])
def test_outputs_may_lie_apart(types: tuple[Any, Any, Any], layout: str) -> None:
    case = Case((3, 4, 10), types)
    x, mu, h0 = case.inputs()
    memory = np.full((6, 7, 9, 13), 5, x.dtype)
    view = {
        "apart": memory[:, 1:6:2, :8:2, 2:12],
        "upside_down": memory[:, 5:0:-2, 7::-2, 2:12],
        "swapped rows": memory[:, :4, :3, :10].transpose(0, 2, 1, 3),
        "alternating": memory[:3, :4, :6, :10].transpose(2, 0, 1, 3),
    }[layout]
    ht = np.full((3, 2, 10), 5, h0.dtype)
    outputs = token_shift(x, mu, h0, out=(*view, ht[:, 1:]), **case.scales)
    assert all(output.base is not None for output in outputs)
    assert_same(outputs, token_shift(x, mu, h0, **case.scales))
    view[...] = 5
    assert (memory == 5).all()
    assert (ht[:, 0] == 5).all()


@pytest.mark.parametrize("size", [(0, 3, 4), (3, 2, 0), (0, 1, 0)])
@pytest.mark.parametrize("types", [(F32, F32, F32), (I8, I8, F16)], ids=named)
def test_without_sequences_or_columns_nothing_is_done(size: tuple[int, int, int], types: tuple[Any, Any, Any]) -> None:
    case = Case(size, types)
    outputs = token_shift(*case.inputs(), **case.scales)
    assert [y.shape for y in outputs] == [size] * 6 + [(size[0], 1, size[2])]
    assert token_shift(*case.inputs(), out=outputs, **case.scales)[6] is outputs[6]


def test_nan_stays_in_its_column_and_the_token_behind_it() -> None:
    x, mu, h0 = Case((1, 5, 8), (F32, F32, F32)).inputs()
    x[0, 2, 3] = np.nan
    xr = token_shift(x, mu, h0)[0]
    assert np.argwhere(np.isnan(xr)).tolist() == [[0, 2, 3], [0, 3, 3]]


@pytest.mark.parametrize("types", [(F32, F32, F32), (F16, F16, F32), (I8, F32, F16)], ids=named)
@pytest.mark.parametrize("n_threads", [1, 5])
def test_threads_part_the_rows(
    types: tuple[Any, Any, Any], n_threads: int, team: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_backend(), "team", replace(default_backend().team, size=n_threads))
    monkeypatch.setattr(threads, "GRAIN", 1000)
    case = Case((3, 37, 513), types, ("apart", "plain", "plain"))
    inputs = case.inputs()
    assert_same(token_shift(*inputs, **case.scales), defined(*inputs, **case.scales))


@pytest.mark.parametrize("types", [(F32, F32, F32), (F16, F16, F16), (I8, I8, F32)], ids=named)
@pytest.mark.parametrize("layout", ["plain", "apart", "gaps", "backwards"])
def test_no_temporary_is_larger_than_an_output(types: tuple[Any, Any, Any], layout: str) -> None:
    case = Case((2, 64, 1024), types, (layout, "plain", "plain"))
    inputs = case.inputs()
    out = token_shift(*inputs, **case.scales)
    tracemalloc.start()
    try:
        token_shift(*inputs, out=out, **case.scales)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < out[0].nbytes + 50_000


# what it refuses

BATCH, TOKENS, WIDTH = 2, 3, 4


def arguments(dtype: Any = F32) -> dict[str, Any]:
    case = Case((BATCH, TOKENS, WIDTH), (dtype, dtype, F32))
    return {**dict(zip(("x", "rwkvag", "h0"), case.inputs(), strict=True)), **case.scales}


def with_out(**changes: Any) -> dict[str, Any]:
    out = {name: np.full((BATCH, TOKENS, WIDTH), 5, F32) for name in NAMES}
    out["ht"] = out["ht"][:, :1]
    return {"out": [*{**out, **changes}.values()]}


def shared(what: str) -> dict[str, Any]:
    given = arguments()
    out = with_out()["out"]
    if what == "h0":
        memory = np.zeros((BATCH, 2, WIDTH), F32)
        given["h0"], out[6] = memory[:, :1], memory[:1].reshape(2, 1, WIDTH)
    elif what == "rwkvag":
        mu = np.zeros(24, F32)
        given["rwkvag"], out[1] = mu.reshape(6, 4), mu.reshape(BATCH, TOKENS, WIDTH)
    elif what == "x":
        out[0] = given["x"]
    elif what == "x of ht":
        out[6] = given["x"][:, :1]
    else:
        out[2] = out[0]
    return {**given, "out": out}


def big_endian(dtype: str, *shape: int) -> Array:
    return np.zeros(shape, f">{dtype}")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{f"{name} is None": ({name: None}, f"{name} is NoneType") for name in ("x", "rwkvag", "h0")},
    **{f"{name} is a list": ({name: [[[1.0]]]}, f"{name} is list") for name in ("x", "rwkvag", "h0")},
    "x of rank 2": ({"x": np.zeros((3, 4), F32)}, "x of shape (3, 4)"),
    "x of rank 4": ({"x": np.zeros((1, 2, 3, 4), F32)}, "x of shape (1, 2, 3, 4)"),
    "no tokens": ({"x": np.zeros((2, 0, 4), F32)}, "x of shape (2, 0, 4)"),
    "5 rows": ({"rwkvag": np.zeros((5, 1, 1, 4), F32)}, "rwkvag of shape (5, 1, 1, 4)"),
    "rwkvag of rank 3": ({"rwkvag": np.zeros((6, 1, 4), F32)}, "rwkvag of shape (6, 1, 4)"),
    "rwkvag dimension 1": ({"rwkvag": np.zeros((6, 2, 1, 4), F32)}, "rwkvag of shape (6, 2, 1, 4)"),
    "rwkvag of other columns": ({"rwkvag": np.zeros((6, 5), F32)}, "rwkvag of shape (6, 5)"),
    "rwkvag of one column": ({"rwkvag": np.zeros((6, 1), F32)}, "rwkvag of shape (6, 1)"),
    "h0 of rank 2": ({"h0": np.zeros((4, 2), F32)}, "h0 of shape (4, 2)"),
    "h0 of rank 1": ({"h0": np.zeros(4, F32)}, "h0 of shape (4,)"),
    "h0 of 2 rows": ({"h0": np.zeros((2, 2, 4), F32)}, "h0 of shape (2, 2, 4)"),
    "h0 of other sequences": ({"h0": np.zeros((1, 1, 4), F32)}, "h0 of shape (1, 1, 4)"),
    "h0 of other columns": ({"h0": np.zeros((2, 1, 3), F32)}, "h0 of shape (2, 1, 3)"),
    "x float64": ({"x": np.zeros((2, 3, 4))}, "x of dtype float64"),
    "x uint8": ({"x": np.zeros((2, 3, 4), np.uint8)}, "x of dtype uint8"),
    "x of other byte order": ({"x": big_endian("f4", 2, 3, 4)}, "x of dtype >f4"),
    "h0 of other byte order": ({"h0": big_endian("f4", 2, 1, 4)}, "h0 of dtype >f4"),
    "rwkvag of other byte order": ({"rwkvag": big_endian("f4", 6, 4)}, "rwkvag of dtype >f4"),
    "rwkvag int8 without a scale": ({"rwkvag": np.zeros((6, 4), I8)}, "mu_scale is missing"),
    "rwkvag float64": ({"rwkvag": np.zeros((6, 4))}, "rwkvag of dtype float64"),
    "rwkvag uint8": ({"rwkvag": np.zeros((6, 4), np.uint8)}, "rwkvag of dtype uint8"),
    "h0 int8": ({"h0": np.zeros((2, 1, 4), I8)}, "h0 of dtype int8"),
    "h0 float64": ({"h0": np.zeros((2, 1, 4))}, "h0 of dtype float64"),
    "a scale of float32": ({"x_scale": 0.5}, "x_scale=0.5"),
    "an out_scale of float32": ({"out_scale": 0.5}, "out_scale=0.5"),
    "a mu_scale of float32": ({"mu_scale": 0.5}, "mu_scale=0.5"),
    "out of 6": ({"out": [np.zeros((2, 3, 4), F32)] * 6}, "out of 6 arrays"),
    "out is a number": ({"out": 3}, "out is int"),
    **{f"{name} is None": (with_out(**{name: None}), f"{name} is NoneType") for name in NAMES},
    **{f"{name} is a list": (with_out(**{name: [[[0.0]]]}), f"{name} is list") for name in NAMES},
    **{
        f"{name} of another shape": (with_out(**{name: np.zeros((2, 2, 4), F32)}), f"{name} of shape (2, 2, 4)")
        for name in NAMES
    },
    "xk of another dtype": (with_out(xk=np.zeros((2, 3, 4), F16)), "xk of shape (2, 3, 4), float16"),
    "xr of another byte order": (with_out(xr=big_endian("f4", 2, 3, 4)), "xr of shape (2, 3, 4), >f4"),
    "ht of x's dtype": (with_out(ht=np.zeros((2, 1, 4), F16)), "ht of shape (2, 1, 4), float16"),
    "xa read-only": (with_out(xa=np.broadcast_to(np.float32(0), (2, 3, 4))), "xa is read-only"),
    "xr with gaps": (with_out(xr=np.zeros((2, 3, 8), F32)[..., ::2]), "xr of strides (96, 32, 8)"),
    "xw of other strides": (with_out(xw=np.zeros((2, 3, 8), F32)[..., :4]), "xw of strides (96, 32, 4)"),
    **{
        f"{name} lies on {other}": (shared(what), f"{name} lies on {other}")
        for what, name, other in (
            ("x", "xr", "x"),
            ("x of ht", "ht", "x"),
            ("xr", "xk", "xr"),
            ("rwkvag", "xw", "rwkvag"),
            ("h0", "ht", "h0"),
        )
    },
}  # fmt: skip
LISTS: list[Any] = [[], {}, [1.0, 2.0], [[0.5]], [1, [2]]]
SCALES: dict[str, tuple[Any, str]] = {
    **{
        f"{name} {value}": ({name: value}, f"{name}={value!r}")
        for name in ("x_scale", "mu_scale", "out_scale")
        for value in (0, -1.0, np.nan, np.inf, 1e-60, 1e60, 10**400, 1j, True, "a", b"1", *LISTS)
    },
    **{f"{name} missing": ({name: None}, f"{name} is missing") for name in ("x_scale", "mu_scale", "out_scale")},
    "one bad of six": ({"out_scale": [1, 1, 1, 1, 1, -1]}, "out_scale=[1, 1, 1, 1, 1, -1]"),
    "five": ({"out_scale": [1.0] * 5}, "out_scale=[1.0, 1.0"),
    "six of x": ({"x_scale": [1.0] * 6}, "x_scale=[1.0, 1.0"),
}  # fmt: skip


def assert_refused(given: dict[str, Any], message: str) -> None:
    """ValueError that begins with the argument and its value; no array is changed."""
    given = {**with_out(), **given}
    out = given["out"]
    arrays = [array for array in (*given.values(), *(out if isinstance(out, list) else ())) if hasattr(array, "dtype")]
    before = [array.copy() for array in arrays]
    with np.errstate(all="raise", under="ignore"), pytest.raises(ValueError, match=rf"^{re.escape(message)}"):
        token_shift(**given)
    for array, copy in zip(arrays, before, strict=True):
        assert_same_bytes(array, copy)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    changes, message = REFUSED[name]
    assert_refused({**arguments(), **changes}, message)


@pytest.mark.parametrize("name", SCALES)
def test_scales_that_are_refused(name: str) -> None:
    changes, message = SCALES[name]
    out = [*np.full((6, BATCH, TOKENS, WIDTH), 5, I8), np.full((BATCH, 1, WIDTH), 5, F32)]
    assert_refused({**arguments(I8), "out": out, **changes}, message)


def test_the_state_may_have_two_axes() -> None:
    x, mu, h0 = Case((3, 4, 17), (F32, F32, F16), seed=2).inputs()
    flat = np.ascontiguousarray(h0[:, 0])
    expected = token_shift(x, mu, h0)
    for actual, wanted in zip(token_shift(x, mu, flat), expected, strict=True):
        assert_same_bytes(actual, wanted)
    outputs = (*(np.empty_like(each) for each in expected[:6]), flat.reshape(h0.shape))
    token_shift(x, mu, flat, out=outputs)
    for actual, wanted in zip(outputs, expected, strict=True):
        assert_same_bytes(actual, wanted)
    with pytest.raises(ValueError, match=r"h0 of shape \(17, 3\): must be \[3, 1, 17\] or \[3, 17\]"):
        token_shift(x, mu, flat.T)
