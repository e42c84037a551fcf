"""What is kept between runs is this user's alone, or is not used; and what killed processes leave is deleted."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from kit.commands import fresh, process
from kit.every_command import HOMELESS

from graph_runner.cli.diff import _folder
from quant import folders
from quant.folders import FolderError, cache_root, kept, partial_file, temporary_folder, tidy
from quant.kernels import cache
from quant.kernels.kept import DamagedError, sealed, unsealed, write_sealed

IS_ROOT = os.geteuid() == 0
OTHER = 65534
as_root = pytest.mark.skipif(not IS_ROOT, reason="only root can give a folder to somebody else")
QUANTIZE = "import numpy, quant; print(quant.quantize(numpy.zeros(64, numpy.float32), 'q8_0').size)"


@pytest.fixture(params=["XDG_CACHE_HOME", "NUMBA_CACHE_DIR"])
def variable(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A variable that says where kernels are kept: in a folder of the test."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv(request.param, str(tmp_path / "cache"))
    return str(request.param)


def test_folders_are_made_for_this_user_alone(variable: str, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = cache.kept_in()
    finally:
        os.umask(before)
    for each in (folder, *folder.parents):
        if each != tmp_path and each.is_relative_to(tmp_path):
            assert stat.S_IMODE(each.stat().st_mode) == 0o700, each


def made(tmp_path: Path) -> list[Path]:
    """The folder of kernels and those above it, up to the one that the variable names."""
    folder = cache.kept_in()
    return [each for each in (folder, *folder.parents) if each.is_relative_to(tmp_path / "cache")]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_not_used(variable: str, tmp_path: Path, mode: int) -> None:
    for path in made(tmp_path):
        path.chmod(mode)
        said = f"'{path}' can be written by others; set {variable} to a folder of your own"
        with pytest.raises(FolderError, match=f"^{said}$"):
            cache.kept_in()
        path.chmod(0o755)


def test_a_folder_like_tmp_may_be_shared(variable: str, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)
    assert cache.kept_in().is_dir()


@as_root
def test_a_folder_of_somebody_else_is_not_used(variable: str, tmp_path: Path) -> None:
    for path in made(tmp_path):
        os.chown(path, OTHER, OTHER)
        with pytest.raises(FolderError, match=f"belongs to user {OTHER}; set {variable}"):
            cache.kept_in()
        os.chown(path, 0, 0)


# what a planted kernel is: a library that does something as soon as it is loaded
PLANTED = """
#include <stdlib.h>
#include <sys/stat.h>
__attribute__((constructor)) static void run(void) { mkdir(getenv("TOLD"), 0700); }
long kernel(void) { return 0; }
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A kept kernel with a right checksum."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.c").write_text(PLANTED)
    done = process("cc", "-shared", "-fPIC", "-o", folder / "planted.so", folder / "planted.c")
    assert done.code == 0, done.err
    return sealed((folder / "planted.so").read_bytes())


@pytest.mark.parametrize("how", ["mine", "shared", pytest.param("of somebody else", marks=as_root)])
def test_a_file_that_can_be_anothers_is_not_read(tmp_path: Path, how: str) -> None:
    path = tmp_path / "kernel.so"
    write_sealed(path, b"content")
    if how == "shared":
        path.chmod(0o666)
    elif how == "of somebody else":
        os.chown(path, OTHER, OTHER)
    if how == "mine":
        assert unsealed(path) == b"content"
    else:
        with pytest.raises(DamagedError, match="can be another user's"):
            unsealed(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["mine", pytest.param("a file of somebody else", marks=as_root), "a shared file", "a shared folder"]
)
def test_no_planted_kernel_is_loaded(tmp_path: Path, planted: bytes, how: str) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "TOLD": str(tmp_path / "ran")}
    assert process(sys.executable, "-c", QUANTIZE, env=environment).out == "68\n"
    for path in (tmp_path / "cache").rglob("*.so"):
        path.write_bytes(planted)
        if how == "a file of somebody else":
            os.chown(path, OTHER, OTHER)
        elif how == "a shared file":
            path.chmod(0o666)
        elif how == "a shared folder":
            path.parent.chmod(0o777)
    done = process(sys.executable, "-c", QUANTIZE, env=environment)
    assert (done.code, done.out) == (0, "68\n"), done.err
    assert (tmp_path / "ran").exists() == (how == "mine")
    assert ("can be another user's: made anew" in done.err) == ("file" in how)


# without a home


