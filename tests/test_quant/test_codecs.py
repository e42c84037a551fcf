"""quant: every ggml type, byte for byte what the live ggml's own functions give."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kit.nodes import bind
from kit.support import ENGINES, assert_same_bytes, examples, one_nan, pool, special_floats
from numpy.typing import NDArray

import quant
from ggml_backend_npu import Node, Tensor, default_backend
from ggml_backend_npu.ggml import structs
from ggml_backend_npu.ggml.codecs import Bound, _probe
from ggml_backend_npu.ggml.codecs import bound as bound_codecs
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.plugin.plugin import Plugin
from quant import Rounding, codec

Blocks = NDArray[np.uint8]
Floats = NDArray[np.float32]

TYPES = quant.type_names()
OURS = [("q8_0", "reference"), ("q8_0", "simd"), ("q8_0", "neon"), ("q4_0", "reference")]
ON_X86 = platform.machine().lower() in ("x86_64", "amd64")
ELSEWHERE = "neon" if ON_X86 else "simd"  # how ggml's CPU rounds on other processors
BUILT_SLOWLY = ("iq1_m", "iq1_s", "iq2_s", "iq2_xs", "iq2_xxs")  # seconds for tables, once
IQ_BY_TABLE = ("iq1", "iq2", "iq3")  # ggml looks for the nearest points of a grid
WITHOUT_REFERENCE = ("iq1", "iq2", "iq3", "iq4_nl")  # ggml's function needs tables, or is another one than the CPU's


def bound(ggml: Ggml, name: str) -> Bound:
    """The type's functions in the live ggml: to_float, and from_float of its CPU backend."""
    return Bound(ggml, ggml.types[ggml.type_numbers[name]])


def from_float_ref(ggml: Ggml, name: str) -> Callable[[Floats], Blocks]:
    """The type's reference encoder in the live ggml, for (n_blocks, block_size) values."""
    address = ggml.ggml_get_type_traits(ggml.type_numbers[name]).contents.from_float_ref
    function = structs.RowFunction(address)

    def encode(x: Floats) -> Blocks:
        x = np.ascontiguousarray(x)
        blocks = np.zeros((len(x), codec(name).block_bytes), np.uint8)
        function(x.ctypes.data, blocks.ctypes.data, x.size)
        return blocks

    return encode


def expected(ggml: Ggml, name: str, rounding: str, x: Floats) -> Blocks:
    """What ggml makes of x: its reference encoder, or for another rounding that of its CPU backend."""
    return from_float_ref(ggml, name)(x) if rounding == "reference" else bound(ggml, name).encode(x, "simd")


def normal(n_blocks: int, block: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((n_blocks, block)).astype(np.float32)


def hard_blocks() -> Floats:
    """Blocks of 32 that quantisers treat in a way of their own."""
    rng = np.random.default_rng(1)
    ties = np.arange(-127, 129, dtype=np.float32).reshape(-1, 32) / 2
    ties[:, 0] = 127
    halves = np.where(np.arange(32) % 2, np.float32(0.5), np.float32(-0.5)) * np.arange(1, 33, dtype=np.float32)
    zeros = np.array([[0.0] * 32, [0.0, -0.0] * 16], np.float32)
    tiny = (rng.integers(0, 1 << 23, (64, 32), dtype=np.uint32) | np.uint32(1)).view(np.float32)  # subnormal
    tiny[::2] *= np.float32(-1)
    scales = np.float32(10) ** rng.integers(-44, 39, (2048, 1)).astype(np.float32)
    with np.errstate(over="ignore"):
        spread = (normal(2048, 32) * scales).clip(-3.4028235e38, 3.4028235e38).astype(np.float32)
    equal = np.where(rng.random((64, 32)) < 0.5, np.float32(3.25), np.float32(-3.25))  # which is the first largest?
    largest = np.full((1, 32), np.finfo(np.float32).max, np.float32)
    return np.concatenate([ties, halves[None], zeros, tiny, spread, equal, largest])


def with_plain_zeros(x: Floats) -> Floats:
    """Blocks of nothing but zeros with the sign of the first one taken away: -0 there has a test of its own."""
    x[(x == 0).all(axis=1), 0] = 0
    return x


def defined(x: Floats) -> Floats:
    """Blocks so small that 1 / scale is infinite are zeros: C does not say what quants they have."""
    return np.where(np.abs(x).max(axis=1, keepdims=True) < 1e-36, np.float32(0), x)


def contracts() -> bool:
    """Whether a compiler made one step of a product and its sum in this ggml's quantisers (-ffp-contract, with FMA):
    its q8_K beside that of `quant` tells, as other types are ggml's own there."""
    return bound_codecs().fuses


finite_blocks = hnp.arrays(
    np.float32, (3, 32), elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
).map(lambda x: with_plain_zeros(defined(x)))

# shapes and input


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in BUILT_SLOWLY else ()) for name in TYPES]
)
def test_values_become_blocks_and_come_back_in_shape(name: str) -> None:
    kind = codec(name)
    x = normal(6, 2 * kind.block_size).reshape(2, 3, -1) * 8
    blocks = quant.quantize(x, name)
    assert blocks.dtype == np.uint8
    assert blocks.shape == (2, 3, 2 * kind.block_bytes)
    back = quant.dequantize(blocks, name)
    assert back.dtype == np.float32
    assert back.shape == x.shape
    assert (back * x).sum() > 0
    assert quant.quantize(x[:, :0], name).shape == (2, 0, 2 * kind.block_bytes)
    assert quant.dequantize(blocks[:0], name).shape == (0, 3, 2 * kind.block_size)


