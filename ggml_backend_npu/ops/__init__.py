"""The kernels, a file per family. Importing this package registers them.

OWN  the ops as this project defines them: in `registry.OPS` a user's kernel may stand in the place of one
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ggml_backend_npu.abi import target  # noqa: F401  (before any kernel is made)
from ggml_backend_npu.ops import (  # noqa: F401
    attention,
    convolution,
    deepseek,
    elementwise,
    glu,
    matmul,
    movers,
    norms,
    patches,
    pooling,
    recurrent,
    rope,
    routing,
    softmax,
    sums,
    transposed,
    triangles,
    unary,
    upscale,
    vision,
)
from ggml_backend_npu.registry import OPS, Op

OWN: Mapping[str, Op] = MappingProxyType(dict(OPS))
