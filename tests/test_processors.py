"""With AVX2 alone: ggml's own programs are built for it, and kernels follow them on any processor.

Part of pytest -m conformance, which builds them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import Models

from graph_runner.suites import build
from quant.jit import processor_has

COMMAND = Path(sys.executable).with_name("ggml-npu")
pytestmark = [
    pytest.mark.conformance,
    pytest.mark.skipif(not processor_has("avx2", "fma", "f16c"), reason="the processor has no AVX2"),
]


@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("name", ["demo", "llama", "moe", "gpt-oss", "rwkv7"])
def test_every_byte_is_the_cpu_s(model: Models, name: str, flash_attn: str) -> None:
    command = [COMMAND, "diff", model(name), "--all", "--flash-attn", flash_attn]
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(build())}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.stdout.endswith("every byte equals ggml's CPU\n"), result.stdout + result.stderr
