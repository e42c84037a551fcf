"""Every argument that the aclnn calls refuse in their first phase: a code, one line, and nothing is written."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.acl_tensors import FLOATS, INVALID, NAMES, NULL, Array, first, run, stored_shape
from kit.support import assert_same_bytes, examples

from ggml_backend_npu import Tensor
from ggml_backend_npu.documents import aclnn
from ggml_backend_npu.documents.aclnn import AclTensor
from ggml_backend_npu.ir.packed import Packed

pytestmark = pytest.mark.usefixtures("engine")


def full(shape: tuple[int, ...], type: str = "f32", value: float = 3) -> Array:
    return np.full(shape, value, {**FLOATS, "int8": np.int8}[type])


def held(value: object) -> bytes:
    """What lies in the memory of an argument, around a view too."""
    if isinstance(value, AclTensor):
        value = value.packed
    if isinstance(value, Tensor):
        value = value.memory.owner
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    return value.tobytes() if isinstance(value, np.ndarray) else b""


def assert_refused(call: str, arguments: dict[str, Any], code: int, message: str) -> None:
    """In the first phase: by this code, in one line that has the message in it, with nothing written."""
    before = [held(value) for value in arguments.values()]
    status, size, executor = first(call, *arguments.values())
    assert (int(status), status.name, size, executor) == (code, NAMES[code], 0, None), status
    assert message in status.message
    assert "\n" not in status.message
    assert [held(value) for value in arguments.values()] == before


def backwards(array: Array) -> Array:
    return array[:, :, ::-1]


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def shared(*shapes_of: tuple[int, ...]) -> list[Array]:
    """float32 arrays that begin at one address."""
    memory = full((max(prod(shape) for shape in shapes_of),))
    return [memory[: prod(shape)].reshape(shape) for shape in shapes_of]


def q8_0(shape: tuple[int, ...], value: int = 3) -> Tensor:
    return Tensor.of(np.full(stored_shape("q8_0", shape), value, np.uint8), "q8_0")


def q4_0(shape: tuple[int, ...]) -> Tensor:
    return Tensor.of(np.full(stored_shape("q4_0", shape), 3, np.uint8), "q4_0")


def int4(shape: Any, logical: Any = None) -> AclTensor:
    return AclTensor(np.full((*shape[:-1], shape[-1] // 2), 3, np.uint8), shape if logical is None else logical)


def packed_tensor() -> Tensor:
    """A tensor of the device's own memory."""
    storage = np.zeros(34, np.uint8)
    plain = Tensor.of(storage.reshape(1, 1, 1, 34), "q8_0")
    return replace(plain, packed=Packed.of("q8_0", plain.address, storage))


SRC, OUT, IDS = (1, 2, 3, 8), (1, 2, 4, 8), (1, 1, 2, 4)
PAIR = shared(SRC, OUT)
OUT_AND_SCALE = shared(OUT, (1, 2, 3, 2))
OUT_AND_IDS = shared(OUT, IDS)
BAD_IDS = np.array([[[[0, 1, 2, 0], [0, 2, 3, 9]]]], np.int32)
# what is not as in a call that is taken: src (1, 2, 3, 8) int8 in groups of 4, indices (1, 1, 2, 4)
BAD_ROWS: list[tuple[dict[str, Any], int, str]] = [
    ({"src": None}, NULL, "src is None: must be a tensor"),
    ({"indices": None}, NULL, "indices is None: must be a tensor"),
    ({"out": None}, NULL, "out is None: must be a tensor"),
    # types
    ({"src": [1, 2]}, INVALID, "src is of type list: must be an ndarray, an AclTensor or a Tensor"),
    (
        {"src": np.zeros(SRC)},
        INVALID,
        "src is an array of float64, shape (1, 2, 3, 8): must be one of float32, float16",
    ),
    ({"src": np.zeros(SRC, ">f4")}, INVALID, "src is an array of >f4"),
    ({"src": np.zeros(SRC, np.uint8)}, INVALID, "src is an array of uint8"),
    ({"src": Tensor.of(full(SRC))}, INVALID, "src is a Tensor of f32: must be one of q8_0 or q4_0"),
    ({"src": packed_tensor()}, INVALID, "src is a packed Tensor: its blocks must lie as ggml has them"),
    ({"out": full(OUT, "f16")}, INVALID, "out is f16: must be f32"),
    ({"out": full(OUT, "i32")}, INVALID, "out is i32: must be f32"),
    ({"src": full(SRC), "out": full(OUT, "i32")}, INVALID, "out is i32: must be f32"),
    ({"src": full(SRC, "i32"), "out": full(OUT, "f16")}, INVALID, "out is f16: must be f32 or i32"),
    ({"out": q8_0((1, 2, 4, 32))}, INVALID, "out is q8_0: must be f32"),
    ({"indices": np.zeros(IDS, np.int64)}, INVALID, "indices is an array of int64"),
    ({"indices": full(IDS)}, INVALID, "indices is f32: must be i32"),
    # ranks and shapes
    ({"src": full(SRC[1:], "int8")}, INVALID, "src has shape (2, 3, 8): must be 4-D"),
    ({"src": full((1, *SRC), "int8")}, INVALID, "src has shape (1, 1, 2, 3, 8): must be 4-D"),
    ({"out": full(OUT[1:])}, INVALID, "out has shape (2, 4, 8): must be 4-D"),
    ({"out": full((2, 1, 4, 8))}, INVALID, "out has shape (2, 1, 4, 8): must be (1, 2, 4, 8)"),
    ({"out": full((1, 2, 3, 8))}, INVALID, "out has shape (1, 2, 3, 8): must be (1, 2, 4, 8)"),
    ({"out": full((1, 2, 4, 4))}, INVALID, "out has shape (1, 2, 4, 4): must be (1, 2, 4, 8)"),
    ({"indices": full((2, 4), "i32", 0)}, INVALID, "indices has shape (2, 4): must be 4-D or 3-D"),
    ({"indices": full((2, 1, 2, 4), "i32", 0)}, INVALID, "indices has shape (2, 1, 2, 4): must be (1, 1, 2, x)"),
    ({"indices": full((1, 2, 1, 4), "i32", 0)}, INVALID, "indices has shape (1, 2, 1, 4): must be (1, 1, 2, x)"),
    ({"indices": full((2, 1, 4), "i32", 0)}, INVALID, "indices has shape (2, 1, 4): must be (1, 1, 2, x)"),
    ({"src": int4(SRC, (1, 2, 3, 7))}, INVALID, "src has shape (1, 2, 3, 7): its bytes of shape (1, 2, 3, 4) are int4"),
    ({"src": AclTensor(np.zeros(SRC, np.int8), SRC)}, INVALID, "src.packed is an array of int8"),
    ({"src": AclTensor(np.zeros(8, np.uint8), SRC)}, INVALID, "src.packed is an array of uint8, shape (8,)"),
    # strides
    # scales
    ({"scale": None}, INVALID, "scale is None: src is int8, which needs one"),
    ({"src": int4(SRC), "scale": None}, INVALID, "scale is None: src is int4, which needs one"),
    ({"scale": full((1, 2, 3, 2), "f16")}, INVALID, "scale is f16: must be f32"),
    ({"scale": full((2, 3, 2))}, INVALID, "scale has shape (2, 3, 2): must be 4-D"),
    ({"scale": full((1, 2, 4, 2))}, INVALID, "scale has shape (1, 2, 4, 2): must be (1, 2, 3, 2)"),
    ({"scale": full((1, 2, 3, 8))}, INVALID, "scale has shape (1, 2, 3, 8): must be (1, 2, 3, 2)"),
    ({"antiquantGroupSize": 0}, INVALID, "scale has shape (1, 2, 3, 2): must be (1, 2, 3, 1)"),
    ({"antiquantGroupSize": 3}, INVALID, "antiquantGroupSize is 3: does not divide the 8 elements of a row of src"),
    ({"antiquantGroupSize": 16}, INVALID, "antiquantGroupSize is 16: does not divide"),
    ({"antiquantGroupSize": 2**80}, INVALID, f"antiquantGroupSize is {2**80}: does not divide"),
    ({"antiquantGroupSize": -4}, INVALID, "antiquantGroupSize is -4: must be 0 or more"),
    ({"antiquantGroupSize": 4.0}, INVALID, "antiquantGroupSize is of type float: must be an int"),
    ({"antiquantGroupSize": None}, INVALID, "antiquantGroupSize is of type NoneType: must be an int"),
    ({"antiquantGroupSize": True}, INVALID, "antiquantGroupSize is of type bool: must be an int"),
    ({"antiquantGroupSize": full((2, 2))}, INVALID, "antiquantGroupSize is an array of float32, shape (2, 2)"),
    ({"src": q8_0((1, 2, 3, 32)), "out": full((1, 2, 4, 32))}, INVALID, "scale is an array of float32"),
    (
        {"src": q4_0((1, 2, 3, 32)), "out": full((1, 2, 4, 32)), "scale": None},
        INVALID,
        "is 4: must be 32 or 0, src is q4_0",
    ),
    # indices
    (
        {"indices": BAD_IDS},
        INVALID,
        "indices has 3 at [0, 1, 2] of (a, b, x): must be 0 or more and below src's 3 rows",
    ),
    ({"indices": -BAD_IDS[0]}, INVALID, "indices has -1 at [0, 0, 1] of (a, b, x)"),
    (
        {"src": full((1, 2, 0, 8), "int8"), "scale": full((1, 2, 0, 2))},
        INVALID,
        "indices has 2 at [0, 0, 0] of (a, b, x): must be 0 or more and below src's 0 rows",
    ),
    # memory
    ({"out": read_only(full(OUT))}, INVALID, "out is read-only: it is written to"),
    ({"out": np.lib.stride_tricks.as_strided(full((8,)), OUT, (0, 0, 0, 4))}, INVALID, "its elements overlap"),
    ({"out": np.lib.stride_tricks.as_strided(full((99,)), OUT, (64, 16, 4, 4))}, INVALID, "its elements overlap"),
    ({"src": PAIR[0], "out": PAIR[1]}, INVALID, "out overlaps src in memory: out is written to"),
    ({"out": OUT_AND_SCALE[0], "scale": OUT_AND_SCALE[1]}, INVALID, "out overlaps scale in memory"),
    ({"out": OUT_AND_IDS[0], "indices": OUT_AND_IDS[1].view(np.int32)}, INVALID, "out overlaps indices in memory"),
]


def rows_taken() -> dict[str, Any]:
    return {
        "src": full(SRC, "int8"),
        "indices": full(IDS, "i32", 2),
        "scale": full((1, 2, 3, 2)),
        "antiquantGroupSize": 4,
        "out": full(OUT),
    }


def test_the_call_that_get_rows_refuses_when_changed_is_taken() -> None:
    run("aclnnGetRows", *rows_taken().values())


@pytest.mark.parametrize(("changes", "code", "message"), BAD_ROWS, ids=[message for _, _, message in BAD_ROWS])
def test_get_rows_refuses(changes: dict[str, Any], code: int, message: str) -> None:
    assert_refused("aclnnGetRows", {**rows_taken(), **changes}, code, message)


ROW = (1, 1, 2, 64)
LINE = full((400,))
BAD_COPIES: list[tuple[dict[str, Any], int, str]] = [
    ({"self": None}, NULL, "self is None: must be a tensor"),
    ({"src": None}, NULL, "src is None: must be a tensor"),
    # types
    ({"src": np.zeros(ROW)}, INVALID, "src is an array of float64"),
    ({"self": 7}, INVALID, "self is of type int: must be an ndarray"),
    (
        {"src": full(ROW, "i32"), "self": full(ROW, "f16")},
        INVALID,
        "self is f16: src is i32, which is copied to i32, f32",
    ),
    (
        {"src": full(ROW, "f16"), "self": full(ROW, "i32")},
        INVALID,
        "self is i32: src is f16, which is copied to f16, f32",
    ),
    ({"src": full(ROW, "i32")}, INVALID, "self is int8: src is i32"),
    (
        {"src": full(ROW, "int8"), "self": full(ROW, "f16")},
        INVALID,
        "self is f16: src is int8, which is copied to int8, f32",
    ),
    ({"src": q8_0(ROW), "self": q4_0(ROW)}, INVALID, "self is q4_0: src is q8_0, which is copied to q8_0, f32"),
    ({"src": q8_0(ROW)}, INVALID, "self is int8: src is q8_0"),
    ({"src": int4(ROW)}, INVALID, "self is int8: src is int4"),
    # shapes
    ({"src": full(ROW[1:])}, INVALID, "src has shape (1, 2, 64): must be 4-D"),
    ({"self": full(ROW[2:], "int8")}, INVALID, "self has shape (2, 64): must be 4-D"),
    (
        {"src": full((1, 1, 3, 64))},
        INVALID,
        "self has shape (1, 1, 2, 64): 128 elements, src of shape (1, 1, 3, 64) has 192",
    ),
    # groups and scales
    ({"scale": None}, INVALID, "scale is None: self is int8, which needs one"),
    ({"src": full(ROW, "int8"), "self": full(ROW), "scale": None}, INVALID, "scale is None: src is int8"),
    ({"scale": full((1, 1, 2, 2), "f16")}, INVALID, "scale is f16: must be f32"),
    ({"scale": full((1, 1, 2, 1))}, INVALID, "scale has shape (1, 1, 2, 1): must be (1, 1, 2, 2)"),
    ({"antiquantGroupSize": 0}, INVALID, "scale has shape (1, 1, 2, 2): must be (1, 1, 2, 1)"),
    ({"antiquantGroupSize": -32}, INVALID, "antiquantGroupSize is -32: must be 0 or more"),
    (
        {"src": full((1, 1, 4, 32)), "antiquantGroupSize": 0},
        INVALID,
        "antiquantGroupSize is 0, a row of 64 elements of self: does not divide the 32 elements of a row of src",
    ),
    ({"antiquantGroupSize": 24}, INVALID, "antiquantGroupSize is 24: does not divide the 64 elements of a row of self"),
    ({"antiquantGroupSize": "32"}, INVALID, "antiquantGroupSize is of type str: must be an int"),
    (
        {"src": full((1, 1, 8, 16))},
        INVALID,
        "antiquantGroupSize is 32: does not divide the 16 elements of a row of src",
    ),
    (
        {"src": full((1, 1, 8, 16), "int8")},
        INVALID,
        "antiquantGroupSize is 32: does not divide the 16 elements of a row of src",
    ),
    (
        {"src": full(ROW, "int8"), "self": full((1, 1, 8, 16))},
        INVALID,
        "antiquantGroupSize is 32: does not divide the 16 elements of a row of self",
    ),
    ({"self": q8_0(ROW)}, INVALID, "scale is an array of float32, shape (1, 1, 2, 2): must be None, self is q8_0"),
    ({"src": q4_0(ROW), "self": q4_0(ROW)}, INVALID, "must be None, self is q4_0 with scales inside"),
    (
        {"self": q8_0(ROW), "scale": None, "antiquantGroupSize": 64},
        INVALID,
        "antiquantGroupSize is 64: must be 32 or 0",
    ),
    (
        {"src": full((1, 1, 8, 16)), "self": q8_0(ROW), "scale": None},
        INVALID,
        "src has rows of 16 elements: must be whole q8_0 blocks of 32",
    ),
    (
        {"src": q4_0(ROW), "self": full((1, 1, 8, 16)), "scale": None},
        INVALID,
        "self has rows of 16 elements: must be whole q4_0 blocks of 32",
    ),
    # memory
    ({"self": read_only(full(ROW, "int8"))}, INVALID, "self is read-only: it is written to"),
    ({"scale": read_only(full((1, 1, 2, 2)))}, INVALID, "scale is read-only: it is written to"),
    ({"scale": np.broadcast_to(full((1, 1, 1, 1)), (1, 1, 2, 2))}, INVALID, "scale is read-only"),
    (
        {"scale": np.lib.stride_tricks.as_strided(full((4,)), (1, 1, 2, 2), (4, 4, 0, 4))},
        INVALID,
        "scale has strides (4, 4, 0, 4) for shape (1, 1, 2, 2): its elements overlap",
    ),
    ({"self": LINE[:128].reshape(ROW), "src": LINE[1:129].reshape(ROW)}, INVALID, "self overlaps src in memory"),
    (
        {"self": LINE[:64].reshape(1, 1, 8, 8), "src": LINE[:64].reshape(1, 1, 8, 8).swapaxes(2, 3)},
        INVALID,
        "overlaps src",
    ),
    ({"self": LINE[:128].view(np.int32).reshape(ROW), "src": LINE[:128].reshape(ROW)}, INVALID, "self overlaps src"),
    ({"self": LINE[:32].view(np.int8).reshape(ROW), "src": LINE[:128].reshape(ROW)}, INVALID, "self overlaps src"),
    (
        {"src": LINE[:128].reshape(ROW), "scale": LINE[9:13].reshape(1, 1, 2, 2)},
        INVALID,
        "scale overlaps src in memory",
    ),
    (
        {"self": LINE[:32].view(np.int8).reshape(ROW), "scale": LINE[9:13].reshape(1, 1, 2, 2)},
        INVALID,
        "scale overlaps self in memory",
    ),
    (
        {"src": full(ROW, "int8"), "self": LINE[:128].reshape(ROW), "scale": LINE[9:13].reshape(1, 1, 2, 2)},
        INVALID,
        "self overlaps scale in memory",
    ),
]


def copy_taken() -> dict[str, Any]:
    return {
        "self": full(ROW, "int8"),
        "src": full(ROW),
        "scale": full((1, 1, 2, 2)),
        "antiquantGroupSize": 32,
    }


def test_the_call_that_cpy_refuses_when_changed_is_taken() -> None:
    run("aclnnCpy", *copy_taken().values())


@pytest.mark.parametrize(("changes", "code", "message"), BAD_COPIES, ids=[message for _, _, message in BAD_COPIES])
def test_cpy_refuses(changes: dict[str, Any], code: int, message: str) -> None:
    assert_refused("aclnnCpy", {**copy_taken(), **changes}, code, message)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((None, full(ROW), None, 0), NULL, "self is None: must be a tensor"),
        ((full(ROW), full(ROW, "f16"), None, 0), INVALID, "self is f32: must be f16 as src is"),
        ((full(ROW), q8_0(ROW), None, 32), INVALID, "self is f32: must be q8_0 as src is"),
        ((full((1, 2, 1, 64)), full(ROW), None, 0), INVALID, "self has shape (1, 2, 1, 64): must be (1, 1, 2, 64)"),
        ((read_only(full(ROW)), full(ROW), None, 0), INVALID, "self is read-only"),
    ],
)
def test_dup_refuses(arguments: tuple[Any, ...], code: int, message: str) -> None:
    assert_refused("aclnnDup", dict(enumerate(arguments)), code, message)  # type: ignore[arg-type]


ANYTHING: list[Any] = [
    *(None, 0, 1, -1, 32, 2**70, 1.5, "x", [], object(), np.float32(3)),
    *(np.array(3, np.float32), full((4,)), full((2, 2)), full((1, 1, 1, 1, 2)), np.zeros((0, 0, 0, 0), np.float32)),
    *(full((1, 1, 2, 32), type) for type in (*FLOATS, "int8")),
    *(full((1, 1, 2, 1), type, 0) for type in ("f32", "i32")),
    *(np.zeros((1, 1, 2, 32), dtype) for dtype in ("O", "M8[s]", "U3", "?", "c8", "u2", ">i4", [("x", "f4")])),
    np.zeros((1, 1, 2, 32), [("gap", "u1"), ("x", "f4")])["x"],
    *(backwards(full((1, 1, 2, 32))), np.broadcast_to(full((1, 1, 1, 1)), (1, 1, 2, 32))),
    *(q8_0((1, 1, 2, 32)), q4_0((1, 1, 2, 32)), packed_tensor(), Tensor.of(full((2,)))),
    *(int4((1, 1, 2, 32)), int4((1, 1, 2, 32), "x"), int4((1, 1, 2, 32), np.zeros(4)), AclTensor(None, None)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("call", ["aclnnGetRows", "aclnnCpy", "aclnnDup"])
@given(data=st.data())
@examples(60)
def test_no_argument_raises_anything(call: str, data: st.DataObject) -> None:
    """Arguments of a call that is taken, some of them, or all, made anything."""
    arguments = [*(rows_taken() if call == "aclnnGetRows" else copy_taken()).values()]
    for position in data.draw(st.sets(st.integers(0, len(arguments) - 1))):
        arguments[position] = data.draw(st.sampled_from(ANYTHING))
    status, _, executor = first(call, *arguments)
    assert status in NAMES
    assert (status == 0) == (executor is not None)
    assert "\n" not in status.message
    workspace, size = (data.draw(st.sampled_from(ANYTHING)) for _ in range(2))
    given_executor = data.draw(st.sampled_from([executor, *ANYTHING]))
    assert getattr(aclnn, call)(workspace, size, given_executor, stream=workspace) in NAMES


def test_interleaved_views_of_one_array_do_not_overlap() -> None:
    memory = np.arange(256, dtype=np.float32).reshape(1, 1, 2, 128)
    run("aclnnCpy", memory[..., 1::2], memory[..., ::2], None, 0)
    assert_same_bytes(memory, np.repeat(np.arange(0, 256, 2, dtype=np.float32), 2))


def test_what_is_not_looked_at_may_be_anything() -> None:
    """A scale and a group size where nothing is quantised."""
    anything = "not a scale"
    out = np.zeros(ROW, np.float32)
    run("aclnnCpy", out, full(ROW, "f16"), anything, -7)
    run("aclnnGetRows", full(ROW), np.zeros((1, 1, 1, 2), np.int32), anything, anything, out)
    run("aclnnDup", full(ROW, "int8"), full(ROW, "int8", 4), anything, anything)
    assert (out == 3).all()
