"""A prompt in batches of any size, with --matmul exact: which bytes do not depend on the size. docs/numbers.md says
where they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.quantised import write_pair
from kit.support import choose

from graph_runner.base.settings import FlashAttention, Settings
from graph_runner.run.session import Session

SIZES = (1, 2, 7, 32)


def logits_of_last(model: Path, n_tokens: int, size: int, cache: str = "f16", flash: FlashAttention = "on") -> bytes:
    """The bytes of the last token's logits, if that many tokens are decoded at once."""
    settings = Settings("npu", n_ctx=800, threads=2, flash_attention=flash, cache_type_k=cache, cache_type_v=cache)
    tokens = [(17 * i * i + 3) % 200 + 5 for i in range(n_tokens)]
    with Session(model, settings) as session:
        for begin in range(0, n_tokens, size):
            session.decode(tokens[begin : begin + size])
        return session.logits().tobytes()


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch, every_op: None) -> None:
    choose(monkeypatch, matmul="exact")


@pytest.mark.parametrize("type", ["q8_0", "q4_0", "q5_1"])
@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_the_size_of_a_batch_changes_no_byte(tmp_path: Path, type: str, cache: str) -> None:
    _, model = write_pair(tmp_path, type)
    found = {size: logits_of_last(model, 250, size, cache) for size in SIZES}
    assert {size for size in SIZES if found[size] != found[1]} == set()


@pytest.mark.parametrize("type", ["q8_0", "f16", "f32"])
@pytest.mark.parametrize(("flash", "sizes"), [("on", (2, 7, 63)), ("off", (2, 7, 63, 64, 700))])
def test_two_tokens_at_once_and_more(tmp_path: Path, type: str, flash: FlashAttention, sizes: tuple[int, ...]) -> None:
    """Beyond 512 cells, of which ggml's CPU gives each thread some of a single token."""
    _, model = write_pair(tmp_path, type)
    found = {size: logits_of_last(model, 700, size, flash=flash) for size in sizes}
    assert {size for size in sizes if found[size] != found[2]} == set()
    if type != "q8_0" or flash == "on":
        assert logits_of_last(model, 700, 1, flash=flash) != found[2]


def test_where_ggml_attends_in_tiles_it_changes_bytes(tmp_path: Path) -> None:
    """64 tokens and more at once, as docs/numbers.md says; then any such size gives the same."""
    _, model = write_pair(tmp_path, "q8_0")
    one, many, all_ = (logits_of_last(model, 512, size) for size in (32, 128, 512))
    assert one != many
    assert many == all_