@pytest.mark.parametrize("home", [None, ""])
def test_the_home_of_a_user_without_the_variable_is_that_of_the_system(
    monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(folders, "_home_of_the_user", lambda: "/home/somebody")
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    assert cache_root() == Path("/home/somebody/.cache/ggml-npu")
    monkeypatch.setattr(folders, "_home_of_the_user", lambda: "")
    with pytest.raises(FolderError, match=f"^user {os.geteuid()} has no home; set XDG_CACHE_HOME to a folder$"):
        cache_root()
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_root() == Path("/elsewhere/ggml-npu")


def homeless(code: str) -> tuple[int, str, list[str]]:
    """Runs code as a user without a home; returns the exit code, the output, and lines on stderr."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS + code], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.slow
def test_without_a_home_nothing_is_kept_and_a_line_says_so() -> None:
    code, out, notes = homeless(QUANTIZE)
    assert (code, out) == (0, "68\n")
    assert notes == [
        f"ggml-npu: compiling kernels not used before; not kept: user {os.geteuid()} has no home; "
        "set XDG_CACHE_HOME to a folder"
    ]


@pytest.mark.parametrize("words", [["plugin"], pytest.param(["test", "--build"], marks=pytest.mark.slow)], ids=" ".join)
def test_what_has_to_be_kept_says_what_to_set(words: list[str]) -> None:
    code, out, notes = homeless(f"import sys; sys.argv[1:] = {words}; from graph_runner.cli import main; main()")
    assert (code, out, len(notes)) == (2, "", 1)
    assert "cannot be kept: user" in notes[0]
    assert notes[0].endswith("set XDG_CACHE_HOME to a folder")


# names of reproducers


def test_two_models_of_one_name_have_two_folders(tmp_path: Path) -> None:
    names = [_folder(str(tmp_path / folder / "model.gguf")) for folder in "ab"]
    assert len({*names}) == 2
    assert all(name is not None and name.name.startswith("model-") for name in names)


ODD = ["...gguf", "..gguf", ".gguf", "a/../..gguf", "m\udce9\n;$(x).gguf", "é" * 200, "-x.gguf"]


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_odd_names_of_models_are_made_safe(name: str, tmp_path: Path) -> None:
    folder = _folder(str(tmp_path / name))
    assert folder is not None
    assert folder.parent == cache_root() / "reproducers"
    assert folder.name.isascii()
    assert not folder.name.startswith(".")
    assert len(folder.name) < 100


# what killed processes leave

KILLED = """
import os, signal, sys
from pathlib import Path
from quant.folders import partial_file, temporary_folder
with temporary_folder() as folder, partial_file(Path(sys.argv[1])) as (partial, _):
    (folder / "file").touch()
    print(folder, partial, flush=True)
    {then}
"""


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_left_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, own = tmp_path / "system", tmp_path / "own"
    for folder in (system, own):
        folder.mkdir()
    mine = ["ggml-npu-checkout", "ggml-npu-.tmp.gz", ".ggml-npu-notes"]
    for name in mine:
        (system / name).mkdir()
        (own / name).touch()
    environment = os.environ | {"TMPDIR": str(system)}
    code = KILLED.format(then="os.kill(os.getpid(), signal.SIGKILL)")
    assert process(sys.executable, "-c", code, own, env=environment).code == -signal.SIGKILL
    assert (len(left(system)), len(left(own))) == (4, 4)
    waits = subprocess.Popen(
        [sys.executable, "-c", KILLED.format(then="sys.stdin.read()"), own],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with waits:
        assert waits.stdout is not None
        folder, partial = map(Path, waits.stdout.readline().split())
        monkeypatch.setattr(tempfile, "tempdir", str(system))
        tidy()
        tidy(own)
        assert left(system) == sorted([*mine, folder.name])  # that of a process that lives stays
        assert left(own) == sorted([*mine, partial.name])
        waits.communicate("")
    assert left(system) == left(own) == sorted(mine)


@pytest.mark.slow
def test_a_command_deletes_what_killed_ones_left(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process(sys.executable, "-c", KILLED.format(then="os.kill(os.getpid(), signal.SIGKILL)"), tmp_path, env=environment)
    assert len(left(tmp_path)) == 2
    assert fresh("ops", env=environment).code == 0
    assert left(tmp_path) == []


def test_contexts_leave_nothing(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as folder, partial_file(tmp_path) as (partial, _):
        (folder / "file").touch()
        assert partial.exists()
    assert left(tmp_path) == []


def tidied_once(monkeypatch: pytest.MonkeyPatch, module: object, name: str, folder: Path) -> list[str]:
    """After the next call of a function that makes or opens something, another process tidies the folder. Returns what
    it will have found."""
    made, found = getattr(module, name), list[str]()

    def then_tidied(*args: Any, **kwargs: Any) -> Any:
        result = made(*args, **kwargs)
        if not found:
            found.extend(left(folder))
            process(sys.executable, "-c", f"from quant.folders import *; tidy(Path({str(folder)!r}))")
        return result

    monkeypatch.setattr(module, name, then_tidied)
    return found


@pytest.mark.parametrize("where", ["mkdtemp", "open"])
def test_a_folder_that_is_tidied_before_it_is_locked_is_made_again(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tidied_once(monkeypatch, tempfile if where == "mkdtemp" else os, where, tmp_path)
    with temporary_folder(tmp_path) as folder:
        assert left(tmp_path) == [folder.name] != found
        assert len(found) == 1
        (folder / "file").touch()
    assert left(tmp_path) == []


def test_a_file_that_is_tidied_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tidied_once(monkeypatch, tempfile, "mkstemp", tmp_path)
    with partial_file(tmp_path) as (partial, _):
        assert left(tmp_path) == [partial.name] != found
        assert len(found) == 1
        partial.replace(tmp_path / "whole")
    assert left(tmp_path) == ["whole"]


def test_a_file_that_another_process_is_about_to_delete_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, locks = list[str](), fcntl.flock

    def deleted(path: Path, descriptor: int) -> None:
        path.unlink(missing_ok=True)
        os.close(descriptor)

    def locked_by_another(descriptor: int, how: int) -> None:
        if not seen:
            (name,) = left(tmp_path)
            seen.append(name)
            other = os.open(tmp_path / name, os.O_RDWR)
            locks(other, fcntl.LOCK_EX)
            threading.Timer(0.2, deleted, (tmp_path / name, other)).start()
        locks(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", locked_by_another)
    with partial_file(tmp_path) as (partial, _):
        assert left(tmp_path) == [partial.name] != seen
    assert left(tmp_path) == []


def test_a_folder_that_is_missing_is_said(tmp_path: Path) -> None:
    for context in (temporary_folder, partial_file):
        with pytest.raises(FileNotFoundError), context(tmp_path / "no" / "such"):
            pass


def test_nothing_is_kept_through_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(FolderError, match="set XDG_CACHE_HOME"):
        kept(cache_root() / "any")