def test_types_measure_as_in_the_live_ggml(backend: Plugin) -> None:
    ggml = {info.name: (info.block_size, info.block_bytes) for info in backend.ggml.types.values()}
    assert {name: (codec(name).block_size, codec(name).block_bytes) for name in TYPES} == ggml


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "f16", "q6_K"])
def test_any_array_is_taken_by_value(name: str) -> None:
    x = (np.arange(-256, 256) // 4).reshape(2, 256)
    want = quant.quantize(x.astype(np.float32), name)
    same: Any
    for same in (
        x,
        x.astype(np.int8),
        x.astype(np.float16),
        np.repeat(x, 2, 1)[:, ::2],
        np.asfortranarray(x),
        x.tolist(),
    ):
        assert_same_bytes(quant.quantize(same, name), want)
    assert_same_bytes(quant.dequantize(np.asfortranarray(want), name), quant.dequantize(want, name))


@pytest.mark.parametrize("name", ["f16", "f32", "q8_0", "q6_K"])
def test_float64_is_taken_by_value(name: str) -> None:
    x = normal(2, 256)
    assert_same_bytes(quant.quantize(x.astype(np.float64), name), quant.quantize(x, name))


def test_blocks_of_another_dtype_are_taken_as_bytes() -> None:
    x = normal(4, 32)
    assert_same_bytes(quant.dequantize(x.astype(np.float16), "f16"), x.astype(np.float16).astype(np.float32))
    assert_same_bytes(quant.dequantize(x, "f32"), x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quant.quantize(np.zeros(32), "q9_0"), "unknown type 'q9_0'.*known: .*q8_0.*q4_K"),
        (lambda: quant.dequantize(np.zeros(34, np.uint8), ""), "unknown type ''"),
        (lambda: quant.quantize(np.zeros(32), "q8_0", "up"), "unknown rounding 'up'.*reference simd"),  # type: ignore[arg-type]
        (lambda: quant.quantize(np.zeros((2, 33)), "q8_0"), r"x of shape \(2, 33\).*q8_0's block size 32"),
        (lambda: quant.quantize(np.zeros(128), "q4_K"), r"x of shape \(128,\).*q4_K's block size 256"),
        (lambda: quant.quantize(np.array(1, np.float32), "f32"), r"x of shape \(\)"),
        (lambda: quant.dequantize(np.zeros((2, 35), np.uint8), "q8_0"), "blocks of 35 bytes a row.*q8_0's 34"),
        (lambda: quant.dequantize(np.zeros(3, np.uint8), "f16"), "blocks of 3 bytes a row.*f16's 2"),
        (lambda: quant.dequantize(np.array(1, np.uint8), "i8"), r"blocks of shape \(\): must have at least one axis"),
    ],
)
def test_bad_input_is_refused_by_name_and_value(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_type_names_do_not_depend_on_case() -> None:
    assert quant.codec("Q4_k") is quant.codec("q4_K")
    assert quant.codec("F16") is quant.codec("f16")


# decoding


@pytest.mark.parametrize("name", [name for name in TYPES if codec(name).is_quantized and name not in ("q8_1", "q8_K")])
def test_decoding_equals_ggmls_to_float(backend: Plugin, name: str) -> None:
    random = np.random.default_rng(2).integers(0, 256, (2000, codec(name).block_bytes), dtype=np.uint8)
    for blocks in (pool(name, "any"), random):  # finite ones; and any, with scales of NaN and inf
        actual, expected = quant.dequantize(blocks, name), bound(backend.ggml, name).decode(blocks)
        assert_same_bytes(one_nan(actual, "f32"), one_nan(expected, "f32"))


@pytest.mark.parametrize("name", ["q8_1", "q8_K"])
def test_activations_decode_as_defined_here_where_ggml_has_no_function(backend: Plugin, name: str) -> None:
    blocks = pool(name, "any")
    assert_same_bytes(bound(backend.ggml, name).decode(blocks), quant.codec(name).decode(blocks))


def test_activations_decode_to_quants_times_scale() -> None:
    """q8_1 and q8_K, for which ggml has no to_float."""
    quants = np.arange(-128, 128, dtype=np.int8)
    sums = np.zeros(32, np.uint8)
    q8_k = np.concatenate([np.array([0.25], np.float32).view(np.uint8), quants.view(np.uint8), sums])
    assert_same_bytes(quant.dequantize(q8_k, "q8_K"), quants.astype(np.float32) / 4)
    q8_1 = np.concatenate([np.array([0.5, 99], np.float16).view(np.uint8), quants[::8].view(np.uint8)])
    assert_same_bytes(quant.dequantize(q8_1, "q8_1"), quants[::8].astype(np.float32) / 2)


# encoding


def assert_encoded(name: str, x: Floats, actual: Blocks, expected: Blocks) -> None:
    """Equal bytes; of a ggml that contracts, blocks as near to x: of q4_0, codes at most one step off."""
    if not contracts() or not codec(name).is_quantized or name == "q8_0":
        assert_same_bytes(actual, expected)
    elif name == "q4_0":
        assert_same_bytes(actual[:, :2], expected[:, :2])
        low, high = ((actual & part).astype(int) - (expected & part) for part in (0x0F, 0xF0))
        assert np.abs(low[:, 2:]).max(initial=0) <= 1
        assert np.abs(high[:, 2:]).max(initial=0) <= 0x10
    else:
        errors = [np.square(quant.dequantize(each, name) - x).sum(dtype=np.float64) for each in (actual, expected)]
        assert errors[0] == pytest.approx(errors[1], rel=1e-2)
        assert (actual != expected).mean() < 0.1


@pytest.mark.parametrize("name", [name for name in TYPES if not name.startswith(WITHOUT_REFERENCE)])
def test_encoding_equals_ggmls(backend: Plugin, name: str) -> None:
    traits = backend.ggml.ggml_get_type_traits(backend.ggml.type_numbers[name]).contents
    x = normal(300, codec(name).block_size)
    x[::7] = 0
    if traits.from_float_ref:
        assert_encoded(name, x, quant.quantize(x, name), from_float_ref(backend.ggml, name)(x))
    elif backend.ggml.ggml_get_type_traits_cpu(backend.ggml.type_numbers[name]).contents.from_float:
        assert_same_bytes(quant.quantize(x, name), bound(backend.ggml, name).encode(x, "simd"))
    else:
        assert name in ("f64", "i8", "i16", "i64")  # ggml makes them of nothing


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "rounding"), OURS)
def test_hard_blocks_encode_as_in_ggml(
    backend: Plugin, name: str, rounding: Rounding, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rounding == ELSEWHERE:
        pytest.skip("this ggml's CPU backend is another one")
    monkeypatch.setenv("GGML_NPU_ENGINE", engine)
    x = defined(hard_blocks())
    assert_encoded(name, x, quant.quantize(x, name, rounding), expected(backend.ggml, name, rounding, x))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "rounding"), OURS)
