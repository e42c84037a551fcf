"""A diagnosis is true, or there is none: results that could as well come from something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kit.diagnoses import floats
from kit.diffs import FLASH_OFF, PROMPT, planted
from kit.models import Models
from kit.paper import Paper, copy_of
from kit.support import choose

from ggml_backend_npu import Node, Tensor, default_backend
from ggml_backend_npu.backend.fusion import FUSIONS, Fused, Span
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.diagnosis import diagnose
from graph_runner.diff.run import DiffOptions, DiffResult, run_in_step
from graph_runner.judging.results import ISOLATED, OWN_RUN

Kernel = Callable[[Any, Any], None]  # of what dst is to hold and of dst's view
SHAPE = (6, 5, 3, 1)
AS_BEFORE = ("as it was", "as before", "does not write", "writes nothing")
NAN = np.frombuffer(b"\xff" * 4, np.float32)[0]


def said(
    kernel: Kernel, held: Any, *, right: Any = None, type: str = "f32", known: bool = True, again: bool = False
) -> str:
    """What is said of a kernel that computes `right` into dst, which held something.

    known  whether what it held is known
    again  whether the kernel can be called once more
    """
    paper = Paper()
    node = Node("CONT", paper.fresh(type, SHAPE), (floats(paper, SHAPE, type=type),))
    node.dst.view()[...] = held
    values = paper.rng.standard_normal(SHAPE[::-1]) if right is None else np.broadcast_to(right, SHAPE[::-1])
    before, expected, actual = (copy_of(node.dst) for _ in range(3))
    expected.view()[...] = values
    with np.errstate(all="ignore"):
        kernel(expected.view(), actual.view())

    def once_more() -> tuple[Tensor, Tensor]:
        first, then = copy_of(node.dst), copy_of(node.dst)
        first.view()[...] = then.view()[...] = 0.75
        kernel(expected.view(), then.view())
        return first, then

    found = diagnose(node, expected, actual, before if known else None, False, once_more if again else None)
    return found or ""


def nothing(right: Any, dst: Any) -> None:
    pass


def adds(right: Any, dst: Any) -> None:
    dst[...] += right


def multiplies(right: Any, dst: Any) -> None:
    dst[...] *= right


def zeros(right: Any, dst: Any) -> None:
    dst[...] = 0


def all_but_a_row(right: Any, dst: Any) -> None:
    dst[0, 1:] = right[0, 1:]
    dst[0, 0, 1:] = right[0, 0, 1:]


def zeros_in_a_row(right: Any, dst: Any) -> None:
    dst[...] = right
    dst[0, 1, 2] = 0


# what dst held


@pytest.mark.parametrize("type", ["f32", "f16"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("held", [np.nan, NAN], ids=["nan", "blank"])
@pytest.mark.parametrize("kernel", [adds, multiplies])
def test_a_kernel_that_goes_on_from_nan_has_written(kernel: Kernel, held: Any, again: bool, type: str) -> None:
    text = said(kernel, held, type=type, again=again)
    assert not any(words in text for words in AS_BEFORE)
    assert text == "CONT adds its result to what dst held before" if kernel is adds and again else "adds" not in text


@pytest.mark.parametrize("kernel", [zeros, multiplies, nothing])
def test_zeros_where_there_were_zeros_say_nothing(kernel: Kernel) -> None:
    text = said(kernel, 0.0)
    assert not any(words in text for words in (*AS_BEFORE, "gives 0", "times"))


@pytest.mark.parametrize("held", [0.0, np.nan, NAN], ids=["0", "nan", "blank"])
def test_a_kernel_that_writes_nothing_is_known_when_it_is_called_once_more(held: Any) -> None:
    assert said(nothing, held, again=True) == "CONT leaves dst as it was before the node ran"
    assert "as it was" not in said(nothing, held)


def test_a_kernel_that_writes_nothing_over_numbers_is_known_at_once() -> None:
    assert said(nothing, 3.0) == "CONT leaves dst as it was before the node ran"


@pytest.mark.parametrize("held", [3.0, np.nan, NAN], ids=["3", "nan", "blank"])
def test_a_row_is_not_written_if_others_were_written_over(held: Any) -> None:
    text = "CONT does not write row 0 of matrix [i3 0, i2 0]: it is as before"

    def kernel(right: Any, dst: Any) -> None:
        all_but_a_row(right, dst)
        dst[0, 0, 0].fill(held)

    assert said(kernel, held) == text


def test_a_row_of_zeros_among_zeros_may_have_been_added_to() -> None:
    """To zeros, a kernel that adds gives the right values."""
    text = said(lambda right, dst: all_but_a_row(right, dst), 0.0)
    assert not any(words in text for words in (*AS_BEFORE, "gives 0"))


@pytest.mark.parametrize("kernel", [nothing, all_but_a_row, adds])
def test_nothing_is_said_of_what_dst_held_if_that_is_not_known(kernel: Kernel) -> None:
    for held in (3.0, 0.0, np.nan):
        text = said(kernel, held, known=False)
        assert not any(words in text for words in (*AS_BEFORE, "adds"))


def test_a_kernel_that_adds_to_numbers() -> None:
    assert said(adds, 3.0) == "CONT adds its result to what dst held before"


# zeros


@pytest.mark.parametrize("held", [3.0, np.nan])
def test_rows_of_zeros(held: float) -> None:
    assert said(zeros_in_a_row, held) == "CONT gives 0 in row 2 of matrix [i3 0, i2 1]; the others are right"


def test_a_row_of_zeros_is_no_row_moved() -> None:
    """Though another row is right to be zeros."""
    right = np.random.default_rng(4).standard_normal(SHAPE[::-1])
    right[0, 0, 3] = 0
    text = said(zeros_in_a_row, 3.0, right=right)
    assert text == "CONT gives 0 in row 2 of matrix [i3 0, i2 1]; the others are right"


@pytest.mark.parametrize("type", ["f32", "f16"])
@pytest.mark.parametrize(("right", "given", "text"), [(0.0, -0.0, "-0 in place of 0"), (-0.0, 0.0, "0 in place of -0")])
def test_another_zero(type: str, right: float, given: float, text: str) -> None:
    values = np.random.default_rng(4).standard_normal(SHAPE[::-1])
    values[0, 0, 3] = right

    def kernel(expected: Any, dst: Any) -> None:
        dst[...] = expected
        dst[0, 0, 3] = given

    assert said(kernel, 3, right=values, type=type) == f"CONT gives {text} in 6 elements; the others are right"


def test_all_zeros_with_another_sign_are_no_multiple() -> None:
    text = said(lambda right, dst: dst.fill(-0.0), 3.0, right=0.0)
    assert text == "CONT gives -0 in place of 0 in 90 elements; the others are right"


# in a diff


@pytest.fixture
def all_ops(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    choose(monkeypatch, ops="all")
    backend.forget_plans()
    with np.errstate(all="ignore"):
        yield
    backend.forget_plans()


def told(result: DiffResult) -> list[str]:
    return [node.diagnosis for node in result.wrong if node.diagnosis is not None]


def add_to_dst(dst: Tensor, a: Tensor, b: Tensor) -> None:
    before = dst.view().copy()
    OWN["MUL"].define(dst, a, b)
    dst.view()[...] += before


def leave_dst(dst: Tensor, a: Tensor, b: Tensor) -> None:
    pass


@pytest.mark.usefixtures("all_ops")
@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (add_to_dst, "MUL adds its result to what dst held before"),
        (leave_dst, "MUL leaves dst as it was before the node ran"),
    ],
)
def test_a_diff_computes_such_a_node_once_more(model: Models, kernel: Any, text: str) -> None:
    with default_backend().ops.having(planted("MUL", kernel)):
        result = run_in_step(model("llama"), PROMPT, DiffOptions(steps=0, settings=FLASH_OFF))
    isolated = [node for node in result.wrong if node.wrong_in == ISOLATED]
    assert {node.diagnosis for node in isolated} - {None} == {text}


@pytest.mark.some(1)
@pytest.mark.daily(2)
@pytest.mark.usefixtures("all_ops")
@pytest.mark.parametrize("writes", [0.0, 0.25, np.nan], ids=str)
def test_an_operator_wrong_in_a_row_has_written_it(model: Models, writes: float) -> None:
    """What dst held before an operator ran is not known: it is not the operator's own result."""
    right = next(fusion for fusion in FUSIONS if fusion.name == "masked_softmax")

    def match(span: Span) -> Fused | None:
        found = right.match(span)
        if found is None:
            return None
        dst = span.nodes[len(right.ops) - 1].dst

        def call() -> None:
            found.call()
            dst.view()[0, 1, 1] = writes

        return replace(found, call=call)

    backend = default_backend()
    before = backend.fusions
    try:
        backend.fusions = [replace(right, match=match) if each is right else each for each in before]
        result = run_in_step(model("llama"), PROMPT, DiffOptions(steps=0, settings=FLASH_OFF))
    finally:
        backend.fusions = before
    own = [node for node in result.wrong if node.wrong_in == OWN_RUN]
    assert own
    assert not [text for text in told(result) if any(words in text for words in AS_BEFORE)]


@pytest.mark.usefixtures("all_ops")
def test_what_the_own_run_held_is_what_a_row_not_written_keeps(model: Models) -> None:
    """Not what the reference's run held."""
    calls = iter(range(1 << 20))

    def mul(dst: Tensor, a: Tensor, b: Tensor) -> None:
        held = dst.view().copy()
        OWN["MUL"].define(dst, a, b)
        if next(calls) % 2:  # in the own run alone
            dst.view()[0, 0, 3] = held[0, 0, 3]

    with default_backend().ops.having(planted("MUL", mul)):
        result = run_in_step(model("llama"), PROMPT, DiffOptions(steps=0, settings=FLASH_OFF))
    first = result.wrong[0]
    assert first.wrong_in == OWN_RUN
    assert first.diagnosis == "MUL does not write row 3: it is as before"
