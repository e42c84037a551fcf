"""Executors of the aclnn calls: what they are good for, how often, and what is refused in their place."""

from __future__ import annotations

import gc
import pickle
import weakref
from functools import partial

import numpy as np
import pytest
from kit.acl_tensors import INVALID, NAMES, NULL, RUNTIME, TYPES, Array, filled, first
from kit.support import assert_same_bytes

from ggml_backend_npu.documents import aclnn
from ggml_backend_npu.documents.aclnn import AclOpExecutor
from ggml_backend_npu.documents.status import Status

pytestmark = pytest.mark.usefixtures("engine")


def copying() -> tuple[Array, Array, AclOpExecutor]:
    """self, src of ones, and the executor of their copy."""
    target, source = np.zeros((1, 1, 1, 4), np.float32), np.ones((1, 1, 1, 4), np.float32)
    status, size, executor = first("aclnnCpy", target, source, None, 0)
    assert (int(status), status.name, status.message, size) == (0, "ACL_SUCCESS", "", 0)
    assert executor is not None
    assert not target.any()
    return target, source, executor


def assert_status(status: Status, code: int, message: str) -> None:
    assert (int(status), status.name, status.message) == (code, NAMES[code], message)


def test_a_status_can_be_copied() -> None:
    assert repr(pickle.loads(pickle.dumps(Status(7, "NAME", "why")))) == "7 NAME: why"


def test_an_executor_is_good_for_one_run() -> None:
    target, source, executor = copying()
    assert aclnn.aclnnCpy(None, 0, executor, stream=object()) == 0
    assert target.tolist() == source.tolist()
    target[...] = 0
    message = "executor of aclnnCpy is used: a new one comes from the first phase"
    assert_status(aclnn.aclnnCpy(None, 0, executor), INVALID, message)
    assert_status(aclnn.aclSetAclOpExecutorRepeatable(executor), INVALID, message)
    assert_status(aclnn.aclDestroyAclOpExecutor(executor), INVALID, message)
    assert not target.any()


def test_a_repeatable_executor_is_good_until_it_is_destroyed() -> None:
    target, source, executor = copying()
    assert aclnn.aclSetAclOpExecutorRepeatable(executor) == 0
    for value in (1, 2, 3):
        source[...] = value
        assert aclnn.aclnnCpy(None, 0, executor) == 0
        assert target.ravel().tolist() == [value] * 4
    assert aclnn.aclDestroyAclOpExecutor(executor) == 0
    source[...] = 4
    message = "executor of aclnnCpy is destroyed: a new one comes from the first phase"
    assert_status(aclnn.aclnnCpy(None, 0, executor), INVALID, message)
    assert_status(aclnn.aclDestroyAclOpExecutor(executor), INVALID, message)
    assert target.ravel().tolist() == [3] * 4


def test_an_executor_may_be_destroyed_before_it_runs() -> None:
    target, _, executor = copying()
    assert aclnn.aclDestroyAclOpExecutor(executor) == 0
    assert aclnn.aclnnCpy(None, 0, executor) == INVALID
    assert not target.any()


def test_an_ended_executor_holds_no_tensor() -> None:
    target, source, executor = copying()
    references = weakref.ref(target), weakref.ref(source)
    assert aclnn.aclnnCpy(None, 0, executor) == 0
    del target, source
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("call", ["aclnnGetRows", "aclnnDup"])
def test_an_executor_of_another_call_is_refused_and_stays_good(call: str) -> None:
    target, _, executor = copying()
    message = f"executor is one of aclnnCpy: must be one of {call}"
    assert_status(getattr(aclnn, call)(None, 0, executor), INVALID, message)
    assert not target.any()
    assert aclnn.aclnnCpy(None, 0, executor) == 0


@pytest.mark.parametrize("call", ["aclnnGetRows", "aclnnCpy", "aclnnDup"])
def test_what_is_no_executor_is_refused(call: str) -> None:
    run_it = partial(getattr(aclnn, call), None, 0)
    for function in (run_it, aclnn.aclSetAclOpExecutorRepeatable, aclnn.aclDestroyAclOpExecutor):
        assert_status(function(None), NULL, "executor is None: must be one that a first phase gave")  # type: ignore[arg-type]
        assert_status(function(7), INVALID, "executor is of type int: must be one that a first phase gave")  # type: ignore[arg-type]


def test_a_workspace_of_a_size_must_be_there() -> None:
    target, _, executor = copying()
    assert_status(aclnn.aclnnCpy(None, 16, executor), NULL, "workspace is None: workspaceSize is 16")
    message = "workspaceSize is {}: must be a number of bytes, 0 or more"
    assert_status(aclnn.aclnnCpy(None, -1, executor), INVALID, message.format(-1))
    assert_status(aclnn.aclnnCpy(None, "0", executor), INVALID, message.format("of type str"))  # type: ignore[arg-type]
    assert not target.any()
    assert aclnn.aclnnCpy(np.zeros(16, np.uint8), 16, executor) == 0
    assert target.all()


@pytest.mark.parametrize("type", TYPES)
def test_indices_that_were_changed_are_checked_again(type: str) -> None:
    source = filled(type, (1, 1, 3, 32), 32, 1)
    ids, out = np.array([[[[1, 2]]]], np.int32), np.full((1, 1, 2, 32), 7, np.float32)
    _, size, executor = first("aclnnGetRows", source.tensor, ids, source.scale, 32, out)
    assert executor is not None
    ids[0, 0, 0, 1] = 3
    message = "indices has 3 at [0, 0, 1] of (a, b, x): must be 0 or more and below src's 3 rows"
    assert_status(aclnn.aclnnGetRows(None, size, executor), RUNTIME, message)
    assert (out == 7).all()
    ids[0, 0, 0, 1] = 0
    assert aclnn.aclnnGetRows(None, size, executor) == 0
    assert_same_bytes(out, source.real[0, 0, [1, 0]])
