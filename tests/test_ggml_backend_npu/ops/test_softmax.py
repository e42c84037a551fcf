"""SOFT_MAX: against ggml's CPU within what rounding explains, and compiled against the definition beside it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.nodes import bind
from kit.support import (
    ENGINES,
    PLAIN,
    Dims,
    Outcome,
    Placement,
    Recipe,
    Scene,
    assert_as_promised,
    assert_same_bytes,
    by_engines,
    choose,
    engine,
    examples,
    outcome,
    recorded_works,
    refusal,
    seeds,
    supported,
    with_avx2,
    zeros,
)
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor, default_backend
from ggml_backend_npu.ops import softmax
from ggml_backend_npu.ops.kernels.softmax import Rows, slopes
from ggml_backend_npu.ops.softmax import soft_max
from ggml_backend_npu.plugin.plugin import Plugin

Floats = NDArray[np.float32]
NMSE = 1e-11
INF = float("inf")

pytestmark = pytest.mark.usefixtures("every_op")


@dataclass(frozen=True)
class SoftMax:
    """SOFT_MAX of size ne.

    mask      type of one of size (ne0, ne1 + more[0], ne2 / more[1], ne3 / more[2]); None for no mask
    excluded  how much of the mask is -inf; no row all of it
    spread    how far apart scores lie
    """

    ne: Dims
    mask: str | None = None
    more: tuple[int, int, int] = (0, 1, 1)
    sinks: bool = False
    scale: float = 1.0
    max_bias: float = 0.0
    excluded: float = 0.3
    spread: float = 3.0
    seed: int = 0
    x: Placement = PLAIN

    def __call__(self, scene: Scene) -> int:
        rng = np.random.default_rng(self.seed)
        scores = (self.spread * rng.standard_normal(self.ne[::-1])).astype(np.float32)
        x = self.x.hold(scene, "f32", scores, rest=1)
        mask = None
        if self.mask:
            rows, n2, n3 = self.more
            ne = (self.ne[0], self.ne[1] + rows, max(1, self.ne[2] // n2), self.ne[3] // n3)
            added = rng.standard_normal(ne[::-1]).astype(np.float16)
            added[rng.random(added.shape) < self.excluded] = -np.inf
            kept = rng.integers(0, max(1, ne[0]), ne[:0:-1])[..., None]
            if ne[0]:
                np.put_along_axis(added, kept, np.float16(0.5), axis=-1)
            mask = scene.root(self.mask, ne, added.astype(np.float16 if self.mask == "f16" else np.float32))
        node = scene.op("soft_max_ext", x, mask, self.scale, self.max_bias)
        if self.sinks:
            sinks = (2 * rng.standard_normal(self.ne[2])).astype(np.float32)
            scene.function("soft_max_add_sinks")(node, scene.root("f32", (self.ne[2],), sinks))
        return node


def rows_of(result: Outcome) -> NDArray[np.float64]:
    return result.after[0].view(np.float32).astype(np.float64)


def assert_close_to_cpu(backend: Plugin, recipe: Recipe) -> None:
    """Either engine within NMSE of ggml's CPU, sources untouched."""
    cpu = outcome(backend, "CPU", recipe)
    expected = rows_of(cpu)
    for name, npu in by_engines(backend, recipe).items():
        error = np.square(rows_of(npu) - expected).sum()
        assert error <= NMSE * np.square(expected).sum(), name
        assert ((expected != 0) | (rows_of(npu) == 0)).all(), f"{name}: ggml has 0 there"


@st.composite
def soft_maxes(draw: st.DrawFn) -> SoftMax:
    """ne2 and ne3 are multiples of the mask's; head counts that are no power of two among them."""
    more = draw(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 2)))
    width = draw(st.integers(1, 5) | st.integers(1, 600))
    ne = (width, draw(st.integers(1, 4)), more[1] * draw(st.integers(1, 3)), more[2] * draw(st.integers(1, 2)))
    mask = draw(st.sampled_from([None, "f32", "f16"]))
    return SoftMax(
        ne,
        mask,
        more,
        sinks=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 0.125, 0.08838834764, 2.5, 0.0, -1.0])),
        max_bias=draw(st.sampled_from([0.0, 8.0, 1.5])) if mask else 0.0,
        spread=draw(st.sampled_from([0.0, 1.0, 20.0, 1e4])),
        seed=draw(seeds),
        x=Placement(before=(0, 0, 0, draw(st.integers(0, 1)))),
    )


@given(recipe=soft_maxes())
@examples(150)
def test_soft_max(backend: Plugin, recipe: SoftMax) -> None:
    assert_close_to_cpu(backend, recipe)


