"""Without llama-cpp-python, which is an extra: what needs it says in one line what to install, and the rest works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.every_command import COMMANDS

# a sitecustomize: a process and those that it starts find neither the module nor the package
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "llama_cpp" else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *context):
        return (each for each in super().find_distributions(*context) if each.name != "llama_cpp_python")

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
RUN = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from graph_runner.cli import main

found = {}
for line in json.loads(sys.argv[1]):
    sys.argv = ["ggml-npu", *line.split()]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            found[line] = end.code, out.getvalue(), err.getvalue()
print(json.dumps(found))
"""
REFUSED = [*(row.refused for row in COMMANDS.values() if row.refused), "test --memory", "bench calls"]
WORKING = ["ops", "ops GET_ROWS", "cache", "--version"]


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    """Variables of a process that has no llama-cpp-python."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT)
    return os.environ | {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "200"}


def printed(environment: dict[str, str], code: str, *arguments: object, cwd: Path | None = None) -> Any:
    """The JSON in the last line that a program prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_each_command_works_or_says_in_one_line_what_to_install(without: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    found = printed(without, RUN, json.dumps(REFUSED + WORKING), cwd=tmp_path)
    for line in REFUSED:
        code, out, err = found[line]
        assert (code, out, err.count("\n")) == (2, "", 1), (line, err)
        assert err.startswith("ggml-npu: llama-cpp-python is not installed: pip install 'ggml-backend-npu[llama]'")
    for line in WORKING:
        code, out, err = found[line]
        assert (code, err) == (0, ""), line
    assert "llama-cpp-python is not installed" in found["--version"][1]
    assert {path.name for path in tmp_path.iterdir()} <= {"site", "cache", "matrix", "text"}


OF_WHISPER = """
import json
import numpy as np
import ggml_backend_npu, quant
from ggml_backend_npu.plugin.build import Builder

plugin = ggml_backend_npu.register(into="pywhispercpp")
with Builder(plugin.ggml, "NPU") as build:
    table, ids = build.tensor("q8_0", (64, 10)), build.tensor("i32", (3,))
    rows = build.op("get_rows", table, ids)
    blocks = quant.quantize(np.random.default_rng(0).standard_normal((10, 64)), "q8_0")
    build.set(table, blocks)
    build.set(ids, np.array([1, 5, 5], np.int32))
    status = build.compute(rows)
    equal = build.get(rows).tobytes() == quant.dequantize(blocks[[1, 5, 5]], "q8_0").tobytes()
blocks = quant.quantize(np.ones((2, 256), np.float32), "q4_K")
print(json.dumps([status, equal, plugin.ggml.version, quant.dequantize(blocks, "q4_K").mean().item()]))
"""


@pytest.mark.daily(3)
@pytest.mark.slow
def test_the_ggml_of_another_package_is_enough(without: dict[str, str]) -> None:
    """Of pywhispercpp: the device computes in it, and it encodes the long tail of types."""
    pytest.importorskip("pywhispercpp", reason="pywhispercpp is not installed; it is in the extra 'test'")
    status, equal, version, mean = printed(without, OF_WHISPER)
    assert (status, equal) == (0, True)
    assert version
    assert mean == pytest.approx(1, abs=0.01)
