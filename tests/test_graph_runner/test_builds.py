"""Whole models on other builds of ggml: the diff finds no fault, whatever a compiler made of ggml's loops.

pytest -m builds makes the builds of tests/tools/builds.py, in some minutes each; pytest -m conformance uses ggml's own
programs, which are built for AVX2 on every processor.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.models import Models
from tools import builds

from graph_runner.tools import suites
from quant.kernels.processor import processor_has

COMMAND = Path(sys.executable).with_name("ggml-npu")
EXACT, ROUNDING = "every byte equals ggml's CPU\n", "rounding"


def verdict_of(libraries: Path, *arguments: str | Path) -> str:
    """The last lines of a diff with the ggml of a folder, which must end with 0."""
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(libraries)}
    command = [COMMAND, "diff", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout[-300:]


@pytest.mark.conformance
@pytest.mark.skipif(not processor_has("avx2", "fma", "f16c"), reason="the processor has no AVX2")
@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("name", ["demo", "llama", "moe", "gpt-oss", "rwkv7"])
def test_every_byte_is_the_cpu_s(model: Models, name: str, flash_attn: str) -> None:
    assert verdict_of(suites.build(), model(name), "--all", "--flash-attn", flash_attn).endswith(EXACT)


@pytest.mark.builds
@pytest.mark.parametrize("options", [(), ("--all",), ("--all", "--flash-attn", "off")], ids=" ".join)
@pytest.mark.parametrize("build", builds.BUILDS)
def test_the_demo_is_exact_or_rounded(build: str, options: tuple[str, ...]) -> None:
    if builds.lacking(build):
        pytest.skip(f"the processor has no {builds.lacking(build)}")
    verdict = verdict_of(builds.build(build), "demo", *options)
    assert EXACT in verdict or ROUNDING in verdict