@with_avx2
@given(recipe=soft_maxes())
@examples(300)
def test_soft_max_equals_cpu(backend: Plugin, recipe: SoftMax) -> None:
    by_head = slopes(recipe.ne[2], recipe.max_bias)
    powers = by_head is None or (np.frexp(by_head)[0] == 0.5).all()
    which = "slopes of 2 ** n scale" if powers else "other slopes scale"
    assert_as_promised(backend, recipe, f"SOFT_MAX of a mask that {which}")


CASES = {
    "rows of 1": SoftMax((1, 5, 3, 2), "f16", sinks=True),
    "no head": SoftMax((7, 5, 0, 2), "f32", max_bias=8.0),
    "rows of 0": SoftMax((0, 5, 3, 2), "f32", sinks=True),
    "no rows": SoftMax((4, 0, 3, 2)),
    "a long row": SoftMax((100_003, 2, 1, 1), "f32", spread=1.0),
    "a long row of equal scores": SoftMax((65_537, 1, 2, 1), spread=0.0, scale=0.5),
    "a mask for each of 6 heads": SoftMax((33, 4, 6, 1), "f16"),
    "a mask for each sequence": SoftMax((33, 4, 6, 3), "f16", (5, 6, 1)),
    **{f"ALiBi, {n} heads": SoftMax((40, 3, n, 1), "f32", (0, n, 1), max_bias=8.0) for n in (1, 2, 3, 6, 7, 12, 33)},
    "ALiBi, sinks": SoftMax((40, 3, 5, 2), "f16", (1, 5, 2), sinks=True, max_bias=4.0, scale=0.3),
    "a negative bias is none": SoftMax((16, 3, 5, 1), "f32", max_bias=-8.0),
}


@pytest.mark.parametrize("name", CASES)
def test_soft_max_of(backend: Plugin, name: str) -> None:
    assert_close_to_cpu(backend, CASES[name])


@pytest.mark.parametrize("n_threads", [1, 3])
def test_threads_part_the_rows(backend: Plugin, n_threads: int, team: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_backend(), "team", replace(default_backend().team, size=n_threads))
    with recorded_works() as works:
        assert_close_to_cpu(backend, SoftMax((1000, 50, 4, 2), "f16", (0, 4, 2), sinks=True))
    assert [work.block.parts for work in works] == [6]


# without ggml: arrays in, arrays out


def soft_maxed(
    x: Floats, mask: Any = None, sinks: Any = None, *, scale: float = 1.0, max_bias: float = 0.0, dst: Any = None
) -> Floats:
    dst = np.full_like(x, 9, order="C") if dst is None else dst
    src = tuple(None if array is None else Tensor.of(np.asarray(array)) for array in (x, mask, sinks))
    bind(Node("SOFT_MAX", Tensor.of(dst), src, struct.pack("2f", scale, max_bias)))()
    return np.asarray(dst)


@pytest.fixture(params=ENGINES)
def either(request: pytest.FixtureRequest, backend: Plugin) -> Iterator[None]:
    with engine(backend, request.param):
        yield


def assert_within_ulp(actual: Floats, expected: Floats, n: int) -> None:
    """Within n units in the last place of what is expected; NaN where it is NaN."""
    assert (np.isnan(actual) == np.isnan(expected)).all()
    numbers = ~np.isnan(expected)
    a, e = actual[numbers].astype(np.float64), expected[numbers]
    assert (np.abs(a - e) <= n * np.spacing(np.abs(e)).astype(np.float64)).all()


