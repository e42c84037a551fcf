"""NaN in a run: where it began is said; equal NaNs are equal; what ggml leaves undefined blames no kernel."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from kit.commands import Cli, strict_json
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from graph_runner.base.models import model_file
from graph_runner.diff.logits import Endings
from graph_runner.judging.compare import compare
from graph_runner.judging.rules import Rules
from graph_runner.judging.spoilt import defined, is_undefined

NAN = float("nan")


def spoilt_model(folder: Path, name: str, number: float = NAN) -> Path:
    """The tiny model with one number in a weight that is none."""
    path = folder / "nan.gguf"
    with model_file("tiny") as tiny:
        shutil.copy(tiny, path)
    reader = gguf.GGUFReader(path, "r+")
    values = next(tensor for tensor in reader.tensors if tensor.name == name).data.reshape(-1)
    if values.dtype == np.uint8:  # the scale of a q8_0 block
        values[34 * 3 : 34 * 3 + 2] = np.frombuffer(np.float16(number).tobytes(), np.uint8)
    else:
        values[len(values) // 3] = number
    reader.data.flush()
    return path


CACHES = [[], ["--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"]]


@pytest.mark.parametrize("options", CACHES, ids=["f16", "q8_0"])
@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("blk.0.attn_k.weight", "output_norm.weight")),
    ],
)
def test_a_nan_in_a_weight_is_named_and_blames_no_kernel(
    cli: Cli, tmp_path: Path, name: str, options: list[str]
) -> None:
    report, page = tmp_path / "diff.json", tmp_path / "diff.html"
    model = spoilt_model(tmp_path, name)
    outcome = cli("diff", model, "--all", "-n", "1", *options, "--json", report, "--html", page)
    assert outcome.code == 0, outcome.out
    said = next(line for line in outcome.out.splitlines() if line.startswith("NaN or infinity from step 0 node "))
    assert f"the weight or input {name!r} holds nan at" in said
    assert "NMSE inf" not in outcome.out.replace("largest NMSE inf", "")
    assert ("leaves undefined" in said) == (bool(options) and name != "output_norm.weight")
    assert strict_json(report.read_text())["spoilt"]["text"] == said
    assert "holds nan at" in page.read_text()


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.1.ffn_down.weight"])
def test_a_weight_of_minus_infinity_is_named(cli: Cli, tmp_path: Path, name: str) -> None:
    """Which is no mask."""
    outcome = cli("diff", spoilt_model(tmp_path, name, -np.inf), "--in-process", "--all", "-n", "0")
    assert outcome.code == 0, outcome.out
    assert f"the weight or input {name!r} holds -inf at" in outcome.out


@pytest.mark.slow
def test_a_model_without_nan_says_nothing_of_it(cli: Cli) -> None:
    assert "NaN" not in cli("diff", "tiny", "--all", "-n", "0").out


@pytest.mark.parametrize(
    ("device", "nmse"),
    [([1, 2, NAN, 4], 0), ([1, 2, NAN, 2], 4 / 21), ([1, 2, 3, 4], np.inf), ([NAN, 2, NAN, 4], np.inf)],
)
def test_equal_nans_of_logits_are_equal(device: list[float], nmse: float) -> None:
    endings = Endings()
    endings.add(np.array([[1, 2, NAN, 4]], np.float32), np.array([device], np.float32))
    ending = endings.ending()
    assert ending.nmse == pytest.approx(nmse)
    assert (ending.kl == np.inf) == (nmse == np.inf)
    assert (ending.kl == 0) == (nmse == 0)


@pytest.mark.parametrize("op", ["SET_ROWS", "CPY", "MUL_MAT", "FLASH_ATTN_EXT"])
def test_what_quantises_a_nan_is_judged_by_the_rest(op: str) -> None:
    x = np.ones((1, 1, 3, 64), np.float32)
    x[0, 0, 1, 40] = NAN
    blocks = Tensor.of(np.zeros((1, 1, 5, 68), np.uint8), "q8_0")
    if op == "SET_ROWS":
        of = Node(op, blocks, (Tensor.of(x), Tensor.of(np.array([[[[4, 2, 0]]]], np.int64))))
        places = [(0, 0, 2, 1)]
    elif op == "CPY":
        of, places = Node(op, Tensor.of(np.zeros((1, 1, 3, 68), np.uint8), "q8_0"), (Tensor.of(x),)), [(0, 0, 1, 1)]
    elif op == "MUL_MAT":
        of = Node(op, Tensor.of(np.zeros((1, 1, 3, 5), np.float32)), (blocks, Tensor.of(x)))
        places = [(0, 0, 1, i) for i in range(5)]
    else:
        of = Node(op, Tensor.of(np.zeros((1, 3, 1, 64), np.float32)), (Tensor.of(x), blocks, blocks, None, None))
        places = [(0, 1, 0, i) for i in range(64)]
    flags = is_undefined(of)
    assert [tuple(map(int, at)) for at in np.argwhere(flags)] == places
    other = Tensor.of(of.dst.view().copy().reshape(*of.dst.ne[:0:-1], -1), of.dst.type)
    other.view()[places[0]] = 7
    assert Rules().allows(of, of.dst, other, compare(of.dst, other))
    other.view()[0, 0, 0, 0] = 7
    assert not Rules().allows(of, of.dst, other, compare(of.dst, other))


def test_quants_of_a_block_without_a_scale_may_be_any() -> None:
    """quantize_row_iq4_nl does not set them. A scale that one result has is seen."""
    x, blocks = Tensor.of(np.zeros((1, 1, 1, 96), np.float32)), np.zeros((1, 1, 1, 3, 18), np.uint8)
    blocks[..., 1, 0] = 60

    def result(other: int) -> Tensor:
        found = blocks.copy()
        found[..., 2:] = other
        return Tensor.of(found.reshape(1, 1, 1, 54), "iq4_nl")

    of = Node("ADD", result(0x88), (x, x))
    same = defined(of, of.dst, result(0x12))
    assert [bool((same.view() == of.dst.view())[0, 0, 0, block].all()) for block in range(3)] == [True, False, True]
    scaled = result(0x88)
    scaled.view()[..., 0, :2] = 60
    assert not (defined(of, of.dst, scaled).view() == of.dst.view())[0, 0, 0, 0].all()


def undefined_of(op: str, *sources: Tensor | None, ne: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which rows of dst are undefined, all of each."""
    flags = is_undefined(Node(op, Tensor.of(np.zeros(ne, np.float32)), sources))
    assert (flags.all(axis=-1) == flags.any(axis=-1)).all()
    return np.asarray(flags.all(axis=-1))


