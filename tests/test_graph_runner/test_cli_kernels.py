"""Kernels of one's own on the command line: new ops, several files, and files that cannot be used."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from kit.commands import WRONG_CONT, Cli, assert_refused, fresh, kernel_file

from ggml_backend_npu import default_backend

MUL = """
from ggml_backend_npu import op

@op("MUL", types=[("f32", "f32", "f32")])
def mul(dst, a, b):
    dst.view()[...] = a.view() * b.view()
"""
SWIGLU = """
import numpy as np
from ggml_backend_npu import op

@op("SWIGLU", types=[("f32", "f32", "f32")])
def swiglu(dst, gate, up):
    dst.view()[...] = gate.view() / (1 + np.exp(-gate.view())) * up.view()
"""
RMS_NORM = """
import numpy as np
from ggml_backend_npu import op

@op("RMS_NORM")
def rms_norm(dst, x, *, params):
    eps = np.frombuffer(params, np.float32)[0]
    dst.view()[...] = x.view() / np.sqrt((x.view() ** 2).mean(axis=-1, keepdims=True) + eps)
"""


@pytest.mark.parametrize(
    ("op_name", "source"), [("MUL", MUL), ("SWIGLU", SWIGLU), ("RMS_NORM", RMS_NORM)], ids=lambda value: value[:8]
)
def test_run_computes_a_new_op_with_a_kernel_of_ones_own(
    cli: Cli, tiny_text: str, tmp_path: Path, op_name: str, source: str
) -> None:
    kernels = kernel_file(tmp_path, source)
    effect = "replaced" if op_name in default_backend().ops else "new"
    outcome = cli("run", "tiny", "-n", "8", "--kernels", kernels)
    assert outcome.code == 0
    assert outcome.out == tiny_text[:8] + "\n"
    assert f"kernels of {kernels}: {op_name} ({effect})\n" in outcome.err
    on_npu, on_cpu = outcome.counts[op_name]
    assert (on_npu > 0, on_cpu) == (True, 0)


@pytest.mark.slow
def test_diff_compares_a_new_op_too(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("diff", "tiny", "-n", "1", "--ops", "MUL", "--kernels", kernel_file(tmp_path, MUL))
    assert outcome.code == 0
    assert outcome.out.endswith("right: 10 nodes compared, every byte equals ggml's CPU\n")


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_a_kernel_that_raises_ends_run_with_one_line(tmp_path: Path) -> None:
    kernels = kernel_file(tmp_path, WRONG_CONT.format(value="x.shapes"))
    outcome = fresh("run", "tiny", "--flash-attn", "off", "--kernels", kernels)
    assert outcome.code == 2
    assert outcome.out == ""
    announced, *said = outcome.err.splitlines()
    assert announced == f"kernels of {kernels}: CONT (replaced)"
    assert len(said) == 1, outcome.err
    assert said[0].startswith("ggml-npu: ")
    assert "CONT node 'kqv_out-0': AttributeError: 'numpy.ndarray' object has no attribute 'shapes'" in said[0]


BAD_KERNELS = {
    "missing": (None, "no such file"),
    "a folder": ("/", "is a directory"),
    "syntax error": ("x = 1\ndef f(:\n", "line 2: SyntaxError"),
    "null byte": ("x = 1\n\0", "null bytes"),
    "raises": ("x = 1\ny = x / 0\n", "line 2: ZeroDivisionError: division by zero"),
    "raises in lines": ("raise ValueError('one\\ntwo')\n", "line 1: ValueError: one"),
    "unknown module": ("import no_such_module\n", "line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    "no op": ("x = 1\n", "registers no op"),
    "unknown op": (MUL.replace('"MUL"', '"MULL"'), "has no op 'MULL'"),
    "unknown type": (MUL.replace('"f32"', '"f99"'), "f99"),
    "no dst": ("from ggml_backend_npu import op\n@op('SQR')\ndef sqr():\n    pass\n", "line 2: TypeError: kernel sqr"),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("command", ["run", "diff"])
@pytest.mark.parametrize(("source", "reason"), BAD_KERNELS.values(), ids=BAD_KERNELS)
def test_a_file_of_kernels_that_cannot_be_used(
    cli: Cli, tmp_path: Path, command: str, source: str | None, reason: str
) -> None:
    path = tmp_path / "own.py"
    if source == "/":
        path.mkdir()
    elif source is not None:
        path.write_text(source)
    outcome = cli(command, "tiny", "--kernels", path)
    assert_refused(outcome, f"kernels '{path}'", reason)
    assert "None" not in outcome.err


# several files


SQR = "from ggml_backend_npu import op\n@op('SQR')\ndef sqr(dst, x):\n    dst.view()[...] = x.view() ** 2\n"
CONT = "from ggml_backend_npu import op\nimport helps\n@op('CONT')\ndef cont(dst, x):\n    helps.cont(dst, x)\n"
HELPS = "def cont(dst, x):\n    dst.view()[...] = x.view().reshape(dst.ne[::-1])\n"


def test_kernels_come_from_several_files_that_import_their_neighbours(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in {"one.py": SQR, "two.py": CONT, "helps.py": HELPS}.items():
        (tmp_path / name).write_text(text)
    files = tmp_path / "one.py", tmp_path / "two.py"
    said = [f"kernels of {files[0]}: SQR (replaced)", f"kernels of {files[1]}: CONT (replaced)"]
    command = ["run", "tiny", "-n", "2", "--flash-attn", "off"]
    outcome = cli(*command, "--kernels", files[0], "--kernels", files[1])
    assert (outcome.code, outcome.err.splitlines()[:2]) == (0, said)
    monkeypatch.setenv("GGML_NPU_KERNELS", os.pathsep.join(map(str, files)))
    outcome = cli(*command)
    assert (outcome.code, outcome.err.splitlines()[:2]) == (0, said)
