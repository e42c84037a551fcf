"""The runs of a bisection in a file: `graph_runner.bisect.kept`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graph_runner.base.errors import BadInputError
from graph_runner.bisect.kept import Kept
from graph_runner.bisect.result import Trial

ASKED = {"model": "100 bytes", "prompt": "abc"}
RUN = Trial("0-7", 0.5, None, 0.25)
OTHER = Trial("none", None, 2, 0.25, "ended by SIGSEGV")


def test_runs_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    kept = Kept(file, ASKED)
    assert kept.known == ()
    kept.add(RUN)
    kept.add(OTHER)
    again = Kept(file, ASKED)
    assert again.known == (RUN, OTHER)
    again.add(RUN)
    assert Kept(file, ASKED).known == (RUN, OTHER, RUN)


def test_runs_of_something_else_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    Kept(file, ASKED).add(RUN)
    with pytest.raises(BadInputError, match="its runs have prompt 'abc', not 'other'"):
        Kept(file, ASKED | {"prompt": "other"})


NO_RUNS: list[Any] = [[{}], [1], [{"nodes": 1, "nmse": 1, "first_token": None, "seconds": 1, "error": ""}], 7, None]
FILES = [json.dumps({"schema": "ggml-npu bisect runs 1", "asked": ASKED, "runs": runs}) for runs in NO_RUNS]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, *FILES])
def test_a_file_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    file.write_text(text)
    with pytest.raises(BadInputError, match="--resume "):
        Kept(file, ASKED)
    assert file.read_text() == text
