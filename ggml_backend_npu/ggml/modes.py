"""How the processor computes with floats: its rounding mode, whether it flushes subnormals, which exceptions trap.

These modes (MXCSR and the x87 control word on x86, FPCR on ARM) belong to a thread, and whoever changes one changes it
for all that the thread computes afterwards. C's fegetmode and fesetmode read and set them; where there are none, modes
are 0 and nothing is put back.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Any

from quant.kernels.jit import call_openmp, callback
from quant.kernels.late import types
from quant.kernels.threads import working_team

_IS_X86, _IS_ARM = platform.machine() in ("x86_64", "AMD64"), platform.machine() in ("aarch64", "arm64")
# femode_t: on x86 the control word in bits 0 to 15 and MXCSR in bits 32 to 63, on ARM FPCR in bits 0 to 31; the lowest
# bits of MXCSR are flags of what has happened, which are no modes
_MODES = 0x0000FFC0_0000FFFF if _IS_X86 else 0x00000000_FFFFFFFF
_ROUNDING_AT = 32 + 13 if _IS_X86 else 22
_ROUNDINGS = ("to nearest", "down", "up", "toward zero") if _IS_X86 else ("to nearest", "up", "down", "toward zero")
_FLUSHES, _TAKES_AS_ZERO = (1 << (32 + 15), 1 << (32 + 6)) if _IS_X86 else (1 << 24, 0)

_Mode, _to = ctypes.c_uint64, ctypes.byref


def _function(name: str) -> Any:
    """C's function; None where libm does not have it, or where what it writes is not known."""
    return getattr(ctypes.PyDLL(None), name, None) if _IS_X86 or _IS_ARM else None


_get, _set = _function("fegetmode"), _function("fesetmode")


@callback(types.void(types.int64, types.int64, types.int64, types.int64))
def _in_team(openmp: int, function: int, argument: int, n_threads: int) -> None:
    call_openmp(openmp, function, argument, n_threads)


def modes() -> int:
    """This thread's modes, in the places that femode_t has them."""
    if _get is None:
        return 0
    held = _Mode()
    _get(_to(held))
    return held.value & _MODES


def put_back(before: int) -> str | None:
    """Sets this thread, and the others of the working team, to the modes that it had before. Returns in a few words
    what was in place of them; None if nothing had changed."""
    after = modes()
    if after == before:
        return None
    held, team = _Mode(before), working_team()
    _set(_to(held))
    if team.openmp:
        function = ctypes.cast(_set, ctypes.c_void_p).value or 0
        _in_team(team.openmp, function, ctypes.addressof(held), team.n_threads)
    found = []
    if (before ^ after) >> _ROUNDING_AT & 3:
        found.append(f"the rounding mode at {_ROUNDINGS[after >> _ROUNDING_AT & 3]}")
    for bit, what in (_FLUSHES, "results flushed to zero (FTZ)"), (_TAKES_AS_ZERO, "subnormals taken as zero (DAZ)"):
        if (before ^ after) & bit:
            found.append(what if after & bit else f"no longer {what}")
    return " and ".join(found) or "other floating-point exceptions masked"
