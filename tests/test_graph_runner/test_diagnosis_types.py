"""What a diagnosis says of kernels that round or pack numbers wrongly."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from kit.diagnoses import SHAPES, floats, found, ids_of, swap
from kit.paper import Paper, define
from kit.support import Placement

import quant
from ggml_backend_npu import Node, Tensor
from graph_runner.diagnosis import quantised_values

APART = Placement(steps=(1, 2, 2, 2), before=(1, 1, 1, 1), after=(1, 1, 1, 1))


@pytest.mark.parametrize(("ne", "n"), SHAPES)
def test_a_q4_0_kernel_with_nibbles_swapped(ne: tuple[int, ...], n: int) -> None:
    paper = Paper()
    node = paper.op("get_rows", floats(paper, ne, APART, "q4_0"), ids_of(paper, ne, n))

    def reads(node: Node) -> None:
        define(node)
        view = node.dst.view()
        values = view.reshape(*view.shape[:3], -1, 2, 16)
        view[...] = values[..., ::-1, :].reshape(view.shape)

    assert found(node, reads) == (
        "GET_ROWS swaps the two nibbles of each byte of the q4_0 blocks of src0, which gives exactly these bytes"
    )

    def neighbours(node: Node) -> None:
        define(node)
        view = node.dst.view()
        view[...] = view.reshape(*view.shape[:3], -1, 2, 16).swapaxes(-1, -2).reshape(view.shape)

    assert "takes the nibbles of a byte of src0 for neighbours" in str(found(node, neighbours))

    def writes(node: Node) -> None:
        define(node)
        node.dst.view()[...] = swap(node.dst.view())

    node = paper.op("cpy", floats(paper, ne), paper.fresh("q4_0", ne))
    n_blocks = prod(ne) // 32
    assert found(node, writes) == f"CPY swaps the two nibbles of each byte: {n_blocks} of {n_blocks} q4_0 blocks"


def tied(paper: Paper, tensor: Tensor) -> Tensor:
    """Values of which many are exact ties of q8_0: of blocks whose largest is 127."""
    view = tensor.view()
    view[...] = paper.rng.integers(-252, 253, view.shape) / 2
    view[..., ::32] = 127
    return tensor


@pytest.mark.parametrize("function", ["cpy", "set_rows"])
def test_a_q8_0_kernel_of_the_other_rounding(function: str) -> None:
    paper = Paper()
    src = tied(paper, floats(paper, (64, 4, 2), APART))
    dst = paper.fresh("q8_0", (64, 6 if function == "set_rows" else 4, 2, 1))
    ids = ids_of(paper, (64, 6, 2, 1), 4, dtype=np.int64)
    node = paper.op("cpy", src, dst) if function == "cpy" else paper.op("set_rows", dst, src, ids)

    def kernel(node: Node) -> None:
        rows = quant.quantize(src.view(), "q8_0", "reference").reshape(1, 2, 4, 2, 34)
        if function == "cpy":
            node.dst.view()[...] = rows
        else:
            for i2 in range(2):
                node.dst.view()[0, i2, ids.view()[0, 0, i2]] = rows[0, i2]

    text = str(found(node, kernel))
    assert text.startswith(f"{node.op} rounds as ggml's reference q8_0 quantiser, not as the simd one: ")
    values = quantised_values(node)
    assert values is not None
    assert values.shape == node.dst.ne[::-1]
    assert int(np.isfinite(values).sum()) == src.n_elements


@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_floats_that_are_cut_off(type: str) -> None:
    paper = Paper()
    src = floats(paper, (33, 4))
    node = paper.op("cpy", src, paper.fresh(type, (33, 4, 1, 1)))

    def kernel(node: Node) -> None:
        x = src.view()
        if type == "bf16":
            node.dst.view().view(np.uint16)[...] = x.view(np.uint32) >> 16
        else:
            y = x.astype(np.float16)
            node.dst.view()[...] = np.where(np.abs(y.astype(np.float32)) > np.abs(x), np.nextafter(y, np.float16(0)), y)

    assert found(node, kernel) == f"CPY cuts float32 off to {type}: it does not round to the nearest"
