"""cblas_sgemm of this project's own copy of OpenBLAS, which computes in the thread that calls it.

NumPy's copy has its own threads, which would compete with ggml's; how many it may use is up to its user.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_ENDINGS = {"Darwin": ".dylib", "Windows": ".dll"}


@cache
def _library() -> ctypes.CDLL:
    """Loaded by its path: the package's own import takes longer than all else here."""
    ending = _ENDINGS.get(platform.system(), ".so")
    spec = find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'scipy_openblas32'")
    path = next(Path(spec.origin).parent.glob(f"lib/*scipy_openblas*{ending}"))
    library = ctypes.CDLL(str(path))
    library.scipy_openblas_set_num_threads(1)
    return library


def sgemm() -> int:
    """The address of cblas_sgemm."""
    return ctypes.cast(_library().scipy_cblas_sgemm, ctypes.c_void_p).value or 0
