"""The peak memory of a process that decodes with a model: with every node on the NPU, and with llama.cpp alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from graph_runner.base.errors import BenchError
from graph_runner.base.python import environment, python
from graph_runner.bench.measure import GGML_CPU, Measurement

# Programs: arguments are a model, threads, and the tokens of a prompt. What they print last is their own peak; that
# which the system tells a parent process may be of the parent.
_PEAK = """
print(open("/proc/self/status").read())
"""
_ON_THE_NPU = """
import sys
from pathlib import Path
from ggml_backend_npu import default_backend
from graph_runner.run.session import Session, Settings
backend = default_backend()
backend.options = backend.options.updated({"ops": "all"})
model, threads, *tokens = sys.argv[1:]
settings = Settings(device="npu", n_ctx=len(tokens) + 16, threads=int(threads), flash_attention="on")
with Session(Path(model), settings, counts_nodes=False) as session:
    session.decode([int(token) for token in tokens])
    for _ in range(8):
        session.decode([int(tokens[0])])
"""
_LLAMA_CPP = """
import os
import sys
from llama_cpp import llama_cpp
quiet = llama_cpp.llama_log_callback(lambda *_: None)
llama_cpp.llama_log_set(quiet, None)
model, threads, *tokens = sys.argv[1:]
params = llama_cpp.llama_model_default_params()
params.use_extra_bufts = False
model = llama_cpp.llama_model_load_from_file(os.fsencode(model), params)
params = llama_cpp.llama_context_default_params()
params.n_ctx = params.n_batch = params.n_ubatch = len(tokens) + 16
params.n_threads = params.n_threads_batch = int(threads)
params.flash_attn_type = 1
context = llama_cpp.llama_init_from_model(model, params)
for batch in [[int(token) for token in tokens], *[[int(tokens[0])]] * 8]:
    array = (llama_cpp.llama_token * len(batch))(*batch)
    assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(batch))) == 0
"""


def bench_memory(model: Path, tokens: list[int], *, threads: int) -> Measurement:
    """Measures the peak resident memory, in MB, of a process that decodes a prompt and 8 tokens. Raises BenchError if
    it fails."""
    ours, theirs = (_peak(program, model, tokens, threads) for program in (_ON_THE_NPU, _LLAMA_CPP))
    return Measurement("memory of a process", "MB", [ours / 1e6], {GGML_CPU: [theirs / 1e6]}, group="memory")


def _peak(program: str, model: Path, tokens: list[int], threads: int) -> int:
    """Returns the peak resident memory of a process in bytes."""
    command = python("-c", program + _PEAK, model, str(threads), *map(str, tokens))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, errors="replace", check=False)
    found = re.search(r"VmHWM:\s*(\d+) kB", done.stdout)
    if done.returncode or found is None:
        reason = done.stderr.strip() or "this system does not tell"
        raise BenchError(f"memory of {str(model)!r}: {reason.splitlines()[-1]}")
    return int(found[1]) * 1024
