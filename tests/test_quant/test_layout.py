"""quant.to_device and quant.to_blocks: the same numbers in another order, both ways without loss, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.support import assert_same_bytes, seeds
from numpy.typing import NDArray

import quant
from quant import DeviceLayout, codec, to_blocks, to_device
from quant.blocks import compiled_types

TYPES = ("q8_0", "q4_0")

PACKED = " and ".join(compiled_types())


def random_blocks(type: str, lead: tuple[int, ...], n_blocks: int, seed: int, per_scale: int = 1) -> NDArray[np.uint8]:
    """Blocks of any bytes, scales of NaN and inf among them; `per_scale` neighbours in a row share a scale."""
    size = codec(type).block_bytes
    blocks = np.random.default_rng(seed).integers(0, 256, (*lead, n_blocks, size), dtype=np.uint8)
    blocks[..., :2] = blocks[..., ::per_scale, :2].repeat(per_scale, axis=-2)[..., :n_blocks, :]
    return blocks.reshape(*lead, n_blocks * size)


def integers(device: DeviceLayout, type: str) -> NDArray[np.int8]:
    """The quants as numbers, in the order of the elements."""
    if type == "q8_0":
        return np.asarray(device.quants)
    low, high = (device.quants << np.uint8(4)).view(np.int8) >> 4, device.quants.view(np.int8) >> 4
    return np.stack([low, high], axis=-1).reshape(*low.shape[:-1], 2 * low.shape[-1])


leads = st.sampled_from([(), (1,), (3,), (2, 3), (2, 1, 2)])


@pytest.mark.parametrize("type", TYPES)
@given(lead=leads, n_blocks=st.integers(0, 6), group=st.sampled_from([32, 16, 8, 4, 2, 1]), seed=seeds)
def test_any_blocks_come_back_whatever_group_divides_a_block(
    type: str, lead: tuple[int, ...], n_blocks: int, group: int, seed: int
) -> None:
    blocks = random_blocks(type, lead, n_blocks, seed)
    device = to_device(blocks, type, group)
    assert device.scales.shape == (*lead, n_blocks * 32 // group)
    assert device.quants.shape == (*lead, n_blocks * (32 if type == "q8_0" else 16))
    assert_same_bytes(to_blocks(device, type, group), blocks)


@pytest.mark.parametrize("type", TYPES)
@given(lead=leads, n_groups=st.integers(1, 3), per_group=st.sampled_from([1, 2, 3, 4]), whole=st.booleans(), seed=seeds)
def test_blocks_that_share_scales_come_back_from_larger_groups(
    type: str, lead: tuple[int, ...], n_groups: int, per_group: int, whole: bool, seed: int
) -> None:
    """A group of several blocks, or 0: a whole row."""
    n_groups = 1 if whole else n_groups
    group = 0 if whole else 32 * per_group
    blocks = random_blocks(type, lead, n_groups * per_group, seed, per_group)
    device = to_device(blocks, type, group)
    assert device.scales.shape == (*lead, n_groups)
    assert_same_bytes(to_blocks(device, type, group), blocks)


@pytest.mark.parametrize("type", TYPES)
def test_no_rows_come_back_as_no_rows(type: str) -> None:
    blocks = random_blocks(type, (0,), 2, seed=0)
    device = to_device(blocks, type)
    assert device.scales.shape == (0, 2)
    assert to_blocks(device, type).shape == blocks.shape


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("group", [48, 96])
def test_a_group_may_end_inside_a_block(type: str, group: int) -> None:
    blocks = random_blocks(type, (2,), 3, 1, per_scale=3)
    device = to_device(blocks, type, group)
    assert device.scales.shape == (2, 96 // group)
    assert_same_bytes(to_blocks(device, type, group), blocks)


@pytest.mark.parametrize("type", TYPES)
@given(lead=leads, n_blocks=st.integers(1, 4), group=st.sampled_from([32, 16, 1]), seed=seeds)
def test_quants_times_scales_are_what_the_blocks_decode_to(
    type: str, lead: tuple[int, ...], n_blocks: int, group: int, seed: int
) -> None:
    x = np.random.default_rng(seed).standard_normal((*lead, n_blocks * 32)).astype(np.float32)
    blocks = quant.quantize(x, type)
    device = to_device(blocks, type, group)
    scales = device.scales.astype(np.float32).repeat(group, axis=-1)
    assert_same_bytes(integers(device, type).astype(np.float32) * scales, quant.dequantize(blocks, type))


@pytest.mark.parametrize("type", TYPES)
@given(quants=st.binary(min_size=64, max_size=64), scales=st.binary(min_size=8, max_size=8))
def test_any_device_layout_comes_back(type: str, quants: bytes, scales: bytes) -> None:
    dtype: Any = np.int8 if type == "q8_0" else np.uint8
    layout = DeviceLayout(
        np.frombuffer(quants, dtype).reshape(2, -1),
        np.frombuffer(scales, np.float16).reshape(2, -1)[:, : 1 if type == "q8_0" else 2],
    )
    back = to_device(to_blocks(layout, type), type)
    assert_same_bytes(back.quants, layout.quants)
    assert_same_bytes(back.scales, layout.scales)


def test_nibbles_are_ordered_and_signed_as_ggml_cann_does_it() -> None:
    """ggml keeps elements j and j + 16 in byte j, the device neighbours; a code v stands for v - 8."""
    quants = bytes(v * 0x11 for v in range(16))
    block = np.frombuffer(b"\x00\x3c" + quants, np.uint8)
    device = to_device(block, "q4_0")
    assert device.quants.tobytes().hex(" ") == " ".join(["98 ba dc fe 10 32 54 76"] * 2)
    assert device.scales.tolist() == [1.0]
    assert integers(device, "q4_0").tolist() == [*range(-8, 8), *range(-8, 8)]


def test_q8_0_keeps_its_quants_and_their_order() -> None:
    quants = np.arange(-32, 32, dtype=np.int8).reshape(2, 32)
    scales = np.array([[0.5], [2]], np.float16)
    row = np.hstack([scales.view(np.uint8), quants.view(np.uint8)]).reshape(-1)
    device = to_device(row, "q8_0")
    assert device.quants.tolist() == [*range(-32, 32)]
    assert device.scales.tolist() == [0.5, 2]


def blocks_of(n_blocks: int, type: str = "q8_0") -> NDArray[np.uint8]:
    return random_blocks(type, (2,), n_blocks, seed=0)


def layout_of(n: int, n_scales: int) -> DeviceLayout:
    return DeviceLayout(np.zeros((2, n), np.int8), np.arange(2 * n_scales, dtype=np.float16).reshape(2, n_scales))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_device(blocks_of(2), "q4_1"), f"type 'q4_1' has no device layout; {PACKED} have"),
        (lambda: to_blocks(layout_of(32, 1), "f16"), "type 'f16' has no device layout"),
        (lambda: to_device(blocks_of(2)[:, :-1], "q8_0"), r"blocks of shape \(2, 67\).*34 bytes"),
        (lambda: to_device(blocks_of(2).view(np.int8), "q8_0"), r"blocks of shape \(2, 68\)"),
        (lambda: to_device(blocks_of(2), "q8_0", 24), "group size 24 does not divide the row's 64 elements"),
        (lambda: to_device(blocks_of(2), "q8_0", 128), "group size 128 does not divide the row's 64 elements"),
        (lambda: to_device(blocks_of(2), "q8_0", -32), "group size -32 does not divide"),
        (lambda: to_device(blocks_of(2), "q8_0", 64), "group size 64: group 0 of row 0 has more than one scale"),
        (lambda: to_device(blocks_of(4, "q4_0"), "q4_0", 0), "group 0 of row 0 has more than one scale"),
        (lambda: to_blocks(layout_of(48, 3), "q8_0", 16), "quants of 48 elements a row: must be a multiple of 32"),
        (lambda: to_blocks(layout_of(64, 3), "q8_0"), "scales of 3 groups a row: 64 elements in groups of 32 have 2"),
        (lambda: to_blocks(layout_of(64, 4), "q8_0", 16), "group 0 of row 0 has more than one scale"),
        (lambda: to_blocks(layout_of(64, 2), "q8_0", 48), "group size 48 does not divide"),
    ],
)
def test_what_would_lose_something_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_refusal_names_the_first_group_with_two_scales() -> None:
    blocks = random_blocks("q8_0", (3,), 6, seed=1, per_scale=2).reshape(3, 6, 34)
    blocks[2, 3, :2] ^= 1
    with pytest.raises(ValueError, match="group 1 of row 2 has more than one scale"):
        to_device(blocks.reshape(3, -1), "q8_0", 64)
