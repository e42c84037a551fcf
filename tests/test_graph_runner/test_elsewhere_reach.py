"""The memory of another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from graph_runner.base.errors import SessionError
from graph_runner.elsewhere.layout import Place
from graph_runner.elsewhere.reach import Reach

HOLDS = """
import ctypes, sys
held = ctypes.create_string_buffer(bytes(range(256)) * 16)
print(ctypes.addressof(held), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held() -> Iterator[tuple[int, int]]:
    """A process, and where it has the bytes 0 to 255, sixteen times."""
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.communicate()


def test_bytes_of_another_process_by_the_addresses_that_its_buffers_have_here(held: tuple[int, int]) -> None:
    process, base = held
    reach = Reach(process)
    first, second = (reach.buffer(Place(handle, base + at, 256, True)) for handle, at in ((1, 0), (2, 16)))
    assert first is not None
    assert second is not None
    assert reach.buffer(Place(1, base, 256, True)) is first
    assert first.address + first.size <= second.address or second.address + second.size <= first.address
    assert np.array_equal(first.read(3, 5), np.arange(3, 8, dtype=np.uint8))
    assert np.array_equal(reach.read(second.address + 1, 2), np.arange(17, 19, dtype=np.uint8))
    reach.close()


def test_no_buffer() -> None:
    reach = Reach(os.getpid())
    assert reach.buffer(Place(0, 0, 0, True)) is None
    reach.close()


def test_a_process_that_may_not_be_read() -> None:
    with pytest.raises(SessionError, match="the memory of process 999999999 cannot be read: "):
        Reach(999999999)
