"""What commands print in a terminal: nothing is wider than it, and text comes in one piece. The curves of a model's
speed after many tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.text import Text

from graph_runner.base.tiny import write_tiny_llama

sys.path.append(str(Path(__file__).resolve().parent.parent / "docs"))
import depth
import pictures


@pytest.mark.slow
@pytest.mark.parametrize("width", pictures.WIDTHS)
@pytest.mark.parametrize("name", pictures.COMMANDS)
def test_tables_fit_a_terminal(name: str, width: int) -> None:
    arguments = pictures.COMMANDS[name].format(model="tiny")
    lines = [Text.from_ansi(line).plain.rstrip() for line in pictures.recorded(arguments, width)]
    tables = [line for line in lines if "  " in line and ";" not in line]
    assert tables
    assert max(map(len, tables)) <= width
    assert "\x1b" not in "".join(lines)
    for theme in pictures.THEMES:
        assert "</svg>" in pictures.drawn(arguments, lines, width, theme)


@pytest.mark.slow
def test_a_run_writes_its_text_in_one_piece() -> None:
    lines = [Text.from_ansi(line).plain for line in pictures.recorded("run tiny -n 8 -p France", 80)]
    text = lines[: next(place for place, line in enumerate(lines) if line.startswith("nodes computed"))]
    assert len(text) == 1
    assert len(text[0].rstrip()) >= 8


def test_curves_with_the_limits_of_a_machine(tmp_path: Path) -> None:
    work = depth.Work.of(str(write_tiny_llama(tmp_path / "model.gguf")))
    assert work.cell == (2 * 2 * 2 * 2 * 32, 2 * 2 * 4 * 32)  # k and v in two layers of two heads, and of four
    assert work.generated(100, 1e9) == 1e9 / (work.weights[0] + 100 * work.cell[0])
    assert work.of_prompt(0, 1e9, 2e9) == 1e9 / work.weights[1]
    measured = [
        {"what": f"{what}{after}, flash attention {flash}", "median": 2.0, "others": {"llama.cpp": {"median": 1.0}}}
        for what in ("prompt of 512", "32 tokens")
        for after in ("", " after 4,096", " after 4,096, cache of q8_0")
        for flash in ("off", "on")
    ]
    found = depth.curves(measured)
    assert found["32 tokens"] == {"ggml-npu": {0: 2.0, 4096: 2.0}, "llama.cpp's best": {0: 1.0, 4096: 1.0}}
    depth.figure_of(found, work, 50e9, 500e9, 2000e9).savefig(tmp_path / "depth.png")
    assert (tmp_path / "depth.png").read_bytes().startswith(b"\x89PNG")
