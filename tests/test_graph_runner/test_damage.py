"""Damaged models and traces: every command ends by itself, with its result or with one line and exit code 2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from kit.damage import Commands, cuts, edits, flips

from graph_runner.base.tiny import write_tiny_llama
from graph_runner.run.session import Settings
from graph_runner.trace import CaptureOptions, capture

Damage = Callable[[bytes, int, np.random.Generator], bytes]

TURNS = 3  # in which all files have been tried
MODELS = {"flips": 200, "cuts": 100, "edits": 200}
TRACES = {"flips": 80, "cuts": 40, "edits": 80}


def damages(path: Path) -> dict[str, Damage]:
    return {"flips": flips, "cuts": cuts, "edits": edits(path)}


def fuzz(folder: Path, good: Path, kind: str, count: int, turn: int, *arguments: str, end: str = "") -> None:
    """Runs a command over damaged files, a third of them each turn; fails with all that it does not end well over."""
    data, header = good.read_bytes(), int(GGUFReader(good).data_offset)
    damage, random = damages(good)[kind], np.random.default_rng(sum(map(ord, kind + good.name)))
    codes, bad = Counter[object](), []
    with Commands(folder) as command:
        for number in range(count):
            file = folder / f"{kind}-{number}.gguf"
            damaged = damage(data, header, random)
            if number % TURNS != turn % TURNS:
                continue
            file.write_bytes(end_of(damaged, end))
            ended = command(arguments[0], file, *arguments[1:])
            codes[ended.code] += 1
            if not ended.is_fine(0, 2, *([1] if end else [])):  # bytes that are others, and a right digest: they differ
                bad.append(f"{file.name}: {ended.code} after {ended.seconds:.1f} s: {ended.text[-300:]}")
            file.unlink()
    print(kind, dict(codes))
    assert not bad, "\n".join(bad)


def end_of(data: bytes, digest: str) -> bytes:
    """A trace whose digest is right in spite of the damage, where it is to be read further."""
    if digest != "right digest":
        return data
    import hashlib

    from graph_runner.base.sealed import NO_DIGEST
    from graph_runner.trace.format import SEAL

    begin, end = SEAL.digest_at, SEAL.digest_at + len(NO_DIGEST)
    if len(data) < end:
        return data
    blank = data[:begin] + NO_DIGEST + data[end:]
    return data[:begin] + hashlib.sha256(blank).hexdigest().encode() + data[end:]


@pytest.mark.slow
@pytest.mark.daily(6)
@pytest.mark.parametrize("kind", MODELS)
def test_damaged_models(tmp_path: Path, kind: str, turn: int) -> None:
    good = write_tiny_llama(tmp_path / "tiny.gguf")
    fuzz(tmp_path, good, kind, MODELS[kind], turn, "run", "-n", "2", "--threads", "1", "--all")


@pytest.mark.slow
@pytest.mark.daily(6)
@pytest.mark.parametrize("end", ["", "right digest"])
@pytest.mark.parametrize("kind", TRACES)
def test_damaged_traces(tmp_path: Path, kind: str, end: str, turn: int) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    good = tmp_path / "trace.gguf"
    capture(model, "abc", good, CaptureOptions(steps=1, settings=Settings(flash_attention="off", threads=1)))
    fuzz(tmp_path, good, kind, TRACES[kind] // (2 if end else 1), turn, "replay", end=end)


ASSERTED = {
    "block_count": ("llama.block_count", 0, 1_000_000),
    "no blocks": ("llama.block_count", 0, 0),
    "eps": ("llama.attention.layer_norm_rms_epsilon", 0, float("nan")),
    "a token twice": ("tokenizer.ggml.tokens", -1, ord("a")),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ASSERTED.values(), ids=ASSERTED)
def test_a_model_over_which_llama_cpp_aborts_is_told_in_a_line(tmp_path: Path, case: tuple[str, int, float]) -> None:
    key, place, value = case
    file = write_tiny_llama(tmp_path / "tiny.gguf")
    reader = GGUFReader(file, "r+")
    field = reader.fields[key]
    field.parts[field.data[place]][0] = value
    reader.data.flush()
    with Commands(tmp_path) as command:
        ended = command("run", file, "-n", "2", "--threads", "1")
    assert ended.code in (0, 2), ended
    if ended.code == 2:
        (line,) = ended.text.splitlines()
        assert line.startswith(f"ggml-npu: model {str(file)!r}: ")
