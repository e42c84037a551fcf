"""ggml's own suites on the device, in a program that knows nothing of this project: pytest -m conformance.

The programs are built from the sources of the installed llama-cpp-python, once, in some minutes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from tools.conformance import Counts, backend_ops_cases, documented, every_op, table

from ggml_backend_npu.plugin.embedding import check_package, plugin
from graph_runner.base.tiny import write_tiny_llama
from graph_runner.tools import suites
from graph_runner.tools.suites import SuiteError, architectures, backend_ops

pytestmark = pytest.mark.conformance

MEMORY = ("host", "device")
# ops of minutes each, and patterns of their cases that ggml itself prepares for minutes: one of them each time
LONG: dict[str, tuple[str, ...]] = {
    "LIGHTNING_INDEXER": (),
    "FLASH_ATTN_EXT": ("hsk=64.*type_K=iq4_nl", "hsk=64.*type_K=q5_1", "hsk=64.*type_K=q4_1"),
    "MUL_MAT_ID": (
        "type_a=iq3_s.*n_mats=512",
        "type_a=iq3_s.*n_mats=1024",
        *(f"type_a=q4_K.*n_mats=128.*n={n_tokens}," for n_tokens in (16, 32, 64)),
    ),
}
DEVICE_TYPES = ("accel", "gpu")

# per op, how many cases of test-backend-ops the CPU of ggml 0.25.3 supports
CASES = {"GET_ROWS": 240, "SET_ROWS": 559, "CPY": 493, "CONT": 78, "DUP": 10, "SCALE": 7}

# that the NPU alone refuses: a permuted tensor, of which ggml's CPU, its asserts compiled out, sums other elements
REFUSED = {("SUM", "type=f32,ne=[33,256,1,1],permute=[1,0,2,3]")}

MODELS = 133  # that test-llama-archs runs, in ggml 0.25.3


@pytest.fixture(scope="module", autouse=True)
def this_tree() -> None:
    """The plugin runs the package that is tested."""
    check_package()


@pytest.mark.daily(2)
@pytest.mark.parametrize(("memory", "device_type"), list(product(MEMORY, DEVICE_TYPES)))
def test_every_case_that_the_cpu_supports_passes(memory: str, device_type: str) -> None:
    cases = backend_ops(CASES, {"GGML_NPU_MEMORY": memory, "GGML_NPU_DEVICE_TYPE": device_type})
    assert not [case.log for case in cases if case.verdict == "failed"]
    assert not [case.name for case in cases if case.refused_by == ("NPU",)], "the CPU alone supports these"
    assert Counter(case.group for case in cases if case.verdict == "passed") == CASES


@pytest.mark.daily(6)  # 3 minutes each
@pytest.mark.parametrize(("memory", "third"), list(product(MEMORY, range(3))))
def test_every_case_of_an_op_is_as_documented(memory: str, third: int, capsys: pytest.CaptureFixture[str]) -> None:
    device_type = {"host": "accel", "device": "gpu"}[memory]
    ops = sorted(every_op() - set(LONG))[third::3]
    suite = backend_ops_cases().keys() & ops
    cases = backend_ops(suite, {"GGML_NPU_MEMORY": memory, "GGML_NPU_DEVICE_TYPE": device_type, "GGML_NPU_OPS": "all"})
    found = {op: Counts.of([case for case in cases if case.group == op]) for op in ops}
    with capsys.disabled():
        print(f"\n\n{memory} memory\n{table(found)}")
    assert not [case.log for case in cases if case.verdict == "failed"]
    refused = {(case.group, case.name) for case in cases if case.refused_by == ("NPU",)}
    assert not refused - REFUSED, "the CPU alone supports these"
    assert found == {op: counts for op, counts in documented().items() if op in found}


SIMULATED = """
from ggml_backend_npu import register
from ggml_backend_npu.device.sim import Simulator

class Partial(Simulator):
    def refusal(self, node):
        return super().refusal(node) if {taken} is None or node.op in {taken} else "another device's"

