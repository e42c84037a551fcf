"""Which backends are registered with the ggml of this process.

PLUGINS      by the name of the device
REGISTERING  lock that is held while ggml's registry must not change
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Protocol

from ggml_backend_npu.backend.backend import AnyBackend
from ggml_backend_npu.backend.options import DeviceError
from ggml_backend_npu.ggml.guard import Failures
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ops.kernels import strided
from ggml_backend_npu.plugin import capture
from ggml_backend_npu.plugin.plugin import Plugin

PLUGINS: dict[str, Plugin] = {}
REGISTERING = RLock()


def register(ggml: Ggml, backend: AnyBackend) -> Plugin:
    """Registers a backend with ggml, once. Raises DeviceError where another device has its name."""
    with REGISTERING:
        known = PLUGINS.get(backend.name)
        if known is not None and known.backend is backend:
            return known
        if known is not None or ggml.ggml_backend_dev_by_name(backend.name.encode()):
            raise DeviceError(f"name={backend.name!r}: ggml has another device of this name")
        plugin = Plugin(ggml, backend)
        strided.make_ready()
        _ = backend.numerics
        if wanted := capture.wanted():
            capture.begin(plugin, wanted)
        ggml.ggml_backend_register(plugin.registry_address)
        PLUGINS[backend.name] = plugin
        return plugin


class Registrable(Protocol):
    """A backend that can be registered with ggml."""

    @property
    def registry_address(self) -> int:
        """Its ggml_backend_reg_t."""


@contextmanager
def alone(ggml: Ggml, *chosen: Registrable) -> Iterator[None]:
    """Until the context ends, ggml's registry has these backends, registered or not, and no other one of ours.

    llama.cpp gives every context each ACCEL device that it finds, and every model each GPU. What was given before
    stays.
    """
    with REGISTERING:
        others = [plugin for plugin in PLUGINS.values() if plugin not in chosen]
        unknown = {each.registry_address: each for each in chosen if not _is_registered(ggml, each)}
        guests = [*unknown.values()]
        _exchange(ggml, others, guests)
        try:
            yield
        finally:
            _exchange(ggml, guests, others)


def _is_registered(ggml: Ggml, backend: Registrable) -> bool:
    known = (ggml.ggml_backend_reg_get(index) for index in range(ggml.ggml_backend_reg_count()))
    return backend.registry_address in known


def _exchange(ggml: Ggml, out: Sequence[Registrable], new: Sequence[Registrable]) -> None:
    for plugin in out:
        ggml.ggml_backend_unload(plugin.registry_address)
    for plugin in new:
        ggml.ggml_backend_register(plugin.registry_address)


def failures_of(device: str) -> Failures:
    """The `Failures` of a device's callbacks, where the device is one of ours; else an empty one."""
    return PLUGINS[device].failures if device in PLUGINS else Failures()
