"""The plugin in a program that is no Python: it finds its environment, and where it cannot start it says why."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import llama_cpp
import pytest
from typer.testing import CliRunner

import ggml_backend_npu
from ggml_backend_npu.plugin import embedding
from graph_runner.cli.app import application

ROOT = Path(__file__).resolve().parents[2]
GGML = Path(llama_cpp.__file__).parent / "lib" / "libggml.so"

# A program that opens ggml where nobody else sees its symbols, loads plugins, and lists the devices.
HOST = """
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char ** argv) {
    void * ggml = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    void * (*load)(const char *) = (void * (*)(const char *)) dlsym(ggml, "ggml_backend_load");
    size_t (*count)(void) = (size_t (*)(void)) dlsym(ggml, "ggml_backend_dev_count");
    void * (*get)(size_t) = (void * (*)(size_t)) dlsym(ggml, "ggml_backend_dev_get");
    const char * (*name)(void *) = (const char * (*)(void *)) dlsym(ggml, "ggml_backend_dev_name");
    for (int i = 2; i < argc; i++) puts(load(argv[i]) ? "loaded" : "not loaded");
    for (size_t i = 0; i < count(); i++) puts(name(get(i)));
    return 0;
}
"""

# A program with a ggml of its own, of a version that nobody knows.
STRANGER = """
#include <dlfcn.h>
#include <stdio.h>

const char * ggml_version(void) { return "9.8.7"; }

int main(int argc, char ** argv) {
    void * plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    void * (*init)(void) = (void * (*)(void)) dlsym(plugin, "ggml_backend_init");
    puts(init() ? "loaded" : "not loaded");
    return 0;
}
"""

KERNELS = """
import sys
from ggml_backend_npu import op

print(f"kernels run in {sys.prefix}", file=sys.stderr)

@op("SQR", types=[("f32", "f32")])
def sqr(dst, x):
    dst.view()[...] = x.view() ** 2
"""


def compiled(folder: Path, source: str, *options: str) -> Path:
    """A C program."""
    program = folder / "program"
    compiler = shutil.which("cc") or "gcc"
    command = [compiler, "-x", "c", "-", "-o", str(program), *options, "-ldl"]
    subprocess.run(command, input=source, text=True, check=True)
    return program


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("host"), HOST)


def run(*command: str | Path, **variables: str) -> tuple[list[str], list[str]]:
    """What a program, started outside any Python environment, prints: its lines, and those of the plugin."""
    kept = {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR") if name in os.environ}
    done = subprocess.run(command, env={**kept, **variables}, capture_output=True, text=True, timeout=300, cwd="/")
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if not line.startswith(("load_backend", "ggml-npu: compiling"))]
    return done.stdout.splitlines(), notes


@pytest.mark.slow
def test_the_library_is_built_once_in_a_path_with_spaces(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache, with spaces"))
        library = embedding.plugin()
        built = library.stat()
        assert embedding.plugin() == library
    assert " " in str(library)
    assert library.stat().st_mtime_ns == built.st_mtime_ns
    assert sorted(path.name for path in library.parent.iterdir()) == ["contents.json", library.name]
    assert run(host, GGML, library) == (["loaded", "CPU", "NPU"], [])


def test_the_command_prints_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "check_package", lambda: None)  # this checkout may be one on PYTHONPATH
    result = CliRunner().invoke(application(), ["plugin"])
    assert result.stdout == f"{embedding.plugin()}\n"
    assert result.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plugin", "test -o ROLL"])
def test_a_command_of_another_tree_than_the_plugins_is_refused(command: str, tmp_path: Path) -> None:
    for package in ("ggml_backend_npu", "graph_runner", "quant"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys; from graph_runner.cli import main; sys.argv[:1] = ['ggml-npu']; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()], env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd="/",
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        rf"ggml-npu: plugin: would run what is installed, .*, and not {tmp_path}/ggml_backend_npu: "
        rf"pip install -e {tmp_path}\n",
        done.stderr,
    )


def test_nothing_is_started_where_the_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(ggml_backend_npu.__file__).resolve().parents[1])
    monkeypatch.setattr(subprocess, "run", None)
    for path, packages in (([], "/nowhere"), ([here], here)):  # found by a finder; in site-packages
        monkeypatch.setattr(sys, "path", path)
        monkeypatch.setattr(sysconfig, "get_path", {"purelib": packages, "platlib": packages}.get)
        embedding.check_package()


@pytest.mark.slow
def test_a_library_of_another_version_is_refused(host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not say whose ggml it is in: that of llama-cpp-python would be loaded beside it."""
    older = embedding._PYTHON.replace('_ggml_npu.caller = int(ffi.cast("uintptr_t", caller))', "")
    older = older.replace("_ggml_npu.caller", 'int(ffi.cast("uintptr_t", caller))')
    with monkeypatch.context() as patch:
        patch.setattr(embedding, "_PYTHON", older)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        library = embedding.plugin()
    lines, (note,) = run(host, GGML, library)
    assert lines == ["not loaded", "CPU"]
    assert note.startswith("ggml-npu: no device NPU: the plugin was built by another version")


