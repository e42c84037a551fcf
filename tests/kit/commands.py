"""The command ggml-npu: how tests call it, and what it left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

COMMAND = Path(sys.executable).with_name("ggml-npu")
MOVERS = {"CONT", "CPY", "DUP", "GET_ROWS", "SET_ROWS"}  # ops that only move data
WRONG_CONT = """
from ggml_backend_npu import op
import numpy as np

@op("CONT")
def cont(dst, x):
    x = x.view().reshape(dst.ne[::-1])
    dst.view()[...] = {value}
"""


@dataclass(frozen=True)
class Outcome:
    """What a run of the command left; on stderr without the line that kernels are compiled, which comes once."""

    code: int
    out: str
    err: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "err", re.sub(r"(?m)^ggml-npu: compiling kernels .*\n", "", self.err))

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """The table of `run`: nodes on the NPU and on the CPU, by op."""
        rows = re.findall(r"^(\w+) +([\d,]+) +([\d,]+) *$", self.err, re.MULTILINE)
        return {op: (int(npu.replace(",", "")), int(cpu.replace(",", ""))) for op, npu, cpu in rows}


Cli = Callable[..., Outcome]


def fresh(*arguments: object, **keywords: Any) -> Outcome:
    """The command in a process of its own."""
    return process(COMMAND, *arguments, **keywords)


def process(*command: object, **keywords: Any) -> Outcome:
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "env": os.environ | {"COLUMNS": "200"},
    }
    done = subprocess.run([*map(str, command)], text=True, timeout=300, check=False, **options | keywords)
    return Outcome(done.returncode, done.stdout or "", done.stderr or "")


def assert_refused(outcome: Outcome, *words: object) -> None:
    """Bad input: exit code 2 and one line on stderr that says the words."""
    assert outcome.code == 2
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("ggml-npu: ")
    for word in words:
        assert str(word) in lines[0]


def kernel_file(folder: Path, text: str) -> Path:
    path = folder / "own.py"
    path.write_text(text)
    return path


def strict_json(text: str) -> dict[str, Any]:
    """The data of a text that is JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> NoReturn:
        pytest.fail(f"{constant} is no JSON")

    data: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return data
