"""A record of a kernel's parameters as 64-bit words: see `records`."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

Record = tuple[Any, ...]  # an instance of a NamedTuple


def packed(record: Record) -> NDArray[np.int64]:
    """The words of a record, int64. A bool becomes 0 or 1."""
    words: list[int] = []
    _append(record, words)
    return np.array(words, np.int64)


def _append(record: Record, words: list[int]) -> None:
    for value in record:
        if type(value) is int:
            words.append(value)
        elif isinstance(value, tuple):
            _append(value, words)
        else:
            words.append(int(value.view(np.uint32)) if isinstance(value, np.float32) else value)


@cache
def fields_of(record: type[Record]) -> dict[str, tuple[int, Any]]:
    """For each field, the word at which it begins and its kind."""
    found, at = {}, 0
    for name, kind in get_type_hints(record).items():
        found[name] = at, kind
        at += words_of(kind)
    return found


def words_of(kind: Any) -> int:
    """How many words a field of this kind takes."""
    if kind in (int, np.float32):
        return 1
    if get_origin(kind) is tuple:
        return len(get_args(kind))
    return size_of(kind)


def size_of(record: type[Record]) -> int:
    """How many words a record has."""
    return sum(words_of(kind) for _, kind in fields_of(record).values())


def place_in(record: type[Record], name: str) -> int:
    """The word of a record at which a field begins."""
    return fields_of(record)[name][0]