@given(
    ne=st.tuples(st.integers(1, 300), *[st.integers(1, 3)] * 3),
    kind=st.sampled_from([None, np.float32, np.float16]),
    with_sinks=st.booleans(),
    special=st.booleans(),
    scale=st.sampled_from([1.0, 0.25, -3.0, 0.0, 1e38]),
    max_bias=st.sampled_from([0.0, 8.0]),
    seed=seeds,
)
@examples(200)
def test_compiled_equals_the_definition_but_for_rounding(
    ne: Dims, kind: Any, with_sinks: bool, special: bool, scale: float, max_bias: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = (4 * rng.standard_normal(ne[::-1])).astype(np.float32)
    mask = sinks = None
    if kind is not None:
        mask = rng.choice([0, -1, 0.5, -INF], ne[::-1]).astype(kind)
        mask[rng.random((*mask.shape[:3], 1))[..., 0] < 0.2] = -INF
    if with_sinks:
        sinks = rng.choice(np.array([0, 3, -50, *([INF, -INF, np.nan] if special else [])], np.float32), ne[2])
    if special:
        x = np.where(rng.random(x.shape) < 1 / ne[0], rng.choice(np.array([np.nan, INF, -INF], np.float32), x.shape), x)
    compiled = soft_maxed(x, mask, sinks, scale=scale, max_bias=max_bias)
    defined = np.full_like(x, 9)
    tensors = [None if array is None else Tensor.of(array) for array in (mask, sinks)]
    soft_max.define(Tensor.of(defined), Tensor.of(x), *tensors, params=softmax.SoftMax(scale, max_bias))
    expected = exact(x, mask, sinks, scale, max_bias)
    for actual in (compiled, defined):
        assert (np.isnan(actual) == np.isnan(expected)).all()
        # an exponential is within 2.53 units of 2 ** -23, a sum within those of its terms, the quotient within 1
        bound = 6 * np.maximum(2.0**-23 * np.abs(expected), 2.0**-149)
        assert (np.isnan(expected) | (np.abs(actual - expected) <= bound)).all()


def exact(x: Floats, mask: Any, sinks: Any, scale: float, max_bias: float) -> NDArray[np.float64]:
    """softmax in float64 of what float32 makes of the scores less their maximum."""
    with np.errstate(all="ignore"):
        scores, sink = x * np.float32(scale), np.array([-INF], np.float32)
        if mask is not None:
            slope = slopes(x.shape[1], max_bias)
            scores += mask.astype(np.float32) * (1 if slope is None else slope[:, None, None])
        if sinks is not None:
            sink = sinks[:, None, None]
        maximum = np.fmax(scores.max(-1, keepdims=True), sink)
        e = np.exp((scores - maximum).astype(np.float64))
        total = e.sum(-1, keepdims=True) + np.where(np.isneginf(sink), 0, np.exp((sink - maximum).astype(np.float64)))
        y: NDArray[np.float64] = np.where(total == 0, 0, e / total)
    return y


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_what_a_mask_of_minus_infinity_hides_is_0(kind: Any) -> None:
    rng = np.random.default_rng(3)
    kept = rng.random((2, 3, 4, 37)) < 0.6
    kept[..., 5] = True
    x = np.where(kept, rng.standard_normal(kept.shape), np.float32(3e38)).astype(np.float32)
    y = soft_maxed(x, np.where(kept, 0, -INF).astype(kind))
    alone = soft_maxed(np.where(kept, x, np.float32(-1e30)))
    assert (y[~kept] == 0).all()
    assert not np.signbit(y).any()
    assert_within_ulp(y, alone, 1)


@dataclass(frozen=True)
class Special:
    """SOFT_MAX of rows of n, each with another number that is none, or another mask; see `x`, `mask`."""

    n: int
    kind: str
    sink: float | None
    max_bias: float = 0.0

    def __call__(self, scene: Scene) -> int:
        x = np.random.default_rng(self.n).standard_normal((2, 8, self.n)).astype(np.float32)
        mask = np.zeros((8, self.n), np.float32)
        mask[:, ::3] = -INF
        mask[1] = -INF
        x[0, 2, 3] = x[0, 3, 1] = x[0, 5, 4] = np.nan  # the mask hides the first
        x[1, 3, 0], x[1, 4, 2], x[1, 5] = INF, INF, -INF  # and the first
        x[1, 1, 2], mask[0, 1], mask[2, 2] = np.nan, np.nan, INF
        data = mask.astype(np.float16 if self.kind == "f16" else np.float32)
        added = scene.root(self.kind, (self.n, 8), data)
        node = scene.op("soft_max_ext", scene.root("f32", (self.n, 8, 2), x), added, 0.6, self.max_bias)
        if self.sink is not None:
            sinks = scene.root("f32", (2,), np.array([self.sink, 0.1], np.float32))
            scene.function("soft_max_add_sinks")(node, sinks)
        return node


@pytest.mark.parametrize("sink", [None, 0.3, 700.0, np.nan, INF, -INF])
@pytest.mark.parametrize("n", [5, 16, 33])
def test_nan_and_infinity_under_a_mask_give_what_ggml_gives(backend: Plugin, n: int, sink: float | None) -> None:
    """ggml adds -inf to what it hides: NaN stays NaN, and of a row of -inf alone it makes NaN."""
    for recipe in (Special(n, "f16", sink), Special(n, "f32", sink, 8.0)):
        assert_as_promised(backend, recipe, "SOFT_MAX of a mask that slopes of 2 ** n scale", floats="f32")
        result = outcome(backend, "NPU", recipe).after[0].view(np.float32).reshape(2, 8, n)
        assert np.isnan(result[0, 2]).all()
        assert np.isnan(result[0, 1]).all() == (sink is None or not np.isfinite(sink))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("bad", [np.nan, INF])
@pytest.mark.parametrize("at", [0, 3, 36])
def test_nan_or_infinity_at_a_place_that_is_kept_spoils_its_row_alone(at: int, bad: float) -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 37)).astype(np.float32)
    clean = soft_maxed(x)
    x[0, 1, 1, at] = bad
    y = soft_maxed(x)
    assert np.isnan(y[0, 1, 1]).all()
    y[0, 1, 1] = clean[0, 1, 1]
    assert_same_bytes(y, clean)


