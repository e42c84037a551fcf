"""The memory of the device, as a suspect: if it errs, what is computed from it says nothing of a kernel."""

from __future__ import annotations

from collections.abc import Callable

from ggml_backend_npu.device.faults import Checks, MemoryFault

_READ = "copy_out", "copy_out_async", "synchronize"  # methods that, if they err, leave nothing that can be read
_CARELESS = 16  # careful looks in vain: then wrong nodes are the kernels' fault


class Erring:
    """What the device's memory is caught at.

    checks  of each call into it; None if calls are not checked
    faults  what it was caught at so far; `Leaves` adds to it
    """

    def __init__(self, checks: Checks | None) -> None:
        self._checks = checks
        self.faults: list[MemoryFault] = [] if checks is None else checks.faults
        self._careless = 0  # careful looks that have found nothing

    @property
    def unrepaired(self) -> str | None:
        """What the memory does not hold as it was set; then what is computed from it says nothing."""
        return None if self._checks is None else self._checks.unrepaired

    @property
    def is_late(self) -> bool:
        """Whether the device was seen to return from calls before they are done."""
        return self._checks is not None and self._checks.is_late

    def found_carefully(self, again: Callable[[], object]) -> str | None:
        """Does again what has shown a wrong result, now also with copies that the device makes of what is read. Returns
        the fault of the memory that is found so, if there is one."""
        if self._checks is None:
            return None
        if (known := next((each for each in self.faults if each.method in _READ), None)) is not None:
            return str(known)
        if self._careless >= _CARELESS:
            return None
        n = len(self.faults)
        with self._checks.carefully():
            again()
        if len(self.faults) > n:
            return str(self.faults[n])
        self._careless += 1
        return None
