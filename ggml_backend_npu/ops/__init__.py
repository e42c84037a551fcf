"""The kernels, a file per family. Importing this package registers them."""

from ggml_backend_npu.ops import elementwise, movers, rope, routing, softmax  # noqa: F401
