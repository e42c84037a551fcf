"""Names of numba and LLVM import neither, and stand for what they name where a kernel is compiled."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numba import types as of_numba

from quant.kernels.jit import array_at, callback, inlined
from quant.kernels.late import intrinsic, ir, types
from quant.kernels.vectors import FLOAT, INT32

KIND = types.float32  # a name at the top of a module

STARTS = """
import sys
import ggml_backend_npu, graph_runner.run.token_graph, graph_runner.diff.run, graph_runner.trace
from graph_runner.cli.app import COMMANDS, function_of
for command in COMMANDS:
    function_of(command)
ggml_backend_npu.register()
"""
RUNS = """
import sys
from graph_runner.cli import main
sys.argv = ["ggml-npu", "run", "tiny", "-n", "2", "--all"]
try:
    main()
except SystemExit as end:
    assert not end.code
"""
LOADED = """
print("loaded:", *sorted({name.split(".")[0] for name in sys.modules} & {"numba", "llvmlite", "jinja2"}))
"""


def test_what_stands_for_something_becomes_it() -> None:
    assert types.float32.real is of_numba.float32
    assert types.void(types.int64, types.uint8).real == of_numba.void(of_numba.int64, of_numba.uint8)
    assert types.int64(types.uint8, types.intp).names == ("int64", "uint8", "intp")
    assert (str(FLOAT.real), str(INT32.real)) == ("float", "i32")


@intrinsic
def _doubled(typing_context: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.shl(arguments[0], ir.Constant(ir.IntType(64), 1))

    return types.int64(types.int64), emit


@inlined
def _twice(address: int, kind: Any, n: int) -> Any:
    values = array_at(address, kind, n)
    for i in range(n):
        values[i] = KIND(2) * values[i]
    return _doubled(n)


@callback(types.int64(types.int64, types.int64))
def _double(address: int, n: int) -> Any:
    return _twice(address, types.float32, n)


def test_names_are_numbas_in_a_kernel() -> None:
    values = np.arange(5, dtype=np.float32)
    assert _double(values.ctypes.data, 5) == 10
    assert values.tolist() == [0, 2, 4, 6, 8]


def test_a_part_is_called_from_python_too() -> None:
    @inlined
    def add(a: int, b: int) -> int:
        """a + b"""
        return a + b

    assert add(2, 3) == 5
    assert (add.__name__, add.__doc__) == ("add", "a + b")


@pytest.mark.parametrize("code", [STARTS, pytest.param(RUNS, marks=pytest.mark.slow)])
def test_a_process_whose_kernels_are_kept_loads_no_compiler(code: str) -> None:
    for _ in range(2):  # the first one may compile them
        done = subprocess.run([sys.executable, "-c", code + LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"