@pytest.mark.parametrize("value", [3e38, 2e33, 1e30])
def test_a_column_too_large_for_whole_numbers_is_undefined(value: float) -> None:
    """The order in which a block's scales and its sum of whole numbers are multiplied is the compiler's."""
    x = np.ones((1, 1, 3, 256), np.float32)
    x[0, 0, 1, 40] = value
    weights, floats = Tensor.of(np.zeros((1, 1, 5, 144), np.uint8), "q4_K"), Tensor.of(np.ones_like(x))
    assert undefined_of("MUL_MAT", weights, Tensor.of(x), ne=(1, 1, 3, 5)).tolist() == [[[False, value > 1e31, False]]]
    assert not is_undefined(Node("MUL_MAT", floats, (floats, Tensor.of(x)))).any()


def test_a_key_that_is_not_finite_spoils_the_queries_that_see_it() -> None:
    """Two heads of keys, each for two of queries; the second one's cell 3 holds what nobody wrote."""
    q, mask = np.ones((1, 4, 3, 64), np.float32), np.zeros((1, 1, 3, 5), np.float16)
    keys = np.zeros((1, 2, 5, 2, 34), np.uint8)
    keys[0, 1, 3, 0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    k = Tensor.of(keys.reshape(1, 2, 5, 68), "q8_0")
    mask[0, 0, :2, 3] = -np.inf
    found = undefined_of("FLASH_ATTN_EXT", Tensor.of(q), k, k, Tensor.of(mask), None, ne=(1, 3, 4, 64))
    assert np.argwhere(found).tolist() == [[0, 2, 2], [0, 2, 3]]
    found = undefined_of("FLASH_ATTN_EXT", Tensor.of(q), k, k, None, None, ne=(1, 3, 4, 64))
    assert found[0, :, 2:].all()
    assert not found[0, :, :2].any()


@pytest.mark.parametrize("value", [np.inf, 3e38, 1e30])
def test_many_queries_of_which_one_is_not_finite_or_may_overflow(value: float) -> None:
    """From 64 queries on, ggml's CPU multiplies tiles that are filled up with zeros, and infinity times 0 is NaN."""
    q, k = np.ones((1, 2, 64, 32), np.float32), Tensor.of(np.ones((1, 1, 5, 32), np.float16))
    q[0, 1, 7, 3] = value
    found = undefined_of("FLASH_ATTN_EXT", Tensor.of(q), k, k, None, None, ne=(1, 64, 2, 32))
    assert np.argwhere(found).tolist() == ([[0, 7, 1]] if value > 1e31 else [])


def test_an_indexer_takes_what_is_no_number_for_zero() -> None:
    q, k = np.ones((1, 2, 3, 64), np.float32), np.ones((1, 5, 1, 64), np.float32)
    q[0, 1, 2, 7], k[0, 4, 0, 9] = NAN, np.inf
    weights, mask = np.ones((1, 1, 2, 3), np.float32), np.zeros((1, 1, 2, 5), np.float16)
    sources = tuple(Tensor.of(x) for x in (q, k, weights, mask))
    flags = is_undefined(Node("LIGHTNING_INDEXER", Tensor.of(np.zeros((1, 1, 2, 5), np.float32)), sources))
    assert flags[0, 0].tolist() == [[False] * 4 + [True], [True] * 5]