@pytest.mark.slow
def test_a_second_load_in_a_process_changes_nothing(host: Path) -> None:
    library = embedding.plugin()
    assert run(host, GGML, library, library) == (["loaded", "loaded", "CPU", "NPU"], [])


@pytest.mark.slow
def test_python_variables_of_the_host_do_not_matter(host: Path) -> None:
    variables = {"PYTHONHOME": "/nowhere", "PYTHONPATH": "/nowhere", "PATH": "/usr/bin:/bin"}
    assert run(host, GGML, embedding.plugin(), **variables) == (["loaded", "CPU", "NPU"], [])


@pytest.mark.slow
def test_kernels_of_the_users_own(host: Path, tmp_path: Path) -> None:
    kernels = tmp_path / "kernels.py"
    kernels.write_text(KERNELS)
    lines, notes = run(host, GGML, embedding.plugin(), GGML_NPU_KERNELS=str(kernels))
    assert lines == ["loaded", "CPU", "NPU"]
    assert notes == [f"kernels run in {sys.prefix}"]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"GGML_NPU_MEMORY": "disk"}, "GGML_NPU_MEMORY='disk': must be one of host, device"),
        ({"GGML_NPU_DEVICE_TYPE": "npu"}, "GGML_NPU_DEVICE_TYPE='npu': must be one of accel, gpu"),
        ({"GGML_NPU_KERNELS": "/nowhere.py"}, "kernels '/nowhere.py': no such file"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(host: Path, variables: dict[str, str], reason: str) -> None:
    lines, notes = run(host, GGML, embedding.plugin(), **variables)
    assert lines == ["not loaded", "CPU"]
    assert notes == [f"ggml-npu: no device NPU: {reason}"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-rdynamic"], "ggml: no function ggml_type_name in what this program exports"),
        ([], "ggml: no function ggml_version in what this program exports"),
    ],
)
def test_a_strange_ggml_is_refused(tmp_path: Path, options: list[str], reason: str) -> None:
    lines, notes = run(compiled(tmp_path, STRANGER, *options), embedding.plugin())
    assert lines == ["not loaded"]
    assert notes == [f"ggml-npu: no device NPU: {reason}"]


@pytest.mark.slow
def test_a_virtual_environment_is_found_and_what_is_missing_in_it_is_named(host: Path, tmp_path: Path) -> None:
    folder = tmp_path / "an environment"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "ours.pth").write_text(f"{ROOT}\n{sysconfig.get_path('platlib')}\n")
    kernels = tmp_path / "kernels.py"
    kernels.write_text(KERNELS)
    code = "from ggml_backend_npu.plugin.embedding import plugin; print(plugin())"
    cache = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    library = subprocess.run([python, "-c", code], env=cache, check=True, capture_output=True, text=True).stdout.strip()
    loaded = (["loaded", "CPU", "NPU"], [f"kernels run in {folder}"])
    assert run(host, GGML, library, GGML_NPU_KERNELS=str(kernels)) == loaded

    def reason(stub: str, text: str) -> str:
        """What the plugin says where a module of the environment is only this text."""
        path = packages / f"{stub}.py"
        path.write_text(text)
        lines, notes = run(host, GGML, library)
        path.unlink()
        assert lines == ["not loaded", "CPU"]
        assert len(notes) == 1
        return notes[0].removeprefix("ggml-npu: no device NPU: ")

    assert reason("numpy", "raise ModuleNotFoundError(\"No module named 'numpy'\")") == "No module named 'numpy'"
    assert reason("numpy", "raise SyntaxError('of\\ntwo lines')") == "of two lines"
    assert reason("_cffi_backend", "raise ImportError") == f"cffi is missing from the Python environment of {python}"
    (packages / "ours.pth").unlink()
    assert reason("nothing", "") == f"cffi is missing from the Python environment of {python}"


@pytest.mark.slow
def test_a_python_program_has_one_device_whoever_registers_it_first() -> None:
    """In a Python that runs already. cffi's start hangs there where PyCapsule_Type has a version tag."""
    code = """
import ctypes, datetime, sys
import ggml_backend_npu
from ggml_backend_npu.ggml.lib import list_devices

hasattr(datetime.datetime_CAPI, "an attribute")
ours = ggml_backend_npu.register()
load = ctypes.CDLL(sys.argv[1]).ggml_backend_load
load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
assert load(sys.argv[2].encode()) == ctypes.addressof(ours.registry)
print(*[device.name for device in list_devices(ours.ggml)])
"""
    lines, notes = run(sys.executable, "-c", code, GGML, embedding.plugin())
    assert (lines, notes) == (["CPU NPU"], [])


def test_what_the_library_cannot_be_built_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_config_var", {"INSTSONAME": "libpython3.a"}.get)
        with pytest.raises(embedding.PluginError, match="no shared libpython"):
            embedding.plugin()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(embedding.PluginError, match="no C compiler"):
            embedding.plugin()
    monkeypatch.setenv("CC", "false")
    with pytest.raises(embedding.PluginError, match="false failed"):
        embedding.plugin()
