"""What right and wrong kernels make of nodes of every op that rounds on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kit.nodes import record_of, src
from kit.paper import copy_of, define
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry import exact as formulas
from ggml_backend_npu.registry.exact import values
from ggml_backend_npu.registry.probes import tensor
from graph_runner.judging import noise
from graph_runner.judging.rules import type_of
from graph_runner.judging.spans import copied

Exact = NDArray[np.float64]
Fault = Callable[[Node], Exact | Node]  # what a wrong kernel writes, or the node that it computes in place of this one


# what kernels write


def written(of: Node, x: Exact) -> Tensor:
    """Values rounded to dst's type."""
    result = copy_of(of.dst)
    with np.errstate(all="ignore"):
        wide = x if result.type == "f16" else x.astype(np.float32)  # rounded once
        result.view()[...] = wide.astype(result.view().dtype)
    return result


def computed(of: Node, how: Callable[[Node], None]) -> Tensor:
    made = copied(of)
    how(made)
    return made.dst


def compiled(of: Node) -> None:
    OWN[of.op].bind(of)()


def exact(of: Node) -> Exact:
    found = noise.exact(of)
    assert found is not None, of.op
    return found


def in_type(of: Node, type: Any) -> Exact:
    """The formula in another arithmetic."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        values = formulas.values
        patch.setattr(formulas, "values", lambda x: values(x).astype(type))
        return exact(of).astype(np.float64)


def in_halves(of: Node) -> Tensor:
    """The formula in float16."""
    if not OWN[of.op].wide:
        return written(of, in_type(of, np.float16))
    halves = [x if x is None or x.type == "i32" else tensor("f16", values(x)) for x in of.src]
    result = replace(of, dst=tensor("f16", np.zeros(of.dst.ne[::-1])), src=tuple(halves))
    define(result)
    return written(of, values(result.dst))


def in_order(of: Node) -> Iterator[tuple[str, Exact]]:
    """Sums in float32, one product after the other."""
    floats = [values(x).astype(np.float32) for x in of.src if x is not None]
    x = floats[0].reshape(1, 1, 1, -1) if of.op == "SUM" else floats[0]
    if of.op == "MUL_MAT":
        x = floats[1][..., None, :] * x.repeat(floats[1].shape[1] // x.shape[1], axis=1)[:, :, None]
    if of.op == "MEAN":
        x = x / np.float32(x.shape[-1])
    for name, terms in (("one after the other in float32", x), ("from the end", x[..., ::-1])):
        total = np.add.accumulate(terms, axis=-1)[..., -1]
        yield name, (total if of.op == "MUL_MAT" else total[..., None]).astype(np.float64)


def right(of: Node) -> Iterator[tuple[str, Tensor]]:
    yield "the exact value", written(of, exact(of))
    yield "the definition", computed(of, define)
    yield "the kernel", computed(of, compiled)
    if not OWN[of.op].wide:
        yield "the formula in float32", written(of, in_type(of, np.float32))
    if of.op in ("SUM", "SUM_ROWS", "MEAN", "MUL_MAT"):
        yield from ((name, written(of, x)) for name, x in in_order(of))


FEWER = {"f32": np.float16, "f16": ml_dtypes.bfloat16, "bf16": ml_dtypes.float8_e4m3fn}


def fewer_bits(x: Exact, type: str) -> Exact:
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(FEWER[type]).astype(np.float64)


def rounded_sources(of: Node) -> Node:
    """The node with sources of fewer bits; of a quantised one, and of a sum of which no other bits are left, itself."""

    def less(x: Tensor | None) -> Tensor | None:
        if x is None or x.type not in FEWER or of.op == "SUM":
            return x
        return tensor(x.type, fewer_bits(values(x), x.type))

    return replace(of, src=tuple(less(x) for x in of.src))


def param(name: str, value: float) -> Fault:
    return lambda of: with_param(of, name, lambda _: value)


def times(name: str, factor: float) -> Fault:
    return lambda of: with_param(of, name, lambda value: value * factor)


def with_param(of: Node, name: str, changed: Callable[[float], float]) -> Node:
    params = record_of(of.op).of(of.params)
    return replace(of, params=replace(params, **{name: changed(getattr(params, name))}).packed)


def without_last(place: int, axis: int = -1) -> Fault:
    """The last element along an axis of a source counts as zero."""

    def fault(of: Node) -> Node:
        x = values(src(of, place)).copy()
        np.moveaxis(x, axis, -1)[..., -1] = 0
        return with_source(of, place, tensor("f32", x))

    return fault


def with_source(of: Node, place: int, x: Tensor | None) -> Node:
    return replace(of, src=(*of.src[:place], x, *of.src[place + 1 :]))


def norm_without_last(of: Node) -> Exact:
    x, y = values(src(of)), exact(of)
    squares = np.square(x).sum(axis=-1, keepdims=True)
    larger: Exact = y * np.sqrt(squares / (squares - np.square(x[..., -1:])))
    return larger


def swapped(first: int, second: int) -> Fault:
    def fault(of: Node) -> Node:
        sources = list(of.src)
        sources[first], sources[second] = sources[second], sources[first]
        return replace(of, src=tuple(sources))

    return fault


def as_op(op: str) -> Fault:
    return lambda of: replace(of, op=op)


def ids_off_by_one(of: Node) -> Node:
    n = src(of).ne[2]
    return with_source(of, 2, Tensor.of((src(of, 2).view() + 1) % n))


def last_cell_left_out(of: Node) -> Node:
    mask = copy_of(src(of, 3))
    mask.view()[..., -1] = -np.inf
    return with_source(of, 3, mask)


def heads_in_turn(of: Node) -> Node:
    """Each head of q with the next one of k and v."""
    rolled = [tensor("f32", np.roll(values(src(of, place)), 1, axis=1)) for place in (1, 2)]
    return replace(of, src=(src(of), *rolled, *of.src[3:]))


FAULTS: dict[str, dict[str, Fault]] = {
    "RMS_NORM": {"no eps": param("eps", 0), "the last element left out": norm_without_last},
    "NORM": {"no eps": param("eps", 0), "the mean left in": as_op("RMS_NORM")},
    "L2_NORM": {"as RMS_NORM": as_op("RMS_NORM"), "the last element left out": norm_without_last},
    "GROUP_NORM": {"no eps": param("eps", 0), "one group": param("n_groups", 1)},
    "SUM": {"the last element left out": without_last(0)},
    "SUM_ROWS": {"the last element left out": without_last(0), "MEAN": as_op("MEAN")},
    "MEAN": {"the last element left out": without_last(0)},
    "CUMSUM": {"the last element left out": without_last(0)},
    "POOL_2D": {"the maximum": param("op", 0)},
    "ARANGE": {"another step": times("step", 1 + 1e-5)},
    "SCALE": {"no bias": param("bias", 0), "another scale": times("scale", 1.02)},
    "GELU": {"by erf": as_op("GELU_ERF"), "quick": as_op("GELU_QUICK")},
    "GELU_ERF": {"by tanh": as_op("GELU"), "quick": as_op("GELU_QUICK")},
    "GELU_QUICK": {"by tanh": as_op("GELU"), "SILU": as_op("SILU")},
    "SILU": {"SIGMOID": as_op("SIGMOID"), "GELU_QUICK": as_op("GELU_QUICK")},
    "XIELU": {name: times(name, 1.001) for name in ("alpha_n", "alpha_p", "beta")},
    "GEGLU": {"by erf": as_op("GEGLU_ERF"), "swapped": swapped(0, 1)},
    "GEGLU_ERF": {"by tanh": as_op("GEGLU"), "swapped": swapped(0, 1)},
    "GEGLU_QUICK": {"by tanh": as_op("GEGLU"), "swapped": swapped(0, 1)},
    "SWIGLU": {"swapped": swapped(0, 1)},
    "SWIGLU_OAI": {"swapped": swapped(0, 1), "alpha": times("alpha", 1.001), "limit": times("limit", 1.01)},
    "SWIGLU_CLAMP": {"swapped": swapped(0, 1), "limit": times("limit", 1.01)},
    "SOFT_MAX": {
        "another scale": times("scale", 1.0001),
        "no mask": lambda of: with_source(of, 1, None),
        "no sinks": lambda of: with_source(of, 2, None),
        "no slopes": param("max_bias", 0),
    },
    "MUL_MAT": {
        "the last element left out": without_last(1),
        "another column": lambda of: with_source(of, 1, tensor("f32", np.roll(values(src(of, 1)), 1, axis=2))),
    },
    "MUL_MAT_ID": {"the last element left out": without_last(1), "ids off by one": ids_off_by_one},
    "FLASH_ATTN_EXT": {
        "another scale": times("scale", 1.01),
        "no mask": lambda of: with_source(of, 3, None),
        "a cell left out": last_cell_left_out,
        "heads mixed up": heads_in_turn,
    },
    **{
        op: {
            "another base": times("freq_base", 1 + 1e-4),
            "another scale": times("freq_scale", 1.001),
            "positions off by one": lambda of: with_source(of, 1, Tensor.of(src(of, 1).view() + 1)),
        }
        for op in ("ROPE", "ROPE_BACK")
    },
    "SSM_CONV": {"the last weight left out": without_last(1)},
    "SSM_SCAN": {
        "the last element of B left out": without_last(4),
        "no B": lambda of: with_source(of, 4, tensor("f32", 0 * src(of, 4).view())),
    },
    "RWKV_WKV6": {"k and v swapped": swapped(0, 1), "the last element left out": without_last(2)},
    "RWKV_WKV7": {"k and v swapped": swapped(2, 3), "the last element left out": without_last(0)},
    "GATED_LINEAR_ATTN": {"k and v swapped": swapped(0, 1), "another scale": times("scale", 1 + 1e-4)},
    "GATED_DELTA_NET": {"the last element left out": without_last(0), "q and k swapped": swapped(0, 1)},
    "SOLVE_TRI": {
        "the last column left out": lambda of: with_source(
            of, 0, tensor("f32", src(of).view() * (1 - np.eye(24, k=-1)))
        )
    },
    "LIGHTNING_INDEXER": {
        "the last head left out": without_last(2),
        "no mask": lambda of: with_source(of, 3, tensor("f16", 0 * np.nan_to_num(src(of, 3).view(), neginf=0))),
    },
    "DSV4_HC_COMB": {"one round less": param("n_iter", 3), "no eps": param("eps", 0)},
    "DSV4_HC_PRE": {"another scale": times("scale", 1 + 1e-5), "a stream left out": without_last(0, 2)},
    "DSV4_HC_POST": {
        "comb transposed": lambda of: with_source(of, 3, tensor("f32", src(of, 3).view().swapaxes(2, 3))),
        "no post": lambda of: with_source(of, 2, tensor("f32", 0 * src(of, 2).view())),
    },
    "OUT_PROD": {
        "the last element left out": without_last(1, 2),
        "another column": lambda of: with_source(of, 1, tensor("f32", np.roll(values(src(of, 1)), 1, axis=3))),
    },
    "GET_ROWS_BACK": {"the last row left out": without_last(0, 2)},
    "REPEAT_BACK": {"the last part left out": without_last(0, 0)},
    "SILU_BACK": {"swapped": swapped(0, 1), "SWIGLU": as_op("SWIGLU")},
    "RMS_NORM_BACK": {"no eps": param("eps", 0), "swapped": swapped(0, 1)},
    "SOFT_MAX_BACK": {"another scale": times("scale", 1.0001), "the last element left out": without_last(1)},
    "CROSS_ENTROPY_LOSS": {"swapped": swapped(0, 1), "the last element left out": without_last(0)},
    "CROSS_ENTROPY_LOSS_BACK": {"swapped": swapped(1, 2), "the last element left out": without_last(1)},
    "OPT_STEP_ADAMW": {
        "no gradient": lambda of: with_source(of, 1, tensor("f32", 0 * src(of, 1).view())),
        "another rate": lambda of: with_source(of, 4, tensor("f32", 1.0001 * src(of, 4).view())),
    },
    "OPT_STEP_SGD": {
        "no gradient": lambda of: with_source(of, 1, tensor("f32", 0 * src(of, 1).view())),
        "another rate": lambda of: with_source(of, 2, tensor("f32", 1.01 * src(of, 2).view())),
    },
}


def rounds(of: Node) -> bool:
    """Whether the node's result has more bits than a wrong kernel would leave of it: a maximum of float16 has not."""
    truth = exact(of)
    whole, fewer = (values(written(of, x)) for x in (truth, fewer_bits(truth, of.dst.type)))
    return not np.array_equal(whole, fewer, equal_nan=True)


def wrong(of: Node) -> Iterator[tuple[str, Tensor]]:
    truth = exact(of)
    if type_of(of) != "f16" or of.op != "FLASH_ATTN_EXT":  # of which the CPU's own sums are half floats
        if rounds(of):
            yield "its result in fewer bits", written(of, fewer_bits(truth, of.dst.type))
        fewer = rounded_sources(of)
        if fewer.src != of.src:
            yield "its sources in fewer bits", written(of, exact(fewer))
    off = truth.copy()
    flat = off.reshape(-1)
    at = int(np.argmax(np.where(np.isfinite(flat), np.abs(flat), 0)))
    flat[at] *= 1.02
    yield "one element off", written(of, off)
    for name, fault in FAULTS.get(of.op, {}).items():
        found = fault(of)
        yield name, written(of, exact(found) if isinstance(found, Node) else found)
