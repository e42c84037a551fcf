"""Paths of any bytes: llama.cpp opens them, and so do all commands; messages, JSON and HTML name them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from kit.commands import fresh
from kit.every_command import COMMANDS, Files

MARKS = {"a byte that is no UTF-8": b"caf\xe9 ", "UTF-8": "café ".encode()}
WRITTEN = {
    "diff": ["--json", "--html", "--model-explorer"],
    "replay": ["--json"],
    "matrix": ["--json"],
    "compare": ["--json", "--html"],
    "timeline": ["--output", "--html"],
    "coverage": ["--json"],
    "ops": ["--json"],
}
LOCALES: dict[str, dict[str, str]] = {
    "as it is": {},
    "C": {"LC_ALL": "C"},
    "C, without UTF-8": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
FIRST = [("a byte that is no UTF-8", "as it is", "run"), ("a byte that is no UTF-8", "as it is", "diff")]


@pytest.fixture(scope="module", params=MARKS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Files of each kind, in a folder, with a mark in all names."""
    mark = os.fsdecode(MARKS[request.param])
    return Files.within(tmp_path_factory.mktemp("paths") / mark, mark)


def marked(path: Path) -> set[str]:
    """How a path may be shown."""
    text = str(path)
    return {text, ascii(text)[1:-1], text.replace("\udce9", "\\xe9"), text.replace("\udce9", "\\udce9")}


CASES = [(mark, locale, command) for mark in MARKS for locale in LOCALES for command in COMMANDS if command != "bench"]


@pytest.mark.daily(8)
@pytest.mark.parametrize(
    ("files", "locale", "command"),
    [pytest.param(*case, marks=[] if case in FIRST else pytest.mark.slow, id=" ".join(case)) for case in CASES],
    indirect=["files"],
)
def test_every_command_takes_paths_of_any_bytes(files: Files, locale: str, command: str) -> None:
    environment = files.environment | LOCALES[locale]
    for reads, writes, file in ("replay", "capture", files.trace), ("compare", "record", files.record):
        if command == reads and not file.exists():
            assert fresh(*files.line(writes), env=environment).code == 0
    outputs = [files.prompt.with_name(f"{files.prompt.name}{option}") for option in WRITTEN.get(command, [])]
    words = [str(word) for pair in zip(WRITTEN.get(command, []), outputs, strict=True) for word in pair]
    done = fresh(*files.line(command), *words, env=environment, errors="replace")
    assert done.code == COMMANDS[command].code, done.err
    assert "Traceback" not in done.err
    assert "internal error" not in done.err
    for output in outputs:
        text = output.read_text(encoding="utf-8")
        assert output.name.endswith("html") or json.loads(text)


@pytest.mark.some(1)
@pytest.mark.parametrize("files", MARKS, indirect=True)
def test_the_json_of_a_coverage_holds_the_path(files: Files) -> None:
    done = fresh("coverage", files.model, "--json", "-", env=files.environment)
    assert json.loads(done.out)["model"] == str(files.model)


@pytest.mark.some(1)
@pytest.mark.daily(2)
@pytest.mark.parametrize("locale", LOCALES)
def test_a_path_that_is_not_there_is_named(tmp_path: Path, locale: str) -> None:
    missing = tmp_path / os.fsdecode(b"caf\xe9.gguf")
    done = fresh("run", missing, env=os.environ | LOCALES[locale])
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert any(shown in done.err for shown in marked(missing)), done.err