@pytest.mark.usefixtures("either")
def test_scores_of_minus_infinity_count_nothing_and_a_row_of_them_is_nan() -> None:
    y = soft_maxed(np.array([[-INF, 2, 2], [-INF, -INF, -INF]], np.float32))
    assert y[0].tolist() == [0, 0.5, 0.5]
    assert np.isnan(y[1]).all()


@pytest.mark.usefixtures("either")
def test_a_sink_takes_its_part() -> None:
    """exp(0) : exp(ln 3) : the sink's exp(ln 4), in the second head of two."""
    x = np.broadcast_to(np.log(np.array([1, 3], np.float32)), (1, 2, 1, 2))
    y = soft_maxed(np.ascontiguousarray(x), sinks=np.array([-INF, np.log(4)], np.float32))
    assert y[0, :, 0] == pytest.approx(np.array([[0.25, 0.75], [0.125, 0.375]]), rel=1e-6)
    assert soft_maxed(np.array([[[[1, 2]]]], np.float32), sinks=np.array([500], np.float32)).tolist() == [[[[0, 0]]]]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("kind", [None, np.float32, np.float16])
def test_in_place(kind: Any) -> None:
    rng = np.random.default_rng(9)
    x = rng.standard_normal((2, 3, 5, 270)).astype(np.float32)
    mask = None if kind is None else rng.choice([0, -1, -INF], (1, 3, 5, 270)).astype(kind)
    expected = soft_maxed(x, mask, scale=0.5)
    assert_same_bytes(soft_maxed(x, mask, scale=0.5, dst=x), expected)


@pytest.mark.usefixtures("either")
def test_rows_apart() -> None:
    """x, mask and dst with gaps between rows, which no function of ggml makes; what lies in them stays."""
    rng = np.random.default_rng(1)
    x, mask = rng.standard_normal((2, 3, 8, 50)).astype(np.float32), rng.standard_normal((2, 1, 9, 45)).astype("f4")
    dst = np.full((2, 3, 8, 50), 7, np.float32)
    soft_maxed(x[:, ::2, 1::2, 3:40], mask[:, :, ::2, 5:42], dst=dst[:, ::2, 1::2, 3:40])
    expected = soft_maxed(x[:, ::2, 1::2, 3:40].copy(), mask[:, :, ::2, 5:42].copy())
    assert_same_bytes(dst[:, ::2, 1::2, 3:40], expected)
    dst[:, ::2, 1::2, 3:40] = 7
    assert (dst == 7).all()


def test_slopes_of_heads_that_are_no_power_of_two() -> None:
    """The first 4 of 6 as if there were 4, then every other one of 8."""
    halves = [2.0 ** -(i + 1) for i in range(8)]
    assert slopes(8, 8.0) == pytest.approx(halves)
    assert slopes(6, 8.0) == pytest.approx([halves[1], halves[3], halves[5], halves[7], halves[0], halves[2]])
    assert slopes(6, 0.0) is None


@pytest.mark.parametrize(("n_head", "max_bias"), [(33, 1.5), (60, 1.5), (52, 7.581733703613281), (120, 0.3)])
def test_slopes_are_rounded_as_powf_does(backend: Plugin, n_head: int, max_bias: float) -> None:
    """powf of the C library is not always the nearest float32."""
    values = np.random.default_rng(n_head).standard_normal((n_head + 1, 6, 8)).astype(np.float32)

    def recipe(scene: Scene) -> int:
        x, mask = scene.root("f32", (8, 6, n_head), values[1:]), scene.root("f32", (8, 6), values[0])
        return scene.op("soft_max_ext", x, mask, 1.0, max_bias)

    assert_as_promised(backend, recipe, "SOFT_MAX of a mask that other slopes scale")


# exp


def exponentials(x: Floats) -> Floats:
    """e ** x as the kernel computes it: rows of x and a maximum of 0 before, not divided by the sum."""
    dst, maxima, sums = np.empty_like(x), np.empty(len(x), np.float32), np.empty(len(x), np.float32)
    before = np.zeros(len(x), np.float32)
    Rows(Tensor.of(dst), Tensor.of(x), statistics=(before, maxima, sums)).bind()()
    assert (maxima == 0).all()
    assert sums == pytest.approx(dst.sum(-1, dtype=np.float64), rel=1e-6)
    return dst


