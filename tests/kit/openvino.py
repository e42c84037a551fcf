"""ggml-openvino, built from the source of the installed llama-cpp-python beside the package openvino, whose device CPU
it uses.

Needs `pip install openvino` and Debian's packages ocl-icd-opencl-dev and opencl-clhpp-headers: its source includes
OpenCL's headers. It is made once and kept in the user's cache directory.

    python tests/kit/openvino.py    prints the library
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":  # what tests share lies beside this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from kit import ggml_built

from graph_runner.tools import suites
from quant.folders import cache_root

DEVICE = "OPENVINO0"
_OPENCL = Path("/usr/include/CL/opencl.hpp")


def missing() -> str:
    """What the machine lacks to build ggml-openvino and to run it; "" if it can."""
    lacking = [] if find_spec("openvino") else ["openvino"]
    if not _OPENCL.is_file():
        lacking += ["ocl-icd-opencl-dev", "opencl-clhpp-headers"]
    return ", ".join(lacking)


def library() -> Path:
    """libggml-openvino.so, built at the first call. Raises SuiteError if a step fails."""
    spec = find_spec("openvino")
    package = Path(str(spec and spec.origin)).parent
    home = cache_root() / f"openvino-{version('llama-cpp-python')}-{version('openvino')}"
    with suites.building_in(home):
        found = {"OpenVINO_DIR": package / "cmake", "CMAKE_BUILD_RPATH": package / "libs"}
        return ggml_built.kept(home, "openvino", found)


if __name__ == "__main__":
    if missing():
        sys.exit(f"missing: {missing()}")
    print(library())
