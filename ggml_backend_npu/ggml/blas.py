"""cblas_sgemm of this project's own copy of OpenBLAS, which computes in the thread that calls it.

NumPy's copy has its own threads, which would compete with ggml's; how many it may use is up to its user.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

import scipy_openblas32

_ENDINGS = {"Darwin": ".dylib", "Windows": ".dll"}


@cache
def _library() -> ctypes.CDLL:
    ending = _ENDINGS.get(platform.system(), ".so")
    prefix = "" if ending == ".dll" else "lib"
    name = f"{prefix}{scipy_openblas32.get_library()}{ending}"
    library = ctypes.CDLL(str(Path(scipy_openblas32.get_lib_dir()) / name))
    library.scipy_openblas_set_num_threads(1)
    return library


def sgemm() -> int:
    """The address of cblas_sgemm."""
    return ctypes.cast(_library().scipy_cblas_sgemm, ctypes.c_void_p).value or 0
