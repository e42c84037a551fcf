"""Whole models on other builds of ggml: the diff finds no fault, whatever a compiler made of ggml's loops.

pytest -m builds makes the builds of tests/tools/builds.py, in some minutes each; pytest -m conformance uses ggml's own
programs, which are built for AVX2 on every processor.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit import patched
from kit.commands import fresh
from kit.models import Models
from kit.records import recorded
from tools import builds

from graph_runner.base.models import model_file
from graph_runner.record import Run, compare, read_run, write_run
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


@pytest.mark.daily(2)
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


@pytest.mark.builds
def test_what_a_build_computes_otherwise_is_said(tmp_path: Path) -> None:
    """Nodes that begin to differ do so by the rounding of float32 sums and exponentials."""
    a, b = tmp_path / "native.gguf", tmp_path / "v3.gguf"
    write_run(a, recorded_of_tiny())
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(builds.build("v3"))}
    command: list[str | Path] = [COMMAND, "record", "tiny", "-o", b, "--threads", "1", "--like", a]
    subprocess.run(command, env=environment, check=True, timeout=600)
    result = compare(read_run(a), read_run(b), a, b)
    assert "machine.ggml build" in [name for name, _, _ in result.differing]
    assert not result.alone_a
    assert result.origins is not None
    assert result.differ == 0 or result.origins.begins
    assert all(each.nmse < 1e-12 for each in result.origins.begins.values())


def recorded_of_tiny() -> Run:
    with model_file("tiny") as file:
        return recorded(file)


BESIDE = ("diff", "tiny", "-n", "0", "--reference", "cpu", "--device", "cpu", "--device-with")
FAULTS = {
    "stride": ((), r"CONT 'kqv_out-0' .*\nCONT ignores the strides from nb\[1\] on of src0: "),
    "scale": (
        ("--cache-type-k", "q8_0"),
        r"SET_ROWS 'cache_k_l0 \(view\)' .*\n\d+ of \d+ q8_0 blocks differ: \d+ in the scale, 0 ",
    ),
    "crash": ((), r"SWIGLU 'ffn_swiglu-0' .* failed: the process of CPU build=crash ended by SIGSEGV\n"),
    "hang": (
        ("--node-timeout", "5"),
        r"SWIGLU 'ffn_swiglu-0' .*: the process of CPU build=hang was not done after 5 s",
    ),
}


@pytest.mark.builds
@pytest.mark.parametrize("fault", patched.WRONG)
def test_a_fault_of_a_build_is_found_beside_another(fault: str) -> None:
    options, says = FAULTS[fault]
    outcome = fresh(*BESIDE, f"build={patched.build(fault)}", *options)
    assert outcome.code == 1, outcome
    assert re.match(rf"the first wrong node:\nstep 0 node \d+: {says}", outcome.out), outcome.out


@pytest.mark.builds
def test_a_build_beside_another_is_right_within_rounding() -> None:
    outcome = fresh(*BESIDE, f"build={builds.build('v3')}")
    assert outcome.code == 0, outcome
    assert re.search(r"own run of CPU build=v3: 50 nodes \(50 on CPU build=v3\): ", outcome.out), outcome.out
    assert "unobserved run checked" in outcome.out
