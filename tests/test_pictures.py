"""What commands print in a terminal: nothing is wider than it, and text comes in one piece."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.text import Text

sys.path.append(str(Path(__file__).resolve().parent.parent / "docs"))
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
