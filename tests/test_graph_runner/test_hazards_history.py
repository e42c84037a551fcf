"""Last writers by ranges of addresses, beside a dictionary of addresses."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from graph_runner.hazards.extents import Extent
from graph_runner.hazards.history import History, Write, together


def drawn(rng: Random) -> Extent:
    steps = ((rng.randint(2, 4), rng.randint(3, 9)),) if rng.random() < 0.4 else ()
    return Extent(rng.randrange(40), rng.randint(0, 6) if not steps else rng.randint(1, 2), steps)


@given(st.integers(0, 1 << 40))
def test_the_last_writer_of_each_byte(seed: int) -> None:
    rng = Random(seed)
    history, last = History(), dict[int, int]()
    for writer in range(rng.randint(1, 12)):
        extent = drawn(rng)
        history.add(Write(writer, 0, extent))
        last |= {address: writer for address in range(100) if extent.held(address, address + 1)[0]}
    begin, end = sorted(rng.sample(range(90), 2))
    pieces = [*history.over(begin, end)]
    assert (pieces[0].begin, pieces[-1].end) == (begin, end)
    assert all(one.end == other.begin for one, other in pairwise(pieces))
    for piece in pieces:
        for address in range(piece.begin, piece.end):
            held = [each.writer for each in piece.writes if each.extent.held(address, address + 1)[0]]
            assert (held[-1] if held else None) == last.get(address)


def test_a_write_to_all_of_a_range_hides_those_before_it() -> None:
    history = History()
    for writer in range(1000):
        history.add(Write(writer, 0, Extent(8 * (writer % 10), 8)))
    assert [len(piece.writes) for piece in history.over(0, 80)] == [1] * 10
    columns = Extent(0, 1, ((8, 8),))
    for writer in range(1000):
        history.add(Write(writer, 0, columns))
    assert max(len(piece.writes) for piece in history.over(0, 80)) == 2


def test_two_lists_of_ranges_are_cut_at_the_borders_of_both() -> None:
    one, other = History(), History()
    one.add(Write(1, 0, Extent(0, 6)))
    other.add(Write(2, 0, Extent(4, 6)))
    found = [(begin, end, len(a), len(b)) for begin, end, a, b in together(one.over(0, 10), other.over(0, 10))]
    assert found == [(0, 4, 1, 0), (4, 6, 1, 1), (6, 10, 0, 1)]
