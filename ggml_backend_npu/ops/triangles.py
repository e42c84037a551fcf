"""TRI, SOLVE_TRI, DIAG and DIAG_MASK_*: matrices of which only the diagonal, or one side of it, is used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.gradients import lie_apart
from ggml_backend_npu.ops.kernels.sides import next_row
from ggml_backend_npu.registry import exact, probes
from ggml_backend_npu.registry.checks import Exact, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.params import Params, i32
from ggml_backend_npu.registry.shapes import gaps, gaps_in_rows, other_ne
from quant.kernels.jit import array_at, compiled, copy, fused_multiply_add
from quant.kernels.late import types
from quant.kernels.records import Dims, Place, index_of, record_at, row_of
from quant.kernels.threads import Job, Work

# which elements TRI leaves, by ggml_tri_type
_LEFT = (np.less_equal, np.less, np.greater_equal, np.greater)  # of (row, column)


@dataclass(frozen=True)
class Tri(Params):
    """op_params of TRI: ggml_tri. type: a ggml_tri_type."""

    type: i32


def _refuse_tri(dst: Tensor, x: Tensor, params: Tri) -> str | None:
    if not 0 <= params.type < len(_LEFT):
        return f"type {params.type}"
    if x.ne[0] != x.ne[1]:
        return f"x of ne {x.ne} is not square"
    return other_ne(x=x, dst=dst) or gaps(x=x) or gaps_in_rows(dst=dst)


class KeepBand(NamedTuple):
    """ne: of dst. Of row i, columns i - before to i + behind are those of x, and others become a value."""

    ne: Dims
    before: int
    behind: int
    value: np.float32
    x: Place
    dst: Place


@compiled
def keep_band(p, begin, end, scratch):
    """A unit is a row of dst, which may be that of x."""
    of = record_at(p, KeepBand)
    n0, n1, n2, _ = of.ne
    value = of.value
    i1, i2, i3 = index_of(begin, n1, n2)
    for _ in range(begin, end):
        x, y = row_of(of.x, i1, i2, i3), row_of(of.dst, i1, i2, i3)
        first = min(max(0, i1 - of.before), n0)
        last = min(max(first, i1 + of.behind + 1), n0)
        array_at(y, types.float32, first)[:] = value
        if x != y:
            copy(x + 4 * first, y + 4 * first, 4 * (last - first))
        array_at(y + 4 * last, types.float32, n0 - last)[:] = value
        i1, i2, i3 = next_row(of, i1, i2, i3)
    return 0


def _bind_band(dst: Tensor, x: Tensor, before: int, behind: int, value: float = 0) -> Call | None:
    """The call of `keep_band`; None if x and dst share bytes otherwise than row by row."""
    if not lie_apart(dst, x):
        return None
    of = KeepBand(dst.ne, before, behind, np.float32(value), x.place, dst.place)
    return Job(Work(keep_band, of, dst.ne[1] * dst.ne[2] * dst.ne[3], dst.nbytes, keep=(dst, x)))


@op("TRI", types=[("f32", "f32")], refuse=_refuse_tri, params=Tri)
def tri(dst: Tensor, x: Tensor, params: Tri) -> None:
    """dst = x above or below the diagonal, with or without it, and 0 elsewhere; x and dst (n, n, ...).

    Equals ggml_compute_forward_tri.
    """
    rows, columns = np.indices(x.ne[:2], sparse=True)
    dst.view()[...] = np.where(_LEFT[params.type](rows, columns), x.view(), np.float32(0))


@tri.compiled
def _tri(dst: Tensor, x: Tensor, params: Tri) -> Call | None:
    n = x.ne[0]
    before, behind = ((0, n), (-1, n), (n, 0), (n, -1))[params.type]
    return _bind_band(dst, x, before, behind)


def _refuse_diag(dst: Tensor, x: Tensor) -> str | None:
    if x.ne[1] != 1 or dst.ne != (x.ne[0], x.ne[0], *x.ne[2:]):
        return f"x of ne {x.ne}, dst of ne {dst.ne}"
    return gaps_in_rows(x=x, dst=dst)


@op("DIAG", types=[("f32", "f32")], refuse=_refuse_diag)
def diag(dst: Tensor, x: Tensor) -> None:
    """dst = matrices with the rows of x on their diagonals, and 0 elsewhere; x (n, 1, ...) -> dst (n, n, ...).

    Equals ggml_compute_forward_diag.
    """
    places = np.arange(x.ne[0])
    dst.view()[...] = 0
    dst.view()[:, :, places, places] = x.view()[:, :, 0]


@diag.compiled
def _diag(dst: Tensor, x: Tensor) -> Call | None:
    repeated = replace(x, ne=dst.ne, nb=(x.nb[0], 0, *x.nb[2:]))
    return _bind_band(dst, repeated, before=0, behind=0)


@dataclass(frozen=True)
class DiagMask(Params):
    """op_params of DIAG_MASK_INF and DIAG_MASK_ZERO: ggml_diag_mask_inf_impl."""

    n_past: i32


def _refuse_diag_mask(dst: Tensor, x: Tensor, params: DiagMask) -> str | None:
    if params.n_past < 0:
        return f"n_past {params.n_past}"
    if dst.ne[3] != 1 and dst.nb[3] != dst.ne[2] * dst.nb[2]:
        return f"dst matrices are not evenly apart: nb {dst.nb}"
    in_place = (x.address, x.nb) == (dst.address, dst.nb)
    return other_ne(x=x, dst=dst) or (gaps_in_rows(dst=dst) if in_place else gaps(x=x, dst=dst))


def _register_diag_mask(name: str, value: float) -> None:
    functions = dict.fromkeys((f"ggml_{name.lower()}", f"ggml_{name.lower()}_inplace"), "cti")

    @op(name, types=[("f32", "f32")], refuse=_refuse_diag_mask, params=DiagMask, built_by=functions)
    def diag_mask(dst: Tensor, x: Tensor, params: DiagMask) -> None:
        """dst = x, but `value` if the column is more than n_past after the row; in x's ne.

        Equals ggml_compute_forward_diag_mask_f32.
        """
        rows, columns = np.indices(x.ne[1::-1], sparse=True)
        dst.view()[...] = np.where(columns - rows > params.n_past, np.float32(value), x.view())

    @diag_mask.compiled
    def _diag_mask(dst: Tensor, x: Tensor, params: DiagMask) -> Call | None:
        return _bind_band(dst, x, before=x.ne[1], behind=params.n_past, value=value)


_register_diag_mask("DIAG_MASK_INF", -np.inf)
_register_diag_mask("DIAG_MASK_ZERO", 0)


def _refuse_solve(dst: Tensor, a: Tensor, b: Tensor) -> str | None:
    if a.ne != (b.ne[1], *b.ne[1:]):
        return f"A of ne {a.ne}, B of ne {b.ne}"
    return other_ne(B=b, dst=dst) or gaps(A=a, B=b, dst=dst)


@op(
    "SOLVE_TRI",
    types=[("f32", "f32", "f32")],
    refuse=_refuse_solve,
    bound=1e-11,  # sums go from row to row
    wide=True,
    built_by={"ggml_solve_tri": "ctt bbb"},
)
@np.errstate(all="ignore")
def solve_tri(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """dst such that A dst = B, for each lower triangular matrix A, row by row from the top.

    A (n, n, ...), B and dst (columns, n, ...). Equals ggml_compute_forward_solve_tri but for rounding.
    """
    x, matrices = dst.view(), a.view()
    x[...] = b.view()
    for i in range(a.ne[0]):
        row = matrices[:, :, i, None]
        x[:, :, i] = (x[:, :, i] - (row[..., :i] @ x[:, :, :i])[:, :, 0]) / row[..., i]


class Solve(NamedTuple):
    """Addresses of tensors without gaps: matrices of n rows, with n_columns columns in b and dst."""

    a: int
    b: int
    dst: int
    n: int
    n_columns: int


@compiled
def solve(p, begin, end, scratch):
    """A unit is a matrix. The products of each element are added one after the other."""
    of = record_at(p, Solve)
    a, b, dst, n, n_columns = of.a, of.b, of.dst, of.n, of.n_columns
    for index in range(begin, end):
        matrix = a + 4 * index * n * n
        rows = 4 * index * n * n_columns
        for i in range(n):
            factors = array_at(matrix + 4 * i * n, types.float32, n)
            at = rows + 4 * i * n_columns
            x = array_at(dst + at, types.float32, n_columns)
            right = array_at(b + at, types.float32, n_columns)
            x[:] = types.float32(0)
            for j in range(i):
                above = array_at(dst + rows + 4 * j * n_columns, types.float32, n_columns)
                for column in range(n_columns):
                    x[column] = fused_multiply_add(factors[j], above[column], x[column])
            for column in range(n_columns):
                x[column] = (right[column] - x[column]) / factors[i]
    return 0


@solve_tri.compiled
def _solve_tri(dst: Tensor, a: Tensor, b: Tensor) -> Call:
    n, n_matrices = a.ne[0], a.ne[2] * a.ne[3]
    of = Solve(a.address, b.address, dst.address, n, b.ne[0])
    return Job(Work(solve, of, n_matrices, 2 * n * b.n_elements, keep=(dst, a, b)))


@solve_tri.on_the_way
def _on_the_way(a: Tensor, b: Tensor) -> Exact:
    """The terms of a row, of one sign; what became too large in one row is in all below."""
    dst = Tensor.of(np.empty(b.ne[::-1]), "f64")
    solve_tri.define(dst, *(Tensor.of(exact.values(x), "f64") for x in (a, b)))
    x = np.where(np.isfinite(dst.view()), np.abs(dst.view()), 0)
    terms = np.fmax(np.abs(exact.values(b)) + np.tril(np.abs(exact.values(a))) @ x, x)
    largest: Exact = np.maximum.accumulate(np.where(np.isfinite(terms), terms, 0), axis=2)
    return largest


@solve_tri.nodes
def _make(rng: probes.Rng, types: Types) -> Node:
    a = np.tril(0.2 * rng.standard_normal((1, 3, 24, 24))) + np.eye(24)
    b = probes.normal(rng, "f32", 1, 3, 24, 7)
    return probes.node("SOLVE_TRI", "f32", (1, 3, 24, 7), probes.tensor("f32", a), b)
