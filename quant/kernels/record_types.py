"""Records in compiled code: numba's types of them, and LLVM's code that reads and sets their fields."""

from __future__ import annotations

from typing import Any, get_args, get_origin

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.imputils import lower_getattr_generic, lower_setattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import models, register_model

from quant.kernels.words import Record, fields_of, words_of

_WORD = 8  # bytes


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
        field = fields_of(of.record).get(name)
        return None if field is None else _numba_type(field[1], of.constant)


def _pointer(builder: Any, of: _Of, address: Any, name: str) -> Any:
    at, _ = fields_of(of.record)[name]
    return builder.add(address, ir.Constant(ir.IntType(64), at * _WORD))


@lower_getattr_generic(_Of)
def _get(context: Any, builder: Any, of: _Of, address: Any, name: str) -> Any:
    kind = fields_of(of.record)[name][1]
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
        places = [builder.add(at, ir.Constant(ir.IntType(64), i * _WORD)) for i in range(words_of(kind))]
        words = [load(place, ir.IntType(64)) for place in places]
        return context.make_tuple(builder, _numba_type(kind, of.constant), words)
    return at


@lower_setattr_generic(_Of)
def _set(context: Any, builder: Any, signature: Any, arguments: Any, name: str) -> None:
    of, given = signature.args
    at = _pointer(builder, of, arguments[0], name)
    value = context.cast(builder, arguments[1], given, types.int64)
    builder.store(value, builder.inttoptr(at, ir.IntType(64).as_pointer()))


def at(record: Any, constant: bool) -> Any:
    """The signature and the code of a call that makes an address a record of a class; None if it is no such class."""
    if not isinstance(record, types.NamedTupleClass):
        return None
    of = _Of(record.instance_class, constant)
    return of(types.int64, record), lambda context, builder, signature, arguments: arguments[0]
