"""Faults of ADD, SUB, MUL, DIV and SCALE."""

import ctypes
import itertools
import os
import sys
import threading
import time

import numpy as np
from kit.faults import fault, in_place, named
from kit.nodes import src

from ggml_backend_npu import Memory, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.elementwise import Scale

CALLS = itertools.count(1)
RNG = np.random.default_rng(0)
RESULTS: dict[object, np.ndarray] = {}
PLANS: dict[object, np.ndarray] = {}
LOCK = threading.Lock()


@fault("ADD", at=lambda node: src(node, 1).ne != node.dst.ne, model="gpt-oss", never=("writes nothing",))
def add_to_the_first_row(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that adds a vector to the first row alone."""
    total = a.view().copy()
    if a.ne == b.ne:
        total += b.view()
    else:
        total[..., :1, :] += b.view()[..., :1, :]
    dst.view()[...] = total


@fault("ADD", never=("writes nothing",))
def add_one_element_short(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that leaves out the last element."""
    last = dst.view()[-1, -1, -1, -1].copy()
    OWN["ADD"].define(dst, a, b)
    dst.view()[-1, -1, -1, -1] = last


@fault("ADD")
def add_writes_nothing(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that writes nothing."""


@fault("ADD", never=("writes nothing", "permutes"), says="gives nothing but numbers of bf16")
def add_in_bfloats(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that rounds its result to bfloat16."""
    OWN["ADD"].define(dst, a, b)
    dst.view().view(np.uint32)[...] &= 0xFFFF0000


@fault("SUB", model="rwkv7", says="swaps src0 and src1")
def sub_of_swapped_sources(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """SUB with its sources swapped."""
    dst.view()[...] = b.view() - a.view()


@fault("MUL", never=("permutes",))
def mul_repeats_by_row(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """MUL that repeats a vector along the wrong dimension."""
    if b.ne[1] == 1 and b.ne[0] == a.ne[0] and a.ne[1] > 1:
        factors = np.resize(b.view()[0, 0, 0], a.ne[1])[:, None]
        dst.view()[...] = a.view() * factors
    else:
        OWN["MUL"].define(dst, a, b)


@fault("MUL")
def mul_without_the_last_row(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """MUL that does not write the last row."""
    last = dst.view()[..., -1, :].copy()
    OWN["MUL"].define(dst, a, b)
    dst.view()[..., -1, :] = last


@fault("DIV", model="moe")
def div_in_halves(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """DIV by a reciprocal in float16."""
    dst.view()[...] = a.view() * (1 / b.view().astype(np.float16)).astype(np.float32)


@fault("SCALE", at=lambda node: bool(src(node).view().any()), model="rwkv7", never=("writes nothing",))
def scale_without_params(dst: Tensor, x: Tensor, params: Scale) -> None:
    """SCALE that ignores its factor and its bias."""
    dst.view()[...] = x.view()


@fault("ADD", "sources")
def add_clears_its_second_source(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that clears its second source after it has read it."""
    OWN["ADD"].define(dst, a, b)
    Memory(b.address, b.nbytes).bytes()[...] = 0


@fault("ADD", "runs", at=in_place())
def add_off_in_place(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that leaves out the last column where its output lies on a source."""
    last = dst.view()[..., -1].copy()
    in_place = dst.overlaps(a)
    OWN["ADD"].define(dst, a, b)
    if in_place:
        dst.view()[..., -1] = last


@fault("ADD", "runs", at=in_place(1), model="mamba")
def add_not_in_place(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that copies its first source and adds the second: wrong where its output lies on the second."""
    dst.view()[...] = a.view()
    dst.view()[...] += b.view()


@fault("MUL", "runs", at=lambda node: in_place()(node) and src(node, 1).ne[0] == 1, model="moe")
def mul_not_in_place(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """MUL that repeats its second source and multiplies by the first: wrong where its output lies on that."""
    if b.ne[0] > 1:
        OWN["MUL"].define(dst, a, b)
    else:
        dst.view()[...] = b.view()
        dst.view()[...] *= a.view()


@fault("ADD", "runs", steps=3, repeat=8, scattered=True)
def add_race(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that is wrong at every seventh call."""
    OWN["ADD"].define(dst, a, b)
    if next(CALLS) % 7 == 0:
        dst.view()[..., -1, :] *= 2


@fault("MUL", "runs", steps=3, repeat=32, scattered=True)
def mul_race(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """MUL that is wrong in one element, at random."""
    OWN["MUL"].define(dst, a, b)
    if RNG.random() < 0.2:
        dst.view()[0, 0, -1, RNG.integers(dst.ne[0])] += 1


@fault("ADD", "runs", at=in_place(), step=1, steps=2, repeat=8, scattered=True, remembers=True)
def add_cached_in_place(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that keeps results by the output's name, address and shape where it lies on the first source."""
    key = dst.name, dst.address, dst.ne
    if not dst.overlaps(a) or key not in RESULTS:
        OWN["ADD"].define(dst, a, b)
    else:
        dst.view()[...] = RESULTS[key]
    if dst.overlaps(a):
        RESULTS[key] = dst.view().copy()


@fault("MUL", "runs", at=in_place(), steps=1, repeat=8, scattered=True)
def mul_race_in_place(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """MUL that is wrong at every third call in which its output lies on its first source."""
    wrong = dst.overlaps(a) and next(CALLS) % 3 == 0
    OWN["MUL"].define(dst, a, b)
    if wrong:
        dst.view()[..., -1] += 1


@fault("MUL", "runs", at=named("ffn_norm-0"), repeat=8)
def mul_planned_by_shape(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """MUL that reads its second source once for each shape."""
    OWN["MUL"].define(dst, a, Tensor.of(PLANS.setdefault((dst.ne, b.ne), b.view().copy())))


@fault("ADD", "runs", steps=3, repeat=16, scattered=True)
def add_tires(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that adds nothing from its eleventh call on."""
    if next(CALLS) <= 10:
        OWN["ADD"].define(dst, a, b)
    else:
        dst.view()[...] = a.view()


@fault("MUL", "strays")
def mul_writes_before_its_output(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """MUL that writes one float before its output."""
    OWN["MUL"].define(dst, a, b)
    Memory(dst.address - 4, 4).bytes()[...] ^= 0xFF


@fault("ADD", "strays")
def add_writes_1_mib_after(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that writes a row 1 MiB after its output."""
    OWN["ADD"].define(dst, a, b)
    Memory(dst.end + (1 << 20), dst.nb[1]).bytes()[...] ^= 0xFF


@fault("ADD", "ends", at=in_place(), failure=("SIGSEGV",))
def add_reads_address_0_in_place(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that reads address 0 where its output lies on its first source."""
    if dst.overlaps(a):
        ctypes.string_at(0)
    OWN["ADD"].define(dst, a, b)


@fault("MUL", "ends", rounded=False)
def mul_doubles_its_weights(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """MUL that doubles the weights that it has read."""
    OWN["MUL"].define(dst, a, b)
    Memory(b.address, b.nbytes).bytes().view(np.float32)[...] *= 2


@fault("MUL", "ends", failure=("SIGABRT",), rounded=False)
def mul_aborts(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """MUL that aborts the process."""
    os.abort()


@fault("ADD", "ends", failure=("SystemExit",), rounded=False)
def add_calls_sys_exit(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that calls sys.exit."""
    sys.exit(0)


@fault("ADD", "ends", failure=("time",))
def add_sleeps(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD that sleeps for years."""
    time.sleep(1e9)


@fault("MUL", "ends", at=in_place(), failure=("time",))
def mul_waits_for_a_lock_in_place(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """MUL that waits for a lock which it has, where its output lies on its first source."""
    OWN["MUL"].define(dst, a, b)
    if dst.overlaps(a):
        LOCK.acquire()
        LOCK.acquire()


@fault("ADD", "late")
def add_thread_is_late(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """ADD whose last row, of many, a thread writes a fiftieth of a second after the kernel has returned."""
    before = dst.view()[..., -1, :].copy()
    OWN["ADD"].define(dst, a, b)
    if dst.ne[1] == 1:
        return
    row = dst.view()[..., -1, :].copy()
    dst.view()[..., -1, :] = before

    def write() -> None:
        dst.view()[..., -1, :] = row

    threading.Timer(0.02, write).start()
