"""A routing is fused into TopKSoftmax, which selects what its nodes select, and what only looks like one is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from kit.fusing import (
    INF,
    KINDS,
    Route,
    assert_close,
    floats,
    ran,
    reshaped,
    route,
    routed_outputs,
    routed_right,
    scaled,
)
from kit.support import Scene

from ggml_backend_npu import default_backend
from ggml_backend_npu.plugin.plugin import Plugin

pytestmark = pytest.mark.usefixtures("all_fused")


@pytest.mark.some(6)
@pytest.mark.daily(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n_expert", "n_tokens"), [(1, 1), (2, 3), (8, 1), (8, 5), (9, 40), (300, 3)])
def test_a_routing_selects_what_its_nodes_select(backend: Plugin, kind: str, n_expert: int, n_tokens: int) -> None:
    for k in {*range(1, min(n_expert, 9) + 1), n_expert}:

        def build(scene: Scene, k: int = k) -> list[int]:
            nodes = route(scene, kind, n_expert, n_tokens, k)
            return routed_outputs(scene, nodes)

        routed_right(backend, build, "TopKSoftmax")


@pytest.mark.parametrize("kind", KINDS)
def test_a_routing_of_many_rows_by_several_threads(backend: Plugin, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_backend(), "team", replace(default_backend().team, size=3))

    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind, 64, 5000, 6)
        return routed_outputs(scene, nodes)

    routed_right(backend, build, "TopKSoftmax")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_nobody_else_reads_and_weights_read_on(backend: Plugin, kind: str) -> None:
    def build(scene: Scene) -> list[int]:
        logits = scaled(scene, floats(scene, 8, 5), 1e3)
        nodes = route(scene, kind, 8, 5, 2, logits=logits)
        return [scaled(scene, reshaped(scene, nodes.weights, 1, 2, 5), 0.5)]

    routed_right(backend, build, "TopKSoftmax")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_read_again_as_mul_mat_id_reads_them(backend: Plugin, kind: str) -> None:
    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind, 8, 5, 2, logits=scaled(scene, floats(scene, 8, 5), 1e3))
        return [nodes.weights, scene.op("get_rows", floats(scene, 3, 8, 5), nodes.ids)]

    routed_right(backend, build, "TopKSoftmax")


@pytest.mark.parametrize("kind", KINDS)
def test_logits_without_a_softmax_are_nan_and_ids_stay_in_range(backend: Plugin, kind: str) -> None:
    logits = np.random.default_rng(3).standard_normal((6, 8)).astype(np.float32)
    logits[1, 3], logits[2, 3], logits[3] = np.nan, INF, -INF
    logits[4, 1:], logits[5] = -INF, np.nan

    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind, 8, 6, 3, logits=scene.root("f32", (8, 6), logits))
        return routed_outputs(scene, nodes)

    fused, alone = ran(backend, build), ran(backend, build, fusion="off")
    assert fused.fused == {"TopKSoftmax": 1}
    for one, other in zip(fused.outputs, alone.outputs, strict=True):
        assert_close(one, other, 2)
    ids = fused.outputs[1][0, :, :, 0]
    assert all(len({*row}) == 3 and min(row) >= 1 and max(row) <= 8 for row in ids.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_logits_the_first_are_selected(backend: Plugin, kind: str) -> None:
    logits = np.array([[1, 2, 2, 1, 2, 0, 2, 1], [3] * 8], np.float32)

    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind, 8, 2, 5, logits=scene.root("f32", (8, 2), logits))
        return routed_outputs(scene, nodes)

    fused, alone = ran(backend, build), ran(backend, build, fusion="off")
    for one, other in zip(fused.outputs, alone.outputs, strict=True):
        assert_close(one, other, 2)
    assert fused.outputs[1][0, :, :, 0].tolist() == [[2, 3, 5, 7, 1], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("least", [0.0, 0.25, 2.0, -INF])
def test_the_sum_of_weights_is_no_less_than_the_clamp_says(backend: Plugin, least: float) -> None:
    def build(scene: Scene) -> list[int]:
        return [route(scene, k=2, least=least).weights]

    routed_right(backend, build, "TopKSoftmax")


INNER_OF = {
    "softmax": ("probs", "order"),
    "normalised": ("probs", "order", "rows", "total", "least"),
    "softmax of selected": ("order", "rows"),
}
READ_TOO = [(kind, name) for kind, names in INNER_OF.items() for name in names]


def shorter(kind: str, name: str) -> list[str]:
    """What of a routing is still one operator where that result is read: without norm, the first 3 nodes."""
    return ["TopKSoftmax"] if kind == "normalised" and name in ("rows", "total", "least") else []


@pytest.mark.parametrize(("kind", "name"), READ_TOO)
def test_what_is_an_output_of_a_routing_is_computed(backend: Plugin, kind: str, name: str) -> None:
    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind)
        return [getattr(nodes, name), nodes.weights]

    routed_right(backend, build, *shorter(kind, name))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_are_an_output_keep_all_columns(backend: Plugin, kind: str) -> None:
    """ggml marks the ARGSORT that they are a view of as an output as well."""

    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind)
        return [nodes.ids, nodes.order, nodes.weights]

    routed_right(backend, build)


@pytest.mark.parametrize(("kind", "name"), READ_TOO)
def test_what_another_node_reads_of_a_routing_is_computed(backend: Plugin, kind: str, name: str) -> None:
    def direct(scene: Scene) -> list[int]:
        nodes = route(scene, kind)
        return [nodes.weights, scene.op("cont", getattr(nodes, name))]

    def through_views(scene: Scene) -> list[int]:
        nodes = route(scene, kind)
        flat = reshaped(scene, getattr(nodes, name), scene.as_tensor(getattr(nodes, name)).n_elements)
        return [nodes.weights, scene.op("cont", scene.view(flat, (3, 1, 1, 1), (12, 12, 12), 8))]

    def a_view_is_an_output(scene: Scene) -> list[int]:
        nodes = route(scene, kind)
        return [nodes.weights, scene.view(getattr(nodes, name), (1, 1, 1, 1), (4, 4, 4), 4)]

    for build in (direct, through_views, a_view_is_an_output):
        routed_right(backend, build, *shorter(kind, name))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "first"), [(4, 0), (2, 1), (2, 3)])
def test_other_ids_than_those_selected_are_computed_too(backend: Plugin, kind: str, k: int, first: int) -> None:
    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind, k=3)
        return [nodes.weights, scene.view(nodes.order, (k, 5, 1, 1), (32, 160, 160), 4 * first)]

    routed_right(backend, build)


def ascending(scene: Scene, kind: str) -> Route:
    return route(scene, kind, descending=0)


def ids_not_the_first(scene: Scene, kind: str) -> Route:
    return route(scene, kind, first=1)


def other_table(scene: Scene, kind: str) -> Route:
    return route(scene, kind, table=floats(scene, 8, 5, seed=4))


def scale_not_1(scene: Scene, kind: str) -> Route:
    return route(scene, kind, softmax=(None, 0.5, 0.0))


NOT_A_ROUTING = [(build, kind) for build in (ascending, ids_not_the_first, other_table, scale_not_1) for kind in KINDS]


@pytest.mark.parametrize(("build", "kind"), NOT_A_ROUTING)
def test_what_only_looks_like_a_routing_is_computed_node_by_node(
    backend: Plugin, build: Callable[[Scene, str], Route], kind: str
) -> None:
    def outputs(scene: Scene) -> list[int]:
        nodes = build(scene, kind)
        return routed_outputs(scene, nodes)

    routed_right(backend, outputs)


def test_a_mask_in_the_softmax_of_a_routing(backend: Plugin) -> None:
    def build(scene: Scene) -> list[int]:
        nodes = route(scene, softmax=(floats(scene, 8, 5, seed=7), 1.0, 0.0))
        return routed_outputs(scene, nodes)

    routed_right(backend, build, "masked_softmax")


def test_sinks_in_the_softmax_of_a_routing(backend: Plugin) -> None:
    def build(scene: Scene) -> list[int]:
        sink = floats(scene, 1, seed=8)
        nodes = route(scene)
        scene.function("soft_max_add_sinks")(nodes.probs, sink)
        return routed_outputs(scene, nodes)

    routed_right(backend, build)


def sum_with_a_maximum(scene: Scene) -> Route:
    return route(scene, most=0.5)


def divided_by_the_sum(scene: Scene) -> Route:
    """Of the clamped sum only the sum: CLAMP is computed all the same."""
    nodes = route(scene, k=3)
    clamp = scene.op("clamp", nodes.total, 0.9, INF)
    return replace(nodes, least=clamp, weights=scene.op("div", reshaped(scene, nodes.rows, 3, 5), nodes.total))


def divided_by_groups(scene: Scene) -> Route:
    """Sums of pairs, not of rows."""
    nodes = route(scene, "softmax", k=4)
    pairs = reshaped(scene, nodes.rows, 2, 5, 2)
    clamp = scene.op("clamp", scene.op("sum_rows", pairs), 2.0**-14, INF)
    return replace(nodes, weights=scene.op("div", pairs, clamp))


def sums_of_single_weights(scene: Scene) -> Route:
    """As many tokens as are selected: sums of rows of one element look like one for each token."""
    nodes = route(scene, "softmax", n_tokens=3, k=3)
    clamp = scene.op("clamp", scene.op("sum_rows", nodes.rows), 2.0**-14, INF)
    return replace(nodes, weights=scene.op("div", nodes.rows, clamp))


def divided_by_columns(scene: Scene) -> Route:
    """The sums of the rows, laid along the columns."""
    nodes = route(scene, "softmax", n_tokens=3, k=3)
    flat = reshaped(scene, nodes.rows, 3, 3)
    clamp = scene.op("clamp", scene.op("sum_rows", flat), 2.0**-14, INF)
    return replace(nodes, weights=scene.op("div", flat, reshaped(scene, clamp, 3)))


@pytest.mark.parametrize(
    "build",
    [sum_with_a_maximum, divided_by_the_sum, divided_by_groups, sums_of_single_weights, divided_by_columns],
    ids=lambda build: build.__name__,
)
def test_weights_divided_by_something_else_are_not_normalised(backend: Plugin, build: Callable[[Scene], Route]) -> None:
    def outputs(scene: Scene) -> list[int]:
        nodes = build(scene)
        return routed_outputs(scene, nodes)

    routed_right(backend, outputs, "TopKSoftmax")


def test_an_argsort_of_a_part_of_each_row(backend: Plugin) -> None:
    """The 8 probabilities as 2 rows of 4: the first 2 ids are of the first 4."""

    def build(scene: Scene) -> list[int]:
        probs = scene.op("soft_max_ext", scene.root("f32", (8,), np.arange(8, dtype=np.float32)), None, 1.0, 0.0)
        order = scene.op("argsort", reshaped(scene, probs, 4, 2), 1)
        ids = scene.view(order, (2, 1, 1, 1), (16, 16, 16))
        return [scene.op("get_rows", reshaped(scene, probs, 1, 8), ids)]

    routed_right(backend, build)
