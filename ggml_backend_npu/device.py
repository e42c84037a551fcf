"""What the device is: its generation, its memory, its type, its limits. Set by the environment, or by command line
options of the same meaning before the backend is registered."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.profiles import FULL, Profile, ProfileError, load
from quant.kernels import threads

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


_READ_ELSEWHERE = ("engine", "kernels", "threads", "verbose")
_PREFIX = "GGML_NPU_"


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"


def _refuse_unknown_variables() -> None:
    known = [_variable(name) for name in (*_CHECKS, *_READ_ELSEWHERE)]
    for name in os.environ:
        if name.startswith(_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; {near[0]} is meant?" if near else ""
            raise DeviceError(f"{name}: no such variable{meant} There are {' '.join(sorted(known))}")


@dataclass
class DeviceOptions:
    """profile       the device's generation
    memory        "host": tensors stay in ggml's own buffers; "device": the device has memory of its own
    memory_limit  bytes of its memory; None: 8 GiB, or none where tensors stay in ggml's own buffers
    device_type   "accel": every context uses it at once; "gpu": when n_gpu_layers or a model's device list says so
    fallback      "cpu": a node that the device does not take, and is handed all the same, is computed by ggml's CPU
                  backend: behind RPC, where clients do not ask. "none": such a node fails
    ops           "default": SCALE and the ops that move data, which cost a scheduler little; "all": every op there is
    matmul        how weights are multiplied, see `ops.matmul`: "exact" as ggml's CPU does, "fast" by BLAS where columns
                  are many
    """

    profile: Profile = FULL
    memory: str = "host"
    memory_limit: int | None = None
    device_type: str = "accel"
    fallback: str = "none"
    ops: str = "default"
    matmul: str = "fast"
    _fuses: NDArray[np.int64] = field(default_factory=lambda: np.ones(1, np.int64), init=False, repr=False)
    _given: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _environment_is_read: bool = field(default=False, init=False, repr=False)

    @property
    def fusion(self) -> str:
        """ "on": patterns of nodes run as one operator"""
        return "on" if self._fuses[0] else "off"

    @fusion.setter
    def fusion(self, value: str) -> None:
        self._fuses[0] = value == "on"

    @property
    def fuses_at(self) -> int:
        """Where compiled code reads whether they do, int64."""
        return int(self._fuses.ctypes.data)

    @property
    def threads(self) -> int:
        """That a kernel may use, where llama.cpp does not say how many its contexts have."""
        return threads.allowed()

    @threads.setter
    def threads(self, count: int) -> None:
        threads.allow(count)

    @contextmanager
    def multiplying(self, how: str) -> Iterator[None]:
        """Matrices are multiplied in one way until the context ends; plans made before have theirs."""
        before, self.matmul = self.matmul, how
        try:
            yield
        finally:
            self.matmul = before

    def update(self, options: Mapping[str, str | None]) -> None:
        """Takes options by field name, as text; None leaves a field. Raises DeviceError, and then changes nothing.

        The environment is read before, so that what is set here stays.
        """
        self.update_from_environment()
        self._take(options, str)

    def _take(self, options: Mapping[str, str | None], called: Callable[[str], str]) -> None:
        checked = {name: _CHECKS[name](called(name), value) for name, value in options.items() if value is not None}
        for name, value in checked.items():
            setattr(self, name, value)
            self._given[name] = str(options[name])

    def check(self) -> None:
        """Raises DeviceError for options that cannot be together."""
        if self.fallback == "cpu" and self.memory == "device":
            raise DeviceError("GGML_NPU_FALLBACK=cpu needs GGML_NPU_MEMORY=host: the CPU cannot reach device memory")
        if self.memory_limit is not None and self.memory == "host":
            raise DeviceError(f"memory limit of {self.memory_limit} bytes: needs memory 'device', and memory is 'host'")

    @property
    def matmul_to_compare(self) -> str:
        """How matrices are multiplied where nodes are compared: exactly, unless an option says how."""
        return self.matmul if "matmul" in self._given else "exact"

    def chosen(self) -> dict[str, str]:
        """Every option that has a value, by field name, as text that `update` takes."""
        values = {name: getattr(self, name) for name in _CHECKS}
        texts = {name: str(value) for name, value in values.items() if value is not None}
        return texts | {"profile": self._given.get("profile", self.profile.name)}

    def update_from_environment(self) -> None:
        """Takes GGML_NPU_PROFILE, GGML_NPU_MEMORY and so on for each option that is set, once: later calls change
        nothing."""
        if not self._environment_is_read:
            _refuse_unknown_variables()
            self._take({name: os.environ.get(_variable(name)) for name in _CHECKS}, _variable)
            self._environment_is_read = True


DEVICE = DeviceOptions()
