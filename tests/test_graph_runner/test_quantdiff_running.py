"""A text in chunks, and models between two that run over it."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from kit.quantised import SETTINGS, TEXT, write_pair

from graph_runner.base.errors import SessionError
from graph_runner.quantdiff import running
from graph_runner.quantdiff.files import ModelFile
from graph_runner.quantdiff.running import Mixed, Text
from graph_runner.run.session import Session


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFile, ModelFile]:
    big, small = write_pair(tmp_path_factory.mktemp("models"))
    return ModelFile(big), ModelFile(small)


@pytest.fixture(scope="module")
def text(pair: tuple[ModelFile, ModelFile]) -> Text:
    return Text.of(pair[0], TEXT, SETTINGS, 0)


def test_chunks_are_those_of_the_text(pair: tuple[ModelFile, ModelFile], text: Text) -> None:
    with Session(pair[0].path, SETTINGS) as session:
        tokens = session.tokenize(TEXT, special=False)
    assert len(text.chunks) == len(tokens) // 64 > 1
    assert [*chain(*text.chunks)] == tokens[: 64 * len(text.chunks)]
    assert text.n_scored == 31 * len(text.chunks)
    assert [*text.bases[1].targets] == text.chunks[1][33:]
    assert len(Text.of(pair[0], TEXT, SETTINGS, 1).chunks) == len(text.first(1).chunks) == 1


def test_logits_are_those_of_tokens_decoded_one_by_one(pair: tuple[ModelFile, ModelFile], text: Text) -> None:
    """The first token of a chunk is the model's own."""
    with Session(pair[0].path, SETTINGS) as session:
        tokens = [*session.begins_with, *text.chunks[1][1:]]
        assert session.begins_with
        for token in tokens[:40]:
            session.decode([token])
        logits = session.logits()
    base = text.bases[1]
    kept = base.lowest[7] + base.scale[7] * base.steps[7].astype(np.float32)
    x = logits.astype(np.float64)
    expected = np.maximum(x - np.log(np.exp(x - x.max()).sum()) - x.max(), kept.min())
    np.testing.assert_allclose(kept, expected, atol=2e-2)


def test_a_text_that_is_too_short(pair: tuple[ModelFile, ModelFile]) -> None:
    with pytest.raises(SessionError, match="text of 7 tokens: is shorter than a chunk of 64 tokens"):
        Text.of(pair[0], "hello", SETTINGS, 0)


def test_a_text_that_memory_cannot_hold(pair: tuple[ModelFile, ModelFile], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "free_memory", lambda: 1000)
    with pytest.raises(SessionError, match=r"the log-probabilities of all its chunks take .* GB more"):
        Text.of(pair[0], TEXT, SETTINGS, 0)
    assert len(Text.of(pair[0], TEXT, SETTINGS, 1).chunks) == 1


def test_logits_that_are_no_numbers(pair: tuple[ModelFile, ModelFile], text: Text) -> None:
    weights = pair[0].tensors["output_norm.weight"]
    broken = replace(weights, data=np.full(len(weights.data) // 4, np.nan, np.float32).view(np.uint8))
    with pytest.raises(SessionError, match=r"small.gguf with 1 other tensors': its logits hold NaN or infinity"):
        Mixed(pair[1], text).scores([broken])


def test_mixed_models(pair: tuple[ModelFile, ModelFile], text: Text) -> None:
    big, small = pair
    mixed = Mixed(small, text)
    alone = text.scores(small.path)
    assert np.array_equal(mixed.scores([]).kls, alone.kls)
    back = mixed.scores([*big.tensors.values()])
    assert np.array_equal(back.kls, text.scores(big.path).kls)
    assert back.kl.value < 1e-4 < alone.kl.value
    one = mixed.scores([big.tensors["output.weight"]])
    assert back.kl.value < one.kl.value < alone.kl.value
