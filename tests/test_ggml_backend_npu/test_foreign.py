"""Backends of other libraries, without a diff: what can be used, what is refused, memory that is read by copies."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.plugin.build import Builder
from ggml_backend_npu.plugin.foreign import ForeignDevice, ForeignError, ForeignMemory, of_ggml, of_library, of_server


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


class Opaque(ForeignMemory):
    """Takes buffers of ggml's CPU for ones that the host cannot read, and lets all begin at one address, as those of
    ggml-vulkan do."""

    def __init__(self) -> None:
        super().__init__(Hiding(lib.ggml()))  # type: ignore[arg-type]


class Hiding:
    def __init__(self, ggml: lib.Ggml) -> None:
        self._ggml = ggml

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ggml, name)

    def ggml_backend_buffer_is_host(self, handle: int) -> bool:
        return False


class Providing(Hiding):
    """ggml, in which the memory of ggml's CPU is of a device 42: its own, or the host's as it provides it."""

    def __init__(self, ggml: lib.Ggml, *, of_host: bool) -> None:
        super().__init__(ggml)
        self._of_host = of_host

    def ggml_backend_buft_get_device(self, kind: int) -> int:
        return 42

    def ggml_backend_dev_host_buffer_type(self, device: int) -> int:
        return int(self._ggml.ggml_backend_cpu_buffer_type()) if self._of_host else 0


def test_the_cpu_computes_in_memory_of_the_host_that_a_device_provides() -> None:
    """As in Vulkan_Host and CUDA_Host, in which llama.cpp lets its CPU compute beside such a device."""
    device = ForeignDevice(lib.DeviceInfo("GPU0", "GPU", "Some", ""), 42, 0)
    with Builder(lib.ggml(), "CPU") as build:
        node = build.op("neg", build.tensor("f32", (64,)))
        build.graph(node)
        for of_host in (False, True):
            assert bool(device.running(Providing(build.ggml, of_host=of_host), node)) is not of_host  # type: ignore[arg-type]


def test_memory_is_read_and_written_by_copies() -> None:
    ggml, memory = lib.ggml(), Opaque()
    data = np.arange(256, dtype=np.uint8)
    address = data.ctypes.data & -64
    handle = ggml.ggml_backend_cpu_buffer_from_ptr(address, data.ctypes.data + 256 - address)
    assert bytes(memory.bytes_at(data.ctypes.data, 4)) == bytes(convert.bytes_at(data.ctypes.data, 4))
    buffer, at = memory.packed(data.ctypes.data, handle), data.ctypes.data - address
    assert buffer is not None
    assert buffer is memory.packed(data.ctypes.data + 64, handle)
    assert buffer.address != address == buffer.address - buffer.moved
    assert (buffer.read(at + 16, 8) == data[16:24]).all()
    assert bytes(memory.bytes_at(buffer.address + at + 4, 4)) == bytes(data[4:8])
    buffer.write(at + 16, np.full(8, 7, np.uint8))
    assert (data[16:24] == 7).all()
    assert memory.buffer_at(buffer.address - 1) is None
    assert memory.buffer_at(buffer.address + buffer.size) is None
    assert memory.packed(data.ctypes.data, 0) is None
    ggml.ggml_backend_buffer_free(handle)


def test_what_lies_at_rest_is_read_once() -> None:
    ggml, memory = lib.ggml(), Opaque()
    data = np.arange(256, dtype=np.uint8)
    address = data.ctypes.data & -64
    handle = ggml.ggml_backend_cpu_buffer_from_ptr(address, data.ctypes.data + 256 - address)
    buffer, at = memory.packed(data.ctypes.data, handle), data.ctypes.data - address
    assert buffer is not None
    with memory.at_rest():
        assert buffer.read(at + 16, 16)[0] == 16
        data[16:40] = 7
        assert (buffer.read(at + 20, 4) == range(20, 24)).all()  # of what was read
        assert (buffer.read(at + 24, 16) == 7).all()  # it goes on beyond that
        buffer.write(at + 16, np.full(2, 9, np.uint8))
        assert (buffer.read(at + 16, 4) == (9, 9, 7, 7)).all()
        with pytest.raises(ValueError, match="read-only"):
            buffer.read(at + 16, 4)[0] = 1
    data[16] = 5
    assert buffer.read(at + 16, 1)[0] == 5
    ggml.ggml_backend_buffer_free(handle)


def test_buffers_that_begin_at_one_address_are_told_apart() -> None:
    """As those of ggml-vulkan, which all begin at 0x1000."""
    ggml, memory = lib.ggml(), Opaque()
    data = np.arange(1024, dtype=np.uint8)
    begin = -data.ctypes.data % 64
    handles = [ggml.ggml_backend_cpu_buffer_from_ptr(data.ctypes.data + begin, size) for size in (64, 128)]
    first, second = (memory.packed(data.ctypes.data + begin, handle) for handle in handles)
    assert first is not None
    assert second is not None
    assert first.address - first.moved == second.address - second.moved
    assert (first.address + 64 <= second.address) or (second.address + 128 <= first.address)
    assert memory.buffer_at(first.address + 63) is first
    assert memory.buffer_at(second.address + 127) is second
    for handle in handles:
        ggml.ggml_backend_buffer_free(handle)


def test_the_library_of_ggml_vulkan_exports_another_name(tmp_path: Path) -> None:
    """Built without GGML_BACKEND_DL it has ggml_backend_vk_reg."""
    source, library = tmp_path / "vulkan.c", tmp_path / "libggml-vulkan.so"
    source.write_text("void * ggml_backend_vk_reg(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(ForeignError, match="it gives no backend"):
        of_library(lib.ggml(), library)


@pytest.mark.conformance
def test_a_library_that_brings_another_ggml(tmp_path: Path) -> None:
    source, base, library = tmp_path / "empty.c", tmp_path / "libggml-base-two.so", tmp_path / "libggml-two.so"
    source.write_text("int two(void) { return 2; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", base, source], check=True)
    linked: list[str | Path] = ["-Wl,--no-as-needed", base, f"-Wl,-rpath,{tmp_path}"]
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, *linked], check=True)
    with pytest.raises(ForeignError, match="needs a ggml of its own, beside that of "):
        of_library(lib.ggml(), library)
