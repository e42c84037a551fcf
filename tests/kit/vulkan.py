"""ggml-vulkan, built from the source of the installed llama-cpp-python: a device of lavapipe, Mesa's Vulkan on the CPU.

Needs Debian's packages glslc, libvulkan-dev and mesa-vulkan-drivers, which root installs. Debian 12's headers are older
than ggml-vulkan's needs (VK_EXT_layer_settings), so those of the next release are fetched by apt-get and unpacked
beside: nothing is installed. Built once, in three minutes on two cores, and kept in the user's cache directory.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tools.layouts import sources

from graph_runner.tools import suites
from quant.folders import cache_root

DEVICE = "Vulkan0"
_PROGRAMS = ("apt-get", "dpkg-deb", "glslc")
_HEADERS = ("libvulkan-dev", "spirv-headers")
_DEBIAN = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main\n"
_DRIVERS = Path("/usr/share/vulkan/icd.d")
_OPTIONS = {
    "BUILD_SHARED_LIBS": "ON",
    "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_BUILD_EXAMPLES": "OFF",
    "GGML_BUILD_TESTS": "OFF",
    "GGML_CCACHE": "OFF",
    "GGML_VULKAN": "ON",
}
# a project of its own: ggml alone wants files that llama.cpp's copy has not
_PROJECT = 'cmake_minimum_required(VERSION 3.19)\nproject(vulkan C CXX)\nadd_subdirectory("{}" ggml)\n'


def missing() -> str:
    """What the machine lacks to build ggml-vulkan and to run it; nothing if it can."""
    lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
    if not [*_DRIVERS.glob("lvp_icd*.json")]:
        lacking.append("mesa-vulkan-drivers")
    return ", ".join(lacking)


def library() -> Path:
    """libggml-vulkan.so, built at the first call. Raises SuiteError if a step fails."""
    home = cache_root() / f"vulkan-{version('llama-cpp-python')}"
    kept = home / "libggml-vulkan.so"
    with suites.building_in(home):
        if not kept.is_file():
            shutil.copy2(_built(home), kept.with_suffix(".new"))
            kept.with_suffix(".new").replace(kept)
            shutil.rmtree(home / "build")
    return kept


def _built(home: Path) -> Path:
    headers, made = _fetched(home / "headers"), home / "build"
    made.mkdir(exist_ok=True)
    (made / "CMakeLists.txt").write_text(_PROJECT.format(sources(version("llama-cpp-python"))))
    found = {"Vulkan_INCLUDE_DIR": headers / "include", "SPIRV-Headers_DIR": headers / "share/cmake/SPIRV-Headers"}
    options = [f"-D{option}={value}" for option, value in {**_OPTIONS, **found}.items()]
    ninja, cmake = suites._tool("ninja", "BIN_DIR"), suites._tool("cmake", "CMAKE_BIN_DIR")
    suites._run([cmake, "-S", made, "-B", made, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *options])
    suites._run([ninja, "-C", made, "ggml-vulkan"])
    return next(made.glob("**/libggml-vulkan.so"))


def _fetched(folder: Path) -> Path:
    """The folder usr of the headers."""
    if not (folder / "usr").is_dir():
        for part in ("lists/partial", "cache/archives/partial", "new"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "sources.list").write_text(_DEBIAN)
        places = {"Dir::Etc::sourcelist": "sources.list", "Dir::State::lists": "lists", "Dir::Cache": "cache"}
        options = [f"-o={option}={folder / place}" for option, place in places.items()]
        apt: list[str | Path] = ["apt-get", "-qq", *options, "-o=Dir::Etc::sourceparts=-", "-o=APT::Sandbox::User="]
        suites._run([*apt, "update"])
        subprocess.run([*apt, "download", *_HEADERS], cwd=folder, check=True)
        for package in folder.glob("*.deb"):
            suites._run(["dpkg-deb", "-x", package, folder / "new"])
        (folder / "new" / "usr").replace(folder / "usr")
    return folder / "usr"


if __name__ == "__main__":
    print(missing() or library(), file=sys.stderr if missing() else sys.stdout)
