"""Tensors, nodes and graphs: what everything else computes with. It imports nothing of this package."""

from ggml_backend_npu.ir.graph import PARAMS_BYTES as PARAMS_BYTES
from ggml_backend_npu.ir.graph import Dims as Dims
from ggml_backend_npu.ir.graph import Graph as Graph
from ggml_backend_npu.ir.graph import Memory as Memory
from ggml_backend_npu.ir.graph import Node as Node
from ggml_backend_npu.ir.graph import Tensor as Tensor
from ggml_backend_npu.ir.graph import nbytes as nbytes
