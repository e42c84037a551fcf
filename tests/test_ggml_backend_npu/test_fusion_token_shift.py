"""A token shift is fused bit for bit, and what only looks like one is computed node by node."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kit.fusing import INF, assert_fuses, floats, reshaped, scaled, shift
from kit.support import Scene, plain_floats

from ggml_backend_npu.plugin.plugin import Plugin

pytestmark = pytest.mark.usefixtures("all_fused")


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize(
    ("width", "rows", "sequences"), [(1, 1, 1), (3, 1, 4), (64, 5, 1), (513, 2, 3), (1030, 9, 2), (128, 700, 1)]
)
def test_a_token_shift_is_its_nodes_bit_for_bit(backend: Plugin, width: int, rows: int, sequences: int, n: int) -> None:
    assert_fuses(backend, lambda scene: [shift(scene, width, rows, sequences, n).add], "token_shift")


def test_a_token_shift_of_any_values(backend: Plugin) -> None:
    pool = plain_floats()
    pool[::97] = INF
    pool[5::89] = -INF
    pool[7::83] = np.nan

    def build(scene: Scene) -> list[int]:
        x, mu = scene.root("f32", (96, 40), pool[: 96 * 40]), scene.root("f32", (96, 1, 1, 3), pool[-96 * 3 :])
        return [shift(scene, 96, 40, n=3, x=x, mu=mu).add]

    assert_fuses(backend, build, "token_shift")


def test_several_token_shifts_in_a_graph(backend: Plugin) -> None:
    def build(scene: Scene) -> list[int]:
        first = shift(scene, 16, 5, n=6)
        row = scene.view(first.add, (16, 5, 1, 1), (64, 320, 320), 3 * 320)
        second = shift(scene, 16, 5, n=2, x=scaled(scene, row))
        return [second.add, shift(scene, 16, 5, n=1, x=scaled(scene, first.x)).add]

    assert_fuses(backend, build, *["token_shift"] * 3)


def test_rows_that_lie_apart_are_shifted(backend: Plugin) -> None:
    """x and before are rows of one tensor, mu every second of another."""

    def build(scene: Scene) -> list[int]:
        both = floats(scene, 8, 2, 5)
        x, before = (scene.view(both, (8, 5, 1, 1), (64, 320, 320), offset) for offset in (0, 32))
        mu = scene.view(floats(scene, 8, 2, 1, 3), (8, 1, 1, 3), (32, 32, 64), 32)
        repeat = scene.op("repeat", scene.op("sub", before, x), scene.tensor("f32", (8, 5, 1, 3)))
        return [scene.op("add", scene.op("mul", repeat, mu), x)]

    assert_fuses(backend, build, "token_shift")


INNER = ("sub", "repeat", "mul")


@pytest.mark.parametrize("name", INNER)
def test_what_is_an_output_of_a_token_shift_is_computed(backend: Plugin, name: str) -> None:
    def build(scene: Scene) -> list[int]:
        nodes = shift(scene)
        return [getattr(nodes, name), nodes.add]

    assert_fuses(backend, build)


@pytest.mark.parametrize("name", INNER)
def test_what_another_node_reads_of_a_token_shift_is_computed(backend: Plugin, name: str) -> None:
    def direct(scene: Scene) -> list[int]:
        nodes = shift(scene)
        return [nodes.add, scaled(scene, getattr(nodes, name))]

    def through_views(scene: Scene) -> list[int]:
        nodes = shift(scene)
        inner = getattr(nodes, name)
        flat = reshaped(scene, inner, scene.as_tensor(inner).n_elements)
        return [nodes.add, scaled(scene, scene.view(flat, (4, 1, 1, 1), (16, 16, 16), 16))]

    def a_view_is_an_output(scene: Scene) -> list[int]:
        nodes = shift(scene)
        return [nodes.add, scene.view(getattr(nodes, name), (4, 1, 1, 1), (16, 16, 16), 16)]

    for build in (direct, through_views, a_view_is_an_output):
        assert_fuses(backend, build)


def test_the_sum_of_a_token_shift_may_be_read_in_any_way(backend: Plugin) -> None:
    def build(scene: Scene) -> list[int]:
        nodes = shift(scene, 8, 3, n=4)
        rows = [scene.view(nodes.add, (8, 3, 1, 1), (32, 96, 96), i * 96) for i in range(4)]
        return [scaled(scene, rows[2], 0.5), scaled(scene, rows[0], 0.5), scene.op("mul", rows[1], rows[3])]

    assert_fuses(backend, build, "token_shift")


def other_x(scene: Scene) -> int:
    return shift(scene, added=floats(scene, 8, 3, seed=9)).add


def equal_but_other_x(scene: Scene) -> int:
    """The same rows in another order."""
    x = scaled(scene, floats(scene, 8, 3), 1e3)
    return shift(scene, x=x, added=scene.view(x, (8, 3, 1, 1), (0, 96, 96))).add


def mu_permuted(scene: Scene) -> int:
    return shift(scene, mu=scene.permute(floats(scene, 6, 8), (3, 0, 1, 2)), n=6).add


def mu_by_row(scene: Scene) -> int:
    return shift(scene, mu=floats(scene, 8, 3, 1, 6)).add


def mu_for_all(scene: Scene) -> int:
    return shift(scene, mu=floats(scene, 8)).add


def mu_of_one_number(scene: Scene) -> int:
    return shift(scene, mu=floats(scene, 1, 1, 1, 6)).add


def mu_is_the_difference(scene: Scene) -> int:
    x = floats(scene, 8)
    before = scaled(scene, floats(scene, 8, seed=1), 1e3)
    sub = scene.op("sub", before, x)
    repeat = scene.op("repeat", sub, scene.tensor("f32", (8,)))
    return scene.op("add", scene.op("mul", repeat, sub), x)


def mu_is_the_repeated_difference(scene: Scene) -> int:
    x = floats(scene, 8)
    sub = scene.op("sub", scaled(scene, floats(scene, 8, seed=1), 1e3), x)
    repeat = scene.op("repeat", sub, scene.tensor("f32", (8, 1, 1, 6)))
    return scene.op("add", scene.op("mul", repeat, repeat), x)


def differences_reshaped(scene: Scene) -> int:
    """Rows that were one sequence are one each of several mu."""
    return shift(scene, 4, 2, n=2, repeated=lambda sub: reshaped(scene, sub, 4, 1, 1, 2)).add


def repeated_reshaped(scene: Scene) -> int:
    """mu of every second row, not of every second tensor."""
    nodes = shift(
        scene, 4, 2, n=2,
        multiplied=lambda repeat: reshaped(scene, repeat, 4, 1, 1, 4),
        summed=lambda mul: reshaped(scene, mul, 4, 2, 1, 2),
    )  # fmt: skip
    return nodes.add


def subtracted_from_x(scene: Scene) -> int:
    x, before = floats(scene, 8, 3), floats(scene, 8, 3, seed=1)
    repeat = scene.op("repeat", scene.op("sub", x, before), scene.tensor("f32", (8, 3, 1, 2)))
    return scene.op("add", scene.op("mul", repeat, floats(scene, 8, 1, 1, 2)), x)


def one_row_before_all(scene: Scene) -> int:
    """before - x, where before is longer than x."""
    x, before = floats(scene, 8, 1), floats(scene, 8, 3, seed=1)
    repeat = scene.op("repeat", scene.op("sub", before, x), scene.tensor("f32", (8, 3, 1, 2)))
    return scene.op("add", scene.op("mul", repeat, floats(scene, 8, 1, 1, 2)), x)


def sum_in_other_order(scene: Scene) -> int:
    x, before = floats(scene, 8, 3), floats(scene, 8, 3, seed=1)
    repeat = scene.op("repeat", scene.op("sub", before, x), scene.tensor("f32", (8, 3, 1, 1)))
    return scene.op("add", x, scene.op("mul", repeat, floats(scene, 8)))


NOT_A_TOKEN_SHIFT = [
    other_x, equal_but_other_x, mu_permuted, mu_by_row, mu_for_all, mu_of_one_number, mu_is_the_difference,
    mu_is_the_repeated_difference, differences_reshaped, repeated_reshaped, subtracted_from_x, one_row_before_all,
    sum_in_other_order,
]  # fmt: skip


@pytest.mark.parametrize("build", NOT_A_TOKEN_SHIFT, ids=lambda build: build.__name__)
def test_what_only_looks_like_a_token_shift_is_computed_node_by_node(
    backend: Plugin, build: Callable[[Scene], int]
) -> None:
    assert_fuses(backend, lambda scene: [build(scene)])
