"""Mistakes in a file of kernels: each is said, with the file, the line and what is meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.commands import Cli, Outcome, assert_refused, kernel_file

from ggml_backend_npu import default_backend, op
from ggml_backend_npu.registry.entry import recording
from graph_runner.tools import suites

BEGIN = "from ggml_backend_npu import op\n"
FILES = {
    "no parentheses": (
        BEGIN + "@op\ndef sqr(dst, x):\n    pass\n",
        ["line 2: TypeError: @op of 'sqr': needs the op's name", '@op("SQR")'],
    ),
    "small letters": (BEGIN + "@op('sqr')\ndef sqr(dst, x):\n    pass\n", ["has no op 'sqr'; did you mean 'SQR'?"]),
    "misspelt": (
        BEGIN + "@op('GET_ROW')\ndef k(dst, x, i):\n    pass\n",
        ["no op 'GET_ROW'; did you mean 'GET_ROWS'?"],
    ),
    "twice": (
        BEGIN + "@op('SQR')\ndef one(dst, x):\n    pass\n@op('SQR')\ndef two(dst, x):\n    pass\n",
        ["registers SQR twice, at lines 2 and 5"],
    ),
    "a source too few": (
        BEGIN + "@op('MUL')\ndef mul(dst, a):\n    pass\n",
        ["line 2: kernel mul takes 1 of the 2 sources that MUL has"],
    ),
    "a source of two too few": (
        BEGIN + "@op('SET_ROWS')\ndef put(dst, x):\n    pass\n",
        ["kernel put takes 1 of the 2 sources that SET_ROWS has"],
    ),
    "types of a source too many": (
        BEGIN + "@op('SQR', types=[('f32', 'f32', 'f32')])\ndef sqr(dst, x):\n    pass\n",
        ["line 2: TypeError: op SQR: types ('f32', 'f32', 'f32') name 2 sources, sqr takes 1"],
    ),
    "types in no list": (
        BEGIN + "@op('SQR', types=('f32', 'f32'))\ndef sqr(dst, x):\n    pass\n",
        ["line 2: TypeError: op SQR: types ('f32', 'f32'): must be a list of tuples, such as [(\"f32\", \"f32\")]"],
    ),
    "types in lists": (
        BEGIN + "@op('SQR', types=[['f32', 'f32']])\ndef sqr(dst, x):\n    pass\n",
        ["types [['f32', 'f32']]: must be a list of tuples"],
    ),
}


@pytest.mark.parametrize(("text", "words"), FILES.values(), ids=FILES)
def test_what_is_registered_is_checked(cli: Cli, tmp_path: Path, text: str, words: list[str]) -> None:
    before = dict(default_backend().ops)
    path = kernel_file(tmp_path, text)
    assert_refused(cli("run", "tiny", "-n", "1", "--kernels", path), f"kernels '{path}'", *words)
    assert dict(default_backend().ops) == before, "a file that is refused leaves no kernel"


REFUSES = """
from ggml_backend_npu import op

def refuse(dst, x, ids):
    {line}

@op("SET_ROWS", refuse=refuse)
def put(dst, x, ids):
    dst.view()[...] = 0
"""
WRONG = {
    "raises": ("return None if x.shapes else None", "AttributeError: 'Tensor' object has no attribute 'shapes'"),
    "gives no reason": ("return True", "must give a reason or None, and gave True"),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("command", ["run", "diff", "coverage"])
@pytest.mark.parametrize("mistake", WRONG.values(), ids=WRONG)
def test_a_refuse_that_cannot_answer_ends_the_command(
    cli: Cli,
    tmp_path: Path,
    command: str,
    mistake: tuple[str, str],
) -> None:
    line, says = mistake
    path = kernel_file(tmp_path, REFUSES.format(line=line))
    outcome: Outcome = (
        cli(command, "tiny", "-n", "1", "--kernels", path)
        if command != "coverage"
        else cli(command, "tiny", "--kernels", path)
    )
    assert outcome.code == 2
    said = outcome.err.splitlines()
    assert len(said) == 2, outcome.err
    assert said[1].startswith("ggml-npu: SET_ROWS node '")
    assert f"refuse: {says}" in said[1]
    if "Attribute" in says:
        assert "(own.py line 5)" in said[1]


def test_a_refuse_that_raises_is_no_case_that_is_not_supported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = [
        "Backend 1/1: NPU",
        "ggml-npu: SQR node 'out': refuse: ZeroDivisionError: division by zero (own.py line 5)",
        "  SQR(type=f32): not supported [NPU]",
    ]
    monkeypatch.setattr(suites, "_with_plugin", lambda *arguments: iter(lines))
    (case,) = suites.backend_ops(["SQR"])
    assert case.verdict == "failed"
    assert "refuse: ZeroDivisionError" in case.log


def test_a_kernel_that_takes_no_case_is_told_why(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["Backend 1/1: NPU", "ggml-npu: NPU refuses SQR: types f16 -> f16", "  SQR(type=f16): not supported [NPU]"]
    monkeypatch.setattr(suites, "build", lambda console: None)
    monkeypatch.setattr(suites, "_with_plugin", lambda *arguments: iter(lines))
    outcome = cli("test", "-o", "SQR")
    assert outcome.code == 1
    assert outcome.out.splitlines()[2:] == ["first refused case of SQR:", *map(str.strip, lines[1:])]


def test_an_error_in_a_kernel_names_file_line_and_node(cli: Cli, tmp_path: Path) -> None:
    path = kernel_file(tmp_path, BEGIN + "@op('SET_ROWS')\ndef put(dst, x, ids):\n    x = 1\n    x / 0\n")
    outcome = cli("run", "tiny", "-n", "1", "--kernels", path)
    assert outcome.code == 2
    assert outcome.err.splitlines()[1].startswith("ggml-npu: SET_ROWS node '")
    assert outcome.err.endswith(": ZeroDivisionError: division by zero (own.py line 5)\n")


def test_a_kernel_that_returns_a_value_fails_its_node(cli: Cli, tmp_path: Path) -> None:
    path = kernel_file(tmp_path, BEGIN + "@op('SET_ROWS')\ndef put(dst, x, ids):\n    return x.view()\n")
    outcome = cli("run", "tiny", "-n", "1", "--kernels", path)
    assert outcome.code == 2
    assert outcome.err.splitlines()[1].startswith("ggml-npu: SET_ROWS node '")
    assert outcome.err.endswith(": returned ndarray; a kernel returns nothing and writes into dst.view()\n")


def test_an_op_without_a_name_is_no_decorator() -> None:
    with pytest.raises(TypeError, match="needs the op's name"):

        @op  # type: ignore[arg-type]
        def sqr(dst: object, x: object) -> None:
            pass


def test_what_a_file_makes_is_recorded_and_nobodys_yet() -> None:
    before = dict(default_backend().ops)
    with recording() as made:
        first = op("SQR")(lambda dst, x: None)
        second = op("SQR")(lambda dst, x: None)
    assert made == [first, second]
    assert dict(default_backend().ops) == before
