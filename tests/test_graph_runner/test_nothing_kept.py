"""Every command of a user with no folder for what is kept: it works, or says in one line which variable to set."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.commands import Outcome, fresh
from kit.every_command import COMMANDS, HOMELESS, Files

USERS: dict[str, dict[str, str]] = {
    "no home": {},
    "a home that cannot be written to": {"HOME": "/proc/nothing"},
    "a cache that cannot be written to": {"HOME": "/tmp", "XDG_CACHE_HOME": "/proc/nothing"},
}
NEED = {"plugin", "test"}  # nothing of use would be left of what these make
FIRST = [("no home", "plugin"), ("a home that cannot be written to", "plugin")]
CASES = [(user, command) for user in USERS for command in COMMANDS if command != "bench"]


def as_user(user: str, files: Files, command: str) -> Outcome:
    """A command, and the processes that it starts, of a user."""
    own = files.cache.with_name("homeless")
    own.mkdir()
    (own / "sitecustomize.py").write_text(HOMELESS)
    gone = {"HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"}
    environment = {name: value for name, value in files.environment.items() if name not in gone}
    return fresh(*files.line(command), env=environment | {"PYTHONPATH": str(own)} | USERS[user])


@pytest.mark.daily(30)
@pytest.mark.parametrize(
    ("user", "command"),
    [pytest.param(*case, marks=[] if case in FIRST else pytest.mark.slow, id=" ".join(case)) for case in CASES],
)
def test_every_command_works_or_says_what_to_set(tmp_path: Path, user: str, command: str) -> None:
    files = Files.within(tmp_path)
    for reads, writes in ("replay", "capture"), ("compare", "record"):
        if command == reads:
            assert fresh(*files.line(writes), env=files.environment).code == 0
    done = as_user(user, files, command)
    assert "Traceback" not in done.err
    assert "internal error" not in done.err
    if command not in NEED:
        assert done.code == 0, done.err
        assert ("each process compiles its kernels; not kept: " in done.err) == (command in {"matrix", "triage"})
        return
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1, done.err
    assert "cannot be kept: " in done.err
    assert "; set XDG_CACHE_HOME to a folder" in done.err
