"""ggml-vulkan, built from the source of the installed llama-cpp-python, and a device for it: lavapipe, Mesa's Vulkan on
the CPU.

Needs Debian 12 with its packages glslc, libvulkan-dev and mesa-vulkan-drivers, which root installs. Two of them are
too old: the headers (ggml-vulkan wants VK_EXT_layer_settings), and the driver, Mesa 22.3, which uses buffers that are
freed (docs/found.md). Newer ones, of the next release and of Debian's backports, are fetched by apt-get and unpacked
beside: nothing is installed. All is made once, in three minutes on two cores, and kept in the user's cache directory.

    python tests/kit/vulkan.py    prints the library and what the environment must be
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

if __name__ == "__main__":  # what tests share lies beside this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from kit import ggml_built
from kit.idle_vulkan import layer

from graph_runner.tools import suites
from quant.folders import cache_root

DEVICE = "Vulkan0"
_PROGRAMS = ("apt-get", "dpkg-deb", "glslc")
_SUITES = ("trixie", "bookworm-backports")  # of Debian, for headers and for the driver
_PACKAGES = ("libvulkan-dev/trixie", "spirv-headers/trixie", "mesa-vulkan-drivers/bookworm-backports")
_SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian {} main\n"
_DRIVERS = Path("/usr/share/vulkan/icd.d")
_LOADER = "*/libvulkan.so"  # below /usr/lib: what ggml-vulkan is linked to


def missing() -> str:
    """What the machine lacks to build ggml-vulkan and to run it; "" if it can."""
    lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
    if not [*_DRIVERS.glob("lvp_icd*.json")]:
        lacking.append("mesa-vulkan-drivers")
    if not [*Path("/usr/lib").glob(_LOADER)]:
        lacking.append("libvulkan-dev")
    return ", ".join(lacking)


def library() -> Path:
    """libggml-vulkan.so, built at the first call. Raises SuiteError if a step fails."""
    home = _home()
    with suites.building_in(home):
        usr = _fetched(home / "debian")
        found = {"Vulkan_INCLUDE_DIR": usr / "include", "SPIRV-Headers_DIR": usr / "share" / "cmake" / "SPIRV-Headers"}
        return ggml_built.kept(home, "vulkan", found)


def environment() -> dict[str, str]:
    """What a process needs that loads the library, once that is built: which driver and which of its devices."""
    (driver,) = _home().glob("debian/usr/share/vulkan/icd.d/here.json")
    return {"VK_ICD_FILENAMES": str(driver), "GGML_VK_VISIBLE_DEVICES": "0"}


def idle(folder: Path) -> dict[str, str]:
    """What the environment must be besides, so that the device computes nothing, by a layer that is built in a folder.
    The library must be there."""
    return layer(folder, _home() / "debian" / "usr" / "include")


def _home() -> Path:
    return cache_root() / f"vulkan-{version('llama-cpp-python')}"


def _fetched(folder: Path) -> Path:
    """The folder usr of the packages."""
    usr = folder / "usr"
    if not usr.is_dir():
        for part in ("lists/partial", "cache/archives/partial", "new"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "sources.list").write_text("".join(map(_SOURCE.format, _SUITES)))
        places = {"Dir::Etc::sourcelist": "sources.list", "Dir::State::lists": "lists", "Dir::Cache": "cache"}
        options = [f"-o={option}={folder / place}" for option, place in places.items()]
        apt: list[str | Path] = ["apt-get", "-qq", *options, "-o=Dir::Etc::sourceparts=-", "-o=APT::Sandbox::User="]
        suites._run([*apt, "update"])
        subprocess.run([*apt, "download", *_PACKAGES], cwd=folder, check=True)
        for package in folder.glob("*.deb"):
            suites._run(["dpkg-deb", "-x", package, folder / "new"])
        (folder / "new" / "usr").replace(usr)
        (theirs,) = usr.glob("share/vulkan/icd.d/lvp_icd*.json")
        said = json.loads(theirs.read_text())
        (driver,) = usr.glob(f"lib/*/{said['ICD']['library_path']}")
        said["ICD"]["library_path"] = str(driver)
        theirs.with_name("here.json").write_text(json.dumps(said))
    return usr


if __name__ == "__main__":
    if missing():
        sys.exit(f"missing: {missing()}")
    print(library(), *(f"{name}={value}" for name, value in environment().items()), sep="\n")
