"""Where differences begin: `graph_runner.record.origins`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graph_runner.record.aligning import aligned
from graph_runner.record.forms import Form, FormNode, Leaf
from graph_runner.record.origins import Origin, Origins

FORM = Form(
    (
        FormNode("MUL_MAT", "Kcur-0", "f32", "", (-1, -2)),
        FormNode("SET_ROWS", "cache_k_l0 (view)", "f16", "", (0, -3, -4)),
        FormNode("MUL_MAT", "kq-0", "f32", "", (-4, -2)),
        FormNode("SOFT_MAX", "node_3", "f32", "", (2,)),
    ),
    (Leaf("blk.0.w", "f32"), Leaf("inp", "f32"), Leaf("idxs", "i64"), Leaf("cache_k_l0", "f16")),
    (0,) * 16,
)
SIZES = (1,)


def seen(*steps: tuple[Form, set[int]]) -> Origins:
    """Steps: the graph of the other run, and the places of the nodes that differ."""
    origins = Origins()
    for other, places in steps:
        pairs = aligned(FORM, SIZES, other, SIZES)
        differs = np.isin(pairs.a, [*places])
        origins.add(FORM, pairs, differs, np.where(differs, 1e-9, 0.0))
    return origins


def test_a_difference_begins_where_all_that_is_read_is_equal() -> None:
    origins = seen((FORM, {0, 1, 2, 3}))
    assert origins.begins == {"MUL_MAT Kcur-*": Origin(1, 1e-9)}
    assert (origins.inherits, origins.unknown, origins.absorbs) == (3, {}, {})


def test_a_difference_that_grows_at_once_is_said() -> None:
    origins = Origins()
    for errors in ([1e-9, 1e-9, 0, 0], [0, 0, 1e-6, 1e-5]):  # the second step reads the cache of the first
        found = np.array(errors)
        origins.add(FORM, aligned(FORM, SIZES, FORM, SIZES), found > 0, found)
    assert origins.grows == {"MUL_MAT kq-*": Origin(1, 1e-6)}
    assert origins.inherits == 2


def test_what_is_rounded_away_is_absorbed() -> None:
    origins = seen((FORM, {0}), (FORM, {2}))
    assert {*origins.begins} == {"MUL_MAT Kcur-*", "MUL_MAT kq-*"}
    assert origins.absorbs == {"SET_ROWS cache_k_l* (view)": Origin(1), "SOFT_MAX": Origin(1)}
    assert origins.inherits == 0


def test_a_cache_that_was_written_otherwise_is_read_in_later_steps() -> None:
    origins = seen((FORM, {1}), (FORM, {2}))
    assert origins.begins == {"SET_ROWS cache_k_l* (view)": Origin(1, 1e-9)}
    assert origins.inherits == 1
    assert origins.absorbs == {"MUL_MAT kq-*": Origin(1), "SOFT_MAX": Origin(1)}


def test_what_reads_a_node_without_a_partner_is_not_said_to_begin_anything() -> None:
    """Here the cache is written by another op, which is not compared."""
    nodes = list(FORM.nodes)
    nodes[1] = FormNode("CPY", "k-0", "f16", "", (0, -4))
    origins = seen((replace(FORM, nodes=tuple(nodes)), {2, 3}))
    assert origins.begins == {}
    assert origins.unknown == {"MUL_MAT kq-*": Origin(1, 1e-9)}
    assert origins.inherits == 1