register(Partial("NPU"))
"""
# of a small backend: what it lacks the CPU computes
SOME = (
    *("ADD", "CONT", "CPY", "DUP", "GET_ROWS", "MUL", "MUL_MAT", "RMS_NORM", "ROPE", "SCALE", "SET_ROWS", "SOFT_MAX"),
    "SWIGLU",
)


def simulated(folder: Path, taken: tuple[str, ...] | None = None) -> dict[str, str]:
    """Options of a plugin whose device is a simulated one, by the name that the suites ask for; it takes some ops, or
    all."""
    file = folder / "sim.py"
    file.write_text(SIMULATED.format(taken=taken))
    return {"GGML_NPU_DEVICE_FILE": str(file)}


@pytest.mark.daily(2)
def test_every_case_of_an_op_passes_on_a_simulated_device(tmp_path: Path, turn: int) -> None:
    """The movers, and of the others one in sixteen, others each time."""
    others = sorted(backend_ops_cases().keys() - {*LONG, *CASES})
    cases = backend_ops({*CASES, *others[turn % 16 :: 16]}, simulated(tmp_path))
    assert not [case.log for case in cases if case.verdict == "failed"]
    assert not {(case.group, case.name) for case in cases if case.refused_by == ("NPU",)} - REFUSED


@pytest.mark.daily(2)
@pytest.mark.parametrize("taken", [None, SOME], ids=["all", "some"])
def test_every_model_computes_what_it_does_on_the_cpu_on_a_simulated_device(
    tmp_path: Path, taken: tuple[str, ...] | None
) -> None:
    models = architectures(simulated(tmp_path, taken))
    assert not [model.log for model in models if model.verdict == "failed"]
    assert sum(model.verdict == "passed" for model in models) == MODELS


@pytest.mark.daily(6)
@pytest.mark.parametrize("op", LONG)
def test_cases_of_an_op_of_minutes_pass(op: str, turn: int, capsys: pytest.CaptureFixture[str]) -> None:
    others = LONG[op]
    today = others[turn % len(others)] if others else ""
    left_out = "|".join(other for other in others if other != today) or "none"
    computed = f"^(?!.*({left_out}))"
    cases = backend_ops([op], {"GGML_NPU_OPS": "all"}, pattern=computed)
    found = Counts.of(cases)
    with capsys.disabled():
        print(f"\n\nwithout {left_out}\n{table({op: found})}")
    assert not [case.log for case in cases if case.verdict == "failed"]
    known = backend_ops_cases()[op]
    here = sum(re.search(computed, parameters) is not None for parameters in known)
    assert found == Counts(here, here, here, here)
    assert Counts(*[len(known)] * 4) == documented()[op]


@pytest.mark.parametrize("memory", MEMORY)
def test_every_model_computes_what_it_does_on_the_cpu_where_the_device_takes_all(memory: str) -> None:
    models = architectures({"GGML_NPU_OPS": "all", "GGML_NPU_MEMORY": memory})
    assert not [model.log for model in models if model.verdict == "failed"]
    assert sum(model.verdict == "passed" for model in models) == MODELS


@pytest.mark.parametrize("memory", MEMORY)
def test_every_model_computes_what_it_does_on_the_cpu(memory: str) -> None:
    models = architectures({"GGML_NPU_MEMORY": memory})
    assert not [model.log for model in models if model.verdict == "failed"]
    assert sum(model.verdict == "passed" for model in models) == MODELS


def test_a_plugin_that_is_not_loaded_is_no_success() -> None:
    with pytest.raises(SuiteError, match="no device NPU: GGML_NPU_MEMORY='disk'"):
        backend_ops(["DUP"], {"GGML_NPU_MEMORY": "disk"})
    with pytest.raises(SuiteError, match="test-backend-ops has no device NPU"):
        backend_ops(["DUP"], {"GGML_BACKEND_PATH": os.devnull})
    with pytest.raises(SuiteError, match="test-llama-archs has no device NPU"):
        architectures({"GGML_BACKEND_PATH": os.devnull})


KERNEL = """
from ggml_backend_npu import op

