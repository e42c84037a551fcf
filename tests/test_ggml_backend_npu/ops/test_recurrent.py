"""SSM_CONV, SSM_SCAN, RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN, GATED_DELTA_NET beside ggml's CPU, by either engine.

The compiled kernels add in the CPU's order, as GCC has it with AVX-512: their bytes are the CPU's there. Those of the
definitions have an order of their own: what tokens gave and the states that are left are compared apart, by their
normalised mean squared error, whose bound is far below the 1e-7 of test-backend-ops.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.models import Models
from kit.support import (
    ENGINES,
    PLAIN,
    Placement,
    Recipe,
    Scene,
    assert_as_promised,
    computed,
    examples,
    refusal,
    seeds,
    zeros,
)
from numpy.typing import NDArray

from ggml_backend_npu import KernelError
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.run.session import Session, Settings

Floats = NDArray[np.float32]

BOUND = 1e-12  # of the normalised mean squared error
HEADS_SWAPPED = Placement(axes=(0, 2, 1, 3))
ROWS_BETWEEN = Placement(steps=(1, 1, 2, 1), before=(0, 0, 1, 0), after=(0, 0, 1, 1))

pytestmark = pytest.mark.usefixtures("every_op")


def between(low: float, high: float, *shape: int, seed: int) -> Floats:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape).astype(np.float32)


def error(actual: Floats, expected: NDArray[Any]) -> float:
    return float(np.square(actual - expected, dtype=np.float64).sum() / np.square(expected, dtype=np.float64).sum())


few = st.integers(1, 3)


# SSM_CONV


@given(
    n_conv=st.integers(1, 40), n_channels=st.integers(1, 70), n_tokens=st.integers(1, 9), n_sequences=few, seed=seeds
)
def test_a_convolution(
    backend: Plugin, n_conv: int, n_channels: int, n_tokens: int, n_sequences: int, seed: int
) -> None:
    x = between(-1, 1, n_sequences, n_channels, n_conv - 1 + n_tokens, seed=seed)
    weights = between(-1, 1, n_channels, n_conv, seed=seed)

    def recipe(scene: Scene) -> int:
        source = Placement(after=(0, 0, 1, 0), before=(0, 0, 1, 0)).hold(scene, "f32", x[None], rest=7)
        return scene.op("ssm_conv", source, scene.root("f32", weights.shape[::-1], weights))

    assert_as_promised(backend, recipe, "SSM_CONV")


def test_a_convolution_at_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = between(-1, 1, 7, 5, 2, seed=0).T, between(-1, 1, 3, 5, seed=1).T
    results = []
    for name in ENGINES:
        monkeypatch.setenv("GGML_NPU_ENGINE", name)
        whole = np.full((2, 10, 5), 9, np.float32)
        results.append(computed("SSM_CONV", whole[:, ::2], x, weights))
        assert (whole[:, 1::2] == 9).all()
    terms = [x[:, :, i : i + 5] * weights[:, i, None] for i in range(3)]
    expected = np.sum(terms, axis=0).swapaxes(1, 2)
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


# SSM_SCAN


def scan(
    n_state: int, dim: int, n_head: int, n_group: int, n_tokens: int, n_sequences: int, count: int, seed: int
) -> Recipe:
    """dim 1: a decay for every element of the state, as in Mamba-1. x, B and C are parts of the same rows."""
    width = dim * n_head + 2 * n_state * n_group
    xbc = between(-1, 1, n_sequences, n_tokens, width, seed=seed)
    steps = between(-4, 25, n_sequences, n_tokens, n_head, seed=seed)
    decays = between(-0.1, 0.02, n_head, n_state if dim == 1 else 1, seed=seed)
    states = between(-1, 1, n_sequences + 2, n_head, dim, n_state, seed=seed)
    ids = np.random.default_rng(seed).permutation(n_sequences + 2)[:n_sequences].astype(np.int32)

    def recipe(scene: Scene) -> int:
        rows = scene.root("f32", xbc.shape[::-1], xbc)

        def part(row: int, n: int, begin: int) -> int:
            nb = (4 * row, 4 * width, 4 * width * n_tokens)
            return scene.view(rows, (row, n, n_tokens, n_sequences), nb, 4 * begin)

        return scene.op(
            "ssm_scan",
            scene.root("f32", states.shape[::-1], states),
            part(dim, n_head, 0),
            scene.root("f32", steps.shape[::-1], steps),
            scene.root("f32", decays.shape[::-1], decays),
            part(n_state, n_group, dim * n_head),
            part(n_state, n_group, dim * n_head + n_state * n_group),
            scene.root("i32", ids.shape, ids),
            count,
        )

    return recipe


@given(
    n_state=st.integers(2, 150), n_group=few, heads=few, n_tokens=st.integers(1, 5), n_sequences=few, seed=seeds
)  # fmt: skip
@examples(12)
def test_mamba_1(
    backend: Plugin, n_state: int, n_group: int, heads: int, n_tokens: int, n_sequences: int, seed: int
) -> None:
    n_head = heads * n_group
    recipe = scan(n_state, 1, n_head, n_group, n_tokens, n_sequences, 1, seed)
    assert_as_promised(backend, recipe, "SSM_SCAN with a decay for each element")


@given(
    n_state=st.integers(1, 150), dim=st.integers(2, 9), n_group=few, heads=few, n_tokens=st.integers(1, 5),
    n_sequences=few, count=st.integers(1, 4), seed=seeds,
)  # fmt: skip
@examples(12)
def test_mamba_2(
    backend: Plugin,
    n_state: int,
    dim: int,
    n_group: int,
    heads: int,
    n_tokens: int,
    n_sequences: int,
    count: int,
    seed: int,
) -> None:
    n_head = heads * n_group
    recipe = scan(n_state, dim, n_head, n_group, n_tokens, n_sequences, count, seed)
    assert_as_promised(backend, recipe, "SSM_SCAN with a decay for each head")


def scan_arrays(n_tokens: int = 2, n_state: int = 4, by_element: bool = False) -> list[NDArray[Any]]:
    """Sources of 2 sequences of 3 heads of 2 rows, of 5 states."""
    return [
        between(-1, 1, 5, 3, 2, n_state, seed=0),
        between(-1, 1, 2, n_tokens, 3, 2, seed=1),
        between(-1, 1, 2, n_tokens, 3, seed=2),
        between(-1, 0, 3, n_state if by_element else 1, seed=3),
        between(-1, 1, 2, n_tokens, 1, n_state, seed=4),
        between(-1, 1, 2, n_tokens, 1, n_state, seed=5),
        np.array([4, 2], np.int32),
    ]


@pytest.mark.parametrize("name", ENGINES)
def test_states_that_no_token_leaves_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NPU_ENGINE", name)
    n_given, n_states = 24, 48
    dst = computed(
        "SSM_SCAN", np.full(n_given + 4 * n_states, 7, np.float32), *scan_arrays(), params=struct.pack("i", 4)
    )
    given, *states = np.split(dst, n_given + n_states * np.arange(4))
    assert (given != 7).all()
    assert [(state == 7).all() for state in states] == [False, False, True, True]
    q, k, v, state = (between(-1, 1, 2, 2, 3, 4, seed=seed) for seed in range(4))
    state = between(-1, 1, 2, 3, 4, 4, seed=0)
    g, beta = -between(0, 1, 2, 2, 3, 1, seed=4), between(0, 1, 2, 2, 3, 1, seed=5)
    dst = np.full(48 + 4 * 96, 7, np.float32)
    computed("GATED_DELTA_NET", dst.reshape(-1, 12), q, k, v, g, beta, state, params=struct.pack("i", 4))
    given, *states = np.split(dst, 48 + 96 * np.arange(4))
    assert (given != 7).all()
    assert [(state == 7).all() for state in states] == [False, False, True, True]


@pytest.mark.parametrize("by_element", [False, True])
def test_a_scan_at_any_strides(by_element: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with gaps too, which the compiled kernel leaves to the definition."""
    arrays, params, dst = scan_arrays(by_element=by_element), struct.pack("i", 1), np.zeros(24 + 48, np.float32)
    monkeypatch.setenv("GGML_NPU_ENGINE", "reference")
    expected = computed("SSM_SCAN", dst.copy(), *arrays, params=params)
    for name in ENGINES:
        monkeypatch.setenv("GGML_NPU_ENGINE", name)
        for order in ("F", "C"):
            apart = [np.asarray(np.repeat(array, 2, axis=0), order=order)[::2] for array in arrays]
            actual = computed("SSM_SCAN", dst.copy(), *apart, params=params)
            assert error(actual, expected) <= BOUND


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("bad", [-1, 5])
def test_a_state_that_is_not_there(name: str, bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NPU_ENGINE", name)
    arrays = [*scan_arrays()[:-1], np.array([0, bad], np.int32)]
    with pytest.raises(KernelError, match=rf"^state {bad} of sequence 1 is outside 0\.\.4$"):
        computed("SSM_SCAN", np.zeros(24 + 48, np.float32), *arrays, params=struct.pack("i", 1))


# RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN


def heads(n: int, size: int, n_head: int, n_tokens: int, n_sequences: int, seed: int) -> list[Floats]:
    """n operands of all tokens, the first between 0 and 1, and the states."""
    shape, state = (n_tokens * n_sequences, n_head, size), (n_sequences, n_head * size * size)
    operands = [between(0 if i == 0 else -1, 1, *shape, seed=seed + i) for i in range(n)]
    return [*operands, between(-1, 1, *state, seed=seed)]


def attention(function: str, operands: list[Floats], *numbers: float) -> Recipe:
    return lambda scene: scene.op(function, *(scene.root("f32", x.shape[::-1], x) for x in operands), *numbers)


@given(size=st.integers(1, 70), n_head=few, n_tokens=st.integers(1, 4), n_sequences=few, seed=seeds)
@examples(12)
def test_wkv6(backend: Plugin, size: int, n_head: int, n_tokens: int, n_sequences: int, seed: int) -> None:
    decay, k, v, r, state = heads(4, size, n_head, n_tokens, n_sequences, seed)
    first = between(-1, 1, n_head, size, seed=seed)
    recipe = attention("rwkv_wkv6", [k, v, r, first, decay, state])
    assert_as_promised(backend, recipe, "RWKV_WKV6")


@given(size=st.integers(1, 70), n_head=few, n_tokens=st.integers(1, 4), n_sequences=few, seed=seeds)
@examples(12)
def test_gated_linear_attention(
    backend: Plugin, size: int, n_head: int, n_tokens: int, n_sequences: int, seed: int
) -> None:
    gate, k, v, q, state = heads(4, size, n_head, n_tokens, n_sequences, seed)
    assert_as_promised(backend, attention("gated_linear_attn", [k, v, q, gate, state], 0.3), "GATED_LINEAR_ATTN")


def removing(size: int, n_head: int, n_tokens: int, n_sequences: int, seed: int) -> list[Floats]:
    """Operands of WKV7: what a removes, of length 1, b gives back in part."""
    w, r, k, v, a, state = heads(5, size, n_head, n_tokens, n_sequences, seed)
    a /= np.linalg.norm(a, axis=-1, keepdims=True)
    return [r, w, k, v, a, -a * between(0, 1, *a.shape, seed=seed), state]


@given(size=st.sampled_from([64, 128]), n_head=few, n_tokens=st.integers(1, 4), n_sequences=few, seed=seeds)
@examples(10)
def test_wkv7(backend: Plugin, size: int, n_head: int, n_tokens: int, n_sequences: int, seed: int) -> None:
    operands = removing(size, n_head, n_tokens, n_sequences, seed)
    assert_as_promised(backend, attention("rwkv_wkv7", operands), "RWKV_WKV7")


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("size", [1, 5, 48])
def test_wkv7_of_heads_of_any_size(size: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ggml's CPU goes beyond the rows of a state: its vectors are not cut."""
    monkeypatch.setenv("GGML_NPU_ENGINE", name)
    n_head, n_tokens, n_sequences = 2, 3, 2
    r, w, k, v, a, b, state = operands = removing(size, n_head, n_tokens, n_sequences, 3)
    dst = computed("RWKV_WKV7", np.zeros((n_sequences * (n_tokens + size), n_head * size), np.float32), *operands)
    given, states = np.split(dst.reshape(-1), [r.size])
    s = state.reshape(n_sequences, n_head, size, size).astype(np.float64)
    expected = np.empty(r.shape)
    for sequence, t, head in np.ndindex(n_sequences, n_tokens, n_head):
        at, matrix = (sequence * n_tokens + t, head), s[sequence, head]
        matrix[...] = matrix * w[at] + np.outer(v[at], k[at]) + np.outer(matrix @ a[at], b[at])
        expected[at] = matrix @ r[at]
    assert error(given.reshape(r.shape), expected) <= BOUND
    assert error(states, s.reshape(-1)) <= BOUND


# GATED_DELTA_NET


@given(
    size=st.integers(1, 150), kv_heads=few, repeats=st.integers(1, 2), n_tokens=st.integers(1, 5), n_sequences=few,
    shared=st.booleans(), gates=st.booleans(), count=st.integers(1, 4), place=st.sampled_from([PLAIN, HEADS_SWAPPED,
    ROWS_BETWEEN]), seed=seeds,
)  # fmt: skip
@examples(20)
def test_gated_delta_net(
    backend: Plugin,
    size: int,
    kv_heads: int,
    repeats: int,
    n_tokens: int,
    n_sequences: int,
    shared: bool,
    gates: bool,
    count: int,
    place: Placement,
    seed: int,
) -> None:
    """gates: one for each element of a row; shared: q and k are those of all sequences."""
    n_head = kv_heads * repeats
    qk = (1 if shared else n_sequences, n_tokens, kv_heads, size)
    q, k = (between(-1, 1, *qk, seed=seed + i) for i in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = between(-1, 1, n_sequences, n_tokens, n_head, size, seed=seed)
    g = -between(0, 3, n_sequences, n_tokens, n_head, size if gates else 1, seed=seed)
    beta = between(0, 1, n_sequences, n_tokens, n_head, 1, seed=seed)
    state = between(-1, 1, n_sequences, n_head, size, size, seed=seed)

    def recipe(scene: Scene) -> int:
        placed = [place.hold(scene, "f32", x, rest=9) for x in (q, k, v)]
        others = [scene.root("f32", x.shape[::-1], x) for x in (g, beta, state)]
        return scene.op("gated_delta_net", *placed, *others, count)

    assert_as_promised(backend, recipe, "GATED_DELTA_NET")


# numbers that are none, and refusals


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_head(name: str, number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NPU_ENGINE", name)
    operands = removing(8, 2, 2, 1, 0)
    operands[3][0, 1] = number
    dst = computed("RWKV_WKV7", np.zeros((2 + 8, 16), np.float32), *operands).reshape(-1)
    given, states = dst[:32].reshape(2, 2, 8), dst[32:].reshape(2, 64)
    assert np.isfinite(given[:, 0]).all()
    assert np.isfinite(states[0]).all()
    assert not np.isfinite(given[:, 1]).any()
    arrays = scan_arrays(by_element=True)
    arrays[3][2] = number
    dst = computed("SSM_SCAN", np.zeros(24 + 48, np.float32), *arrays, params=struct.pack("i", 1))
    scanned = dst[:24].reshape(2, 2, 3, 2)
    assert np.isfinite(scanned[:, :, :2]).all()
    assert not np.isfinite(scanned[:, :, 2]).any()


def one(value: int) -> bytes:
    return struct.pack("i", value)


SCAN = (zeros(5, 3, 2, 4), zeros(2, 2, 3, 2), zeros(2, 2, 3), zeros(3, 1), zeros(2, 2, 1, 4), zeros(2, 2, 1, 4))
DELTA = (*[zeros(2, 2, 3, 4)] * 3, *[zeros(2, 2, 3, 1)] * 2, zeros(2, 3, 4, 4))
IDS = np.zeros(2, np.int32)


def with_one(arrays: tuple[NDArray[Any], ...], place: int, other: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    return *arrays[:place], other, *arrays[place + 1 :]


@pytest.mark.parametrize(
    ("op", "arrays", "params", "reason"),
    [
        ("SSM_CONV", (zeros(1, 2, 5), zeros(1, 5, 3), zeros(5, 4)), b"", "4 weights for rows of 3"),
        ("SSM_CONV", (zeros(1, 2, 5), zeros(1, 5, 3), zeros(4, 2)), b"", "x of ne (3, 5, 1, 1)"),
        ("SSM_CONV", (zeros(1, 3, 5), zeros(1, 5, 3), zeros(5, 2)), b"", "dst of ne (5, 3, 1, 1)"),
        ("SSM_CONV", (zeros(1, 2, 5), zeros(1, 5, 3), np.zeros((5, 2), np.float16)), b"", "types f32 f16 -> f32"),
        ("SSM_SCAN", (zeros(72), *SCAN, IDS), one(0), "0 states"),
        ("SSM_SCAN", (zeros(120), *with_one(SCAN, 3, zeros(3, 4)), IDS), one(2), "2 states of a decay of ne"),
        ("SSM_SCAN", (zeros(72), *with_one(SCAN, 3, zeros(3, 2)), IDS), one(1), "A of ne (2, 3, 1, 1)"),
        ("SSM_SCAN", (zeros(72), *with_one(SCAN, 4, zeros(2, 2, 2, 4)), IDS), one(1), "3 heads in 2 groups"),
        ("SSM_SCAN", (zeros(72), *with_one(SCAN, 5, zeros(2, 1, 1, 4)), IDS), one(1), "C of ne (4, 1, 1, 2)"),
        ("SSM_SCAN", (zeros(72), *with_one(SCAN, 2, zeros(2, 2, 2)), IDS), one(1), "dt of ne (2, 2, 2, 1)"),
        ("SSM_SCAN", (zeros(72), *with_one(SCAN, 0, zeros(5, 3, 3, 4)), IDS), one(1), "s of ne (4, 3, 3, 5)"),
        ("SSM_SCAN", (zeros(72), *SCAN, np.zeros(3, np.int32)), one(1), "ids of ne (3, 1, 1, 1)"),
        ("SSM_SCAN", (zeros(73), *SCAN, IDS), one(1), "dst of ne (73, 1, 1, 1)"),
        ("SSM_SCAN", (zeros(144)[::2], *SCAN, IDS), one(1), "is no 72 elements without gaps"),
        ("RWKV_WKV7", (zeros(13, 8), *[zeros(3, 2, 4)] * 6, zeros(2, 32)), b"", "3 tokens of 2 sequences"),
        ("RWKV_WKV7", (zeros(6, 8), *[zeros(2, 2, 4)] * 6, zeros(1, 16)), b"", "state of ne (16, 1, 1, 1)"),
        ("RWKV_WKV7", (zeros(5, 8), *[zeros(2, 2, 4)] * 6, zeros(1, 32)), b"", "dst of ne (8, 5, 1, 1)"),
        ("RWKV_WKV7", (zeros(6, 8), *[zeros(2, 2, 4)] * 5, zeros(1, 2, 4), zeros(1, 32)), b"", "b of ne (4, 2, 1, 1)"),
        ("RWKV_WKV6", (zeros(6, 8), *[zeros(2, 2, 4)] * 3, zeros(4), zeros(2, 2, 4), zeros(1, 32)), b"", "tf of ne"),
        ("GATED_LINEAR_ATTN", (zeros(6, 8), *[zeros(2, 2, 4)] * 3, zeros(2, 2, 1), zeros(1, 32)), bytes(4), "g of ne"),
        ("GATED_DELTA_NET", (zeros(12, 12), *DELTA), one(0), "0 states"),
        ("GATED_DELTA_NET", (zeros(12, 12), *with_one(DELTA, 0, zeros(3, 2, 3, 4))), one(1), "q of ne (4, 3, 2, 3)"),
        ("GATED_DELTA_NET", (zeros(12, 12), *with_one(DELTA, 1, zeros(2, 1, 3, 4))), one(1), "k of ne (4, 3, 1, 2)"),
        ("GATED_DELTA_NET", (zeros(12, 12), *with_one(DELTA, 3, zeros(2, 2, 3, 3))), one(1), "g of ne (3, 3, 2, 2)"),
        ("GATED_DELTA_NET", (zeros(12, 12), *with_one(DELTA, 4, zeros(2, 2, 3, 4))), one(1), "beta of ne (4, 3, 2, 2)"),
        ("GATED_DELTA_NET", (zeros(12, 12), *with_one(DELTA, 5, zeros(1, 3, 4, 4))), one(1), "state of ne"),
        ("GATED_DELTA_NET", (zeros(12, 12), *DELTA), one(2), "dst of ne (12, 12, 1, 1)"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(op: str, arrays: tuple[NDArray[Any], ...], params: bytes, reason: str) -> None:
    assert reason in str(refusal(op, *arrays, params=params))


@pytest.mark.parametrize(
    ("op", "arrays", "params"),
    [
        ("SSM_CONV", (zeros(1, 1, 5), zeros(1, 5, 3), zeros(5, 3)), b""),
        ("SSM_SCAN", (zeros(72), *SCAN, IDS), one(1)),
        ("RWKV_WKV7", (zeros(6, 8), *[zeros(2, 2, 4)] * 6, zeros(1, 32)), b""),
        ("RWKV_WKV6", (zeros(6, 8), *[zeros(2, 2, 4)] * 3, zeros(2, 4), zeros(2, 2, 4), zeros(1, 32)), b""),
        ("GATED_LINEAR_ATTN", (zeros(6, 8), *[zeros(2, 2, 4)] * 4, zeros(1, 32)), bytes(4)),
        ("GATED_DELTA_NET", (zeros(12, 12), *DELTA), one(1)),
    ],
)  # fmt: skip
def test_what_the_refusals_vary_is_taken(op: str, arrays: tuple[NDArray[Any], ...], params: bytes) -> None:
    assert refusal(op, *arrays, params=params) is None


# models


@pytest.fixture
def forgotten(backend: Plugin) -> Iterator[None]:
    """Plans of other ops are gone, before and after."""
    backend.forget_plans()
    yield
    backend.forget_plans()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("mamba", ("SSM_CONV", "SSM_SCAN", "CONCAT")),
        ("mamba2", ("SSM_CONV", "SSM_SCAN", "CONCAT")),
        ("rwkv6", ("RWKV_WKV6", "CONCAT")),
        ("rwkv7", ("RWKV_WKV7", "CONCAT", "SUM_ROWS")),
        ("qwen35", ("SSM_CONV", "GATED_DELTA_NET", "CONCAT")),
    ],
)
def test_a_model_says_what_it_says_on_the_cpu(model: Models, name: str, ops: tuple[str, ...]) -> None:
    """A prompt in two parts, then tokens one by one, the same for both: logits, on states carried along.

    Products with f16 weights round what they are given to f16: the last bit of a float32 may decide to which one.
    """
    said: dict[str, list[Floats]] = {}
    for device in ("cpu", "npu"):
        with Session(model(name), Settings(device, threads=1)) as session:
            tokens = session.tokenize("once upon a time")
            said[device] = []
            for part in (tokens[:9], tokens[9:], *([token] for token in tokens[:5])):
                session.decode(part)
                said[device].append(session.logits().copy())
            if device == "npu":
                assert not [op for op in ops if session.npu_nodes[op] != session.nodes[op]]
    for npu, cpu in zip(said["npu"], said["cpu"], strict=True):
        assert error(npu, cpu) <= 1e-5
