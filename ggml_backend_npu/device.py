"""What the device is: its memory, its type, its limits. Set by the environment, or by command line options of the same
meaning before the backend is registered."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class DeviceError(Exception):
    """An option of the device that cannot be: one line that names it, its value and what is allowed."""


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise DeviceError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
    return value


def _bytes(name: str, value: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)i?B?", value.strip(), re.IGNORECASE)
    if found is None or int(found[1]) == 0:
        raise DeviceError(f"{name}={value!r}: must be a size such as 512M or 2G")
    return int(found[1]) * _UNITS[found[2].upper()]


@dataclass
class DeviceOptions:
    """memory        "host": tensors stay in ggml's own buffers; "device": the device has memory of its own
    memory_limit  bytes of its memory
    device_type   "accel": every context uses it at once; "gpu": when n_gpu_layers or a model's device list says so
    """

    memory: str = "host"
    memory_limit: int = 8 << 30
    device_type: str = "accel"

    def update(self, options: Mapping[str, str | None]) -> None:
        """Takes options by field name, as text; None leaves a field. Raises DeviceError, and then changes nothing."""
        checked = {name: self._checked(name, value) for name, value in options.items() if value is not None}
        for name, value in checked.items():
            setattr(self, name, value)

    def _checked(self, name: str, value: str) -> Any:
        variable = f"GGML_NPU_{name.upper()}"
        if name == "memory":
            return _choice(variable, value, ("host", "device"))
        if name == "device_type":
            return _choice(variable, value, ("accel", "gpu"))
        return _bytes(variable, value)

    def update_from_environment(self) -> None:
        """Takes GGML_NPU_MEMORY, GGML_NPU_MEMORY_LIMIT and GGML_NPU_DEVICE_TYPE where they are set."""
        self.update({field.name: os.environ.get(f"GGML_NPU_{field.name.upper()}") for field in fields(self)})


DEVICE = DeviceOptions()
