"""Which llama.cpp a process has: that of this environment, a build in a folder, or another environment's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graph_runner.base.python import environment

if TYPE_CHECKING:
    from ggml_backend_npu.ggml.lib import Ggml

_LIBRARIES, _PACKAGE = "LLAMA_CPP_LIB_PATH", "LLAMA_CPP_PACKAGE"
_NEEDED = ("libllama.so", "libggml.so")
_WITHIN = (".", "bin", "build/bin", "lib")  # where in a folder they may lie
# parts of paths
_SAY_NOTHING = {"bin", "build", "lib", "llama_cpp", "python", "python3", "site-packages", ".venv", "venv"}
_FIND = "import importlib.util as u; s = u.find_spec('llama_cpp'); print(s.submodule_search_locations[0] if s else '')"
_CHUNK = 1 << 24
_SECONDS = 60.0  # that a Python may take to say where its llama_cpp is


@dataclass(frozen=True)
class Build:
    """Which llama.cpp a process loads.

    libraries  folder of libllama and libggml; None: those that the Python package llama_cpp has
    package    folder of another environment's package llama_cpp; None: this environment's
    """

    libraries: str | None = None
    package: str | None = None

    @classmethod
    def of_this_process(cls) -> Build:
        """Returns what this process has, or will load."""
        return cls(os.environ.get(_LIBRARIES) or None, os.environ.get(_PACKAGE) or None)

    @classmethod
    def of_folder(cls, text: str) -> Build:
        """Returns the build in a folder: of llama.cpp's own build, or what one has installed. Raises ValueError for a
        folder that has none."""
        folder = Path(text)
        if not folder.is_dir():
            raise ValueError("no such directory")
        for each in (folder / part for part in _WITHIN):
            if all((each / name).exists() for name in _NEEDED):
                return cls(str(each.resolve()))
        raise ValueError(f"has no {' and no '.join(_NEEDED)}")

    @classmethod
    def of_python(cls, text: str) -> Build:
        """Returns the build of an environment's package llama_cpp. Raises ValueError for a Python that has none."""
        if not Path(text).is_file():
            raise ValueError("no such file")
        found = ""
        try:
            done = subprocess.run([text, "-I", "-c", _FIND], capture_output=True, text=True, timeout=_SECONDS)
            found = done.stdout.strip()
        except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
            done = None
        if done is None or done.returncode:
            raise ValueError("is no Python that runs")
        if not found:
            raise ValueError("this Python has no llama-cpp-python")
        return cls(package=found)

    @property
    def where(self) -> str:
        """Where it is: a folder, or the Python package of this environment."""
        return self.libraries or self.package or "this environment's llama-cpp-python"

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within it, processes that this one starts load it; this one too, if it has loaded none yet."""
        before = dict(os.environ)
        for name, value in self._variables.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        try:
            yield
        finally:
            for name in self._variables:
                os.environ.pop(name, None)
                os.environ.update({name: before[name]} if name in before else {})

    def environment(self) -> dict[str, str]:
        """Returns the environment of a process that has it, and finds the same modules as this one."""
        variables = self._variables
        kept = {name: value for name, value in environment().items() if name not in variables}
        return kept | {name: value for name, value in variables.items() if value is not None}

    @property
    def _variables(self) -> dict[str, str | None]:
        return {_LIBRARIES: self.libraries, _PACKAGE: self.package}


@dataclass(frozen=True)
class About:
    """What a side of a diff computes with, if the sides are of two builds.

    ggml   its version
    build  the digest of its CPU backend's file, and the features that it was compiled with
    where  it is
    """

    ggml: str
    build: str
    where: str

    @classmethod
    def of_this_process(cls, ggml: Ggml) -> About:
        """Returns what this process computes with."""
        return cls(ggml.version, build_of(ggml), Build.of_this_process().where)

    def __str__(self) -> str:
        return f"ggml {self.ggml}, {self.build}; {self.where}"


def short(path: str) -> str:
    """Returns the part of a path that says most, to call a build by: "before" of before/build/bin."""
    parts = [part for part in Path(os.path.abspath(path)).parts[1:] if part not in _SAY_NOTHING]
    return next((part for part in reversed(parts) if not part.startswith("python3.")), path)


def build_of(ggml: Ggml) -> str:
    """Returns what ggml's CPU backend is: the digest of its file, and the features that it was compiled with."""
    features = " ".join(name for name, value in ggml.features.items() if value != "0")
    return f"{hash_of(Path(ggml.cpu_file))} {features}".strip()


def hash_of(*files: Path) -> str:
    """Returns the xxh3-64 of files, one after the other."""
    import xxhash  # late: the command's options do not need it

    digest = xxhash.xxh3_64()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
