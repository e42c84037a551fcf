"""Products of quantised rows with quantised vectors: a C function for each type of rows, compiled when it is needed.

The types of rows are those of `quant.dots.DOTS`, and its PACKED. Exactly, one and two vectors are multiplied row by row
(`quant.dots`), and more with panels of rows (`quant.panels`), as ggml's CPU adds up. Fast, sums are rounded less often
(`quant.dots_fast`, `quant.panels_fast`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from quant import dots, dots_fast, panels, panels_fast
from quant.dots import Steps
from quant.kernels.jit import CFunction, callback, caller, inlined
from quant.kernels.late import intrinsic, types
from quant.kernels.records import record_at

_SEVERAL = 3  # vectors from which on rows are laid out in panels


@intrinsic
def multiply_at(typing_context, function, scales, quants, steps, first, n_rows, y, target, n_columns, panel):
    """Calls the function of a `product` at an address.

    scales, quants, steps, first, n_rows  the rows, as `quant.dots.all_rows` takes them; steps: the address of a record
    y, target, n_columns                  the columns, as there
    panel                                 the address of `quant.panels.bytes_of` bytes, at the begin of a cache line
    """
    return types.int64(*[types.int64] * 10), caller(9)


_product = callback(types.int64(*[types.int64] * 9))


@cache
def product(type: str, *, exact: bool) -> CFunction:
    """The C function that multiplies rows of a type, as `multiply_at` calls it."""
    made = (_exact if exact else _fast)(type)
    made.__qualname__ = f"{type.replace(' ', '_')}_{'exact' if exact else 'fast'}"  # under this name it is kept on disk
    return _product(made)


@inlined
def _from(rows, done):
    """Rows without the first ones."""
    scales, quants, steps, first, n_rows = rows
    return scales + done * steps.scale_row, quants + done * steps.quants_row, steps, first + done, n_rows - done


def _exact(type: str) -> Any:
    some, one, at_once = _by_row(type)
    lay, (several, single, together), in_a_panel = panels.LAYS[type], panels.PANELS[type], panels.ROWS

    def multiply(scales, quants, steps, first, n_rows, y, target, n_columns, panel):
        rows, columns = (scales, quants, record_at(steps, Steps), first, n_rows), (y, target, n_columns)
        done = 0
        if n_columns >= _SEVERAL:
            panels.all_panels((lay, several, single, together), rows, columns, panel)
            done = n_rows // in_a_panel * in_a_panel
        dots.all_rows((some, one, at_once), _from(rows, done), columns)
        return 0

    return multiply


def _fast(type: str) -> Any:
    some, one, at_once = _by_row(type)
    lay, (four, two, ready), in_a_panel = panels.LAYS[type], panels_fast.PANELS[type], panels.ROWS
    with_one = _with_one_vector(type)

    def multiply(scales, quants, steps, first, n_rows, y, target, n_columns, panel):
        rows, columns = (scales, quants, record_at(steps, Steps), first, n_rows), (y, target, n_columns)
        if n_columns >= panels_fast.FEW:
            panels_fast.all_panels((lay, four, two, ready), rows, columns, panel)
            done = n_rows // in_a_panel * in_a_panel
        else:
            done = with_one(rows, columns)
        dots.all_rows((some, one, at_once), _from(rows, done), columns)
        return 0

    return multiply


def _by_row(type: str) -> Any:
    return dots.DOTS_PACKED if type == dots.PACKED else dots.DOTS[type]


def _with_one_vector(type: str) -> Any:
    """Multiplies rows with a vector in fewer steps, and returns how many."""
    if type not in dots_fast.DOTS:
        return inlined(lambda rows, columns: 0)
    several = dots_fast.DOTS[type]

    @inlined
    def multiplied(rows, columns):
        if rows[2].n_blocks % 2:
            return 0
        dots_fast.all_rows(several, rows, columns)
        return rows[4] // dots_fast.ROWS * dots_fast.ROWS

    return multiplied
