"""Your own kernels for llama.cpp, in NumPy: RMS_NORM and GET_ROWS, in place of those of the backend.

ggml-npu run  demo --kernels examples/my_kernels.py
ggml-npu diff demo --kernels examples/my_kernels.py --ops GET_ROWS
"""

import struct

import numpy as np

from ggml_backend_npu import Tensor, op


@op("RMS_NORM", types=[("f32", "f32")])
def rms_norm(dst: Tensor, x: Tensor, params: bytes) -> None:
    """Divides each row by its root mean square; eps is the first float of the node's params."""
    (eps,) = struct.unpack_from("f", params)
    rows = x.view()
    dst.view()[...] = rows / np.sqrt(np.square(rows).mean(-1, keepdims=True) + eps)


@op("GET_ROWS", types=[("f32", "f32", "i32")])
def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """Copies the rows of src that ids names."""
    for i3, i2, i1 in np.ndindex(dst.ne[:0:-1]):
        dst.view()[i3, i2, i1] = src.view()[i3, i2, ids.view()[0, i3, i2, i1]]
