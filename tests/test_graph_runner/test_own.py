"""The device's own run: each node is judged by what the reference makes of the very inputs that it had there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.diffs import FLASH_OFF, PROMPT, planted
from kit.models import Models
from kit.support import choose

from ggml_backend_npu import Memory, Node, Tensor, default_backend
from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.norms import Norm
from ggml_backend_npu.ops.routing import Argsort
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.registry.entry import Op
from graph_runner.diff.own import Mirrored, OwnNode, OwnRun, _held
from graph_runner.diff.run import DiffOptions, DiffResult, diff, run_in_step
from graph_runner.judging.compare import compare
from graph_runner.judging.results import ISOLATED, OWN_RUN, Fate, Verdict
from graph_runner.judging.rules import Rules
from graph_runner.trace import read_trace, replay

RIGHT = {Verdict.EXACT, Verdict.ROUNDING, Verdict.INHERITED, Verdict.AMPLIFIED}


@pytest.fixture(autouse=True)
def all_ops_one_by_one(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    choose(monkeypatch, ops="all")
    choose(monkeypatch, fusion="off")
    backend.forget_plans()
    yield
    backend.forget_plans()


@pytest.fixture
def mirrored(monkeypatch: pytest.MonkeyPatch) -> list[Mirrored]:
    """What the reference had to compute once more."""
    made: list[Mirrored] = []
    right = OwnRun.mirrored

    def spy(run: OwnRun, own: OwnNode) -> Mirrored | None:
        found = right(run, own)
        made.extend([found] if found is not None else [])
        return found

    monkeypatch.setattr(OwnRun, "mirrored", spy)
    return made


def run(file: Path, steps: int = 1, **options: Any) -> DiffResult:
    return diff(file, PROMPT, DiffOptions(steps=steps, settings=FLASH_OFF, **options))


def embedding_off_by_an_ulp(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["GET_ROWS"].define(dst, src, ids)
    if dst.name == "embd":
        dst.view()[...] = np.nextafter(dst.view(), np.float32(np.inf))


def first_norm_off_by_an_ulp(dst: Tensor, src: Tensor, params: Norm) -> None:
    OWN["RMS_NORM"].define(dst, src, params=params)
    if dst.name == "norm-0":
        dst.view()[...] = np.nextafter(dst.view(), np.float32(np.inf))


OFF = planted("GET_ROWS", embedding_off_by_an_ulp)
FIRST_NORM_OFF = planted("RMS_NORM", first_norm_off_by_an_ulp)


def in_the_own_run(op: str, name: str, damage: Callable[..., None], nth: int = 1) -> Op:
    """An op that does damage in a node of that name: in its nth call, of which each node of a step has two, the first
    isolated."""
    calls, right = count(), OWN[op].define

    def compute(dst: Tensor, *src: Tensor) -> None:
        right(dst, *src)
        if dst.name == name and next(calls) == nth:
            damage(dst, *src)

    def of_one(dst: Tensor, src: Tensor) -> None:
        compute(dst, src)

    def of_two(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        compute(dst, src, ids)

    return planted(op, of_one if OWN[op].n_src == 1 else of_two)


def skip_where_products_are_rounded() -> None:
    """Before they are added: then no bytes are promised of ROPE, and attention."""
    if not codecs.bound().contracts:
        pytest.skip("this ggml was built without contraction of products and sums")


def test_rules_see_what_a_node_read_though_others_have_written_over_it() -> None:
    """A sort of equal scores, judged after a node that lies in their place."""
    scores, params = Tensor.of(np.zeros((1, 1, 1, 4), np.float32)), Argsort(1)
    expected, actual = (Tensor.of(np.array([[[order]]], np.int32)) for order in ([0, 1, 2, 3], [3, 0, 1, 2]))
    node = Node("ARGSORT", expected, (scores,), params.packed)
    same = Mirrored(node, node, expected, expected)
    assert _held(same) is same
    held = _held(Mirrored(node, node, expected, actual))
    scores.view()[...] = [1, 2, 3, 4]
    assert held is not None
    found = compare(expected, actual)
    assert Rules().allows(held.node, expected, actual, found)
    assert not Rules().allows(node, expected, actual, found)


def test_what_is_fed_alike_is_not_computed_once_more(model: Models, mirrored: list[Mirrored]) -> None:
    result = run(model("llama"))
    assert result
    skip_where_products_are_rounded()
    assert {node.verdict for node in result.nodes} == {Verdict.EXACT}
    assert mirrored == []
    assert all(node.mirrored == node.isolated == node.cumulative for node in result.nodes)
    assert {node.wrong_in for node in result.nodes} == {""}


def test_a_right_node_is_what_the_reference_makes_of_inputs_that_are_off(
    model: Models, mirrored: list[Mirrored]
) -> None:
    with default_backend().ops.having(OFF):
        result = run(model("llama"))
    assert {node.name for node in result.wrong} == {"embd"}
    later = [node for node in result.nodes if node.cumulative is not None and not node.cumulative and node]
    assert len(later) > 30
    skip_where_products_are_rounded()
    assert {node.verdict for node in later} <= {Verdict.INHERITED, Verdict.AMPLIFIED}
    assert all(node.mirrored is not None and node.mirrored.n_different == 0 for node in later)
    assert len(mirrored) >= len(later)
    for each in mirrored:
        assert each.expected.address != each.actual.address
        assert each.whole is None


@pytest.mark.some(1)
@pytest.mark.parametrize("upstream", [(), (OFF,)], ids=["alone", "with inputs that are off"])
def test_a_node_that_is_wrong_in_the_own_run_alone(model: Models, upstream: tuple[Op, ...], tmp_path: Path) -> None:
    def damage(dst: Tensor, src: Tensor) -> None:
        dst.view()[0, 0, 3, 5] += 1

    with default_backend().ops.having(*upstream, in_the_own_run("CONT", "kqv_out-1", damage)):
        result = run(model("llama"), reproducers=tmp_path)
    wrong = [node for node in result.wrong if node.op == "CONT"]
    assert [(node.step, node.name, node.verdict, node.wrong_in) for node in wrong] == [
        (0, "kqv_out-1", Verdict.INTRODUCED, OWN_RUN)
    ]
    (node,) = wrong
    assert node.isolated
    assert node.shown == node.mirrored
    assert node.mirrored is not None
    assert (node.mirrored.where, node.mirrored.n_different > 0) == ((0, 0, 3, 5), True)
    assert node.reproducer is not None
    (recorded,) = read_trace(Path(node.reproducer))
    assert recorded.node.name == "kqv_out-1"
    assert replay(Path(node.reproducer))
    place = result.nodes.index(node)
    assert all(each.verdict in RIGHT for each in result.nodes[place + 1 :] if each.name != "embd")


@pytest.mark.slow
@pytest.mark.daily(2)
def test_what_is_wrong_alone_is_wrong_there_first(model: Models) -> None:
    def twice(dst: Tensor, src: Tensor) -> None:
        OWN["CONT"].define(dst, src)
        dst.view()[...] *= 2

    with default_backend().ops.having(planted("CONT", twice)):
        result = run(model("llama"))
    assert {(node.op, node.wrong_in) for node in result.wrong} == {("CONT", ISOLATED)}
    assert all(node.shown == node.isolated for node in result.wrong)
    assert all(node.mirrored is not None and not node.mirrored for node in result.wrong)


@pytest.mark.parametrize("nth", [0, 1], ids=["alone", "in the own run"])
def test_a_kernel_that_changes_its_source_fails(model: Models, nth: int) -> None:
    def damage(dst: Tensor, src: Tensor) -> None:
        Memory(src.address, 4).bytes()[:] ^= 1

    with default_backend().ops.having(in_the_own_run("CONT", "kqv_out-0", damage, nth)):
        result = run(model("llama"))
    first = result.wrong[0]
    assert (first.op, first.name, first.verdict) == ("CONT", "kqv_out-0", Verdict.FAILED)
    assert first.failure is not None
    if nth == 0:
        assert first.failure.startswith("changes src0 '")
        assert first.wrong_in == ISOLATED
    else:
        assert first.failure.startswith("in the own run writes to '")
        assert first.wrong_in == OWN_RUN


def writes_into_the_embedding() -> tuple[Op, Op]:
    """CONT of the first layer writes to what GET_ROWS gave, which is read after it: other bytes with each call."""
    kept: list[Tensor] = []
    values = count(1)

    def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        OWN["GET_ROWS"].define(dst, src, ids)
        if dst.name == "embd":
            kept[:] = [dst]

    def cont(dst: Tensor, src: Tensor) -> None:
        OWN["CONT"].define(dst, src)
        if dst.name == "kqv_out-0":
            kept[0].view()[0, 0, 0, 7] = next(values)

    return planted("GET_ROWS", get_rows), planted("CONT", cont)


def test_a_write_into_another_tensor_is_seen_by_who_reads_that(model: Models) -> None:
    """The reader is right, and is not blamed."""
    with default_backend().ops.having(*writes_into_the_embedding()):
        result = run_in_step(model("llama"), PROMPT, DiffOptions(steps=1, settings=FLASH_OFF))
    assert not result
    assert result.wrong == []
    assert result.is_unexplained
    assert [(stray.what.tensor, stray.step) for stray in result.strays] == [("embd", 0), ("embd", 1)]
    words = "step 0: before ADD node 'ffn_inp-0', 'embd', which GET_ROWS node 'embd' wrote"
    assert str(result.strays[0]).startswith(words)


@pytest.mark.slow
@pytest.mark.daily(2)
def test_a_diff_of_which_no_node_is_wrong_looks_at_every_buffer(model: Models) -> None:
    with default_backend().ops.having(*writes_into_the_embedding()):
        result = run(model("llama"))
    assert result.strict
    assert {(node.op, node.name, node.verdict, node.wrong_in) for node in result.wrong} == {
        ("CONT", "kqv_out-0", Verdict.FAILED, OWN_RUN)
    }
    words = "in the own run writes to 'embd', which GET_ROWS node 'embd' wrote, beside its output"
    assert result.wrong[0].failure == words


@pytest.mark.slow
def test_a_strict_diff_of_right_kernels_finds_nothing(model: Models) -> None:
    for name in ("llama", "moe"):
        result = run(model(name), strict=True)
        assert result, (result.wrong[:1], result.strays[:1])
        assert result.strict


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "off", "operator"), [("moe", FIRST_NORM_OFF, "TopKSoftmax"), ("rwkv7", OFF, "token_shift")]
)
def test_with_inputs_that_are_off_what_runs_as_one_operator_is_right(
    model: Models, name: str, off: Op, operator: str, monkeypatch: pytest.MonkeyPatch, mirrored: list[Mirrored]
) -> None:
    choose(monkeypatch, fusion="on")
    with default_backend().ops.having(off):
        result = run(model(name))
    assert {node.name for node in result.wrong} <= {"embd"}
    together = [each for each in mirrored if each.whole is not None]
    assert together
    assert all(len(each.whole.graph.nodes) > 1 for each in together if each.whole is not None)
    of_operator = [node for node in result.nodes if node.fused == operator]
    assert {node.fate for node in of_operator} == {Fate.JUDGED, Fate.FUSED}
    assert all(node.mirrored for node in of_operator if node.fate is Fate.JUDGED)
    assert {node.verdict for node in of_operator} <= RIGHT
