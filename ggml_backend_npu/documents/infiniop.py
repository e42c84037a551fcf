"""TopKSoftmax of InfiniOP: the k largest values of each row's softmax, and their indices.

Decided against the document or its source: the row stride of the descriptor is used (the source reads rows as if there
were no gaps); a topk of 0 or above the width is refused at the call.

The document sorts probabilities by std::sort, which leaves the order of equal ones open: here those that float32 cannot
tell apart, such as all that underflow to 0, are in the order of their scores, which is that of the exact probabilities;
of equal scores the first comes first.

The document's sample output, {0.705, 0.259} for {1, 3, 2, 4} and top 2, is wrong: normalised it is {0.7310586,
0.2689414}, and not normalised {0.6439143, 0.2368828}; the indices {3, 1} are right.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ggml_backend_npu.documents import run
from ggml_backend_npu.documents.status import Status
from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.routing import bind_routing

INFINI_STATUS_SUCCESS = Status(0, "INFINI_STATUS_SUCCESS")
_CODES = {
    "INFINI_STATUS_BAD_PARAM": 3,
    "INFINI_STATUS_NULL_POINTER": 4,
    "INFINI_STATUS_BAD_TENSOR_DTYPE": 10,
    "INFINI_STATUS_BAD_TENSOR_SHAPE": 11,
    "INFINI_STATUS_BAD_TENSOR_STRIDES": 12,
}
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def _error(name: str, message: str) -> Status:
    return Status(_CODES[f"INFINI_STATUS_{name}"], f"INFINI_STATUS_{name}", message)


@dataclass(frozen=True)
class TensorDescriptor:
    """infiniopTensorDescriptor_t: shape and strides in elements, and dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    @staticmethod
    def of(array: NDArray[Any]) -> TensorDescriptor:
        """The descriptor of an array. Raises ValueError for anything else."""
        if not isinstance(array, np.ndarray):
            raise ValueError(f"array is {type(array).__name__}: must be an ndarray")
        if not array.size:  # numpy's strides are 0 then
            return TensorDescriptor.contiguous(array.shape, array.dtype)
        return TensorDescriptor(array.shape, tuple(s // array.itemsize for s in array.strides), array.dtype)

    @staticmethod
    def contiguous(shape: tuple[int, ...], dtype: DTypeLike) -> TensorDescriptor:
        """The descriptor of an array of this shape without gaps."""
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return TensorDescriptor(shape, strides, np.dtype(dtype))


@dataclass(frozen=True)
class TopKSoftmax:
    """The descriptor of the operator: made once by `create`, for any number of calls of `calculate`.

    N, width        rows, and scores of a row
    workspace_size  bytes, 0
    """

    x_desc: TensorDescriptor
    workspace_size: int = 0

    @property
    def N(self) -> int:
        """Rows of x."""
        return self.x_desc.shape[0]

    @property
    def width(self) -> int:
        """Scores of a row of x."""
        return self.x_desc.shape[1]

    @staticmethod
    def create(handle: object, x_desc: TensorDescriptor | None) -> tuple[Status, TopKSoftmax | None]:
        """Status and descriptor; the descriptor is None where the status is not success.

        handle  of the library; not None
        x_desc  of x: (N, width), float32, float16 or bfloat16, elements of a row adjacent

        Returns status 3 where x_desc is not a TensorDescriptor, 4 for a None, 10 for another dtype, 11 for another
        rank, 12 for gaps in rows.
        """
        if handle is None or x_desc is None:
            return _error("NULL_POINTER", f"{'handle' if handle is None else 'x_desc'} is None"), None
        if not isinstance(x_desc, TensorDescriptor):
            return _error("BAD_PARAM", f"x_desc is {type(x_desc).__name__}: must be a TensorDescriptor"), None
        dtype = _dtype(x_desc.dtype)
        if dtype is None or dtype.name not in _DTYPES or not dtype.isnative:
            return _error("BAD_TENSOR_DTYPE", f"x of dtype {x_desc.dtype}: must be one of {', '.join(_DTYPES)}"), None
        shape, strides = _integers(x_desc.shape), _integers(x_desc.strides)
        if len(shape) != 2 or min(shape) < 0:
            return _error("BAD_TENSOR_SHAPE", f"x of shape {x_desc.shape}: must be (N, width)"), None
        if len(strides) != 2 or strides[1] != 1 or strides[0] < 0:
            return _error("BAD_TENSOR_STRIDES", f"x of strides {x_desc.strides}: must be (0 or more, 1)"), None
        return INFINI_STATUS_SUCCESS, TopKSoftmax(TensorDescriptor(shape, strides, dtype))

    def calculate(
        self,
        workspace: object,
        workspace_size: int,
        values: NDArray[np.float32] | None,
        indices: NDArray[np.int32] | None,
        x: NDArray[Any] | None,
        topk: int,
        norm: bool,
        stream: object = None,
    ) -> Status:
        """Fills values and indices with the topk largest of each row's softmax, the largest first, and their indices.

        workspace, workspace_size, stream  not used: None, 0 and None will do
        values   (N, topk) float32, indices (N, topk) int32, both contiguous
        x        what the descriptor describes
        topk     1 to width
        norm     whether the values of a row are divided by their sum

        Computed in float32. -inf has probability 0; where a row holds NaN or +inf, or only -inf, its values are NaN and
        its indices 0 to topk - 1, so that they can be used as indices. Returns status 3 for topk, a width of 0, a norm
        that is not an integer, arguments that are not arrays, or arrays that share memory, 4 for a None, and 10, 11, 12
        for arrays of another dtype, shape or strides; nothing is written then.
        """
        refused = self._refusal(values, indices, x, topk, norm)
        if refused is not None:
            return refused
        assert values is not None
        assert indices is not None
        assert x is not None
        if self.N:
            run(bind_routing(*(Tensor.of(_plain(array)) for array in (values, indices, x)), norm=bool(norm)))
        return INFINI_STATUS_SUCCESS

    def _refusal(self, values: Any, indices: Any, x: Any, topk: Any, norm: Any) -> Status | None:
        arrays = {"values": values, "indices": indices, "x": x}
        for name, array in arrays.items():
            if array is None:
                return _error("NULL_POINTER", f"{name} is None")
        if self.width == 0:
            return _error("BAD_PARAM", "x of width 0: must be 1 or more")
        if not _integers([topk]) or not 1 <= topk <= self.width:
            return _error("BAD_PARAM", f"topk={topk!r}: must be 1 to {self.width}, the width")
        if not isinstance(norm, int | np.integer | np.bool_):
            return _error("BAD_PARAM", f"norm={norm!r}: must be a bool, or an int of which 0 is no")
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                return _error("BAD_PARAM", f"{name} is {type(array).__name__}: must be an array")
        for name, array, dtype in (("values", values, np.float32), ("indices", indices, np.int32)):
            if array.dtype != dtype:
                return _error("BAD_TENSOR_DTYPE", f"{name} of dtype {array.dtype}: must be {np.dtype(dtype)}")
            if array.shape != (self.N, topk):
                return _error("BAD_TENSOR_SHAPE", f"{name} of shape {array.shape}: must be {(self.N, topk)}")
            if not array.flags.c_contiguous or not array.flags.writeable:
                return _error(
                    "BAD_TENSOR_STRIDES", f"{name} of strides {array.strides}: must be contiguous and writable"
                )
        if x.dtype != self.x_desc.dtype:
            return _error("BAD_TENSOR_DTYPE", f"x of dtype {x.dtype}: the descriptor says {self.x_desc.dtype}")
        if x.shape != self.x_desc.shape:
            return _error("BAD_TENSOR_SHAPE", f"x of shape {x.shape}: the descriptor says {self.x_desc.shape}")
        strides = TensorDescriptor.of(x).strides
        between, within = (at != said for at, said in zip(strides, self.x_desc.strides, strict=True))
        if (between and self.N > 1) or (within and self.width > 1):
            return _error("BAD_TENSOR_STRIDES", f"x of strides {strides}: the descriptor says {self.x_desc.strides}")
        if any(np.may_share_memory(a, b) for a, b in ((values, x), (indices, x), (values, indices))):
            return _error("BAD_PARAM", "values, indices and x share memory: each must have its own")
        return None


def _dtype(value: Any) -> np.dtype[Any] | None:
    try:
        dtype: np.dtype[Any] = np.dtype(value)
    except TypeError:
        return None
    return dtype


def _integers(values: Any) -> tuple[int, ...]:
    """The values as integers; empty where they are not a sequence, or one is not an integer, or is a bool."""
    try:
        return () if any(isinstance(value, bool) for value in values) else tuple(map(operator.index, values))
    except TypeError:
        return ()


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """The array, with the usual strides where it is contiguous: those of a single row, or column, may be anything."""
    return array.reshape(-1).reshape(array.shape) if array.flags.c_contiguous else array
