"""What reaches a terminal or a pipe: names that are escaped, whole names and lines, JSON alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
from io import StringIO
from pathlib import Path

import pytest
from kit.commands import Cli, fresh

from graph_runner.base.console import Console, table


def test_what_a_model_names_does_not_reach_the_terminal(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "\x1b[2J.gguf"
    file.write_bytes(tiny.read_bytes().replace(b"token_embd.weight", b"token\x1b[2J.weight"))
    outcome = cli("run", file)
    assert outcome.code == 2
    assert "\x1b" not in outcome.err
    assert "\\x1b[2J" in outcome.err


def test_names_of_nodes_are_escaped(tmp_path: Path) -> None:
    written = StringIO()
    shown = table("op")
    shown.add_row("\x1b[2J\x07name\x9b")
    console = Console(file=written)
    console.print(shown)
    console.print("\x1b]0;title\x07", markup=False)
    assert "\x1b" not in written.getvalue()
    assert "\\x1b[2J\\x07name\\x9b" in written.getvalue()


def test_a_narrow_terminal_gets_whole_names() -> None:
    written, name = StringIO(), "a_very_long_name_of_a_node"
    shown = table("op", "name")
    shown.add_row("GET_ROWS", name)
    Console(file=written, force_terminal=True, width=20).print(shown)
    parts = [line[10:].strip() for line in written.getvalue().splitlines()[1:]]
    assert "".join(parts) == name


@pytest.mark.slow
def test_a_pipe_gets_whole_lines() -> None:
    narrow = os.environ | {"COLUMNS": "40"}
    outcome = fresh("devices", env=narrow)
    assert re.search(r"^NPU +ACCEL +NPU +Python kernels \(ggml-backend-npu\) *$", outcome.out, re.MULTILINE)
    assert max(map(len, fresh("ops", env=narrow).out.splitlines())) >= 100


@pytest.mark.slow
def test_json_stands_alone_where_text_goes_to_the_same_place() -> None:
    outcome = fresh("coverage", "tiny", "--json", "-", stderr=subprocess.STDOUT)
    assert json.loads(outcome.out)["schema"].startswith("ggml-npu coverage")
