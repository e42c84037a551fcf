"""aclnnGetRows, aclnnCpy, aclnnDup: the two-phase calls of the GET_ROWS / CPY / DUP requirement, on NumPy arrays.

    status, size, executor = aclnnGetRowsGetWorkspaceSize(src, indices, scale, 32, out)
    status = aclnnGetRows(None, size, executor)

Tensors are 4-D, row-major, of any strides. None is copied, except one with an axis that runs backwards: that one is
copied at each run, as the kernels walk forwards.

- an ndarray of float32, float16, int32, or of int8: quants, whose scales are a tensor of their own
- an `AclTensor`: int4, two to a byte, whose scales are a tensor of their own
- an `ir.Tensor` made by `Tensor.of(bytes, "q8_0")` or `"q4_0"`: blocks as ggml has them, scales inside

The first phase checks everything: where it refuses, its executor is None and nothing has been written. The second phase
checks what can have changed since. Both return a `Status`, whose message names the argument and its value; a mistake of
the caller raises nothing.

    0       ACL_SUCCESS
    161001  ACLNN_ERR_PARAM_NULLPTR    a tensor, an executor or a workspace is None
    161002  ACLNN_ERR_PARAM_INVALID    an invalid type, shape, stride or value, or an executor not valid for this call
    361001  ACLNN_ERR_RUNTIME_ERROR    an index that was changed after the first phase names no row

No call needs a workspace: sizes are 0. Streams are accepted and ignored: a call has run when it returns.

Source: the requirement "get_rows, cpy, dup" of llama.cpp on 310P and 910B, with aclnn's calling convention. Where it
says nothing, numbers are ggml's: GET_ROWS and CPY of its CPU backend, quantised with the rounding of
quantize_row_*_ref.
"""

from __future__ import annotations

from ggml_backend_npu.documents.aclnn.copies import (
    aclnnCpy,
    aclnnCpyGetWorkspaceSize,
    aclnnDup,
    aclnnDupGetWorkspaceSize,
)
from ggml_backend_npu.documents.aclnn.executors import (
    AclOpExecutor,
    aclDestroyAclOpExecutor,
    aclSetAclOpExecutorRepeatable,
)
from ggml_backend_npu.documents.aclnn.get_rows import aclnnGetRows, aclnnGetRowsGetWorkspaceSize
from ggml_backend_npu.documents.aclnn.operands import AclTensor

__all__ = [
    "AclOpExecutor",
    "AclTensor",
    "aclDestroyAclOpExecutor",
    "aclSetAclOpExecutorRepeatable",
    "aclnnCpy",
    "aclnnCpyGetWorkspaceSize",
    "aclnnDup",
    "aclnnDupGetWorkspaceSize",
    "aclnnGetRows",
    "aclnnGetRowsGetWorkspaceSize",
]
