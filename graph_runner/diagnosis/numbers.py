"""Wrong numbers at their right places: rounded differently, not finite, multiples of the right ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.movers import convert
from ggml_backend_npu.registry.entry import KernelError
from graph_runner.diagnosis.case import ROUNDED, Bytes, Case, Flags, error_of, power_of, same_bytes
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


def rounded_otherwise(case: Case) -> str | None:
    """Finds what was wrong when values were quantised, or rounded to 16 bits."""
    kind = case.expected.codec
    if kind.is_quantized:
        values = quantised_values(case.node)
        found = compare_blocks(case.expected, case.actual, values)
        if found.swapped_nibbles:
            return f"swaps the two nibbles of each byte: {found.n_different} of {found.n_blocks} q4_0 blocks"
        if kind.name == "q4_0" and _are_neighbours(case.e.reshape(-1, 18), case.a.reshape(-1, 18)):
            return "packs neighbours, elements 2j and 2j + 1, into a byte of q4_0, not j and j + 16"
        if found.rounding is not None and not found.n_scale:
            other = compare_blocks(case.expected, case.expected, values).rounding
            if other is not None and other != found.rounding:
                return (
                    f"rounds as ggml's {found.rounding} q8_0 quantiser, not as the {other} one: "
                    f"{found.n_different} of {found.n_blocks} blocks differ, {found.off_by_one} quants by one"
                )
        return None
    if case.expected.type not in ("f16", "bf16"):
        return None
    values = quantised_values(case.node)
    if values is None:
        return None
    expected, actual = (tensor.view().view(np.uint16) for tensor in (case.expected, case.actual))
    cut = np.where(np.isnan(values), expected, _cut_off(values, case.expected.type))
    if np.array_equal(cut, actual) and not case.data_is_right:
        return f"cuts float32 off to {case.expected.type}: it does not round to the nearest"
    return None


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


def not_finite(case: Case, others_right: bool = True) -> str | None:
    """Finds NaN or infinities in rows where the reference has none.

    others_right  whether the other rows must be right
    """
    if case.expected.type not in (*ROUNDED, "f64"):
        return None
    shape = (-1, case.expected.ne[0])
    e, a = case.values_e.reshape(shape), case.values_a.reshape(shape)
    new: Flags = np.logical_or.reduce(~np.isfinite(a) & np.isfinite(e), axis=1)
    if not new.any() or not case.gaps_are_right or (others_right and same_bytes(case.a, case.b)[new].all()):
        return None
    kinds = [name for name, test in (("NaN", np.isnan), ("Inf", np.isinf)) if (test(a) & np.isfinite(e)).any()]
    text = f"gives {' and '.join(kinds)} in {rows_of(new, case)}, where the reference has none"
    if not others_right:
        return text
    right = case.same_rows(case.a, case.e)
    if not (right | new).all():
        return None
    return text if new.all() else f"{text}; the others are right"


def not_finite_at_all(case: Case) -> str | None:
    """Finds NaN or infinities, whatever the other rows hold."""
    return not_finite(case, others_right=False)


def times_factor(case: Case) -> str | None:
    """Finds a multiple of the right values, or the right values plus a constant."""
    if case.is_exact and case.expected.type not in ROUNDED:
        return None
    e, a = case.values_e.reshape(-1), case.values_a.reshape(-1)
    if not (np.isfinite(e) & np.isfinite(a)).all() or e.size < 8 or not case.gaps_are_right:
        return None
    tolerance = max(case.tolerance, ROUNDED.get(case.expected.type, 0.0))
    power, total = power_of(e), power_of(a)
    if not total:
        return "gives 0 everywhere"
    if power:
        factor = float(e @ a) / power
        if error_of(factor * e, a) <= tolerance * total and error_of(factor * e, a) <= 1e-2 * error_of(e, a):
            return f"gives {factor:.9g} times the right values everywhere"
    constant = float((a - e).mean())
    if np.ptp(e) and error_of(e + constant, a) <= 1e-2 * min(tolerance * total, error_of(e, a)):
        return f"gives the right values and {constant:.6g} more everywhere"
    return None


def times_row_factors(case: Case) -> str | None:
    """Finds the right rows, each times a factor of its own: a sum over the row is wrong."""
    if case.expected.type not in ROUNDED or case.expected.ne[0] < 8 or not case.gaps_are_right:
        return None
    e, a = (values.reshape(-1, case.expected.ne[0]) for values in (case.values_e, case.values_a))
    power = np.square(e).sum(axis=1)
    if not (np.isfinite(e) & np.isfinite(a)).all() or not power.all():
        return None
    factors = (e * a).sum(axis=1) / power
    error = error_of(factors[:, None] * e, a)
    if not error <= max(case.tolerance, ROUNDED[case.expected.type]) * power_of(a) or error > 1e-2 * error_of(e, a):
        return None
    least, most = factors.min(), factors.max()
    return f"gives each row times a number of its own, {least:.9g} to {most:.9g}: what it makes of a whole row is off"


def in_halves(case: Case) -> str | None:
    """Finds a result of which all values are exact in a 16-bit type and near the right ones."""
    e, a = case.values_e.astype(np.float32), case.values_a.astype(np.float32)
    if case.expected.type != "f32" or not np.isfinite(e).all() or len(np.unique(a)) < 8:
        return None
    if error_of(case.values_e, case.values_a) > _NEAR * power_of(case.values_e):
        return None
    for kind in ("bf16", "f16"):
        as_halves = [convert(convert(x, "f32", kind), kind, "f32") == x for x in (e, a)]
        if as_halves[1].all() and as_halves[0].mean() < 0.5:
            return f"gives nothing but numbers of {kind}: it computes in that type, or rounds its result to it"
    return None
