"""The two phases of a call, and the executor that the first passes to the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ggml_backend_npu.documents import run
from ggml_backend_npu.documents.aclnn.refusals import RefusedError, brief, invalid, null_argument
from ggml_backend_npu.documents.status import Status

Call = Callable[[], None]
Bound = tuple[Call, Callable[[], str | None]]  # the call, and what has changed since it was checked
FirstPhase = tuple[Status, int, "AclOpExecutor | None"]

SUCCESS = Status(0, "ACL_SUCCESS")


class AclOpExecutor:
    """What the first phase of a call passes to the second: valid for one run, or, if made repeatable, until destroyed.

    call  name of the call it was made for
    """

    def __init__(self, call: str, run: Call, changed: Callable[[], str | None]) -> None:
        self.call = call
        self._run: Call | None = run
        self._changed = changed
        self._repeatable = False
        self._ended = ""

    def _end(self, how: str) -> None:
        """Releases the tensors."""
        self._run, self._changed, self._ended = None, unchanged, how


def aclSetAclOpExecutorRepeatable(executor: AclOpExecutor) -> Status:
    """Makes an executor valid for any number of runs, on the contents of its tensors at the time, until it is
    destroyed.

    Returns 161001 where executor is None, 161002 where it is not an executor, or is used or destroyed.
    """
    refusal = _refusal(executor)
    if refusal is None:
        executor._repeatable = True
    return refusal or SUCCESS


def aclDestroyAclOpExecutor(executor: AclOpExecutor) -> Status:
    """Ends an executor, which releases its tensors. One that is used, and not repeatable, has ended already.

    Returns 161001 where executor is None, 161002 where it is not an executor, or is used or destroyed.
    """
    refusal = _refusal(executor)
    if refusal is None:
        executor._end("destroyed")
    return refusal or SUCCESS


def _refusal(executor: Any, call: str | None = None) -> Status | None:
    """Why an executor is not valid, or, where a call is given, not valid for it."""
    if executor is None:
        return null_argument("executor is None: must be one that a first phase gave")
    if not isinstance(executor, AclOpExecutor):
        return invalid(f"executor is of type {type(executor).__name__}: must be one that a first phase gave")
    if call is not None and executor.call != call:
        return invalid(f"executor is one of {executor.call}: must be one of {call}")
    if executor._ended:
        return invalid(f"executor of {executor.call} is {executor._ended}: a new one comes from the first phase")
    return None


def first_phase(call: str, bind: Callable[[], Bound]) -> FirstPhase:
    """Checks and binds the arguments of a call; returns its status, the size of its workspace, and its executor."""
    try:
        return SUCCESS, 0, AclOpExecutor(call, *bind())
    except RefusedError as refused:
        return refused.status, 0, None


def second_phase(call: str, workspace: object, size: Any, executor: Any) -> Status:
    """Runs what the first phase bound."""
    refusal = _refusal(executor, call)
    if refusal is not None:
        return refusal
    if not isinstance(size, int | np.integer) or size < 0:
        shown = size if isinstance(size, int | np.integer) else brief(size)
        return invalid(f"workspaceSize is {shown}: must be a number of bytes, 0 or more")
    if workspace is None and size > 0:
        return null_argument(f"workspace is None: workspaceSize is {size}")
    changed = executor._changed()
    if changed is not None:
        return Status(361001, "ACLNN_ERR_RUNTIME_ERROR", changed)
    run(executor._run)
    if not executor._repeatable:
        executor._end("used")
    return SUCCESS


def nothing() -> None:
    """The call that moves no element."""


def unchanged() -> str | None:
    """What has changed since the first phase, where nothing can."""
    return None
