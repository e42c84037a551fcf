"""A wrong kernel, from the first look at a model to the fix: plants a bug in CONT, finds it, fixes it.

python examples/find_a_bug.py [MODEL]        MODEL: a path, demo (the default) or tiny
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from ggml_backend_npu import Op, Tensor, default_backend
from graph_runner.base.models import model_file
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.trace import replay


def cont(dst: Tensor, x: Tensor) -> None:
    """Makes x contiguous, or so its author thinks: it takes the bytes as they lie in memory and ignores the strides of
    x."""
    bytes_as_they_lie = x.memory.bytes()[x.offset : x.offset + dst.nbytes]
    dst.view()[...] = bytes_as_they_lie.view(np.float32).reshape(dst.ne[::-1])


with model_file(sys.argv[1] if len(sys.argv) > 1 else "demo") as model, tempfile.TemporaryDirectory() as folder:
    with default_backend().ops.having(Op("CONT", cont, frozenset({("f32", "f32")}))):
        result = diff(model, "The capital of France is", DiffOptions(steps=1, reproducers=Path(folder)))
    first = result.wrong[0]
    print(f"{len(result.wrong)} of {len(result.compared)} nodes are wrong, the first one is {first.op} {first.name!r}:")
    print(first.diagnosis)
    print(f"nearest test cases of ggml: {first.test}")
    inherited = sum(node.verdict == "inherited" for node in result.nodes)
    print(f"{inherited} nodes after it are right, and compute with what it did")

    trace = sorted(Path(folder).glob("*-CONT.gguf"))[0]
    with default_backend().ops.having(Op("CONT", cont, frozenset({("f32", "f32")}))):
        wrong = replay(trace)
    right = replay(trace)
    print(f"{trace.name}, {trace.stat().st_size:,} bytes, without the model: {'right' if wrong else 'wrong'} with this")
    print(f"kernel, {'right' if right else 'wrong'} with the one that heeds strides")
    found = not wrong and bool(right) and first.diagnosis is not None
sys.exit(not found)
