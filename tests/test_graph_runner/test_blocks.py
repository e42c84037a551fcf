"""Quantised outputs by block: scales, quants, nibbles and roundings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.support import examples, seeds, values
from numpy.typing import NDArray

import quant
from ggml_backend_npu import Tensor
from graph_runner.judging.blocks import compare_blocks

QUANTISED = [name for name in quant.type_names() if quant.codec(name).is_quantized]
NE = (128, 3, 2, 1)


def tensor(blocks: NDArray[np.uint8], type: str) -> Tensor:
    return Tensor.of(np.ascontiguousarray(blocks), type)


def quantised(type: str, x: NDArray[Any], rounding: Any = "reference") -> Tensor:
    return tensor(quant.quantize(x, type, rounding), type)


def random_floats(seed: int = 0, shape: tuple[int, ...] = (2, 3, 128)) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def with_ties(seed: int = 0, shape: tuple[int, ...] = (2, 3, 128)) -> NDArray[np.float32]:
    x = np.random.default_rng(seed).integers(-252, 253, shape).astype(np.float32)
    x /= 2
    x[..., ::32] = 127
    return x


def edited(of: Tensor, edit: Any) -> Tensor:
    """A copy whose blocks, (24, block bytes), were edited."""
    blocks = of.view().copy()
    edit(blocks.reshape(-1, blocks.shape[-1]))
    return tensor(blocks.reshape(*blocks.shape[:-2], -1), of.type)


@pytest.mark.parametrize("type", QUANTISED)
@given(seed=seeds)
def test_the_same_blocks_are_the_same(type: str, seed: int) -> None:
    kind = quant.codec(type)
    blocks = values(type, 4 * kind.block_size, np.random.default_rng(seed)).reshape(2, -1)
    found = compare_blocks(tensor(blocks, type), tensor(blocks.copy(), type))
    assert found
    assert (found.n_blocks, found.n_different) == (4, 0)
    assert found.sentence() == f"all 4 {type} blocks are the same"


@examples(300)
@given(seed=seeds, rounding=st.sampled_from(quant.ROUNDINGS))
def test_right_blocks_are_the_same_and_their_rounding_is_never_called_the_other(seed: int, rounding: Any) -> None:
    x = with_ties(seed) if seed % 2 else random_floats(seed)
    found = compare_blocks(quantised("q8_0", x, rounding), quantised("q8_0", x, rounding), x)
    assert found
    assert found.rounding in (rounding, None, *(["simd"] if rounding == "neon" else []))


def test_a_scale_and_quants_that_differ() -> None:
    expected = quantised("q8_0", random_floats())

    def edit(blocks: NDArray[np.uint8]) -> None:
        blocks[3, :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
        quants = blocks[:, 2:].view(np.int8)
        quants[5, 7] += 1 if quants[5, 7] < 0 else -1
        quants[5, 8] += 2 if quants[5, 8] < 0 else -2
        quants[9, 0] = -quants[9, 0] if abs(int(quants[9, 0])) > 1 else 99

    found = compare_blocks(expected, edited(expected, edit))
    assert not found
    assert (found.n_blocks, found.n_different, found.n_scale, found.n_quants) == (24, 3, 1, 2)
    assert (found.off_by_one, found.off_by_more) == (1, 2)
    assert found.rounding is None
    assert found.sentence() == (
        "3 of 24 q8_0 blocks differ: 1 in the scale, 2 in the quants; 1 quants are off by one, 2 by more"
    )


def test_quants_from_one_end_to_the_other_are_far_apart() -> None:
    x = np.full((1, 32), 127, np.float32)
    expected = quantised("q8_0", x)
    found = compare_blocks(expected, edited(expected, lambda blocks: blocks[:, 2:].fill(128)))
    assert (found.off_by_one, found.off_by_more) == (0, 32)


def test_quants_of_q4_0_off_by_one() -> None:
    expected = quantised("q4_0", random_floats())

    def edit(blocks: NDArray[np.uint8]) -> None:
        blocks[4, 2] ^= 0x01
        blocks[6, 9] ^= 0x10
        blocks[6, 10] ^= 0x80

    found = compare_blocks(expected, edited(expected, edit))
    assert (found.n_different, found.n_scale, found.n_quants) == (2, 0, 2)
    assert (found.off_by_one, found.off_by_more) == (2, 1)
    assert not found.swapped_nibbles


@given(seed=seeds)
def test_swapped_nibbles(seed: int) -> None:
    expected = quantised("q4_0", random_floats(seed))

    def edit(blocks: NDArray[np.uint8]) -> None:
        blocks[2:8, 2:] = (blocks[2:8, 2:] >> 4) | (blocks[2:8, 2:] << 4)

    found = compare_blocks(expected, edited(expected, edit))
    assert found.swapped_nibbles
    assert found.sentence() == "6 of 24 q4_0 blocks differ: the nibbles are swapped"

    def one_more(blocks: NDArray[np.uint8]) -> None:
        edit(blocks)
        blocks[20, 2] ^= 1

    assert not compare_blocks(expected, edited(expected, one_more)).swapped_nibbles


@pytest.mark.parametrize("rounding", ["reference", "simd"])
@given(seed=seeds)
def test_which_rounding_was_used(rounding: Any, seed: int) -> None:
    x = with_ties(seed)
    expected = quantised("q8_0", x, "simd" if rounding == "reference" else "reference")
    found = compare_blocks(expected, quantised("q8_0", x, rounding), x)
    assert found.rounding == rounding
    assert (found.n_scale, found.off_by_more) == (0, 0)
    assert found.sentence().endswith(f"they are rounded as ggml's {rounding} quantiser does it")


def test_the_rounding_of_an_arm_shows_where_it_gives_other_quants_than_that_of_x86() -> None:
    largest = np.linspace(1, 2, 4, dtype=np.float32)[:, None]
    x = (np.arange(32, dtype=np.float32) + np.float32(0.5)) * (largest / np.float32(127))
    x[:, 0] = largest[:, 0]
    found = compare_blocks(quantised("q8_0", x, "simd"), quantised("q8_0", x, "neon"), x)
    assert (found.rounding, found.off_by_more) == ("neon", 0)


def test_rounding_of_values_of_which_some_are_not_known() -> None:
    x = with_ties()
    some = x.copy()
    some[0, 1] = np.nan
    actual = edited(quantised("q8_0", x), lambda blocks: blocks[4:8].fill(1))
    assert compare_blocks(quantised("q8_0", x, "simd"), actual, some).rounding == "reference"
    assert compare_blocks(quantised("q8_0", x, "simd"), actual, x).rounding is None
    assert compare_blocks(quantised("q8_0", x), actual, np.full_like(x, np.nan)).rounding is None
    with pytest.raises(ValueError, match="source of 128 values"):
        compare_blocks(actual, actual, x[0, 0])


@pytest.mark.parametrize("type", ["q4_1", "q5_0", "q5_1", "q8_1", "q8_K"])
def test_other_types_by_value_in_steps(type: str) -> None:
    expected = quantised(type, random_floats(shape=(2, 512)))
    at = {"q4_1": 4, "q5_0": 6, "q5_1": 8, "q8_1": 4, "q8_K": 4}[type]

    def edit(blocks: NDArray[np.uint8]) -> None:
        blocks[1, at] ^= 1

    found = compare_blocks(expected, edited(expected, edit))
    assert (found.n_different, found.n_scale, found.n_quants) == (1, 0, 1)
    assert found.in_steps
    assert found.largest == pytest.approx(1, rel=1e-3)
    assert "by up to 1 steps" in found.sentence()


@pytest.mark.parametrize("type", QUANTISED)
@given(seed=seeds)
def test_any_two_outputs_are_compared(type: str, seed: int) -> None:
    kind, rng = quant.codec(type), np.random.default_rng(seed)
    x, y = (rng.integers(0, 256, (3, kind.block_bytes), dtype=np.uint8) for _ in range(2))
    found = compare_blocks(tensor(x, type), tensor(y, type), np.ones((3, kind.block_size), np.float32))
    assert found.n_different == 3
    assert found.sentence().startswith(f"3 of 3 {type} blocks differ")


def test_what_is_not_of_one_quantised_type_is_refused() -> None:
    x = quantised("q8_0", random_floats())
    with pytest.raises(ValueError, match="must be of one quantised type and ne"):
        compare_blocks(x, quantised("q4_0", random_floats()))
    with pytest.raises(ValueError, match="must be of one quantised type and ne"):
        compare_blocks(Tensor.of(random_floats()), Tensor.of(random_floats()))
