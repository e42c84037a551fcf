"""A ggml backend written in Python: llama.cpp's scheduler runs its graph nodes in the kernels registered here.

import ggml_backend_npu
ggml_backend_npu.register()      # the ggml inside llama-cpp-python now has a device called NPU
"""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.metadata import version
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

from ggml_backend_npu import names  # noqa: F401  (first: it refuses a foreign `quant`)
from ggml_backend_npu.backend import Backend, default_backend, default_backends, op
from ggml_backend_npu.buffer import Buffer
from ggml_backend_npu.device import Device, Program, QueuedDevice
from ggml_backend_npu.device_backend import DeviceBackend
from ggml_backend_npu.device_files import check, recorded
from ggml_backend_npu.ir import Graph, Memory, Node, Tensor
from ggml_backend_npu.options import DeviceError, Options
from ggml_backend_npu.plan import Plan
from ggml_backend_npu.registry import KernelError, Op

if TYPE_CHECKING:
    from ggml_backend_npu.abi.plugin import Plugin

__version__ = version("ggml-backend-npu")

__all__ = [
    "Backend",
    "Buffer",
    "Device",
    "DeviceBackend",
    "DeviceError",
    "Graph",
    "KernelError",
    "Memory",
    "Node",
    "Op",
    "Options",
    "Plan",
    "Program",
    "QueuedDevice",
    "Tensor",
    "default_backend",
    "op",
    "register",
]

MOVED = {
    "aclnn": (
        "AclTensor aclDestroyAclOpExecutor aclSetAclOpExecutorRepeatable aclnnCpy aclnnCpyGetWorkspaceSize "
        "aclnnDup aclnnDupGetWorkspaceSize aclnnGetRows aclnnGetRowsGetWorkspaceSize"
    ),
    "infiniop": "TensorDescriptor TopKSoftmax",
    "rbln": (
        "dynamic_flash_attn_tile dynamic_load dynamic_masked_softmax dynamic_store flash_attn_recompute "
        "flash_attn_tile insert masked_softmax nn_pad softmax to_dynamic_index window_insert window_slice "
        "window_softmax"
    ),
    "rwkv": "token_shift",
}


def __getattr__(name: str) -> Any:
    """The operators of documents, which could be imported from here before they had modules of their own. Gives a
    DeprecationWarning, and raises AttributeError for any other name."""
    for module, operators in MOVED.items():
        if name in operators.split():
            where = f"{__name__}.documents.{module}"
            warnings.warn(f"{__name__}.{name} has moved to {where}", DeprecationWarning, stacklevel=2)
            return getattr(import_module(where), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@overload
def register(backend: Backend | None = None, *, into: str | PathLike[str] | None = None) -> Plugin:
    """Registers a backend, or the default one. Always returns the registered backend."""


@overload
def register(backend: Device, *, into: str | PathLike[str] | None = None) -> Plugin | None:
    """Registers a device. Returns None while a file of devices is loaded."""


def register(backend: Backend | Device | None = None, *, into: str | PathLike[str] | None = None) -> Plugin | None:
    """Makes a backend's device known to the ggml inside llama-cpp-python. A second call for the same one changes
    nothing.

    backend  a `Backend` or a `Device`. Default: the default backend, a device called NPU, whose options come from the
             environment where nobody has set them; or all devices of GGML_NPU_DEVICE_FILE. Each of several backends
             needs its own name
    into     another ggml: that of a Python package, by name ("pywhispercpp"), or that of a library, by path. A process
             has one ggml, which the first call chooses

    Returns None while a file of devices is loaded, which only lists them; else the (first) registered backend, whose
    `statistics` count what it computes. Raises `ggml_backend_npu.abi.lib.UnknownGgmlError` where the layouts of that
    ggml are not known here; DeviceError for an option that cannot be used, and for a name that another device of ggml
    has, and for a device that lacks a method or names a type or an op that ggml does not have;
    `ggml_backend_npu.abi.places.PlaceError` for an `into` that has no ggml; TypeError for a class.
    """
    from ggml_backend_npu.abi import lib, plugin

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
    registered = plugin.register(lib.ggml(), first)
    for other in others:
        plugin.register(lib.ggml(), other)
    return registered