@given(x=finite_blocks)
@examples(60)
def test_any_finite_block_encodes_as_in_ggml(
    backend: Plugin, name: str, rounding: Rounding, engine: str, x: Floats
) -> None:
    if rounding == ELSEWHERE:
        pytest.skip("this ggml's CPU backend is another one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGML_NPU_ENGINE", engine)
        assert_encoded(name, x, quant.quantize(x, name, rounding), expected(backend.ggml, name, rounding, x))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "rounding"), OURS)
def test_zeros_that_begin_with_a_negative_one_encode_as_in_ggml(
    backend: Plugin, name: str, rounding: Rounding, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_NPU_ENGINE", engine)
    x = np.array([[-0.0] * 32, [-0.0, 0.0] * 16], np.float32)
    assert_same_bytes(quant.quantize(x, name, rounding), expected(backend.ggml, name, rounding, x))


def test_ggmls_cpu_computes_with_the_rounding_and_the_q4_0_that_were_detected(backend: Plugin) -> None:
    x = defined(hard_blocks())
    for name in ("q8_0", "q4_0"):
        detected = default_backend().numerics.codec(name).encode(x, default_backend().numerics.rounding)
        assert_same_bytes(detected, bound(backend.ggml, name).encode(x, "simd"))
    assert default_backend().numerics.rounding not in ("reference", ELSEWHERE)


def test_the_roundings_of_q8_0_differ_on_ties() -> None:
    x = np.zeros(32, np.float32)
    x[:6] = 127, 0.5, 2.5, -2.5, 1.5, 0.4
    away, *even = (quant.quantize(x, "q8_0", rounding)[2:8].view(np.int8).tolist() for rounding in quant.ROUNDINGS)
    assert away == [127, 1, 3, -3, 2, 0]
    assert even == [[127, 0, 2, -2, 2, 0]] * 2


def test_the_roundings_of_q8_0_differ_in_the_inverse_scale_too() -> None:
    """1 / (amax / 127) is not 127 / amax: on random data a few quants in a million."""
    x = normal(40000, 32)
    reference, simd, neon = (quant.quantize(x, "q8_0", rounding) for rounding in quant.ROUNDINGS)
    assert 0 < (reference != simd).sum() < 100
    assert 0 < (neon != simd).sum() < 100
    assert (neon != reference).sum() < 100


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["q8_0", "q8_1"])
def test_an_arm_divides_by_the_scale_and_rounds_to_even(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value by value, in Python's own numbers: a product of two float32 is exact in float64."""
    monkeypatch.setenv("GGML_NPU_ENGINE", engine)
    largest = np.linspace(1, 2, 64, dtype=np.float32)[:, None]
    x = (np.arange(32, dtype=np.float32) + np.float32(0.5)) * (largest / np.float32(127))
    x[:, 0], x[::2] = largest[:, 0], -x[::2]
    quants = quant.quantize(x, name, "neon").reshape(64, -1)[:, -32:].view(np.int8)
    for row, found in zip(x, quants, strict=True):
        inverse = np.float32(1) / np.float32(np.abs(row).max() / np.float32(127))
        assert found.tolist() == [round(float(np.float32(float(value) * float(inverse)))) for value in row]
    assert (quants != quant.quantize(x, name, "simd").reshape(64, -1)[:, -32:].view(np.int8)).any()


def test_the_probe_tells_the_roundings_of_q8_0_apart() -> None:
    x = _probe()
    assert len({quant.quantize(x, "q8_0", rounding).tobytes() for rounding in quant.ROUNDINGS}) == len(quant.ROUNDINGS)


def quantize_chunk(ggml: Ggml, name: str, x: Floats, importance: Floats | None = None) -> Blocks:
    """ggml_quantize_chunk of rows, with the importance of each column."""
    blocks = np.zeros((len(x), x.shape[1] // codec(name).block_size * codec(name).block_bytes), np.uint8)
    weights = None if importance is None else importance.ctypes.data
    ggml.ggml_quantize_chunk(ggml.type_numbers[name], x.ctypes.data, blocks.ctypes.data, 0, *x.shape, weights)
    return blocks


@pytest.mark.skipif(not ON_X86, reason="this ggml's CPU backend is not the x86 one")
@pytest.mark.parametrize("name", [name for name in TYPES if codec(name).is_quantized and name[:3] not in IQ_BY_TABLE])
def test_each_type_has_the_roundings_of_model_files_and_of_ggmls_cpu(backend: Plugin, name: str) -> None:
    """q8_0, q8_1 and iq4_nl have another one for each; of any other type they are one. Of a ggml that contracts nearly
    all blocks are equal."""
    block = codec(name).block_size
    x = np.concatenate([hard_blocks(), normal(3072, 32)])
    x = x[: len(x) // 8 * 8]
    if name == "iq4_nl":  # ggml leaves the quants of smaller ones as they are in memory
        x = np.where(np.abs(x).max(axis=1, keepdims=True) < 1e-15, np.float32(1), x)
    x = np.ascontiguousarray(x.reshape(-1, block))
    simd, reference = (quant.quantize(x, name, rounding) for rounding in ("simd", "reference"))
    cpu = bound(backend.ggml, name).encode(x, "simd")
    if contracts():
        assert (simd != cpu).any(axis=1).mean() < 0.02  # a seldom quant or scale of iq4_nl
    else:
        assert_same_bytes(simd, cpu)
        if name not in ("q8_1", "q8_K"):  # ggml_quantize_chunk has them not
            assert_same_bytes(reference, quantize_chunk(backend.ggml, name, x))
    assert np.array_equal(simd, reference) == (name not in ("q8_0", "q8_1", "iq4_nl"))


BY_TABLE = [name for name in TYPES if name[:3] in IQ_BY_TABLE]  # seconds each
FLOATS = ("f32", "f16", "bf16")
NOT_OF_FILES = ("q8_1", "q8_K", *BY_TABLE)  # ggml_quantize_chunk has them not, or may end the process
OF_FILES = [name for name in TYPES if (codec(name).is_quantized or name in FLOATS) and name not in NOT_OF_FILES]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_TABLE)
def test_types_by_table_encode_as_ggml_quantize_chunk(backend: Plugin, name: str) -> None:
    """Up to the largest magnitude that is taken, block by block: nothing that an earlier block left is read."""
    rng = np.random.default_rng(3)
    scales = np.float32(2) ** rng.integers(-140, 30 if name in ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs") else 39, (24, 1))
    x = np.concatenate([normal(8, 256), rng.uniform(-1, 1, (24, 256)) * scales, np.sign(normal(4, 256)) * scales.max()])
    x = np.ascontiguousarray(x, np.float32)
    needs = backend.ggml.ggml_quantize_requires_imatrix(backend.ggml.type_numbers[name])
    assert needs == (name in ("iq1_s", "iq2_xxs", "iq2_xs"))
    each = [quantize_chunk(backend.ggml, name, row[None], np.square(row) if needs else None)[0] for row in x]
    assert_same_bytes(quant.quantize(x, name), np.array(each))
    assert_same_bytes(quant.quantize(x[::-1], name)[::-1], np.array(each))


def any_bits(rng: np.random.Generator, n_blocks: int, block: int) -> Floats:
    """Blocks of random bits: of every magnitude, and of one or two; with infinities and any NaN, first, last and
    between."""
    bits = rng.integers(0, 1 << 32, (n_blocks, block), dtype=np.uint32)
    bits[::2] = bits[::2] & 0x80FFFFFF | rng.integers(0, 255, (len(bits[::2]), 1), dtype=np.uint32) << 23
    few = rng.random(bits.shape) < rng.choice([0, 0.05, 1], (n_blocks, 1), p=[0.6, 0.3, 0.1])
    few[1::7, 0] = few[2::7, -1] = True
    bits[few] |= 0x7F800000
    bits[few & (rng.random(bits.shape) < 0.3)] &= 0xFF800000
    return bits.view(np.float32)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", OF_FILES)
def test_any_bits_encode_as_ggml_quantize_chunk(
    backend: Plugin, name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All finite numbers, infinities and NaN."""
    if contracts():
        pytest.skip("of what C leaves undefined, this ggml's compiler made something else")
    monkeypatch.setenv("GGML_NPU_ENGINE", engine)
    x = any_bits(np.random.default_rng(5), 1000, max(codec(name).block_size, 32))
    assert_same_bytes(quant.quantize(x, name), quantize_chunk(backend.ggml, name, x))


HOSTILE = """
import sys
import numpy as np
import quant

np.seterr(all="ignore")
rng = np.random.default_rng(1)
powers = 2.0 ** np.arange(-149, 128, int(sys.argv[1]))
for name in sys.argv[2:]:
    n = 2 * max(quant.codec(name).block_size, 32)
    for value in (np.nan, np.inf, -np.inf, 3.4028235e38, 3e9, *powers):
        some, row, all_ = (rng.standard_normal((4, n)).astype(np.float32) for _ in range(3))
        some[1, 7], row[1], all_[...] = value, value, all_ * np.float32(value)
        for x in (some, row, all_, np.abs(all_), np.sign(all_) * np.float32(value)):
            for rounding in quant.ROUNDINGS:
                try:
                    quant.quantize(x, name, rounding)
                except ValueError as error:
                    print(error)
"""


@pytest.mark.parametrize(
    ("names", "step"),
    [
        pytest.param([name for name in TYPES if name[:3] not in IQ_BY_TABLE], 16, id="others"),
        *(pytest.param([name], 4, id=name, marks=pytest.mark.slow) for name in BY_TABLE),
    ],
)
def test_no_value_of_any_type_ends_the_process(names: list[str], step: int) -> None:
    """Not a number, infinities, and magnitudes from the smallest to the largest."""
    command = [sys.executable, "-c", HOSTILE, str(step), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused = done.stdout.splitlines()
    assert all("takes finite values of at most" in line for line in refused)
    assert bool(refused) == (names[0][:3] in IQ_BY_TABLE)


@pytest.mark.parametrize("name", [name for name in TYPES if name[:3] in IQ_BY_TABLE])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 6e11])
def test_a_value_that_ggmls_own_c_is_not_defined_for_is_refused(name: str, value: float) -> None:
    x = normal(2, 512)
    x[1, 300] = value
    with pytest.raises(ValueError, match=rf"^x holds {value:g}: ".replace("+", r"\+") + f"{name} takes finite values"):
        quant.quantize(x, name)


def test_other_types_have_one_rounding() -> None:
    x = hard_blocks()
    for name in ("q4_0", "q4_1", "f16", "bf16"):
        assert_same_bytes(quant.quantize(x, name, "simd"), quant.quantize(x, name, "reference"))


CLASSES = {
    "quiet NaN": [0x7FC00000, 0xFFC12345],
    "signalling NaN": [0x7F800001, 0xFF812345],
    "infinity": [0x7F800000, 0xFF800000],
    "zero": [0x00000000, 0x80000000],
    "subnormal": [0x00000001, 0x807FFFFF],
    "a scale below all halves": [0x33000000, 0xB0123456],
    "a scale beyond all halves": [0x4B123456, 0xFF7FFFFF],
    "ordinary": [0x3F800000, 0xC0490FDB, 0x42FE0000, 0xBF000000],
}


def blocks_of_any_floats() -> Floats:
    """Blocks of each class of floats alone, and with one or with many of another class in them; any bits; scales that
    lie between two halves."""
    rng = np.random.default_rng(9)
    found = []
    for one in CLASSES.values():
        for other in CLASSES.values():
            for share in (1 / 32, 1 / 2):
                bits = np.where(rng.random((8, 32)) < share, rng.choice(other, (8, 32)), rng.choice(one, (8, 32)))
                found.append(bits.astype(np.uint32).view(np.float32))
    ties = normal(256, 32).clip(-1, 1)
    between = 1 + (2 * np.arange(128, dtype=np.float32)[:, None] + 1) / 2048
    scales = np.concatenate([127 * between, 8 * between]) * np.float32(2) ** rng.integers(-24, 8, (256, 1))
    ties = (ties * scales).astype(np.float32)
    ties[:, :1] = scales * rng.choice([-1, 1], (256, 1))
    return np.concatenate([*found, ties, special_floats().reshape(-1, 32)])


@pytest.mark.parametrize(("name", "rounding"), OURS)
def test_compiled_runs_equal_their_definitions(name: str, rounding: Rounding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of floats of every class; and of blocks of any bits, every half float among their scales."""
    x = np.concatenate([hard_blocks(), normal(5000, 32), blocks_of_any_floats()])
    blocks = np.random.default_rng(3).integers(0, 256, (1 << 16, codec(name).block_bytes), dtype=np.uint8)
    blocks[:, :2] = np.arange(1 << 16, dtype=np.uint16)[:, None].view(np.uint8)
    results = []
    for engine in ENGINES:
        monkeypatch.setenv("GGML_NPU_ENGINE", engine)
        results.append((quant.quantize(x, name, rounding), quant.dequantize(blocks, name)))
    for compiled, definition in zip(*results, strict=True):
        assert_same_bytes(compiled, definition)


@pytest.mark.parametrize("source", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("name", "rounding"), OURS)
def test_compiled_runs_of_half_floats_equal_their_definitions(
    name: str, rounding: Rounding, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.concatenate([hard_blocks(), normal(2000, 32), blocks_of_any_floats()]).astype(source)
    order = np.random.default_rng(4).permuted(np.tile(np.arange(1 << 16, dtype=np.uint16), 2))
    x = np.concatenate(
        [x, np.arange(1 << 16, dtype=np.uint16).view(source).reshape(-1, 32), order.view(source).reshape(-1, 32)]
    )
    monkeypatch.setattr(default_backend(), "numerics", replace(default_backend().numerics, rounding=rounding))
    results = []
    for engine in ENGINES:
        monkeypatch.setenv("GGML_NPU_ENGINE", engine)
        results.append(np.zeros((len(x), codec(name).block_bytes), np.uint8))
        bind(Node("CPY", Tensor.of(results[-1], name), (Tensor.of(x),)))()
    assert_same_bytes(results[0], results[1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [name for name in TYPES if codec(name).is_quantized and name[:2] != "iq"])
def test_nan_and_infinity_crash_no_encoder(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they become is undefined in ggml."""
    monkeypatch.setenv("GGML_NPU_ENGINE", engine)
    x = normal(8, codec(name).block_size)
    x[0], x[1], x[2, 3], x[3, 0], x[4, 5], x[5, ::2] = np.nan, np.inf, -np.inf, np.nan, np.inf, -np.nan
    for rounding in quant.ROUNDINGS:
        blocks = quant.quantize(x, name, rounding)
        assert_same_bytes(blocks[6:], quant.quantize(x[6:], name, rounding), "blocks without them")


# worked examples


@pytest.mark.parametrize("engine", ENGINES)
def test_the_worked_example_of_q4_0(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NPU_ENGINE", engine)
    blocks = quant.quantize((np.arange(32, dtype=np.float32) - 8) / 2, "q4_0")
    assert blocks.tobytes().hex() == "c0bd" + "5b5a5a4a493939382828271717160606"
    values = quant.dequantize(blocks, "q4_0")
    assert (values[0], values[31]) == (-4.3125, 11.5)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_worked_example_of_q8_0(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale of 0.1 is kept as the float16 0.0999755859375."""
    monkeypatch.setenv("GGML_NPU_ENGINE", engine)
    block = np.concatenate([np.array([0.1], np.float16).view(np.uint8), np.full(32, 15, np.uint8)])
    assert quant.dequantize(block, "q8_0").tolist() == [1.4996337890625] * 32


@pytest.mark.parametrize(("name", "block"), [("q8_0", "0000" + "00" * 32), ("q4_0", "0080" + "88" * 16)])
@pytest.mark.parametrize("rounding", quant.ROUNDINGS)
def test_a_block_of_zeros(name: str, block: str, rounding: Rounding) -> None:
    """The scale of q4_0 is then 0 / -8."""
    blocks = quant.quantize(np.zeros(32, np.float32), name, rounding)
    assert blocks.tobytes().hex() == block
    assert not quant.dequantize(blocks, name).any()


@pytest.mark.parametrize(("values", "first"), [([3, -3], 3), ([-3, 3], -3)])
def test_q4_0_takes_the_sign_of_the_first_largest(values: list[int], first: int) -> None:
    x = np.zeros(32, np.float32)
    x[[4, 20]] = values
    assert quant.quantize(x, "q4_0")[:2].view(np.float16)[0] == first / -8


# scalars


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_all_65536_half_floats_decode_as_in_ggml(backend: Plugin, name: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16).reshape(-1, 1).view(np.uint8)
    assert_same_bytes(quant.dequantize(patterns, name), bound(backend.ggml, name).decode(patterns))


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_half_floats_come_back_as_they_were(name: str) -> None:
    """But for signalling NaNs, which become quiet."""
    patterns = np.arange(65536, dtype=np.uint16)
    back = quant.quantize(quant.dequantize(patterns, name), name, "simd").view(np.uint16)
    quiet = {"f16": 0x0200, "bf16": 0x0040}[name]
    nan = np.isnan(quant.dequantize(patterns, name))
    assert_same_bytes(back, np.where(nan, patterns | quiet, patterns).astype(np.uint16))


def around_every_half_float(name: str) -> Floats:
    """The float32 of every pattern, the ties between neighbours, and what lies one step beside these."""
    if name == "bf16":
        ends = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
        return ((np.arange(65536, dtype=np.uint32) << 16)[:, None] | ends).view(np.float32)
    with np.errstate(all="ignore"):
        exact = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
        ties = np.append((exact[:-1] + exact[1:]) / 2, np.float32(65520))
    around = np.concatenate([x.view(np.uint32) + np.array([[-1], [0], [1]]) for x in (exact, ties)])
    return np.ascontiguousarray(around.astype(np.uint32)).view(np.float32)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_f32_becomes_the_half_float_that_ggml_makes_of_it(backend: Plugin, name: str) -> None:
    """In a file, and in a graph, where a NaN may keep its payload."""
    in_graphs = default_backend().numerics.rounding
    random = np.random.default_rng(4).integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    for x in (around_every_half_float(name).reshape(-1, 1), random.reshape(-1, 1)):
        assert_same_bytes(quant.quantize(x, name), quantize_chunk(backend.ggml, name, x))
        assert_same_bytes(quant.quantize(x, name, in_graphs), bound(backend.ggml, name).encode(x, "simd"))


@pytest.mark.parametrize(
    ("value", "half"),
    [
        (65504, 0x7BFF),  # the largest
        (65519.996, 0x7BFF),
        (65520, 0x7C00),  # overflow
        (-3e38, 0xFC00),
        (2**-24, 0x0001),  # the smallest
        (2**-25, 0x0000),  # a tie, to even
        (2**-25 * 1.0001, 0x0001),
        (2**-14 - 2**-25, 0x0400),  # a tie, to the smallest normal
        (1 + 2**-11, 0x3C00),
        (1 + 3 * 2**-11, 0x3C02),
        (-0.0, 0x8000),
    ],
)
def test_f16_rounds_to_nearest_even_overflows_to_infinity_and_keeps_subnormals(value: float, half: int) -> None:
    assert quant.quantize(np.array([value]), "f16").view(np.uint16).tolist() == [half]


@pytest.mark.parametrize("name", ["f32", "f64", "i8", "i16", "i32", "i64"])
def test_other_scalars_are_c_casts(name: str) -> None:
    dtype = codec(name).dtype
    x = np.array([-128.0, -1.9, -0.5, 0.0, 0.99, 1.5, 127.0], np.float32)
    assert_same_bytes(quant.quantize(x, name), x.astype(dtype))
    assert_same_bytes(quant.dequantize(x.astype(dtype), name), x.astype(dtype).astype(np.float32))


def test_an_array_of_the_type_itself_is_kept_to_the_bit() -> None:
    integers = np.array([2**31 - 1, 16777217, -(2**31)], np.int32)
    assert_same_bytes(quant.quantize(integers, "i32"), integers)
    signalling = np.array([0x7F800001, 0xFFBFFFFF], np.uint32).view(np.float32)
    assert_same_bytes(quant.quantize(signalling, "f32"), signalling)
    assert_same_bytes(quant.dequantize(signalling, "f32"), signalling)


def test_integers_are_values_also_where_bf16_has_as_many_bytes() -> None:
    integers = np.array([0, 1, 2, 65535], np.uint16)
    assert_same_bytes(quant.quantize(integers, "bf16"), quant.quantize(integers.astype(np.float32), "bf16"))
    rounded = integers.astype(ml_dtypes.bfloat16)
    assert_same_bytes(quant.quantize(rounded, "bf16"), rounded)
