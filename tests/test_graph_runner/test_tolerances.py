"""How far results may be apart: the bounds of this project, and files of bounds that lie over them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from kit.diffs import planted, run
from kit.models import Models

from ggml_backend_npu import Tensor, default_backend
from ggml_backend_npu.ops import OWN
from graph_runner.cli import main
from graph_runner.judging.results import Verdict
from graph_runner.judging.rules import Rules, ToleranceError

pytestmark = pytest.mark.usefixtures("as_before")


def test_tolerances_by_op_and_type() -> None:
    own = Rules()
    assert own.bound("GET_ROWS", "q8_0") == own.bound("SET_ROWS", "f32") == own.bound("NO_SUCH_OP", "f32") == 0
    assert own.bound("MUL_MAT", "q4_K") == own.bound("MUL_MAT", "f32") == 1e-10
    assert own.bound("FLASH_ATTN_EXT", "f32") == 1e-11
    assert own.bound("FLASH_ATTN_EXT", "f16") == 1e-6, "the CPU adds up v of that type in half floats"
    assert own.bound("ROPE", "f16") == own.bound("ROPE", "bf16") == 1e-11


def test_a_file_of_tolerances_lies_over_the_own_ones(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[MUL_MAT]\nf32 = 0.5\n[GET_ROWS]\n"*" = 1\n')
    found = Rules(path)
    assert found.bound("MUL_MAT", "f32") == 0.5
    assert found.bound("MUL_MAT", "f16") == 1e-10
    assert found.bound("GET_ROWS", "q8_0") == 1.0
    assert Rules().bound("GET_ROWS", "q8_0") == 0


BAD = [
    ("MUL_MAT = 3", "MUL_MAT = 3: must be a table of types"),
    ("[MUL_MAT]\nf32 = -1", "MUL_MAT.f32 = -1: must be a number of 0 or more"),
    ("[MUL_MAT]\nf32 = nan", "MUL_MAT.f32 = nan: must be a number of 0 or more"),
    ("[MUL_MAT]\nf32 = inf", "MUL_MAT.f32 = inf: must be a number of 0 or more"),
    ("[MUL_MAT]\nf32 = true", "MUL_MAT.f32 = True: must be a number of 0 or more"),
    ('[MUL_MAT]\nf32 = "0.1"', "MUL_MAT.f32 = '0.1': must be a number of 0 or more"),
    ("[MUL_MAT\n", "at line 1, column 9"),
    (b"\xff\xfe", "codec can't decode byte"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_file_of_tolerances_that_is_none(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ToleranceError) as refused:
        Rules(path)
    assert str(refused.value).startswith(f"tolerances {str(path)!r}: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "message"), [("none.toml", "No such file or directory"), ("", "Is a directory")])
def test_no_file_of_tolerances(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ToleranceError, match=message):
        Rules(tmp_path / name)


def test_the_command_refuses_a_file_of_tolerances_in_one_line(
    model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[CONT]\nf32 = -1\n")
    monkeypatch.setattr(sys, "argv", ["ggml-npu", "diff", str(model("llama")), "--tolerances", str(path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"ggml-npu: tolerances {str(path)!r}: CONT.f32 = -1: must be a number of 0 or more\n"


def test_a_diff_goes_by_the_tolerances_that_it_is_given(model: Models, tmp_path: Path) -> None:
    def off(dst: Tensor, src: Tensor) -> None:
        OWN["CONT"].define(dst, src)
        dst.view()[...] *= np.float32(1 + 1e-4)

    path = tmp_path / "own.toml"
    path.write_text("[CONT]\nf32 = 1e-7\n")
    with default_backend().ops.having(planted("CONT", off)):
        assert not run(model("llama"), steps=0)
        result = run(model("llama"), steps=0, rules=Rules(path))
    assert result
    first, second = (node for node in result.nodes if node.op == "CONT")
    assert (first.verdict, second.verdict) == (Verdict.ROUNDING, Verdict.INHERITED)
