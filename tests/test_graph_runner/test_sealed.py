"""Files that carry their own SHA-256: `graph_runner.base.sealed`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader

from graph_runner.base.sealed import Seal

SEAL = Seal("sample")


def sealed(path: Path) -> Path:
    writer = SEAL.writer(path)
    writer.add_tensor("bytes", np.arange(64, dtype=np.int8))
    SEAL.finish(writer, path)
    return path


def test_a_whole_file_is_accepted_and_is_a_gguf(tmp_path: Path) -> None:
    path = sealed(tmp_path / "a.gguf")
    assert SEAL.begins(path)
    assert SEAL.refusal(path) is None
    assert [each.name for each in GGUFReader(path, "r").tensors] == ["bytes"]


def test_each_byte_counts(tmp_path: Path) -> None:
    path = sealed(tmp_path / "a.gguf")
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert SEAL.refusal(path), at
    path.write_bytes(data[:-1])
    assert "cut off" in str(SEAL.refusal(path))


def test_another_kind_is_none_of_this_one(tmp_path: Path) -> None:
    path = sealed(tmp_path / "a.gguf")
    assert not Seal("other").begins(path)
    assert Seal("other").refusal(path) == "a GGUF file, but no other"