def test_exp_is_within_two_and_a_half_units_in_the_last_place() -> None:
    """From 0 to where nothing is left of it, subnormal results included: half a million values. It is ggml's own."""
    dense = np.linspace(-110, 0, 1 << 19, dtype=np.float32)
    ties = (np.log(2) * (np.arange(-300, 0) / 2)).astype(np.float32)
    ends = np.array(
        [0.0, -0.0, -1e-45, -1e-8, -6e-8, -87.33655, -87.336544, -103.27893, -103.97208, -103.972084, -104], np.float32
    )
    x = np.concatenate([dense, ties, np.nextafter(ties, np.float32(0)), ends, -np.geomspace(1e-30, 1, 10_000)])
    x = np.resize(x[x >= -110], (64, -(-len(x) // 64))).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    with np.errstate(under="ignore"):
        unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert (np.abs(exponentials(x) - exact) <= 2.5 * unit).all()


def test_exp_of_what_is_no_number() -> None:
    x = np.array([[-INF, -1e30, -105, -2, 0], [-INF, -1e30, -105, np.nan, 0]], np.float32)
    dst, maxima, sums = np.empty_like(x), np.empty(2, np.float32), np.empty(2, np.float32)
    Rows(Tensor.of(dst), Tensor.of(x), statistics=(None, maxima, sums)).bind()()
    assert dst[0, [0, 1, 2, 4]].tolist() == [0, 0, 0, 1]
    assert maxima[0] == 0
    for row in (dst[1], maxima[1], sums[1]):
        assert np.isnan(row).all()


# refusals


def test_without_all_ops_it_is_not_taken(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supported(backend, SoftMax((8, 2, 2, 1)))
    choose(monkeypatch, ops="default")
    assert not supported(backend, SoftMax((8, 2, 2, 1)))


X = (2, 6, 4, 8)


@pytest.mark.parametrize(
    ("dst", "x", "mask", "sinks", "reason"),
    [
        (zeros(*X), zeros(2, 6, 8, 4), None, None, "x of ne (4, 8, 6, 2), dst of ne (8, 4, 6, 2)"),
        (zeros(*X, dtype=np.float16), zeros(*X), None, None, "types f32 -> f16"),
        (zeros(*X), zeros(*X, dtype=np.float16), None, None, "types f16 -> f32"),
        (zeros(*X), zeros(2, 6, 4, 16)[..., ::2], None, None, "x rows have gaps: nb0 is 8"),
        (zeros(2, 6, 4, 16)[..., ::2], zeros(*X), None, None, "dst rows have gaps: nb0 is 8"),
        (zeros(*X), zeros(*X), zeros(4, 7), None, "mask of type f32, ne (7, 4, 1, 1) does not fit"),
        (zeros(*X), zeros(*X), zeros(3, 8), None, "mask of type f32, ne (8, 3, 1, 1) does not fit"),
        (zeros(*X), zeros(*X), zeros(4, 4, 8), None, "mask of type f32, ne (8, 4, 4, 1) does not fit"),
        (zeros(*X), zeros(*X), zeros(3, 1, 4, 8), None, "mask of type f32, ne (8, 4, 1, 3) does not fit"),
        (zeros(*X), zeros(*X), zeros(0, 1, 4, 8), None, "mask of type f32, ne (8, 4, 1, 0) does not fit"),
        (zeros(*X), zeros(*X), zeros(4, 16)[..., ::2], None, "mask rows have gaps: nb0 is 8"),
        (zeros(*X), zeros(*X), zeros(4, 8, dtype=np.int32), None, "mask of type i32"),
        (zeros(*X), zeros(*X), zeros(4, 8, dtype=np.float64), None, "mask of type f64"),
        (zeros(*X), zeros(*X), None, zeros(5), "sinks of type f32, ne (5, 1, 1, 1) do not fit"),
        (zeros(*X), zeros(*X), None, zeros(2, 6), "sinks of type f32, ne (6, 2, 1, 1) do not fit"),
        (zeros(*X), zeros(*X), None, zeros(12)[::2], "sinks of type f32, ne (6, 1, 1, 1) do not fit"),
        (zeros(*X), zeros(*X), None, zeros(6, dtype=np.float16), "sinks of type f16"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(dst: Any, x: Any, mask: Any, sinks: Any, reason: str) -> None:
    assert reason in str(refusal("SOFT_MAX", dst, x, mask, sinks, params=struct.pack("2f", 1, 0)))
