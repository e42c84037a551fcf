"""Wrong numbers at their right places: rounded differently, not finite, multiples of the right ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.movers import convert
from ggml_backend_npu.registry.entry import KernelError
from graph_runner.diagnosis.case import ROUNDED, Bytes, Case, Finding, Flags, error_of, power_of
from graph_runner.diagnosis.words import rows_of
from graph_runner.judging.blocks import compare_blocks
from graph_runner.judging.mistakes import inside
from quant import quantize

_NEAR = 1e-2  # NMSE of numbers with 8 or 11 bits, and of sums of them


def quantised_values(node: Node) -> NDArray[np.float32] | None:
    """Returns the float32 values that a node quantises, in dst's shape with axes reversed, NaN where it writes nothing.
    Returns None if it does not quantise or round floats."""
    dst, src = node.dst, node.src[0] if node.src else None
    if src is None or src.type not in ("f32", "f16", "bf16") or src.type == dst.type:
        return None
    own = OWN.get(node.op)
    if own is None or own.has_formula or not all(source is None or inside(source) for source in node.src):
        return None
    wide = Tensor.of(np.full(dst.ne[::-1], np.nan, np.float32))
    (_, *sources), keywords = own.arguments(node)
    try:
        own.define(wide, *sources, **keywords)
    except (KernelError, ValueError, IndexError):
        return None
    return wide.view()


def rounded_otherwise(case: Case) -> Iterator[Finding]:
    """Finds what was wrong when values were quantised, or rounded to 16 bits."""
    kind = case.expected.codec
    values = quantised_values(case.node)
    if kind.is_quantized:
        found = compare_blocks(case.expected, case.actual, values)
        if found.swapped_nibbles:
            yield Finding(f"swaps the two nibbles of each byte: {found.n_different} of {found.n_blocks} q4_0 blocks")
        if kind.name == "q4_0" and _are_neighbours(case.e.reshape(-1, 18), case.a.reshape(-1, 18)):
            yield Finding("packs neighbours, elements 2j and 2j + 1, into a byte of q4_0, not j and j + 16")
        if found.rounding is not None and not found.n_scale:
            other = compare_blocks(case.expected, case.expected, values).rounding
            if other is not None and other != found.rounding:
                yield Finding(
                    f"rounds as ggml's {found.rounding} q8_0 quantiser, not as the {other} one: "
                    f"{found.n_different} of {found.n_blocks} blocks differ, {found.off_by_one} quants by one"
                )
    elif case.expected.type in ("f16", "bf16") and values is not None:
        expected = case.expected.view().view(np.uint16)
        cut = np.where(np.isnan(values), expected, _cut_off(values, case.expected.type))
        text = f"cuts float32 off to {case.expected.type}: it does not round to the nearest"
        if np.array_equal(cut, case.actual.view().view(np.uint16)):
            yield Finding(text, np.ascontiguousarray(cut).view(np.uint8).reshape(case.e.shape))


def _are_neighbours(expected: Bytes, actual: Bytes) -> bool:
    """Whether the q4_0 blocks that differ have elements 2j and 2j + 1 in byte j."""
    different = (expected != actual).any(axis=1)
    blocks = expected[different]
    quants = np.hstack([blocks[:, 2:] & 15, blocks[:, 2:] >> 4])
    return np.array_equal(np.hstack([blocks[:, :2], quants[:, ::2] | (quants[:, 1::2] << 4)]), actual[different])


def _cut_off(values: NDArray[np.float32], type: str) -> NDArray[np.uint16]:
    """Returns the bits of float32 values as 16-bit floats, rounded towards zero."""
    if type == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    nearest = quantize(values, "f16").view(np.float16)
    too_large = np.abs(nearest.astype(np.float32)) > np.abs(values)
    return np.where(too_large, np.nextafter(nearest, np.float16(0)), nearest).view(np.uint16)


def not_finite(case: Case, others_right: bool = True) -> Iterator[Finding]:
    """Finds NaN or infinities in rows where the reference has none.

    others_right  whether the other rows must be right
    """
    if case.expected.type not in (*ROUNDED, "f64"):
        return
    shape = (-1, case.expected.ne[0])
    e, a = case.values_e.reshape(shape), case.values_a.reshape(shape)
    spoilt: Flags = ~np.isfinite(a) & np.isfinite(e)
    new: Flags = np.logical_or.reduce(spoilt, axis=1)
    not_written = case.is_as_before.reshape(spoilt.shape)[spoilt].all()
    if not new.any() or not case.gaps_are_right or (others_right and not_written):
        return
    kinds = [name for name, test in (("NaN", np.isnan), ("Inf", np.isinf)) if (test(a) & np.isfinite(e)).any()]
    text = f"gives {' and '.join(kinds)} in {rows_of(new, case)}, where the reference has none"
    if not others_right:
        yield Finding(text)
    elif (case.same_rows(case.a, case.e) | new).all():
        yield Finding(text if new.all() else f"{text}; the others are right")


def not_finite_at_all(case: Case) -> Iterator[Finding]:
    """Finds NaN or infinities, whatever the other rows hold."""
    yield from not_finite(case, others_right=False)


def other_zeros(case: Case) -> Iterator[Finding]:
    """Finds the right values with another sign of zeros."""
    if case.expected.type not in ROUNDED or not case.gaps_are_right:
        return
    differs: Flags = np.logical_or.reduce(case.e != case.a, axis=-1)
    e, a = case.values_e[differs], case.values_a[differs]
    if differs.any() and not e.any() and not a.any():
        signs = ["-0" if np.signbit(x).all() else "0" if not np.signbit(x).any() else "zeros" for x in (a, e)]
        yield Finding(f"gives {signs[0]} in place of {signs[1]} in {int(differs.sum())} elements; the others are right")


def zero_rows(case: Case) -> Iterator[Finding]:
    """Finds rows of zeros while all others are right."""
    right = case.same_rows(case.a, case.e)
    written = case.a.reshape(len(right), -1) != 0
    zero: Flags = ~written.any(axis=1) & ~right
    if zero.any() and not zero.all() and (right | zero).all():
        yield Finding(f"gives 0 in {rows_of(zero, case)}; the others are right", case.a)


def times_factor(case: Case) -> Iterator[Finding]:
    """Finds a multiple of the right values, or the right values plus a constant."""
    if case.is_exact and case.expected.type not in ROUNDED:
        return
    e, a = case.values_e, case.values_a
    if not (np.isfinite(e) & np.isfinite(a)).all() or e.size < 8:
        return
    tolerance = max(case.tolerance, ROUNDED.get(case.expected.type, 0.0))
    power, total = power_of(e), power_of(a)
    if not total:
        yield Finding("gives 0 everywhere", a)
        return
    if power:
        factor = float(e.reshape(-1) @ a.reshape(-1)) / power
        if error_of(factor * e, a) <= min(tolerance * total, 1e-2 * error_of(e, a)):
            yield Finding(f"gives {factor:.9g} times the right values everywhere", factor * e)
    constant = float((a - e).mean())
    if np.ptp(e) and error_of(e + constant, a) <= 1e-2 * min(tolerance * total, error_of(e, a)):
        yield Finding(f"gives the right values and {constant:.6g} more everywhere", e + constant)


def times_row_factors(case: Case) -> Iterator[Finding]:
    """Finds the right rows, each times a factor of its own: a sum over the row is wrong."""
    if case.expected.type not in ROUNDED or case.expected.ne[0] < 8:
        return
    e, a = (values.reshape(-1, case.expected.ne[0]) for values in (case.values_e, case.values_a))
    power = np.square(e).sum(axis=1)
    if not (np.isfinite(e) & np.isfinite(a)).all() or not power.all() or not a.any(axis=1).all():
        return
    factors = (e * a).sum(axis=1) / power
    gives = factors[:, None] * e
    if error_of(gives, a) > min(max(case.tolerance, ROUNDED[case.expected.type]) * power_of(a), 1e-2 * error_of(e, a)):
        return
    least, most = factors.min(), factors.max()
    yield Finding(
        f"gives each row times a number of its own, {least:.9g} to {most:.9g}: what it makes of a whole row is off",
        gives.reshape(case.values_e.shape),
    )


def in_halves(case: Case) -> Iterator[Finding]:
    """Finds a result of which all values are exact in a 16-bit type and near the right ones."""
    e, a = case.values_e.astype(np.float32), case.values_a.astype(np.float32)
    if case.expected.type != "f32" or not np.isfinite(e).all() or len(np.unique(a)) < 8:
        return
    if error_of(case.values_e, case.values_a) > _NEAR * power_of(case.values_e):
        return
    for kind in ("bf16", "f16"):
        as_halves = [convert(convert(x, "f32", kind), kind, "f32") == x for x in (e, a)]
        if as_halves[1].all() and as_halves[0].mean() < 0.5:
            text = f"gives nothing but numbers of {kind}: it computes in that type, or rounds its result to it"
            yield Finding(text, case.values_a)
