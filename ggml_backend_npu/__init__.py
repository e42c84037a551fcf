"""A ggml backend written in Python: llama.cpp's scheduler runs its graph nodes in the kernels registered here.

import ggml_backend_npu
ggml_backend_npu.register()      # the ggml inside llama-cpp-python now has a device called NPU
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from ggml_backend_npu import ops  # noqa: F401  (registers the kernels)
from ggml_backend_npu.device import DEVICE, DeviceError
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
from ggml_backend_npu.plan import Plan, plan
from ggml_backend_npu.registry import OPS, KernelError, Op, op

if TYPE_CHECKING:
    from ggml_backend_npu.abi.plugin import Plugin

__version__ = version("ggml-backend-npu")

__all__ = [
    "DEVICE",
    "OPS",
    "AclTensor",
    "DeviceError",
    "Graph",
    "KernelError",
    "Memory",
    "Node",
    "Op",
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
    "plan",
    "register",
    "softmax",
    "to_dynamic_index",
    "token_shift",
    "window_insert",
    "window_slice",
    "window_softmax",
]


@cache
def register() -> Plugin:
    """Makes the device NPU known to the ggml inside llama-cpp-python. A second call changes nothing.

    The device is what DEVICE says, or the environment where that has not been read before. Returns the registered
    backend, whose `statistics` count what it computes. Raises `ggml_backend_npu.abi.lib.UnknownGgmlError` where that
    ggml is not one whose layouts are known here, DeviceError for an option that cannot be.
    """
    from ggml_backend_npu.abi import lib, plugin

    DEVICE.update_from_environment()
    return plugin.make(lib.ggml())
