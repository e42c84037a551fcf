"""A user's Python files."""

import os
import sys
from pathlib import Path

from ggml_backend_npu.registry.user_files import run_file


def test_a_file_that_was_edited_twice_in_a_second_is_run_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    for value in (1, 2):
        file.write_text(f"from __future__ import annotations\nVALUE = {value}\n")
        os.utime(file, (1e9, 1e9))
        run_file(file, "edited")
        assert value == sys.modules["edited"].VALUE
    assert [*tmp_path.iterdir()] == [file]


def test_a_file_can_declare_records(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import KW_ONLY, dataclass\n"
        "@dataclass\n"
        "class Chip:\n"
        "    name: str\n"
        "    _: KW_ONLY\n"
        "    size: int = 1\n"
    )
    run_file(file, "with_records")
    assert sys.modules["with_records"].Chip("a", size=2).size == 2
