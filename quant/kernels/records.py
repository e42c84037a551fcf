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

from functools import cache
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.imputils import lower_getattr_generic, lower_setattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, models, register_model
from numpy.typing import NDArray

from quant.kernels.jit import inlined

Record = tuple[Any, ...]  # an instance of a NamedTuple
_WORD = 8  # bytes


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


def packed(record: Record) -> NDArray[np.int64]:
    """The words of a record, int64. A bool becomes 0 or 1."""
    words: list[int] = []
    _append(record, words)
    return np.array(words, np.int64)


def _append(record: Record, words: list[int]) -> None:
    for value in record:
        if isinstance(value, tuple):
            _append(value, words)
        else:
            words.append(int(value.view(np.uint32)) if isinstance(value, np.float32) else value)


class _Of(types.Type):  # type: ignore[misc,unused-ignore]
    """numba's type of a record in memory.

    constant  nobody writes to the record while the kernel runs, so LLVM need not read a field twice
    """

    def __init__(self, record: type[Record], constant: bool) -> None:
        self.record, self.constant = record, constant
        super().__init__(f"{'constant ' if constant else ''}record {record.__module__}.{record.__qualname__}")


@register_model(_Of)
class _Model(models.PrimitiveModel):  # type: ignore[misc,unused-ignore]
    """An address."""

    def __init__(self, dmm: Any, fe_type: _Of) -> None:
        super().__init__(dmm, fe_type, ir.IntType(64))


@cache
def _fields(record: type[Record]) -> dict[str, tuple[int, Any]]:
    """For each field, the word at which it begins and its kind."""
    found, at = {}, 0
    for name, kind in get_type_hints(record).items():
        found[name] = at, kind
        at += _size(kind)
    return found


def _size(kind: Any) -> int:
    """How many words a field of this kind takes."""
    if kind in (int, np.float32):
        return 1
    if get_origin(kind) is tuple:
        return len(get_args(kind))
    return size_of(kind)


def size_of(record: type[Record]) -> int:
    """How many words a record has."""
    return sum(_size(kind) for _, kind in _fields(record).values())


def place_in(record: type[Record], name: str) -> int:
    """The word of a record at which a field begins."""
    return _fields(record)[name][0]


def _numba_type(kind: Any, constant: bool) -> Any:
    if kind is int:
        return types.int64
    if kind is np.float32:
        return types.float32
    if get_origin(kind) is tuple:
        return types.UniTuple(types.int64, len(get_args(kind)))
    return _Of(kind, constant)


@infer_getattr
class _Attributes(AttributeTemplate):  # type: ignore[misc,unused-ignore]
    key = _Of

    def generic_resolve(self, of: _Of, name: str) -> Any:
        """numba's type of a field."""
        field = _fields(of.record).get(name)
        return None if field is None else _numba_type(field[1], of.constant)


def _pointer(builder: Any, of: _Of, address: Any, name: str) -> Any:
    at, _ = _fields(of.record)[name]
    return builder.add(address, ir.Constant(ir.IntType(64), at * _WORD))


@lower_getattr_generic(_Of)
def _get(context: Any, builder: Any, of: _Of, address: Any, name: str) -> Any:
    kind = _fields(of.record)[name][1]
    at = _pointer(builder, of, address, name)

    def load(place: Any, what: Any) -> Any:
        value = builder.load(builder.inttoptr(place, what.as_pointer()))
        if of.constant:
            value.set_metadata("invariant.load", builder.module.add_metadata([]))
        return value

    if kind is int:
        return load(at, ir.IntType(64))
    if kind is np.float32:
        return load(at, ir.FloatType())
    if get_origin(kind) is tuple:
        places = [builder.add(at, ir.Constant(ir.IntType(64), i * _WORD)) for i in range(_size(kind))]
        words = [load(place, ir.IntType(64)) for place in places]
        return context.make_tuple(builder, _numba_type(kind, of.constant), words)
    return at


@lower_setattr_generic(_Of)
def _set(context: Any, builder: Any, signature: Any, arguments: Any, name: str) -> None:
    of, given = signature.args
    at = _pointer(builder, of, arguments[0], name)
    value = context.cast(builder, arguments[1], given, types.int64)
    builder.store(value, builder.inttoptr(at, ir.IntType(64).as_pointer()))


def _at(address: Any, record: Any, constant: bool) -> Any:
    if not isinstance(record, types.NamedTupleClass):
        return None
    of = _Of(record.instance_class, constant)
    return of(types.int64, record), lambda context, builder, signature, arguments: arguments[0]


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
