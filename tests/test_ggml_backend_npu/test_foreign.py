"""Backends of other libraries, without a diff: what can be used, what is refused, memory that is read by copies."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.plugin.foreign import ForeignError, ForeignMemory, of_ggml, of_library, of_server


def test_devices_of_ggml() -> None:
    found = {each.name: each for each in of_ggml(lib.ggml())}
    assert found["CPU"].info.type == "CPU"
    assert not found["CPU"].takes_layers


def test_libraries_that_are_no_backend(tmp_path: Path) -> None:
    text = tmp_path / "libggml-text.so"
    text.write_text("no library")
    with pytest.raises(ForeignError, match=r"libggml-text.so': cannot be loaded: "):
        of_library(lib.ggml(), text)
    with pytest.raises(ForeignError, match=r"libggml-none\.so': no such file"):
        of_library(lib.ggml(), tmp_path / "libggml-none.so")
    base = next(lib.ggml().cpu_file.parent.glob("libggml-base.so*"))
    with pytest.raises(ForeignError, match="exports no ggml_backend_init and no ggml_backend_base_reg"):
        of_library(lib.ggml(), base)


@pytest.mark.parametrize("endpoint", ["", "localhost", "localhost:", "a b:1", "localhost:123456", ":1"])
def test_endpoints_that_are_none(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ForeignError, match="must be HOST:PORT"):
        of_server(lib.ggml(), endpoint, tmp_path / "libggml-rpc.so")


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    for endpoint in ("127.0.0.1:1", "127.0.0.1:70000"):
        with pytest.raises(ForeignError, match="no server answers"):
            of_server(lib.ggml(), endpoint, tmp_path / "libggml-rpc.so")


def test_memory_is_read_and_written_by_copies() -> None:
    """Of a buffer of ggml's CPU, as if the host could not read it."""
    ggml, memory = lib.ggml(), ForeignMemory(lib.ggml())
    data = np.arange(256, dtype=np.uint8)
    address = data.ctypes.data & -64
    handle = ggml.ggml_backend_cpu_buffer_from_ptr(address, data.ctypes.data + 256 - address)
    assert bytes(memory.bytes_at(data.ctypes.data, 4)) == bytes(convert.bytes_at(data.ctypes.data, 4))
    memory._learns(handle)
    buffer, at = memory.buffer_at(data.ctypes.data), data.ctypes.data - address
    assert buffer is not None
    assert (buffer.read(at + 16, 8) == data[16:24]).all()
    assert bytes(memory.bytes_at(data.ctypes.data + 4, 4)) == bytes(data[4:8])
    buffer.write(at + 16, np.full(8, 7, np.uint8))
    assert (data[16:24] == 7).all()
    assert memory.buffer_at(address - 1) is None
    assert memory.buffer_at(data.ctypes.data + 256) is None
    ggml.ggml_backend_buffer_free(handle)


@pytest.mark.conformance
def test_a_library_that_brings_another_ggml(tmp_path: Path) -> None:
    source, base, library = tmp_path / "empty.c", tmp_path / "libggml-base-two.so", tmp_path / "libggml-two.so"
    source.write_text("int two(void) { return 2; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", base, source], check=True)
    linked: list[str | Path] = ["-Wl,--no-as-needed", base, f"-Wl,-rpath,{tmp_path}"]
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, *linked], check=True)
    with pytest.raises(ForeignError, match="needs a ggml of its own, beside that of "):
        of_library(lib.ggml(), library)