@op("SQR", types=[{types}])
def sqr(dst, x):
    dst.view()[...] = {value}
"""
F32, F16 = '("f32", "f32")', '("f16", "f16")'


@pytest.mark.parametrize(
    ("types", "value", "row", "log", "code"),
    [
        (f"{F32}, {F16}", "x.view() ** 2", ["SQR", "6", "0", "0"], "", 0),
        (F32, "x.view() ** 2", ["SQR", "3", "0", "3"], "", 0),
        (F32, "x.view() * 2", ["SQR", "0", "3", "3"], "SQR(type=f32,ne=[10,5,4,3]): FAIL", 1),
        (F32, "x.ne.no", ["SQR", "0", "3", "3"], "ggml-npu: SQR node 'out': AttributeError", 1),
        ('("i8", "i8")', "x.view() ** 2", ["SQR", "0", "0", "6"], "ggml-npu: NPU refuses SQR: types f16 -> f16", 1),
    ],
)
def test_the_command_judges_a_file_of_kernels(
    tmp_path: Path, types: str, value: str, row: list[str], log: str, code: int
) -> None:
    kernels = tmp_path / "own kernels.py"
    kernels.write_text(KERNEL.format(types=types, value=value))
    command: list[str | Path] = [sys.executable, "-c", "from graph_runner.cli import main; main()", "test", kernels]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    heading, counts, *rest = done.stdout.splitlines()
    assert heading.split() == ["op", "passed", "failed", "not", "supported"]
    assert counts.split() == row
    assert log in "\n".join(rest)
    assert bool(log) == bool(rest)


COUNTS = """
import os
from ggml_backend_npu import op
from ggml_backend_npu.ops import OWN

@op("SET_ROWS")
def set_rows(dst, x, ids):
    os.write(2, b"called\\n")
    OWN["SET_ROWS"].define(dst, x, ids)
"""


@pytest.mark.parametrize(("options", "is_asked"), [((), False), (("-dev", "NPU"), True)], ids=["alone", "-dev NPU"])
def test_llama_completion_asks_the_device_that_it_is_told_of(
    tmp_path: Path, options: tuple[str, ...], is_asked: bool
) -> None:
    kernels, model = tmp_path / "counts.py", write_tiny_llama(tmp_path / "tiny.gguf")
    kernels.write_text(COUNTS)
    done = subprocess.run(
        [suites.build() / "llama-completion", "-no-cnv", "-m", model, "-p", "hello", "-n", "4", *options],
        env=os.environ | {"GGML_BACKEND_PATH": str(plugin()), "GGML_NPU_KERNELS": str(kernels)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=300, check=True,
    )  # fmt: skip
    assert ("called" in done.stderr) == is_asked


def test_a_kernel_that_loops_is_no_test_that_runs_on(tmp_path: Path) -> None:
    """Ctrl-C ends `ggml-npu test` and the program that it runs."""
    kernels = tmp_path / "loops.py"
    kernels.write_text("from ggml_backend_npu import op\n@op('SQR')\ndef sqr(dst, x):\n    while True:\n        pass\n")
    suites.build()
    with subprocess.Popen([sys.executable, "-m", "graph_runner", "test", str(kernels)]) as command:
        program = running_program(command.pid)
        command.send_signal(signal.SIGINT)
        assert command.wait(timeout=3) == 130
    assert not Path(f"/proc/{program}").exists()


def running_program(parent: int) -> int:
    """The process id of the test-backend-ops that a process has started."""
    for _ in range(600):
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            for child in children.read_text().split():
                if b"test-backend-ops" in Path(f"/proc/{child}/cmdline").read_bytes():
                    time.sleep(3)
                    return int(child)
        time.sleep(0.1)
    pytest.fail("no test-backend-ops was started")
