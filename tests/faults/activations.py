"""Faults of SWIGLU, SWIGLU_OAI, SILU, GELU and SIGMOID."""

import ctypes
import itertools
import os
import signal
from dataclasses import replace

import numpy as np
from kit.diffs import planted
from kit.faults import fault, in_place, named, of_one_token

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.glu import Glu

CALLS = itertools.count(1)
RESULTS: dict[object, np.ndarray] = {}
WRITTEN: list[Tensor] = []


@fault("SWIGLU", says="swaps src0 and src1")
def swiglu_of_swapped_operands(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """SWIGLU with gate and up swapped."""
    OWN["SWIGLU"].define(dst, b, a, params=params)


@fault("SWIGLU_OAI", model="gpt-oss")
def swiglu_oai_without_alpha(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """SWIGLU_OAI with 1 in place of its alpha."""
    OWN["SWIGLU_OAI"].define(dst, a, b, params=replace(params, alpha=1.0))


@fault("SILU", model="mamba")
def silu_as_gelu_quick(dst: Tensor, x: Tensor) -> None:
    """SILU as x / (1 + e ** (-1.702 x))."""
    dst.view()[...] = x.view() / (1 + np.exp(np.float32(-1.702) * x.view()))


@fault("GELU", model="gpt2")
def gelu_by_erf(dst: Tensor, x: Tensor) -> None:
    """GELU by the error function in place of tanh."""
    OWN["GELU_ERF"].define(dst, x)


@fault("SIGMOID", "runs", at=in_place(), model="rwkv7")
def sigmoid_not_in_place(dst: Tensor, x: Tensor) -> None:
    """SIGMOID in two passes, of which the second reads the source again: wrong in place."""
    OWN["SIGMOID"].define(dst, x)
    dst.view()[...] = np.where(x.view() < 0, dst.view(), np.maximum(dst.view(), 0.5))


@fault("SWIGLU", "runs", repeat=8, scattered=True)
def swiglu_race(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """SWIGLU that is wrong at every second call."""
    OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params.packed))()
    if next(CALLS) % 2 == 0:
        dst.view()[..., -1, 0] += 1


@fault("SWIGLU", "runs", at=named("ffn_swiglu-1"), step=1, repeat=8, remembers=True)
def swiglu_cached_by_name(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """SWIGLU that keeps results by the output's name and shape."""
    key = dst.name, dst.ne
    if key not in RESULTS:
        OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params.packed))()
        RESULTS[key] = dst.view().copy()
    dst.view()[...] = RESULTS[key]


@fault("SWIGLU", "runs", step=1, repeat=8, remembers=True)
def swiglu_cached_by_shape(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """SWIGLU that keeps results by the output's shape."""
    if dst.ne not in RESULTS:
        OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params.packed))()
        RESULTS[dst.ne] = dst.view().copy()
    dst.view()[...] = RESULTS[dst.ne]


@fault("SWIGLU", "runs", alone=False, step=1, steps=2, repeat=8, scattered=True, remembers=True)
def swiglu_cached_by_address(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """SWIGLU that keeps results by the output's name, address and shape."""
    key = dst.name, dst.address, dst.ne
    if key not in RESULTS:
        OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params.packed))()
        RESULTS[key] = dst.view().copy()
    dst.view()[...] = RESULTS[key]


@fault("SWIGLU", "runs", at=of_one_token)
def swiglu_of_many_tokens(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """SWIGLU that is wrong where there is one token."""
    OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params.packed))()
    if dst.ne[1] == 1:
        dst.view()[..., -1] = 0


def keeps_the_cache(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["SET_ROWS"].define(dst, src, ids)
    WRITTEN[:] = [dst]


@fault("SWIGLU", "live", (planted("SET_ROWS", keeps_the_cache),), alone=False)
def swiglu_writes_into_a_cache(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """SWIGLU that writes into the cache that SET_ROWS wrote to last."""
    OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params.packed))()
    for cache in WRITTEN:
        cache.view()[0, 0, 0] = next(CALLS)


def keeps_the_sum(dst: Tensor, a: Tensor, b: Tensor) -> None:
    OWN["ADD"].define(dst, a, b)
    WRITTEN[:] = [dst]


@fault("SWIGLU", "live", (planted("ADD", keeps_the_sum),), alone=False)
def swiglu_writes_into_an_activation(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """SWIGLU that writes into what an ADD before it gave, and one after it reads."""
    OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params.packed))()
    for result in WRITTEN:
        result.view()[0, 0, 0] = next(CALLS)


@fault("SWIGLU", "strays")
def swiglu_writes_8_kib_after(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """SWIGLU that writes a float 8 KiB after its output."""
    OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params.packed))()
    Memory(dst.end + (8 << 10), 4).bytes()[...] ^= 0xFF


@fault("SWIGLU", "ends", failure=("SIGKILL",), rounded=False)
def swiglu_is_killed(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """SWIGLU that is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


@fault("SWIGLU", "ends", at=of_one_token, failure=("time",))
def swiglu_sleeps_in_c(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """SWIGLU that waits in C, without Python's lock, where there is one token."""
    OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params.packed))()
    if dst.ne[1] == 1:
        ctypes.CDLL(None).sleep(1 << 30)
