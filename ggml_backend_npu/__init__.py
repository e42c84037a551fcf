"""A ggml backend written in Python: llama.cpp's scheduler runs its graph nodes in the kernels registered here.

import ggml_backend_npu
ggml_backend_npu.register()      # the ggml inside llama-cpp-python now has a device called NPU
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from ggml_backend_npu.backend import Backend, default_backend, op
from ggml_backend_npu.ir import Graph, Memory, Node, Tensor
from ggml_backend_npu.operators.aclnn import (
    AclTensor,
    aclDestroyAclOpExecutor,
    aclnnCpy,
    aclnnCpyGetWorkspaceSize,
    aclnnDup,
    aclnnDupGetWorkspaceSize,
    aclnnGetRows,
    aclnnGetRowsGetWorkspaceSize,
    aclSetAclOpExecutorRepeatable,
)
from ggml_backend_npu.operators.infiniop import TensorDescriptor, TopKSoftmax
from ggml_backend_npu.operators.rbln import (
    dynamic_flash_attn_tile,
    dynamic_load,
    dynamic_masked_softmax,
    dynamic_store,
    flash_attn_recompute,
    flash_attn_tile,
    insert,
    masked_softmax,
    nn_pad,
    softmax,
    to_dynamic_index,
    window_insert,
    window_slice,
    window_softmax,
)
from ggml_backend_npu.operators.rwkv import token_shift
from ggml_backend_npu.options import DeviceError, Options
from ggml_backend_npu.plan import Plan
from ggml_backend_npu.registry import KernelError, Op

if TYPE_CHECKING:
    from ggml_backend_npu.abi.plugin import Plugin

__version__ = version("ggml-backend-npu")

__all__ = [
    "AclTensor",
    "Backend",
    "DeviceError",
    "Graph",
    "KernelError",
    "Memory",
    "Node",
    "Op",
    "Options",
    "Plan",
    "Tensor",
    "TensorDescriptor",
    "TopKSoftmax",
    "aclDestroyAclOpExecutor",
    "aclSetAclOpExecutorRepeatable",
    "aclnnCpy",
    "aclnnCpyGetWorkspaceSize",
    "aclnnDup",
    "aclnnDupGetWorkspaceSize",
    "aclnnGetRows",
    "aclnnGetRowsGetWorkspaceSize",
    "default_backend",
    "dynamic_flash_attn_tile",
    "dynamic_load",
    "dynamic_masked_softmax",
    "dynamic_store",
    "flash_attn_recompute",
    "flash_attn_tile",
    "insert",
    "masked_softmax",
    "nn_pad",
    "op",
    "register",
    "softmax",
    "to_dynamic_index",
    "token_shift",
    "window_insert",
    "window_slice",
    "window_softmax",
]


def register(backend: Backend | None = None) -> Plugin:
    """Makes a backend's device known to the ggml inside llama-cpp-python. A second call for it changes nothing.

    backend  the default one, a device NPU, where left out: its options are those of the environment where nobody has
             set them. Of several each has a name of its own

    Returns the registered backend, whose `statistics` count what it computes. Raises
    `ggml_backend_npu.abi.lib.UnknownGgmlError` where that ggml is not one whose layouts are known here, DeviceError for
    an option that cannot be, and for a name that ggml has a device of.
    """
    from ggml_backend_npu.abi import lib, plugin

    return plugin.register(lib.ggml(), backend or default_backend())
