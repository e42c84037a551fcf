"""Every compiled kernel beside its definition: one that nobody compares fails here."""

from __future__ import annotations

import importlib
import pkgutil
import struct
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import pytest
from kit.kernel_cases import Array, Case, floats, node
from kit.kernels_of_images import OF_IMAGES
from kit.kernels_of_models import OF_MODELS, each, scanned
from kit.kernels_of_training import OF_TRAINING
from kit.support import assert_same_bytes, in_pieces, recorded_works, special_floats

import ggml_backend_npu
import quant
from ggml_backend_npu import Node, Op, Tensor, default_backend
from ggml_backend_npu.documents.infiniop import TensorDescriptor, TopKSoftmax
from ggml_backend_npu.documents.rwkv import token_shift
from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ops import OWN, mamba, pooling, routing
from ggml_backend_npu.ops import token_shift as shifts
from ggml_backend_npu.ops.kernels import elements, groups, hadamard, strided, tiles
from ggml_backend_npu.registry.checks import Types
from quant import conversions
from quant.kernels import region, threads
from quant.kernels.jit import CFunction, compiled

OF_OPS = {**OF_MODELS, **OF_TRAINING, **OF_IMAGES}


def named_by(op: Op) -> tuple[CFunction, ...]:
    """The kernels that the function under an op's `compiled` names; none if a function that ops share binds it."""
    code, names = getattr(op.prepare, "__code__", None), getattr(op.prepare, "__globals__", {})
    named = (names.get(name) for name in (code.co_names if code is not None else ()))
    return tuple(kernel for kernel in named if is_kernel(kernel))


def by_its_nodes(op: Op) -> Case:
    """The op's own nodes, by the kernels that it names."""

    def run() -> list[Array]:
        nodes = made(op)
        for of in nodes:
            op.bind(of, codecs.bound())()
        return [of.dst.view() for of in nodes]

    return Case(run, named_by(op), names=lambda: [f"{op.name} of {' '.join(types_of(of))}" for of in made(op)])


def made(op: Op) -> list[Node]:
    """The op's own nodes, of each of the types that it takes of which its functions make them."""
    nodes = ((types, make(np.random.default_rng(0), types)) for types in sorted(op.types or ()) for make in op.makes)
    return [of for types, of in nodes if types_of(of)[: len(types)] == types]


def types_of(of: Node) -> Types:
    return tuple(x.type for x in (of.dst, *of.src) if x is not None)


def is_kernel(value: object) -> TypeGuard[CFunction]:
    """Whether a value is a function that `compiled` has made."""
    decorator: Any = compiled
    return isinstance(value, CFunction) and value._signature == decorator.keywords["signature"]


OF_OPS |= {
    name: by_its_nodes(op) if op.makes and named_by(op) else each(name)
    for name, op in OWN.items()
    if op.prepare is not None and name not in OF_OPS
}


def codec(type: str) -> list[Array]:
    x = special_floats().reshape(-1, 64)
    encoded = [quant.quantize(x, type, rounding) for rounding in quant.ROUNDINGS]
    return [*encoded, quant.dequantize(encoded[0], type)]


