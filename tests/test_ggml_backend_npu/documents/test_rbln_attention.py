"""Whole attentions of RBLN's operators, and the examples: against the definition and against ggml."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.documented import F16, F32, Array, either_engine
from kit.scores import causal, close, defined, drawn, f32, one, row
from kit.support import seeds

from ggml_backend_npu.documents.rbln import dynamic_flash_attn_tile, flash_attn_recompute, masked_softmax
from ggml_backend_npu.plugin.build import Builder
from ggml_backend_npu.plugin.plugin import Plugin

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_local_offsets_are_the_causal_mask_where_later_partitions_are_left_out() -> None:
    """All sizes up to 4: the columns that the tiles of a step have, with and without the partitions after its end."""
    cases = 0
    for size, n_new in product(range(1, 5), range(1, 5)):
        for cached in range(3 * size + 1):
            if cached % size + n_new > size:
                continue
            last = (cached + n_new - 1) // size + 1
            expected = causal((1, 1, n_new, (last + 1) * size), cached)
            tiles = []
            for partition in range(last + 1):
                index = min(max(cached - partition * size, 0), size)
                _, e, _ = dynamic_flash_attn_tile(np.zeros((1, 1, n_new, size), np.float32), index)
                left_out = partition * size >= cached + n_new
                assert left_out == (partition == last)
                tiles.append(0 * e if left_out else e)
                assert not left_out or e.any()  # it would show what was never stored
            np.testing.assert_array_equal(np.concatenate(tiles, -1) > 0, expected)
            cases += 1
    assert cases == 70


@either_engine
def test_a_sink_counts_in_each_tile_that_is_given_it() -> None:
    _, _, without = dynamic_flash_attn_tile(row(1, 2), 2)
    maximum, e, total = dynamic_flash_attn_tile(row(1, 2), 2, sink=one(3))
    np.testing.assert_array_equal(maximum, one(3))
    close(total, np.exp(f32(1 - 3, 2 - 3)).sum() + 1)
    close(e, np.exp(row(1 - 3, 2 - 3)))
    assert total != without
    again, _, second = dynamic_flash_attn_tile(row(1, 2), 2, maximum, sink=one(3))
    close(flash_attn_recompute(maximum, again, total, second, e, e)[0], 2 * total)


class Scenario:
    """A sequence and its attentions: by the definition, and by ggml's ops on its CPU."""

    def __init__(self, backend: Plugin, n_tokens: int, head: int, group: int, d: int, window: int | None) -> None:
        rng = np.random.default_rng(n_tokens)
        self.ggml, self.window = backend.ggml, window
        self.q = drawn((1, head, group, n_tokens, d), rng, spread=1)
        self.k, self.v = (drawn((1, head, 1, n_tokens, d), rng, spread=1) for _ in range(2))
        self.sink = drawn((1, head, group, 1, 1), rng, spread=1)
        self.scale = d**-0.5
        self.kept = np.tri(n_tokens, dtype=np.bool_)
        if window is not None:
            self.kept &= ~np.tri(n_tokens, k=-window, dtype=np.bool_)
        self.added = np.where(self.kept, 0, -np.inf)

    def defined(self, sink: Array | None) -> Array:
        scores = self.q.astype(np.float64) @ self.k.swapaxes(-1, -2) * self.scale
        return defined(scores, np.broadcast_to(self.kept, scores.shape), sink) @ self.v

    def by_soft_max(self, sink: Array | None, mask_type: str) -> Array:
        """The probabilities are ggml's."""
        scores = (self.q @ self.k.swapaxes(-1, -2)).astype(np.float32)
        _, head, group, n, _ = scores.shape
        with Builder(self.ggml, "CPU") as build:
            x, mask = build.tensor("f32", (n, n, head * group)), build.tensor(mask_type, (n, n))
            node = build.op("soft_max_ext", x, mask, self.scale, 0.0)
            logits = build.tensor("f32", (head * group,))
            if sink is not None:
                build.function("soft_max_add_sinks")(node, logits)
                build.set(logits, sink)
            build.set(x, scores)
            build.set(mask, self.added.astype({"f16": np.float16, "f32": np.float32}[mask_type]))
            assert build.compute(node) == 0
            p = build.get(node).view(np.float32).reshape(scores.shape)
        return p @ self.v

    def by_flash_attention(self, sink: Array | None) -> Array:
        _, head, group, n, d = self.q.shape
        with Builder(self.ggml, "CPU") as build:
            q = build.tensor("f32", (d, n, head * group))
            k, v = (build.tensor("f32", (d, n, head)) for _ in range(2))
            mask, logits = build.tensor("f16", (n, n)), build.tensor("f32", (head * group,))
            node = build.op("flash_attn_ext", q, k, v, mask, self.scale, 0.0, 0.0)
            if sink is not None:
                build.function("flash_attn_ext_add_sinks")(node, logits)
                build.set(logits, sink)
            for tensor, data in ((q, self.q), (k, self.k), (v, self.v), (mask, self.added.astype(np.float16))):
                build.set(tensor, data)
            assert build.compute(node) == 0
            out = build.get(node).view(np.float32).reshape(1, n, head, group, d)
        return np.moveaxis(out, 1, 3)

    def check(self, attention: Callable[[Array | None], Array]) -> None:
        """An attention of this sequence equals all others, without and with the sink."""
        for sink in (None, self.sink):
            actual = attention(sink)
            assert actual.dtype == F32
            for expected in (
                self.defined(sink),
                self.by_soft_max(sink, "f16"),
                self.by_soft_max(sink, "f32"),
                self.by_flash_attention(sink),
            ):
                np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


