"""whisper.cpp as pywhispercpp has it, a wheel with a ggml of its own: the device goes in, and its trace is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit import whisper

from graph_runner.trace import replay

pytest.importorskip("pywhispercpp", reason="pywhispercpp is not installed; it is in the extra 'test'")

PROGRAM = """
import json, sys
import numpy as np

result = {}
if sys.argv[3] == "npu":
    import ggml_backend_npu

    plugin = ggml_backend_npu.register(into="pywhispercpp")
from pywhispercpp.model import Model

model = Model(
    sys.argv[1], redirect_whispercpp_logs_to=None, print_progress=False, max_tokens=8, n_threads=2, temperature_inc=0.0,
    no_timestamps=True, context_params={"flash_attn": sys.argv[4] == "flash"},
)
result["text"] = [segment.text for segment in model.transcribe(np.load(sys.argv[2]))]
if sys.argv[3] == "npu":
    result |= {"nodes": plugin.statistics.computed, "refused": plugin.refusals, "ggml": plugin.ggml.version}
print(json.dumps(result))
"""


def transcribed(folder: Path, device: str, attention: str, **variables: str) -> dict[str, Any]:
    """What a program that transcribes a second of noise prints."""
    model, sound = folder / "model.bin", folder / "sound.npy"
    if not model.exists():
        whisper.write_model(model)
        whisper.save_noise(sound)
    command = [sys.executable, "-c", PROGRAM, str(model), str(sound), device, attention]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["plain", "flash"])
def test_all_nodes_are_on_the_npu_and_the_text_is_the_cpus(tmp_path: Path, attention: str) -> None:
    trace = tmp_path / "trace.gguf"
    cpu = transcribed(tmp_path, "cpu", attention)
    npu = transcribed(tmp_path, "npu", attention, GGML_NPU_OPS="all", GGML_NPU_CAPTURE=str(trace))
    assert npu["text"] == cpu["text"]
    assert npu["text"][0].strip()
    assert npu["refused"] == {}
    assert {"IM2COL", "MUL_MAT", "NORM", "GELU", "ADD", "MUL", "GET_ROWS"} <= npu["nodes"].keys()
    assert ("FLASH_ATTN_EXT" in npu["nodes"]) == (attention == "flash")
    judged = replay(trace)
    assert judged
    assert len(judged.nodes) == sum(npu["nodes"].values())