def grouped(bits: int) -> list[Array]:
    """Quantised in groups of 32, and back."""
    x, back = floats(5, 128), np.zeros((5, 128), np.float32)
    quants, scales = np.zeros((5, 128 * bits // 8), np.int8), np.zeros((5, 4), np.float32)
    held = groups.Groups(bits, 32, Tensor.of(quants), Tensor.of(scales))
    groups.bind_quantize(held, Tensor.of(x))()
    groups.bind_dequantize(Tensor.of(back), held)()
    return [quants, scales, back]


X, MU, H0 = floats(2, 9, 70), floats(6, 70, seed=1), floats(2, 1, 70, seed=2)


def shifted_by_hand() -> list[Array]:
    before = np.concatenate([H0, X[:, :-1]], axis=1)
    return [*(X + (before - X) * mu for mu in MU), X[:, -1:]]


def top(x: Array) -> list[Array]:
    values, indices = np.zeros((len(x), 7), np.float32), np.zeros((len(x), 7), np.int32)
    _, descriptor = TopKSoftmax.create("handle", TensorDescriptor.of(x))
    assert descriptor is not None
    assert descriptor.calculate(None, 0, values, indices, x, 7, True) == 0
    return [values, indices]


def top_by_hand(x: Array) -> list[Array]:
    p = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    indices = np.argsort(-p, axis=1, kind="stable")[:, :7]
    values = np.take_along_axis(p / p.sum(axis=1, keepdims=True), indices, axis=1)
    return [(values / values.sum(axis=1, keepdims=True)).astype(np.float32), indices.astype(np.int32)]


RUN_OTHERS = threads._run, region.run
CASES = {
    **OF_OPS,
    "SCALE with a bias": Case(
        lambda: node("SCALE", np.zeros((9, 1500), np.float32), floats(9, 1500), params=struct.pack("2f", 0.3, 0.7)),
        (tiles.compute,),
    ),
    "POOL_1D, the maximum": Case(
        lambda: node("POOL_1D", np.zeros((9, 30), np.float32), floats(9, 60), params=struct.pack("4i", 0, 3, 2, 1)),
        (pooling.pool_rows,),
    ),
    "POOL_2D_BACK, the maximum": Case(
        lambda: node(
            "POOL_2D_BACK",
            np.zeros((3, 9, 8), np.float32),
            floats(3, 9, 8),
            floats(3, 9, 8, seed=1).round(1),
            params=struct.pack("7i", 0, 3, 3, 1, 1, 1, 1),
        ),
        (pooling.pool_gradients,),
    ),
    "MUL_MAT of a Hadamard matrix": Case(
        lambda: node(
            "MUL_MAT", np.zeros((9, 64), np.float32), floats(64, 64), floats(9, 64), params=struct.pack("2i", 0, 1)
        ),
        (hadamard.transform,),
    ),
    "transposed f16": Case(lambda: node("CPY", np.zeros((70, 33), np.float16), floats(33, 70).T), (strided.transpose,)),
    **{f"codec {type}": Case(partial(codec, type), (conversions.convert,)) for type in ("q8_0", "q4_0")},
    **{f"groups of int{bits}": Case(partial(grouped, bits), (groups._quantize, groups._dequantize)) for bits in (8, 4)},
    "a scan with one decay for a head": Case(lambda: scanned(1), (mamba.scan,), ulp=16),
    "token_shift": Case(lambda: [*token_shift(X, MU, H0)], (shifts.shift,), shifted_by_hand),
    "top_k": Case(lambda: top(floats(9, 300)), (routing.top_k,), lambda: top_by_hand(floats(9, 300)), ulp=4),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pieces", [False, True])
def test_a_kernel_equals_its_definition(name: str, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    codecs.bound()  # found once, by kernels
    if pieces:
        with in_pieces(np.random.default_rng(0)):
            found = case.run()
    else:
        with recorded_works() as works:
            found = case.run()
        assert {kernel.address for kernel in case.kernels} == {work.block.kernel for work in works}
    monkeypatch.setenv("GGML_NPU_ENGINE", "reference")
    with recorded_works() as works:
        expected = case.define() if case.define is not None else case.run()
    assert not works, "the definition needs no kernel"
    names = case.names() if case.names is not None else [name] * len(found)
    for of, actual, right in zip(names, found, expected, strict=True):
        if actual.dtype in (np.float32, np.float16) and case.ulp:
            np.testing.assert_array_max_ulp(actual, right, case.ulp)
        else:
            assert_same_bytes(actual, right, of)


def kernels() -> dict[int, str]:
    """The kernels of all modules, by identity; those of `elements` are called by that of `tiles`."""
    found = {}
    for package in (quant, ggml_backend_npu):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            for name, value in vars(module).items():
                if is_kernel(value) and module is not elements:
                    found[id(value)] = name
    return found


def test_every_kernel_is_compared_with_its_definition() -> None:
    compared = {*map(id, RUN_OTHERS), *(id(kernel) for case in CASES.values() for kernel in case.kernels)}
    assert [name for key, name in kernels().items() if key not in compared] == []
    assert [op for op in OF_OPS if default_backend().ops[op].prepare is None] == []
