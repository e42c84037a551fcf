"""float16 in software is what NumPy says, and kernels run on a processor that has no instructions for it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from llvmlite import binding

from quant.kernels import halves

Functions = tuple[Callable[[int], float], Callable[[float], int]]

_CALLS = """
declare float @__extendhfsf2(half)
declare half @__truncsfhf2(float)

define float @widened(i16 %bits) {
  %half = bitcast i16 %bits to half
  %float = call float @__extendhfsf2(half %half)
  ret float %float
}

define i16 @narrowed(float %x) {
  %half = call half @__truncsfhf2(float %x)
  %bits = bitcast half %half to i16
  ret i16 %bits
}
"""


@pytest.fixture(scope="module")
def functions() -> Iterator[Functions]:
    """widened, narrowed."""
    kept = halves.define()
    target = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(_CALLS), target)
    engine.finalize_object()
    widened = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_uint16)(engine.get_function_address("widened"))
    narrowed = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_float)(engine.get_function_address("narrowed"))
    yield widened, narrowed
    del kept, engine


def test_every_half_is_widened(functions: Functions) -> None:
    widened = functions[0]
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # an ARM's conversion says that it met a signalling NaN
        expected = bits.view(np.float16).astype(np.float32)
    actual = np.array([widened(int(each)) for each in bits], np.float32)
    numbers = ~np.isnan(expected)
    assert np.array_equal(actual[numbers].view(np.uint32), expected[numbers].view(np.uint32))
    assert np.isnan(actual[~numbers]).all()


def test_floats_are_narrowed_to_the_nearest_half(functions: Functions) -> None:
    """Each half and its neighbours, what lies halfway between two, and what is beyond them."""
    narrowed = functions[1]
    halfs = np.arange(1 << 16, dtype=np.uint16)[::7].view(np.float16)
    halfs = halfs[np.isfinite(halfs)].astype(np.float32)
    between = np.nextafter(halfs.astype(np.float16), np.float16(np.inf)).astype(np.float32) / 2 + halfs / 2
    ends = np.array([65504, 65519.996, 65520, 65536, 3e38, np.inf, 2**-24, 2**-25, 2**-26, 0.0], np.float32)
    x = np.concatenate([halfs, between, np.nextafter(between, np.float32(0)), ends, -ends])
    with np.errstate(over="ignore", under="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    actual = np.array([narrowed(each) for each in x.tolist()], np.uint16)
    assert np.array_equal(actual, expected)
    assert narrowed(float("nan")) & 0x7E00 == 0x7E00


_RUNS = """
import numpy as np
import ggml_backend_npu
from graph_runner.judging import promises
from quant.kernels.processor import processor_has
assert not processor_has("f16c")
names = [
    *("MUL_MAT of f16", "MUL_MAT of q8_0", "SOFT_MAX of a mask that slopes of 2 ** n scale"),
    "FLASH_ATTN_EXT of f16, fewer than 64 queries",
]
print(*(name for name in names if not promises.holds(name)))
"""


@pytest.mark.slow
@pytest.mark.daily(3)
def test_kernels_for_a_processor_without_vectors_give_the_same_bytes() -> None:
    """In a process whose kernels are compiled for the first x86-64 of all; elsewhere for the plainest of its kind."""
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic"}
    result = subprocess.run([sys.executable, "-c", _RUNS], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr
