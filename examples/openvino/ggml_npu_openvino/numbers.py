"""Numbers as ggml's CPU has them: blocks are decoded, and x is rounded for a product, by this project's codecs.

OpenVINO's CPU calls them in the middle of a model. Other plugins call nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as op

from quant import codec

Value = Any  # an output of a node of openvino

HALVES, WITH_MINIMA = ("f16", "bf16"), ("q4_1", "q5_1")

# type of weights -> what ggml's CPU rounds x to
ROUNDED = {
    **{each: each for each in ("f32", *HALVES)},
    **dict.fromkeys(("q8_0", "q4_0", "q5_0"), "q8_0"),
    **dict.fromkeys(WITH_MINIMA, "q8_1"),
    **dict.fromkeys(("q4_K", "q5_K", "q6_K"), "q8_K"),
}


@lru_cache
def scalar(x: float) -> Value:
    return op.constant(np.float32(x))


def integers(x: Any) -> Value:
    array = np.asarray(x, np.int32)
    return _few(array.shape, array.tobytes()) if array.size < 64 else op.constant(array)


@lru_cache
def _few(shape: tuple[int, ...], data: bytes) -> Value:
    """Returns a constant of few integers, which many models share."""
    return op.constant(np.frombuffer(data, np.int32).reshape(shape))


def reshaped(x: Value, *shape: int) -> Value:
    return x if x.get_output_partial_shape(0) == ov.PartialShape(shape) else op.reshape(x, integers(shape), False)


def divided(a: Value, b: Value) -> Value:
    """Returns a / b, rounded once: a plugin is not to multiply by the inverse. a is no constant: OpenVINO 2026.4's CPU
    then gives b / a, if it fuses the division with what makes b."""
    node = op.divide(a, b)
    node.get_rt_info()["nonconvertable_divide_0"] = True
    return node


# on the host

raised: list[Exception] = []  # by functions that a model called: OpenVINO says nothing of them


class Called(ov.Op):
    """A function of an array in the middle of a model, which gives float32 of a shape.

    OpenVINO copies it when it compiles, and calls the copy, but does not keep it: so it is in `copies`, too. What is
    given to super() would be kept, and for ever if it were the op itself.
    """

    def __init__(self, function: Callable[[Any], Any], x: Value, shape: Sequence[int], copies: list[Called]) -> None:
        super().__init__(function)
        self._function, self._gives, self._copies = function, shape, copies
        self.set_arguments([x])
        self.constructor_validate_and_infer_types()

    def validate_and_infer_types(self) -> None:
        self.set_output_type(0, ov.Type.f32, ov.PartialShape(self._gives))

    def clone_with_new_inputs(self, inputs: list[Value]) -> Called:
        self._copies.append(Called(self._function, inputs[0], self._gives, self._copies))
        return self._copies[-1]

    def visit_attributes(self, visitor: Any) -> bool:
        visitor.on_attributes({"function": id(self._function)})  # ops of equal inputs and attributes become one
        return True

    def has_evaluate(self) -> bool:
        return True

    def evaluate(self, outputs: list[Any], inputs: list[Any]) -> bool:
        try:
            with np.errstate(all="ignore"):
                outputs[0].data[...] = self._function(inputs[0].data).reshape(self._gives)
        except Exception as error:
            raised.append(error)
        return True


def floats(blocks: Any, type: str, apart: bool = False) -> Any:
    """Returns the float32 of an array of blocks, (..., bytes). If what is at their third and fourth byte, a minimum or
    a sum, is to be `apart`, a block is 33 columns: without it, then it."""
    of = codec(type)
    blocks = blocks.reshape(-1, of.block_bytes)
    if not apart:
        return of.decode(blocks)
    blocks, halves = blocks.copy(), blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    blocks[:, 2:4] = 0
    return np.concatenate([of.decode(blocks), halves], -1)


def nearest(x: Any, type: str) -> Any:
    """Returns an array of float32 rounded to a type. A block of q8_1 is 33 columns: the last is its sum."""
    of = codec(type)
    return floats(of.encode(x.reshape(-1, of.block_size), "simd"), type, apart=type == "q8_1")
