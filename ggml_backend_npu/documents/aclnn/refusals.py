"""How the first phase of a call refuses an argument."""

from __future__ import annotations

import numpy as np

from ggml_backend_npu.documents.status import Status


class RefusedError(Exception):
    """Ends the first phase."""

    def __init__(self, status: Status) -> None:
        super().__init__(str(status))
        self.status = status


def null_argument(message: str) -> Status:
    """The status of an argument that is None."""
    return Status(161001, "ACLNN_ERR_PARAM_NULLPTR", message)


def invalid(message: str) -> Status:
    """The status of an argument of a wrong type, shape, stride or value."""
    return Status(161002, "ACLNN_ERR_PARAM_INVALID", message)


def require(condition: bool, message: str) -> None:
    """Raises RefusedError of an invalid argument where the condition does not hold."""
    if not condition:
        raise RefusedError(invalid(message))


def brief(value: object) -> str:
    """A value as a message names it."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, shape {value.shape}"
    return f"of type {type(value).__name__}"
