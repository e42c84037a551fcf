"""The words of works that were bound at home, and where the memory of nodes lies."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ops import sums
from ggml_backend_npu.plugin.forms import Form
from ggml_backend_npu.plugin.placing import Placing, place
from ggml_backend_npu.plugin.rows import home
from quant.kernels.threads import Job, Work


def bound(*words: int) -> Work:
    return Work(sums.sum_of_sums, words, 1)


def form(*works: Work, n_groups: int = 2) -> Form | None:
    return Form.of(Plan((("", Job(*works)),), Counter(), Counter()), n_groups)


@pytest.mark.parametrize("word", [2 * home(0), home(1) - home(0), home(2), -home(0), -(2**63)])
def test_a_word_that_is_neither_an_address_nor_a_small_number_is_not_known(word: int) -> None:
    """A sum or a difference of addresses, or one in another group."""
    assert form(bound(1), bound(word)) is None


def test_a_work_that_keeps_a_list_of_addresses_has_no_form() -> None:
    def keeping(kept: int) -> Work:
        return Work(sums.sum_of_sums, (1, home(0)), 1, keep=(None, [np.array([kept])]))

    assert form(keeping(home(0) + 64)) is None
    assert form(keeping(5)) is not None


def test_a_piece_has_its_own_addresses() -> None:
    works = [bound(1, home(0) + 64, -7), bound(home(1) - 8, 2**47 - 1)]
    works[1].words[-1] = works[0].address + 16  # as a work may name another one
    first, second = form(*works), form(bound(5))
    assert first is not None
    assert second is not None
    sizes = [work.words.size for work in works]
    which = np.array([0, -1, 1, 0])
    ends = np.cumsum([sum(sizes), 0, second.words.n_words, sum(sizes)]), np.cumsum([2, 3, 1, 2])
    n_groups = np.array([2, 1, 0, 3])
    memory = np.array([1000, 2000, 9, 3000, 4000, 5000]), np.cumsum(n_groups), n_groups
    found, at = np.empty(ends[0][-1], np.int64), np.empty(ends[1][-1], np.int64)
    lists = np.array([first.words, second.words]), which, *memory, found, ends[0], at, ends[1]
    of = np.array(Placing(len(which), *(each.ctypes.data for each in lists)))
    place(of.ctypes.data)
    for begin, first_work, bases in ((0, 0, (1000, 2000)), (ends[0][2], 6, (3000, 4000))):
        here = found.ctypes.data + 8 * int(begin)
        one, two = np.split(found[begin : begin + sum(sizes)], sizes[:1])
        assert one[-3:].tolist() == [1, bases[0] + 64, -7]
        assert two[-2:].tolist() == [bases[1] - 8, here + 16]
        begins = [here, here + one.nbytes]
        assert at[first_work : first_work + 2].tolist() == begins
        for work, mine, start in zip(works, (one, two), begins, strict=True):
            assert mine[1] == start + work.words.nbytes - work.parameters.nbytes, "where its record is"
            assert mine[0] == work.words[0], "its kernel"
    assert at[5] == found.ctypes.data + 8 * int(ends[0][1])
