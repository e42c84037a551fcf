"""The default backend, what is added to it, and what makes a backend known to ggml."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cache
from os import PathLike
from typing import overload

from ggml_backend_npu.backend.backend import AnyBackend, Backend
from ggml_backend_npu.backend.kernel_files import load_kernels, named_by_the_environment
from ggml_backend_npu.backend.options import DeviceError
from ggml_backend_npu.device.backend import DeviceBackend, backends_of
from ggml_backend_npu.device.device import Device
from ggml_backend_npu.device.files import check, recorded
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.plugin import registration
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.registry import entry
from ggml_backend_npu.registry.checks import Types
from ggml_backend_npu.registry.entry import Op
from ggml_backend_npu.registry.params import Params


@cache
def default_backends() -> tuple[AnyBackend, ...]:
    """The backends that `ggml_backend_npu.register()` registers: those of the devices of GGML_NPU_DEVICE_FILE, if that
    is set, else this project's own. Raises DeviceError."""
    name = os.environ.get("GGML_NPU_DEVICE_FILE")
    return tuple(backends_of(name)) if name else (Backend(),)


def default_backend() -> AnyBackend:
    """The backend that `ggml_backend_npu.op` adds to, and that is meant if none is named: the first of
    `default_backends`. Raises DeviceError."""
    return default_backends()[0]


def only_backend() -> AnyBackend:
    """The default backend, if one device runs a model. Raises DeviceError if GGML_NPU_DEVICE_FILE names several."""
    first, *others = default_backends()
    if others:
        name, names = os.environ["GGML_NPU_DEVICE_FILE"], " and ".join(each.name for each in (first, *others))
        raise DeviceError(f"device {name!r}: registers {names}, and one runs here: choose it, as {name}:{first.name}")
    return first


def op(
    name: str,
    *,
    types: Iterable[Types] | None = None,
    refuse: Callable[..., str | None] | None = None,
    default: bool = False,
    params: type[Params] | None = None,
) -> Callable[[Callable[..., None]], Op]:
    """Decorator: makes a function a kernel of the ggml op `name`, in the default backend, or, in a file of kernels, in
    the backend that the file is loaded for.

        @op("SQRT", types=[("f32", "f32")], refuse=lambda dst, x: "one row" if x.ne[1] < 2 else None)
        def sqrt(dst, x):
            dst.view()[...] = np.sqrt(x.view())

    name     ggml_op_desc of the nodes that it computes ("GET_ROWS", "SOFT_MAX", "SILU", ...)
    types    the type combinations (dst, src0, src1, ...) that it takes; default: any
    refuse   called like the kernel: returns a reason why such a node is not taken, or None
    default  has no effect on an op that a user registers, which the device always takes
    params   the record of the node's op_params (`ggml_backend_npu.registry.params`)

    The kernel gets `Tensor`s, reads its sources with `.view()` and writes into `dst.view()`. A source that a node
    leaves out is None. A keyword `params` gets the node's op_params: as the record, or without one as bytes, for
    `struct.unpack_from("2f", params)`. An exception in the kernel fails the node, not the process.

    Raises TypeError where `name` is not a string, and where `Op` does.
    """
    make = entry.op(name, types=types, refuse=refuse, default=default, params=params)

    def added(define: Callable[..., None]) -> Op:
        made = make(define)
        if not entry.is_recorded():
            default_backend().ops.add(made)
        return made

    return added


@overload
def register(backend: AnyBackend | None = None, *, into: str | PathLike[str] | None = None) -> Plugin:
    """Registers a backend, or the default one. Always returns the registered backend."""


@overload
def register(backend: Device, *, into: str | PathLike[str] | None = None) -> Plugin | None:
    """Registers a device. Returns None while a file of devices is loaded."""


def register(backend: AnyBackend | Device | None = None, *, into: str | PathLike[str] | None = None) -> Plugin | None:
    """Makes a backend's device known to the ggml inside llama-cpp-python. A second call for the same one changes
    nothing.

    backend  a `Backend` or a `Device`. Default: the default backend, a device called NPU, whose options come from the
             environment where nobody has set them; or all devices of GGML_NPU_DEVICE_FILE. Each of several
             backends needs its own name
    into     another ggml: that of a Python package, by name ("pywhispercpp"), or that of a library, by path. A process
             has one ggml, which the first call chooses

    Returns None while a file of devices is loaded, which only lists them; else the (first) registered backend, whose
    `statistics` count what it computes. Raises `ggml_backend_npu.ggml.lib.UnknownGgmlError` where the layouts of that
    ggml are not known here; DeviceError for an option that cannot be used, and for a name that another device of ggml
    has, and for a device that lacks a method or names a type or an op that ggml does not have;
    `ggml_backend_npu.ggml.places.PlaceError` for an `into` that has no ggml; TypeError for a class.
    """
    if isinstance(backend, type):
        raise TypeError(f"register({backend.__name__}): needs an instance, register({backend.__name__}())")
    noted = recorded()
    if isinstance(backend, Device) and noted is not None:
        noted.append(backend)
        return None
    if into is not None:
        lib.take(into)
    if isinstance(backend, Device):
        check(backend)
        backend = DeviceBackend.of(backend)
    first, *others = default_backends() if backend is None else (backend,)
    registered = registration.register(lib.ggml(), first)
    for other in others:
        registration.register(lib.ggml(), other)
    return registered


@cache
def registry(caller: int) -> int:
    """The address of the backend's ggml_backend_reg, made for the ggml of the code at the address `caller`.

    Reads the device's options and GGML_NPU_KERNELS from the environment. Raises whatever error these, that ggml, or the
    installation cause.
    """
    lib.unchecked()
    lib.check_caller(caller)
    lib.ggml()
    backend = default_backend()
    backend.options.check()
    for file in named_by_the_environment():
        load_kernels(file, backend)
    return register().registry_address
