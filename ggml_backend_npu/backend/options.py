"""What a backend's device is like: its generation, its memory, its type, its limits. The environment sets them, or
command line options with the same meaning."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ggml_backend_npu.profiles import load
from ggml_backend_npu.profiles.rules import FULL, Profile, ProfileError
from quant.errors import UserError

_MOST_BYTES = 1 << 60
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class DeviceError(UserError):
    """An option of the device that cannot be used: one line that names it, its value and what is allowed."""


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise DeviceError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
    return value


def _bytes(name: str, value: str) -> int:
    found = re.fullmatch(r"0*([1-9][0-9]{,18})([KMG]?)i?B?", value.strip(), re.IGNORECASE)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not 0 < size <= _MOST_BYTES:
        raise DeviceError(f"{name}={value!r}: must be a size such as 512M or 2G")
    return size


def _profile(name: str, value: str) -> Profile:
    try:
        return load(value)
    except ProfileError as error:
        raise DeviceError(f"{name}={value!r}: {error}") from None


_CHECKS: dict[str, Callable[[str, str], Any]] = {
    "profile": _profile,
    "memory": partial(_choice, allowed=("host", "device")),
    "memory_limit": _bytes,
    "device_type": partial(_choice, allowed=("accel", "gpu")),
    "fallback": partial(_choice, allowed=("none", "cpu")),
    "ops": partial(_choice, allowed=("default", "all")),
    "fusion": partial(_choice, allowed=("on", "off")),
    "matmul": partial(_choice, allowed=("exact", "fast")),
}


OPTIONS = tuple(_CHECKS)


_READ_ELSEWHERE = ("capture", "capture_as", "capture_nodes", "device_file", "engine", "kernels", "threads", "verbose")
_PREFIX = "GGML_NPU_"


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"


def _refuse_unknown_variables() -> None:
    known = [_variable(name) for name in (*_CHECKS, *_READ_ELSEWHERE)]
    for name in os.environ:
        if name.startswith(_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else "."
            raise DeviceError(f"{name}: no such variable{meant} Known: {' '.join(sorted(known))}")


@dataclass(frozen=True)
class Options:
    """The options of one device.

    profile       the device's generation
    memory        "host": tensors stay in ggml's own buffers; "device": the device has memory of its own
    memory_limit  bytes of its memory; None: 8 GiB, or no limit where tensors stay in ggml's own buffers
    device_type   "accel": every context uses it at once; "gpu": when n_gpu_layers or a model's device list says so
    fallback      "cpu": ggml's CPU backend computes a node that the device does not take but is given all the same:
                  on an RPC server, which clients do not ask. "none": such a node fails
    ops           "default": SCALE and the ops that move data, which cost a scheduler little; "all": every op there is
    fusion        "on": patterns of nodes run as one operator
    matmul        how weights are multiplied, see `ops.matmul`, and q, k and v, see `ops.attention`: "exact" as ggml's
                  CPU does, "fast" with sums of other rounding
    """

    profile: Profile = FULL
    memory: str = "host"
    memory_limit: int | None = None
    device_type: str = "accel"
    fallback: str = "none"
    ops: str = "default"
    fusion: str = "on"
    matmul: str = "fast"
    _given: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_environment(cls) -> Options:
        """GGML_NPU_PROFILE, GGML_NPU_MEMORY and so on, each where it is set. Raises DeviceError for a wrong value, and
        for a GGML_NPU_ variable that does not exist."""
        _refuse_unknown_variables()
        return cls()._with({name: os.environ.get(_variable(name)) for name in _CHECKS}, _variable)

    def updated(self, options: Mapping[str, str | None]) -> Options:
        """These options with some replaced: text by field name; None leaves a field as it is. Raises DeviceError for a
        wrong value."""
        return self._with(options, str)

    def _with(self, options: Mapping[str, str | None], called: Callable[[str], str]) -> Options:
        given = {name: value for name, value in options.items() if value is not None}
        checked = {name: _CHECKS[name](called(name), value) for name, value in given.items()}
        return replace(self, **checked, _given={**self._given, **given})

    def check(self) -> None:
        """Raises DeviceError for options that cannot be combined."""
        if self.fallback == "cpu" and self.memory == "device":
            raise DeviceError("GGML_NPU_FALLBACK=cpu needs GGML_NPU_MEMORY=host: the CPU cannot reach device memory")
        if self.memory_limit is not None and self.memory == "host":
            raise DeviceError(f"memory limit of {self.memory_limit} bytes: needs memory 'device', and memory is 'host'")

    @property
    def to_compare(self) -> Options:
        """The options for comparing nodes: matrices are multiplied exactly, unless an option was given that says
        how."""
        return self if "matmul" in self._given else replace(self, matmul="exact")

    def chosen(self) -> dict[str, str]:
        """Every option that has a value, by field name, as text that `updated` takes."""
        values = {name: getattr(self, name) for name in _CHECKS}
        texts = {name: str(value) for name, value in values.items() if value is not None}
        return texts | {"profile": self._given.get("profile", self.profile.name)}
