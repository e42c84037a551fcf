"""Products of quantised rows with quantised vectors, of each type and in each way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from kit.products import multiplied_exactly, multiplied_fast
from kit.support import encoded
from llvmlite import binding

import quant
from ggml_backend_npu import default_backend
from ggml_backend_npu.ops.kernels import products
from quant import dots


def dots_of_each_type() -> dict[str, str]:
    """What `quant.products` gives, as hexadecimal digits: 7 rows of each type times
    a vector of 512, and 35 rows times 1 and 5."""
    k, n_rows, found = 512, 7, {}
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(n).astype(np.float32) for n in (k, k * n_rows))
    for type in dots.DOTS:
        weights = encoded(type, w.reshape(n_rows, k)).reshape(n_rows, -1)
        y = multiplied_exactly(weights, type, x[None])[0]
        rounding, rounded_to = default_backend().numerics.rounding, products.VEC_DOT[type]
        rounded = quant.dequantize(quant.quantize(x, rounded_to, rounding), rounded_to)
        rows = quant.dequantize(weights, type).reshape(n_rows, k).astype(np.float64)
        bound = 1e-3 if rounded_to == "q8_1" else 1e-6  # the sum beside q8_1's quants is rounded to f16
        assert np.abs(y - rows @ rounded.astype(np.float64)).max() <= bound * np.linalg.norm(rows) * np.linalg.norm(x)
        found[type] = y.tobytes().hex()
        many = encoded(type, rng.standard_normal((35, k)).astype(np.float32)).reshape(35, -1)
        columns = rng.standard_normal((5, k)).astype(np.float32)
        for way, n in product((multiplied_exactly, multiplied_fast), (1, 5)):
            found[f"{type}, {way.__name__}, {n}"] = way(many, type, columns[:n]).tobytes().hex()
    return found


PORTABLE = """
import json
import sys
import test_products
from quant.kernels.processor import processor_has

assert not any(map(processor_has, sys.argv[1:]))
print(json.dumps(test_products.dots_of_each_type()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("lacking", [("avx512vnni",), ("avx512vnni", "avx2")])
def test_the_processors_dot_products_equal_the_portable_ones(lacking: tuple[str, ...]) -> None:
    """Those of AVX2, and the portable ones, each in a process that compiles for a processor that lacks the others."""
    features = binding.get_host_cpu_features().flatten().split(",")
    without = ",".join(f"-{feature[1:]}" if feature[1:] in lacking else feature for feature in features)
    environment = os.environ | {"NUMBA_CPU_FEATURES": without, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PORTABLE, *lacking]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dots_of_each_type()
