"""The words of works at addresses that do not exist, and where the memory of nodes lies: compiled code."""

from __future__ import annotations

from typing import Any, NamedTuple

from ggml_backend_npu.ggml.graph_read import int64s
from ggml_backend_npu.plugin.rows import FAR, HOME
from quant.kernels.jit import callback, copy
from quant.kernels.late import types
from quant.kernels.records import shared_record_at, size_of

_NUMBER, _OWN = -1, -2  # kinds of words; others are the group of memory in which an address lies
_HALF, _FAR, _HOME = 1 << (HOME - 1), 1 << FAR, HOME


class Words(NamedTuple):
    """The words of works, which stand one after another; lists are addresses of int64.

    words   numbers; an address is there as the distance from where its group of memory, or the words, begin
    kinds   of each word: `_NUMBER`, `_OWN` for an address among the words, or the group of memory of an address
    begins  of each work where its words begin, in bytes
    """

    n_words: int
    n_works: int
    words: int
    kinds: int
    begins: int


class Bound(NamedTuple):
    """Words as they were bound, as `take_off` is given them: `Words`, the address of each work, and how many groups of
    memory there are."""

    n_words: int
    n_works: int
    words: int
    kinds: int
    begins: int
    at: int
    n_groups: int


@callback(types.int64(types.int64))
def take_off(p: int) -> Any:
    """Makes the words of a `Bound` what `Words` says. Returns 0, or 1 if one is no address and too large for a
    number."""
    of = shared_record_at(p, Bound)
    words, kinds = int64s(of.words, of.n_words), int64s(of.kinds, of.n_words)
    begins, at = int64s(of.begins, of.n_works + 1), int64s(of.at, of.n_works)
    for i in range(of.n_words):
        word = words[i]
        kinds[i] = _NUMBER
        if word >= _HALF or word <= -_HALF:
            group = (word - _FAR + _HALF) >> _HOME
            if group < 0 or group >= of.n_groups:
                return types.int64(1)
            kinds[i] = group
            words[i] = word - _FAR - (group << _HOME)
        else:
            for j in range(of.n_works):
                if at[j] <= word < at[j] + begins[j + 1] - begins[j]:
                    kinds[i] = _OWN
                    words[i] = word - at[j] + begins[j]
    return types.int64(0)


class Placing(NamedTuple):
    """What `place` is given, and gives. Lists are addresses of int64, of each piece but for `forms` and `bases`.

    forms       the `Words` of each form
    which       the number of its form; -1: none
    bases       where the groups of memory of all pieces begin
    base_ends   where its groups end
    n_groups    how many it has
    words       the words of all pieces
    word_ends   where its words end
    works       the addresses of the works of all pieces
    work_ends   where its works end
    """

    n_pieces: int
    forms: int
    which: int
    bases: int
    base_ends: int
    n_groups: int
    words: int
    word_ends: int
    works: int
    work_ends: int


_SIZE = size_of(Words)


@callback(types.int64(types.int64))
def place(p: int) -> Any:
    """Writes the words of each piece of a `Placing` that has a form, and the addresses of its works. Returns 0."""
    of = shared_record_at(p, Placing)
    n = of.n_pieces
    which, base_ends, n_groups = int64s(of.which, n), int64s(of.base_ends, n), int64s(of.n_groups, n)
    word_ends, work_ends = int64s(of.word_ends, n), int64s(of.work_ends, n)
    for piece in range(n):
        if which[piece] >= 0:
            form = shared_record_at(of.forms + 8 * _SIZE * which[piece], Words)
            here = of.words + 8 * (word_ends[piece] - form.n_words)
            bases = int64s(of.bases + 8 * (base_ends[piece] - n_groups[piece]), n_groups[piece])
            words, kinds = int64s(here, form.n_words), int64s(form.kinds, form.n_words)
            copy(form.words, here, types.int64(8 * form.n_words))
            for i in range(form.n_words):
                if kinds[i] >= 0:
                    words[i] += bases[kinds[i]]
                elif kinds[i] == _OWN:
                    words[i] += here
            works = int64s(of.works + 8 * (work_ends[piece] - form.n_works), form.n_works)
            begins = int64s(form.begins, form.n_works)
            for j in range(form.n_works):
                works[j] = here + begins[j]
    return types.int64(0)
