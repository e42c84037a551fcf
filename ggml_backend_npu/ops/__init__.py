"""The kernels, a file per family.

OWN  the ops as this project defines them; in a backend a user's kernel may stand in the place of one
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ggml_backend_npu.abi import target  # noqa: F401  (before any kernel is made)
from ggml_backend_npu.registry import Op, recording

with recording() as _made:
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

OWN: Mapping[str, Op] = MappingProxyType({op.name: op for op in _made})
