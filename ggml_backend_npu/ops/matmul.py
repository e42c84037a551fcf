"""MUL_MAT and MUL_MAT_ID: rows of src0 times columns of src1, for any type of weights.

GGML_NPU_MATMUL says how weights are multiplied. exact: the columns are rounded to the type that ggml's CPU
rounds them to (`VEC_DOT`), so that the result is the CPU's but for the rounding of the sum; the very bytes if rows
are multiplied as integers, and, with AVX2 or AVX-512, for f16 and f32 weights (`quant.kernels.orders`; f32 rows in
whole 64s). fast: the same, but that sums are rounded less often (`quant.panels_fast` for two columns and more,
`quant.dots_fast` for one), and that many columns of other weights are not rounded, and are multiplied with tiles of
dequantised weights: both are closer to the true product than the CPU, and not equal to it. A processor that does not
multiply bytes takes this way of integers too.

One kernel does both ops and both ways. A matrix of src0 is multiplied with the columns that belong to it: those of its
part of the batch, or those whose ids name it. Rows of q8_0, q4_0, q4_1, q5_0, q5_1, q4_K and q6_K are multiplied as
integers (`quant.products`), others are dequantised, a row or a tile at a time; many columns go to BLAS
(cblas_sgemm, which every thread calls for its own tiles).

A MUL_MAT may say by a hint that its src0 is a Hadamard matrix. As on ggml's CPU, rows are then transformed fast, and
src0 is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml.numerics import PLAIN, Numerics
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops import undefined
from ggml_backend_npu.ops.kernels.hadamard import Transform, hadamard, transform
from ggml_backend_npu.ops.kernels.products import MANY, ROUNDINGS, TILE_BYTES, VEC_DOT, bind, least_for_blas
from ggml_backend_npu.ops.kernels.strided import ids_check
from ggml_backend_npu.ops.movers import checked_ids
from ggml_backend_npu.ops.sums import BOUND
from ggml_backend_npu.registry import cases, exact, probes
from ggml_backend_npu.registry.checks import Cost, Exact, Make, Mistake, Probe, Sums, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.mistakes import LARGEST, altered, made, of_ids
from ggml_backend_npu.registry.params import Params, i32
from quant import codec, dequantize
from quant.dots import DOTS
from quant.kernels.threads import Job, Work
from quant.rows import CODES

_COLUMN_TYPES = {*ROUNDINGS} - {"q8_1", "q8_K"}  # ggml has no to_float of these
HADAMARD = 1  # GGML_HINT_SRC0_IS_HADAMARD


@dataclass(frozen=True)
class MulMat(Params):
    """op_params of MUL_MAT: ggml_mul_mat_set_prec, ggml_mul_mat_set_hint. prec has no effect here."""

    prec: i32 = 0
    hint: i32 = 0


_TYPES = [
    ("f32", weights, columns)
    for weights, rounded in VEC_DOT.items()
    for columns in sorted({"f32", rounded, *(["bf16"] if rounded == "f32" else [])} & _COLUMN_TYPES)
]
_TRANSFORMED = ("f32", "f32", "f16")  # alone if src0 is a Hadamard matrix


def _refuse(dst: Tensor, a: Tensor, b: Tensor) -> str | None:
    if a.ne[0] != b.ne[0]:
        return f"src0 of ne {a.ne}, src1 of ne {b.ne}: rows of different lengths"
    for role, tensor in (("src0", a), ("src1", b), ("dst", dst)):
        if not tensor.has_contiguous_rows():
            return f"{role} rows have gaps: nb0 is {tensor.nb[0]}"
    return None


def _refuse_mul_mat(dst: Tensor, a: Tensor, b: Tensor, params: MulMat = MulMat()) -> str | None:
    """params: without a hint by default, for a kernel that takes no params and refuses what this op refuses."""
    if params.hint == HADAMARD:
        n = b.ne[0]
        if b.type not in ("f32", "f16"):
            return f"src1 of type {b.type} times a Hadamard matrix"
        if a.ne[1] != n or n & (n - 1):
            return f"src0 of ne {a.ne} is no Hadamard matrix"
    elif (dst.type, a.type, b.type) == _TRANSFORMED:
        return f"types {a.type} {b.type} -> {dst.type}"
    if dst.ne != (a.ne[1], *b.ne[1:]) or any(n % m if m else n for n, m in zip(b.ne[2:], a.ne[2:], strict=True)):
        return f"src0 of ne {a.ne}, src1 of ne {b.ne} do not fit dst of ne {dst.ne}"
    return _refuse(dst, a, b)


def _refuse_mul_mat_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> str | None:
    used, n_tokens = ids.ne[:2]
    if dst.ne != (a.ne[1], used, n_tokens, 1) or b.ne[2:] != (n_tokens, 1) or not b.ne[1] or used % b.ne[1]:
        return f"src0 of ne {a.ne}, src1 of ne {b.ne}, ids of ne {ids.ne} do not fit dst of ne {dst.ne}"
    if a.ne[3] != 1:
        return f"src0 of ne {a.ne}: must be 1 in dimension 3"
    return _refuse(dst, a, b)


def _rounds(a: Tensor, b: Tensor, n_columns: int, numerics: Numerics) -> bool:
    """Whether n_columns columns are rounded as the CPU rounds them."""
    few = a.type in DOTS and n_columns < least_for_blas(a)
    return b.type in ("f32", "f16", "bf16") and (numerics.matmul == "exact" or few)


def _decoded(values: NDArray[np.generic], type: str, numerics: Numerics) -> NDArray[np.float64]:
    """The values of a view of a tensor of a type, as float64 rows."""
    bytes_ = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape[:3], -1)
    kind = numerics.codec(type)
    return kind.decode(bytes_.reshape(-1, kind.block_bytes)).reshape(*values.shape[:3], -1).astype(np.float64)


def _define_products(
    y: NDArray[np.float32],
    a: Tensor,
    index: tuple[int, int],
    x: NDArray[np.float64],
    rounds: bool,
    numerics: Numerics,
) -> None:
    """y (n, ne01) = x (n, ne00) times the matrix of src0 at an index, a tile of rows at a time."""
    rounded = VEC_DOT[a.type]
    below = np.zeros(0)
    if rounds:
        units = x.astype(np.float32).reshape(-1, codec(rounded).block_size)
        blocks = numerics.codec(rounded).encode(units, numerics.rounding).reshape(len(x), -1)
        x = dequantize(blocks, rounded).astype(np.float64)
        if rounded == "q8_1":
            sums = blocks.reshape(len(x), -1, 36)[..., 2:4].copy().view(np.float16)[..., 0]
            below = sums - x.reshape(len(x), -1, 32).sum(-1)
    rows = max(1, TILE_BYTES // (4 * a.ne[0]))
    matrix = a.view()[index]
    for first in range(0, a.ne[1], rows):
        tile = matrix[None, None, first : first + rows]
        total = x @ _decoded(tile, a.type, numerics)[0, 0].T
        if below.size:  # its sum of a block stands beside the quants, rounded to f16
            total += below @ tile[0, 0, ..., 2:4].copy().view(np.float16)[..., 0].astype(np.float64).T
        y[:, first : first + rows] = total


@op(
    "MUL_MAT",
    types=[*_TYPES, _TRANSFORMED],
    refuse=_refuse_mul_mat,
    params=MulMat,
    bound=BOUND,
    weights=True,
    built_by={"ggml_mul_mat": "ctt", "ggml_mul_mat_set_prec": "ti", "ggml_mul_mat_set_hint": "ti"},
)
def mul_mat(dst: Tensor, a: Tensor, b: Tensor, params: MulMat, numerics: Numerics = PLAIN) -> None:
    """dst[i3, i2] = b[i3, i2] @ a[i3 / r3, i2 / r2].T, for r2, r3 = b.ne[2] / a.ne[2], b.ne[3] / a.ne[3].

    a (k, rows, a2, a3), b (k, columns, b2, b3), dst (rows, columns, b2, b3). Equals ggml_compute_forward_mul_mat but
    for the rounding of sums, if columns are rounded (see this module).
    """
    if params.hint == HADAMARD:
        with np.errstate(all="ignore"):
            dst.view()[...] = hadamard(b.view().astype(np.float32))
        return
    r2, r3 = b.ne[2] // a.ne[2], b.ne[3] // a.ne[3]
    rounds = _rounds(a, b, b.ne[1] * r2 * r3, numerics)
    x = _decoded(b.view(), b.type, numerics)
    for i3, i2 in np.ndindex(b.ne[3], b.ne[2]):
        _define_products(dst.view()[i3, i2], a, (i3 // r3, i2 // r2), x[i3, i2], rounds, numerics)


@op(
    "MUL_MAT_ID",
    types=[(*types_, "i32") for types_ in _TYPES],
    refuse=_refuse_mul_mat_id,
    bound=BOUND,
    weights=True,
    roles={"ids": "the expert ids"},
)
def mul_mat_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics = PLAIN) -> None:
    """dst[t, s] = b[t, s % b.ne[1]] @ a[ids[t, s]].T: each of a token's experts applied to the token.

    a (k, rows, experts), b (k, used or a divisor of it, tokens), ids (used, tokens), dst (rows, used, tokens). Equals
    ggml_compute_forward_mul_mat_id but for the rounding of sums, if columns are rounded (see this module).
    """
    chosen, x = checked_ids(ids, a.ne[2])[0], _decoded(b.view(), b.type, numerics)[0]
    for expert in np.unique(chosen):
        token, slot = np.nonzero(chosen == expert)
        y = np.empty((len(token), a.ne[1]), np.float32)
        rounds = _rounds(a, b, len(token), numerics)
        _define_products(y, a, (0, int(expert)), x[token, slot % b.ne[1]], rounds, numerics)
        dst.view()[0, token, slot] = y


@mul_mat.compiled
def _mul_mat(dst: Tensor, a: Tensor, b: Tensor, params: MulMat, numerics: Numerics) -> Call | None:
    if params.hint == HADAMARD:
        of = Transform(b.ne, CODES[b.type], b.place, dst.place)
        n_rows = b.ne[1] * b.ne[2] * b.ne[3]
        return Job(Work(transform, of, n_rows, 4 * dst.n_elements * b.ne[0].bit_length(), keep=(dst, b)))
    work = bind(dst, a, b, None, numerics)
    return None if work is None else Job(work)


@mul_mat_id.compiled
def _mul_mat_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics) -> Call | None:
    work = bind(dst, a, b, ids, numerics)
    return None if work is None else Job(ids_check(ids, a.ne[2]), work)


# what they are measured by


def _exact_rows(weights: Tensor, i3: int, i2: int) -> Iterator[tuple[slice, Exact]]:
    """The rows of a matrix of weights, a tile at a time."""
    step = max(1, TILE_BYTES // max(1, weights.ne[0]))
    for begin in range(0, weights.ne[1], step):
        rows = slice(begin, min(begin + step, weights.ne[1]))
        at = weights.offset + i3 * weights.nb[3] + i2 * weights.nb[2] + begin * weights.nb[1]
        part = replace(weights, ne=(weights.ne[0], rows.stop - begin, 1, 1), offset=at)
        yield rows, exact.values(part)[0, 0]


@mul_mat.formula
def _exact_mul_mat(a: Tensor, b: Tensor, params: MulMat) -> Exact | None:
    """The product with b itself, whatever b is rounded to on the CPU."""
    x = exact.values(b)
    if params.hint == HADAMARD:
        return hadamard(x)
    if a.ne[0] != b.ne[0] or b.ne[2] % a.ne[2] or b.ne[3] % a.ne[3]:
        return None
    y = np.empty((*x.shape[:3], a.ne[1]))
    weights, r2, r3 = a.unpacked(), b.ne[2] // a.ne[2], b.ne[3] // a.ne[3]
    for i3, i2 in np.ndindex(a.ne[3], a.ne[2]):
        part = slice(i3 * r3, (i3 + 1) * r3), slice(i2 * r2, (i2 + 1) * r2)
        for rows, matrix in _exact_rows(weights, i3, i2):
            y[(*part, slice(None), rows)] = x[part] @ matrix.T
    return y


@mul_mat.sums
def _sums(a: Tensor, b: Tensor, params: MulMat) -> Sums | None:
    if params.hint == HADAMARD or max(a.n_elements, b.n_elements) > LARGEST:
        return None
    x, y = exact.values(a), exact.values(b)

    def terms(place: tuple[int, int, int]) -> tuple[Exact, Exact]:
        i3, i2, _ = place
        return y[place], x[i3 * a.ne[3] // b.ne[3], i2 * a.ne[2] // b.ne[2]].T

    return Sums(a.ne[0], terms, False, "elements {} of each row of src0 and src1")


@mul_mat_id.formula
def _exact_mul_mat_id(a: Tensor, b: Tensor, ids: Tensor) -> Exact:
    weights, x, chosen = a.unpacked(), exact.values(b), ids.view()[0, 0]
    y = np.empty((1, *chosen.shape, a.ne[1]))
    for expert in np.unique(chosen):
        tokens, slots = np.nonzero(chosen == expert)
        for rows, matrix in _exact_rows(weights, 0, int(expert)):
            y[0, tokens, slots, rows] = x[0, tokens, slots % b.ne[1]] @ matrix.T
    return y


@mul_mat.mistakes
def _mistaken_mul_mat(node: Node, a: Tensor, b: Tensor) -> Iterator[Mistake]:
    if a.n_elements > LARGEST:
        return
    for k in (2, 3):
        if 1 < a.ne[k] < b.ne[k] and b.ne[k] % a.ne[k] == 0:
            whole = np.concatenate([a.view()] * (b.ne[k] // a.ne[k]), axis=3 - k)
            text = f"repeats src0 as a whole along dimension {k}, not matrix by matrix"
            yield Mistake(text, altered(node, 0, made(a, whole)))


@mul_mat_id.mistakes
def _mistaken_mul_mat_id(node: Node, a: Tensor, b: Tensor, ids: Tensor) -> Iterator[Mistake]:
    yield from of_ids(node, 2, a.ne[2])


@mul_mat.cases
def _nearest_mul_mat(dst: Tensor, a: Tensor, b: Tensor, params: MulMat) -> list[str]:
    types = [cases.has("type_a", a.type), cases.has("type_b", b.type)]
    if cases.is_permuted(a) and a.type in ("f32", "f16") and b.type in ("f32", "f16"):
        return [*types, r"per=\[0,[23],\d,\d\]"]
    return [*types, "n=1" if b.ne[1] == 1 else f"n={cases.MORE_THAN_ONE}"]


@mul_mat_id.cases
def _nearest_mul_mat_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> list[str]:
    return [cases.has("type_a", a.type), cases.has("type_b", b.type)]


@mul_mat.undefined
def _undefined(dst: Tensor, a: Tensor, b: Tensor, params: MulMat = MulMat()) -> undefined.Flags:
    if params.hint == HADAMARD or not codec(VEC_DOT[a.type]).is_quantized:
        return undefined.NOTHING
    return np.broadcast_to(undefined.spoilt_rows(b)[..., None], dst.ne[::-1])


@mul_mat_id.undefined
def _undefined_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> undefined.Flags:
    if not codec(VEC_DOT[a.type]).is_quantized:
        return undefined.NOTHING
    columns = np.tile(undefined.spoilt_rows(b), (1, 1, ids.ne[0] // b.ne[1]))
    return np.broadcast_to(columns[..., None], dst.ne[::-1])


@mul_mat.costs
def _cost_of_mul_mat(dst: Tensor, a: Tensor, b: Tensor, params: MulMat) -> Cost:
    return Cost(2 * a.ne[0] * dst.n_elements, matrix=a.type)


@mul_mat_id.costs
def _cost_of_mul_mat_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> Cost:
    return Cost(2 * a.ne[0] * dst.n_elements, matrix=a.type, touched={1: min(1.0, ids.n_elements / a.ne[2])})


def _make(k: int = 256, columns: int = 5, rows: int = 24) -> Make:
    """A MUL_MAT of rows of k elements, each matrix of weights shared by two matrices of columns."""

    def make(rng: probes.Rng, types: Types) -> Node:
        weights, x = probes.normal(rng, types[1], 1, 2, rows, k), probes.normal(rng, types[2], 1, 4, columns, k)
        return probes.node("MUL_MAT", "f32", (1, 4, columns, rows), weights, x)

    return make


mul_mat.nodes(_make())


_BY_INTEGERS = "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"
_IN_TILES = "q4_K", "q6_K"  # by integers too, but ggml's CPU multiplies tiles from 8 columns on


_OTHERS = "bf16", "q2_K", "q3_K", "q5_K", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4", "tq1_0", "tq2_0"


def _of_type(type: str) -> Make:
    """A node of a column of weights of this type."""
    return lambda rng, types: _make(max(256, codec(type).block_size), columns=1)(rng, ("f32", type, "f32"))


def _is_other(dst: Tensor, a: Tensor, b: Tensor) -> bool:
    return a.type in _OTHERS


def _has_few(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor | None = None) -> bool:
    return b.ne[1] < MANY


def _has_many(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor | None = None) -> bool:
    return not _has_few(dst, a, b)


def _is_of(type: str, also: Callable[..., bool] | None = None) -> Callable[..., bool]:
    """Whether weights are of a type, and columns float32."""

    def covers(dst: Tensor, a: Tensor, b: Tensor, *ids: Tensor) -> bool:
        return (a.type, b.type) == (type, "f32") and (also is None or also(dst, a, b, *ids))

    return covers


@mul_mat.probes
def _products() -> Iterator[Probe]:
    of_widths = partial(probes.of_widths, _make)
    few, many = (1, 2, 3, 5, 7), (8, 9, 16, 33, 64)

    def drawn(type: str, columns: tuple[int, ...]) -> tuple[Make, ...]:
        """Nodes of one and of several blocks in a row, of few and many rows, of each number of columns."""
        block = codec(type).block_size
        return tuple(_make(block * n, c, rows) for c in columns for n, rows in ((1, 24), (3, 5)))

    yield Probe(
        "of f16", (*of_widths(), *drawn("f16", few + many)), ("f32", "f16", "f32"), fixed=True, covers=_is_of("f16")
    )
    whole, other = (lambda dst, a, b: a.ne[0] % 64 == 0), (lambda dst, a, b: a.ne[0] % 64 != 0)
    sizes = tuple(_make(k, c, rows) for k in (64, 192) for c in many for rows in (5, 24))
    yield Probe(
        "of f32, rows of whole 64s", (*of_widths((64, 128, 576)), *sizes), fixed=True, covers=_is_of("f32", also=whole)
    )
    yield Probe("of f32, other rows", of_widths((7, 33, 48, 63, 80, 121)), covers=_is_of("f32", also=other))
    for type in _BY_INTEGERS:
        types = "f32", type, "f32"
        yield Probe(f"of {type}", drawn(type, few + many), types, fixed=True, covers=_is_of(type))
    for type in _IN_TILES:
        types = "f32", type, "f32"
        yield Probe(f"of {type}, up to 7 columns", drawn(type, few), types, covers=_is_of(type, also=_has_few))
        yield Probe(f"of {type}, 8 columns or more", drawn(type, many), types, covers=_is_of(type, also=_has_many))
    yield Probe("of other types", tuple(_of_type(type) for type in _OTHERS), covers=_is_other)


@mul_mat_id.nodes
def _make_of_experts(rng: probes.Rng, types: Types) -> Node:
    return _of_experts(rng, types, 5)


def _of_experts(rng: probes.Rng, types: Types, tokens: int) -> Node:
    """6 experts, 2 for each token."""
    weights, x = probes.normal(rng, types[1], 1, 6, 24, 256), probes.normal(rng, types[2], 1, tokens, 1, 256)
    ids = np.stack([rng.permutation(6)[:2] for _ in range(tokens)]).astype(np.int32)
    return probes.node("MUL_MAT_ID", "f32", (1, tokens, 2, 24), weights, x, Tensor.of(ids))


@mul_mat_id.probes
def _products_of_experts() -> Iterator[Probe]:
    few, many = (tuple(partial(_of_experts, tokens=n) for n in counts) for counts in ((1, 5, 7), (25, 64)))
    for type in ("f16", *_BY_INTEGERS):
        yield Probe(f"of {type}", few + many, ("f32", type, "f32"), fixed=True, covers=_is_of(type))
    for type in _IN_TILES:
        types = "f32", type, "f32"
        rows, tiles = (_is_of(type, also=lambda *tensors, of=of: _in_tiles(*tensors) == of) for of in (False, True))
        yield Probe(f"of {type}, up to 7 tokens of an expert", few, types, covers=rows)
        yield Probe(f"of {type}, 8 tokens of an expert or more", many, types, covers=tiles)


def _in_tiles(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> bool:
    """Whether ggml's CPU multiplies tiles of an expert: it does so if enough rows of columns meet that one."""
    return bool(np.unique(ids.view(), return_counts=True)[1].max(initial=0) >= MANY)
