"""Models taken apart and put together in memory, and what is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from kit.models import write_tiny_moe
from kit.quantised import in_type, write_pair, write_with

from graph_runner.base.errors import SessionError
from graph_runner.base.tiny import TinyModel, spm_vocabulary, write_tiny_llama
from graph_runner.quantdiff import files
from graph_runner.quantdiff.files import ModelFile


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "big.gguf")


def test_a_model_of_its_own_tensors_is_the_same_file(big: Path) -> None:
    model = ModelFile(big)
    with model.with_tensors([*model.tensors.values()]) as made:
        assert made.read_bytes() == big.read_bytes()
    assert not made.exists()


def test_a_tensor_in_another_type_keeps_the_others(big: Path, tmp_path: Path) -> None:
    mixed = ModelFile(write_with(tmp_path / "x.gguf", big, {"blk.1.attn_k.weight": in_type("q5_0")}))
    for name, each in ModelFile(big).tensors.items():
        found = mixed.tensors[name]
        assert found.type == ("q5_0" if name == "blk.1.attn_k.weight" else each.type)
        assert (found.ne, found.layer, found.kind) == (each.ne, each.layer, each.kind)
        assert found.type == "q5_0" or found.data.tobytes() == each.data.tobytes()


def test_sizes(big: Path) -> None:
    model = ModelFile(big)
    assert model.n_bytes == sum(each.data.nbytes for each in model.tensors.values())
    assert model.bpw == pytest.approx(8 * model.n_bytes / model.n_weights)
    assert model.tensors["output.weight"].layer is None
    assert model.tensors["blk.1.attn_k.weight"].layer == 1
    assert model.tensors["blk.1.attn_k.weight"].kind == "attn_k.weight"


def test_files_that_are_no_models(big: Path, tmp_path: Path) -> None:
    text, cut = tmp_path / "text.gguf", tmp_path / "cut.gguf"
    text.write_text("no model")
    cut.write_bytes(big.read_bytes()[:5000])
    for path, why in ((text, "not a GGUF file"), (cut, "not a whole GGUF file"), (tmp_path / "none", "no such file")):
        with pytest.raises(SessionError, match=why) as error:
            ModelFile(path)
        assert repr(str(path)) in str(error.value)
        assert "\n" not in str(error.value)


def test_a_part_of_a_split_model(tmp_path: Path) -> None:
    model = TinyModel(tmp_path / "a.gguf", "llama", spm_vocabulary())
    model.writer.add_uint16("split.count", 2)
    model.norm("output_norm")
    with pytest.raises(SessionError, match="is one of several parts"):
        ModelFile(model.save())


def test_models_that_are_not_of_one(big: Path, tmp_path: Path) -> None:
    model = ModelFile(big)
    model.refuse_another(ModelFile(write_pair(tmp_path)[1]))
    with pytest.raises(SessionError, match=r"differ in llama.expert_count|tensor 'blk.0.ffn_gate.weight' is not in"):
        model.refuse_another(ModelFile(write_tiny_moe(tmp_path / "moe.gguf")))
    words = replace(spm_vocabulary(), tokens=[*spm_vocabulary().tokens[:-1], "other"])
    other = TinyModel(tmp_path / "words.gguf", "llama", words)
    other.norm("output_norm")
    with pytest.raises(SessionError, match=r"differ in tokenizer.ggml.tokens$"):
        model.refuse_another(ModelFile(other.save()))
    narrow = TinyModel(tmp_path / "narrow.gguf", "llama", spm_vocabulary(), n_embd=32)
    narrow.norm("output_norm")
    with pytest.raises(SessionError, match=r"differ in llama.embedding_length: 64 and 32"):
        model.refuse_another(ModelFile(narrow.save()))


def test_shapes_that_differ(big: Path) -> None:
    model, other = ModelFile(big), ModelFile(big)
    other.tensors["blk.0.attn_q.weight"] = replace(other.tensors["blk.0.attn_q.weight"], ne=(128, 64))
    with pytest.raises(SessionError, match=r"tensor 'blk.0.attn_q.weight' has ne \[64, 128\] and \[128, 64\]"):
        model.refuse_another(other)


def test_a_mixed_model_that_memory_cannot_hold(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_memory", lambda: 1000)
    model, before = ModelFile(big), len(os.listdir("/proc/self/fd"))
    with pytest.raises(SessionError, match="of memory"), model.with_tensors([*model.tensors.values()]):
        pass
    assert len(os.listdir("/proc/self/fd")) == before