@either_engine
@pytest.mark.parametrize(
    ("n_tokens", "n_prompt", "longest", "size"),
    [(1, 1, 1, 1), (23, 13, 3, 4), (24, 24, 8, 8), (70, 50, 64, 32), (5, 3, 9, 64)],
)
def test_partitioned_flash_attention(backend: Plugin, n_tokens: int, n_prompt: int, longest: int, size: int) -> None:
    example = runpy.run_path(str(EXAMPLES / "partitioned_flash_attention.py"))
    scenario = Scenario(backend, n_tokens, 2, 3, 16, None)
    scenario.check(
        lambda sink: example["attention"](
            scenario.q, scenario.k, scenario.v, n_prompt=n_prompt, longest=longest, size=size, sink=sink
        )
    )


def test_partitioned_flash_attention_refuses_a_step_over_the_end_of_a_partition() -> None:
    example = runpy.run_path(str(EXAMPLES / "partitioned_flash_attention.py"))
    new, cache = np.zeros((1, 1, 1, 2, 4), np.float32), np.zeros((2, 1, 1, 1, 4, 4), np.float32)
    with pytest.raises(ValueError, match="2 tokens behind 3"):
        example["step"](new, new, new, cache, cache, 3)


@either_engine
@pytest.mark.parametrize(
    ("window", "chunks"), [(4, [3, 1, 1, 4, 1, 1]), (4, [11]), (1, [1, 2, 3]), (8, [1] * 20), (64, [40, 40, 1, 1])]
)
def test_sliding_window_attention(backend: Plugin, window: int, chunks: list[int]) -> None:
    example = runpy.run_path(str(EXAMPLES / "sliding_window_attention.py"))
    scenario = Scenario(backend, sum(chunks), 2, 3, 16, window)
    scenario.check(
        lambda sink: example["attention"](scenario.q, scenario.k, scenario.v, window=window, chunks=chunks, sink=sink)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["partitioned_flash_attention", "sliding_window_attention"])
def test_the_examples_say_what_they_checked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("max |difference| to full attention" in line for line in lines)


@either_engine
@given(seed=seeds, mask_type=st.sampled_from([F16, F32]), with_sink=st.booleans())
def test_masked_softmax_gives_what_ggmls_soft_max_gives(
    backend: Plugin, seed: int, mask_type: Any, with_sink: bool
) -> None:
    rng = np.random.default_rng(seed)
    n, hg, s, c = (int(value) for value in rng.integers(1, [3, 5, 5, 40]))
    x, kept = drawn((n, hg, s, c), rng), rng.random((n, 1, s, c)) < 0.6
    kept[..., 0] = True  # ggml gives NaN for a row without any
    sink = drawn((1, hg, 1, 1), rng) if with_sink else None
    with Builder(backend.ggml, "CPU") as build:
        tensor = build.tensor("f32", (c, s, hg, n))
        mask = build.tensor("f16" if mask_type == F16 else "f32", (c, s, 1, n))
        logits = build.tensor("f32", (hg,))
        node = build.op("soft_max_ext", tensor, mask, 1.0, 0.0)
        if sink is not None:
            build.function("soft_max_add_sinks")(node, logits)
            build.set(logits, sink)
        build.set(tensor, x)
        build.set(mask, np.where(kept, 0, -np.inf).astype(mask_type))
        assert build.compute(node) == 0
        expected = build.get(node).view(np.float32).reshape(x.shape)
    close(masked_softmax(x, kept.astype(mask_type), sink), expected)
