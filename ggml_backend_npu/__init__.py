"""A ggml backend written in Python: llama.cpp's scheduler runs its graph nodes in the kernels registered here.

import ggml_backend_npu
ggml_backend_npu.register()      # the ggml inside llama-cpp-python now has a device called NPU
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ggml_backend_npu import names

if TYPE_CHECKING:
    from ggml_backend_npu.backend.backend import AnyBackend as AnyBackend
    from ggml_backend_npu.backend.backend import Backend as Backend
    from ggml_backend_npu.backend.options import DeviceError as DeviceError
    from ggml_backend_npu.backend.options import Options as Options
    from ggml_backend_npu.backend.plan import Plan as Plan
    from ggml_backend_npu.default import default_backend as default_backend
    from ggml_backend_npu.default import op as op
    from ggml_backend_npu.default import register as register
    from ggml_backend_npu.device.backend import DeviceBackend as DeviceBackend
    from ggml_backend_npu.device.device import Device as Device
    from ggml_backend_npu.device.device import Program as Program
    from ggml_backend_npu.device.device import QueuedDevice as QueuedDevice
    from ggml_backend_npu.ir import Graph as Graph
    from ggml_backend_npu.ir import Memory as Memory
    from ggml_backend_npu.ir import Node as Node
    from ggml_backend_npu.ir import Tensor as Tensor
    from ggml_backend_npu.ir.buffer import Buffer as Buffer
    from ggml_backend_npu.registry.entry import KernelError as KernelError
    from ggml_backend_npu.registry.entry import Op as Op

names.check("quant")

_PUBLIC = {
    "AnyBackend": "backend.backend",
    "Backend": "backend.backend",
    "Buffer": "ir.buffer",
    "Device": "device.device",
    "DeviceBackend": "device.backend",
    "DeviceError": "backend.options",
    "Graph": "ir",
    "KernelError": "registry.entry",
    "Memory": "ir",
    "Node": "ir",
    "Op": "registry.entry",
    "Options": "backend.options",
    "Plan": "backend.plan",
    "Program": "device.device",
    "QueuedDevice": "device.device",
    "Tensor": "ir",
    "default_backend": "default",
    "op": "default",
    "register": "default",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    """Returns a public name from its module, so that a device's class imports no kernel."""
    if name == "__version__":
        from importlib.metadata import version  # late, as it is slow

        return version("ggml-backend-npu")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
