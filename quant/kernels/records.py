"""The parameters of a kernel: a record of numbers, packed by Python and read by name in compiled code.

    class Roll(NamedTuple):
        n: int
        eps: np.float32
        x: Place

A record is 64-bit words, in the order of its fields. A field is an int, an np.float32, another record, or a tuple of
ints. `Work` packs the record that it is given, and `record_at` reads it in the kernel:

    of = record_at(p, Roll)
    x = of.x.address + i1 * of.x.nb[1]
"""

from __future__ import annotations

from typing import Any, NamedTuple

from quant.kernels.jit import inlined
from quant.kernels.late import intrinsic, types
from quant.kernels.words import Record as Record
from quant.kernels.words import packed as packed
from quant.kernels.words import place_in as place_in
from quant.kernels.words import size_of as size_of

Dims = tuple[int, int, int, int]


class Place(NamedTuple):
    """Where a tensor lies: element (i0, i1, i2, i3) is at address + the sum of i * nb, in bytes."""

    address: int
    nb: Dims


@inlined
def row_of(place: Any, i1: int, i2: int, i3: int) -> Any:
    """The address of row (i1, i2, i3) of a place."""
    return place.address + i1 * place.nb[1] + i2 * place.nb[2] + i3 * place.nb[3]


@inlined
def index_of(row: int, n1: int, n2: int) -> Any:
    """(i1, i2, i3) of row number `row`, where dimension 1 has n1 rows and dimension 2 has n2."""
    return row % n1, row // n1 % n2, row // (n1 * n2)


def _at(address: Any, record: Any, constant: bool) -> Any:
    from quant.kernels import record_types  # late: it imports numba

    return record_types.at(record, constant)


@intrinsic
def record_at(typing_context: Any, address: Any, record: Any) -> Any:
    """The record at an address, in a kernel. Nobody writes to it while the kernel runs."""
    return _at(address, record, constant=True)


@intrinsic
def shared_record_at(typing_context: Any, address: Any, record: Any) -> Any:
    """The record at an address, whose ints compiled code may set too, while other threads read and set them."""
    return _at(address, record, constant=False)


@intrinsic
def address_of(typing_context: Any, record: Any) -> Any:
    """The address of a record, in compiled code."""
    return types.int64(record), lambda context, builder, signature, arguments: arguments[0]
