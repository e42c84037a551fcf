"""What a run is computed by: `graph_runner.record.machine`."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import xxhash

from ggml_backend_npu.ggml import lib
from graph_runner.base import builds
from graph_runner.record import machine


def test_versions_and_the_build_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ggml = lib.ggml()
    monkeypatch.setattr(machine, "_PACKAGES", ("numpy", "none-of-this-name"))
    found = machine.machine(ggml)
    assert (found["numpy"], found["none-of-this-name"]) == (version("numpy"), "")
    assert found["ggml"] == ggml.version
    assert found["ggml build"].split()[0] == xxhash.xxh3_64_hexdigest(Path(ggml.cpu_file).read_bytes())


def test_the_hash_of_parts_is_that_of_all_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "_CHUNK", 3)
    parts = [tmp_path / "a", tmp_path / "b"]
    for part, data in zip(parts, (b"12345", b"6"), strict=True):
        part.write_bytes(data)
    assert builds.hash_of(*parts) == xxhash.xxh3_64_hexdigest(b"123456")
