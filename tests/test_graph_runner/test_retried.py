"""The command that a diff prints for a wrong node was seen to show it, or none is printed."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.commands import fresh, kernel_file

from graph_runner.judging.results import OWN_RUN, NodeResult, Verdict
from graph_runner.reports.next_steps import next_steps, replay_command

KERNEL = """
import os
from ggml_backend_npu import op
from ggml_backend_npu.ops import OWN

SEEN, CALLS = {{}}, [0]

@op("MUL", types=OWN["MUL"].types, refuse=OWN["MUL"].refuse)
def mul(dst, a, b):
    OWN["MUL"].define(dst, a, b)
    CALLS[0] += 1
    {does}
"""
STALE = """
    key = a.address, b.address, dst.address
    dst.view()[...] = SEEN.setdefault(key, dst.view().copy())
"""
STALE_BY_NE = """
    key = dst.ne
    dst.view()[...] = SEEN.setdefault(key, dst.view().copy())
"""
EVERY_9TH = """
    if CALLS[0] % 9 == 0: dst.view()[..., 0] = 7
"""
ALWAYS = "dst.view()[..., 0] = 7"
ENDS = "os.abort()"
IN_A_MODEL = """
    if CALLS[0] > 330 and CALLS[0] % 2: dst.view()[..., 0] = 7
"""


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("does", "repeats"),
    [
        *((ALWAYS, (1,)), (ENDS, (1,)), (STALE, (8, 64)), (STALE_BY_NE, (8, 64)), (EVERY_9TH, (8, 64))),
        (IN_A_MODEL, (None,)),
    ],
    ids=["always", "ends", "stale by address", "stale by ne", "every 9th call", "in a model alone"],
)
def test_the_command_that_is_printed_shows_the_fault(
    tmp_path: Path, does: str, repeats: tuple[int | None, ...]
) -> None:
    kernels, file = kernel_file(tmp_path, KERNEL.format(does=does)), tmp_path / "result.json"
    steps = 40 if does == IN_A_MODEL else 1
    found = fresh(
        "diff", "tiny", "-n", steps, "--ops", "MUL", "--kernels", kernels, "--reproducers", tmp_path, "--json", file
    )
    assert found.code == 1, found.err
    result = json.loads(file.read_text())
    first = result["nodes"][result["first_introduced"]]
    if repeats == (None,):
        assert first["replay"] is None
        assert "computed again without the model it is right each time" in found.out
        return
    line = next(line for line in found.out.splitlines() if line.startswith("compute it again"))
    command = line.partition(": ")[2]
    assert command == first["replay"]
    _, *arguments = shlex.split(command)
    assert ("--repeat" in arguments) == (repeats != (1,))
    assert fresh(*arguments).code == 1


def wrong(**changes: Any) -> NodeResult:
    node = NodeResult(0, 3, "MUL", "x", "f32 f32 -> f32", (4, 1, 1, 1), Verdict.INTRODUCED, reproducer="a b.gguf")
    return replace(node, **changes)


@pytest.mark.parametrize(
    ("repeats", "where", "command"),
    [
        (None, "", "ggml-npu replay 'a b.gguf'"),
        (None, OWN_RUN, "ggml-npu replay 'a b.gguf' --repeat 8"),
        (1, "", "ggml-npu replay 'a b.gguf'"),
        (1, OWN_RUN, "ggml-npu replay 'a b.gguf'"),
        (64, "", "ggml-npu replay 'a b.gguf' --repeat 64"),
        (0, OWN_RUN, None),
    ],
)
def test_the_command_says_how_often(repeats: int | None, where: str, command: str | None) -> None:
    node = wrong(repeats=repeats, wrong_in=where)
    assert replay_command(node, {}) == command
    (line,) = next_steps(node, {})
    assert line == (
        f"compute it again without the model: {command}"
        if command is not None
        else "computed again without the model it is right each time: 'a b.gguf'"
    )
