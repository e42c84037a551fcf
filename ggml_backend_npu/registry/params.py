"""op_params as records: an op declares its parameters once, and the layout of their bytes follows."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, NamedTuple, Self, get_origin, get_type_hints

from ggml_backend_npu.ir import PARAMS_BYTES

i32 = Annotated[int, "i"]
f32 = Annotated[float, "f"]


class Instead(NamedTuple):
    """Values that a wrong kernel may use in place of a node's own: `eps: Annotated[f32, Instead("eps", (0.0, 1e-6))]`.

    name    of the parameter, in words
    values  for a float, the first is the one that has no effect
    """

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Params:
    """What ggml writes into op_params.

        @dataclass(frozen=True)
        class Scale(Params):
            scale: f32
            bias: f32

    The fields of a record have 4 bytes each, i32 or f32, in ggml's order and without gaps; those of a record that it
    extends come first.
    """

    @classmethod
    def _said(cls) -> dict[str, tuple[Any, ...]]:
        """What the type of each field says: its letter, and what it may be instead."""
        said = get_type_hints(cls, include_extras=True)
        return {name: said[name].__metadata__ for name in said if get_origin(said[name]) is Annotated}

    @classmethod
    @cache
    def _layout(cls) -> struct.Struct:
        return struct.Struct("<" + "".join(kind for kind, *_ in cls._said().values()))

    @classmethod
    def others(cls) -> dict[str, Instead]:
        """Of the fields that say so, what they may be instead."""
        return {name: instead for name, (_, *rest) in cls._said().items() for instead in rest}

    @classmethod
    def of(cls, data: bytes) -> Self:
        """The record at the start of op_params; bytes after their end count as 0."""
        return cls(*cls._layout().unpack_from(data.ljust(PARAMS_BYTES, b"\0")))

    @property
    def packed(self) -> bytes:
        """The 64 bytes of op_params: the record, then zeros."""
        return self._layout().pack(*(getattr(self, name) for name in self.names())).ljust(PARAMS_BYTES, b"\0")

    @classmethod
    def kinds(cls) -> str:
        """One letter for each field: "i" or "f"."""
        return cls._layout().format.removeprefix("<")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the fields, in the order of op_params."""
        return tuple(field.name for field in fields(cls))
