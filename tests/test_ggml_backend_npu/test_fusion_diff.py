"""A diff compares what every fused operator gives with what its nodes give, and finds fused kernels that are wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.fusing import INF
from kit.models import Models
from kit.support import choose
from numpy.typing import NDArray

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.backend import fusion
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ops.softmax import soft_max
from ggml_backend_npu.registry.entry import Call
from graph_runner.cli.options import PROMPT
from graph_runner.diff.run import DiffOptions, DiffResult, diff
from graph_runner.judging.compare import Comparison
from graph_runner.run.session import Sampler, Session, Settings

pytestmark = pytest.mark.usefixtures("all_fused")


def rows(result: DiffResult) -> Counter[tuple[str, str]]:
    """Rows of a diff that are spans, by name and type of the output."""
    return Counter((node.op, node.types.split()[-1]) for node in result.compared if not node.op.isupper())


EXPECTED = {
    "rwkv7": {("token_shift", "f32"): 2},
    "moe": {("TopKSoftmax", "i32"): 2, ("TopKSoftmax", "f32"): 2, ("masked_softmax", "f32"): 2},
    "olmoe": {("TopKSoftmax", "i32"): 2, ("TopKSoftmax", "f32"): 2, ("masked_softmax", "f32"): 2},
    "gpt-oss": {("TopKSoftmax", "i32"): 2, ("TopKSoftmax", "f32"): 2, ("masked_softmax", "f32"): 2},
}


@pytest.mark.some(1)
@pytest.mark.daily(2)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_diff_compares_the_outputs_of_every_span(model: Models, name: str) -> None:
    result = diff(model(name), PROMPT, DiffOptions(steps=2))
    assert result, result.wrong[:1]
    assert rows(result) == {row: count * 3 for row, count in EXPECTED[name].items()}
    for node in result.compared:
        if node.op == "TopKSoftmax":
            assert node.ne[0] == 2 or node.ne[:2] == (1, 2)
        if node.op == "token_shift":
            assert node.isolated
            assert node.ne[3] == 6


@pytest.mark.some(1)
@pytest.mark.daily(3)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_diff_without_fusion_has_no_spans(model: Models, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, fusion="off")
    result = diff(model(name), PROMPT, DiffOptions(steps=0))
    assert result
    assert not rows(result)


@pytest.mark.slow
def test_a_diff_of_one_fusion_compares_nothing_else(model: Models) -> None:
    result = diff(model("moe"), PROMPT, DiffOptions(steps=1, ops={"TopKSoftmax"}))
    assert result
    assert len(result.compared) == 8
    assert {node.op for node in result.compared} == {"TopKSoftmax"}
    assert not diff(model("moe"), PROMPT, DiffOptions(steps=0, ops={"token_shift"})).compared


@pytest.mark.slow
@pytest.mark.daily(2)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_diff_of_several_batches_compares_the_spans_of_each(model: Models, name: str) -> None:
    prompt = "one two three " * 40
    result = diff(model(name), prompt, DiffOptions(steps=0))
    assert result, result.wrong[:1]
    assert result.n_prompt > 512
    assert rows(result) == {row: count * 2 for row, count in EXPECTED[name].items()}


Wrong = Callable[..., Call]


def mu_in_other_order(
    x: Any, before: int, mu: Any, outputs: Sequence[int], *rest: Any, right: Wrong, **keywords: Any
) -> Call:
    return right(x, before, mu, [*outputs[1:], outputs[0]], *rest, **keywords)


def writes_in_front(x: Any, before: int, mu: Any, outputs: Sequence[int], *rest: Any, right: Wrong, **kw: Any) -> Call:
    call = right(x, before, mu, outputs, *rest, **kw)

    def wrong() -> None:
        call()
        Memory(outputs[0] - 1, 1).bytes()[:] ^= 0xFF

    return wrong


def ids_off_by_one(values: Tensor, ids: Tensor, x: Tensor, *, right: Wrong, **keywords: Any) -> Call:
    call = right(values, ids, x, **keywords)

    def wrong() -> None:
        call()
        ids.view()[...] += 1

    return wrong


def last_row_of_many(values: Tensor, ids: Tensor, x: Tensor, *, right: Wrong, **keywords: Any) -> Call:
    call = right(values, ids, x, **keywords)

    def wrong() -> None:
        call()
        if values.ne[1] == 1:
            values.view()[0, 0, -1, -1] *= 1.01

    return wrong


def not_normalised(values: Tensor, ids: Tensor, x: Tensor, *, right: Wrong, **keywords: Any) -> Call:
    return right(values, ids, x, **keywords | {"norm": False})


def writes_behind(values: Tensor, ids: Tensor, x: Tensor, *, right: Wrong, **keywords: Any) -> Call:
    call = right(values, ids, x, **keywords)

    def wrong() -> None:
        call()
        Memory(values.end, 1).bytes()[:] ^= 0xFF

    return wrong


def raises(*_: Any, right: Wrong, **__: Any) -> Call:
    def wrong() -> None:
        raise ValueError("no rows today")

    return wrong


def first_span(file: Path, ops: str, step: int) -> int:
    """The index of the last node of the first such span among a step's nodes."""
    seen: list[list[str]] = [[]]

    class Names:
        def before(self, node: int) -> bool:
            op = convert.op_name(session.ggml, node)
            if convert.computes(op):
                seen[-1].append(op)
            return False

        def after(self, node: int) -> None:
            pass

    with Session(file, Settings(flash_attention="off"), observer=Names()) as session:
        tokens = session.tokenize(PROMPT)
        for _ in range(step + 1):
            seen.append([])
            session.decode(tokens)
            tokens = [Sampler()(session.logits())]
    wanted, found = ops.split(), seen[-1]
    return next(i for i in range(len(found)) if found[i : i + len(wanted)] == wanted) + len(wanted) - 1


SHIFT = "SUB REPEAT MUL ADD"
NORMALISED = "SOFT_MAX ARGSORT GET_ROWS SUM_ROWS CLAMP DIV"
AS_IT_IS = "SOFT_MAX ARGSORT GET_ROWS"
OF_SELECTED = "ARGSORT GET_ROWS SOFT_MAX"


@pytest.mark.some(1)
@pytest.mark.daily(3)
@pytest.mark.parametrize(
    ("name", "kernel", "wrong", "ops", "step", "types"),
    [
        ("rwkv7", "bind_token_shift", mu_in_other_order, SHIFT, 0, {"f32"}),
        ("rwkv7", "bind_token_shift", writes_in_front, SHIFT, 0, {"f32"}),
        ("rwkv7", "bind_token_shift", raises, SHIFT, 0, {"f32"}),
        ("moe", "bind_routing", ids_off_by_one, NORMALISED, 0, {"i32"}),
        ("moe", "bind_routing", not_normalised, NORMALISED, 0, {"f32"}),
        ("moe", "bind_routing", last_row_of_many, NORMALISED, 1, {"f32"}),
        ("moe", "bind_routing", writes_behind, NORMALISED, 0, {"f32"}),
        ("olmoe", "bind_routing", ids_off_by_one, AS_IT_IS, 0, {"i32"}),
        ("olmoe", "bind_routing", writes_behind, AS_IT_IS, 0, {"f32"}),
        ("gpt-oss", "bind_routing", ids_off_by_one, OF_SELECTED, 0, {"i32"}),
        ("gpt-oss", "bind_routing", writes_behind, OF_SELECTED, 0, {"f32"}),
        ("gpt-oss", "bind_routing", raises, OF_SELECTED, 0, {"f32", "i32"}),
    ],
)
def test_a_wrong_fused_kernel_is_found_while_single_nodes_are_right(
    model: Models,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kernel: str,
    wrong: Wrong,
    ops: str,
    step: int,
    types: set[str],
) -> None:
    choose(monkeypatch, ops="default")  # in its own run, the device does not compute them
    right = getattr(fusion, kernel)
    monkeypatch.setattr(fusion, kernel, lambda *args, **keywords: wrong(*args, right=right, **keywords))
    result = diff(model(name), PROMPT, DiffOptions(steps=2))
    assert not result
    assert {node.op for node in result.wrong} == {next(iter(EXPECTED[name]))[0]}
    first = result.wrong[0]
    # of a prompt, the last layer computes the last token alone
    layer_of_one_row = wrong is last_row_of_many
    assert (first.step, first.index) == (0 if layer_of_one_row else step, first.index)
    if not layer_of_one_row:
        assert first.index == first_span(model(name), ops, step)
    assert {node.types for node in result.wrong} == {f"{ops} -> {type}" for type in types}
    if wrong is raises:
        assert first.isolated is None
        assert first.failure is not None
        assert first.failure.startswith("ValueError: no rows today (test_fusion_diff.py line ")
    else:
        assert first.isolated is not None
        assert first.isolated.outside == (wrong in (writes_in_front, writes_behind))
        assert first.isolated.n_different > 0 or first.isolated.outside


class Softmax:
    """SOFT_MAX whose result is changed after it."""

    def __init__(self, change: Callable[[NDArray[Any]], None]) -> None:
        self.right, self.change = soft_max, change

    def bind(self, node: Node) -> Call:
        call = self.right.bind(node)

        def wrong() -> None:
            call()
            self.change(node.dst.view())

        return wrong


def times(factor: float) -> Callable[[NDArray[Any]], None]:
    def change(y: NDArray[Any]) -> None:
        y *= np.float32(factor)

    return change


def one_nan(y: NDArray[Any]) -> None:
    y[-1, -1, -1, 0] = np.nan


@pytest.mark.some(1)
@pytest.mark.daily(3)
@pytest.mark.parametrize(
    ("change", "passes"),
    [(times(1 + 1e-6), True), (times(1 + 2e-6), True), (times(1 + 2e-5), False), (one_nan, False)],
)
def test_an_error_is_rounding_up_to_the_ops_nmse(
    model: Models, monkeypatch: pytest.MonkeyPatch, change: Callable[[NDArray[Any]], None], passes: bool
) -> None:
    """Its square root is 3.2e-6, of the mean over rows of which most is masked."""
    choose(monkeypatch, ops="default")
    monkeypatch.setattr(fusion, "soft_max", Softmax(change))
    result = diff(model("moe"), PROMPT, DiffOptions(steps=0, ops={"masked_softmax", "SOFT_MAX"}))
    assert bool(result) == passes
    assert all(node for node in result.compared if node.op == "SOFT_MAX")
    spans = [node for node in result.compared if node.op == "masked_softmax"]
    assert len(spans) == 2
    assert all(bool(node) == passes and not node.isolated for node in spans)


def test_rounding_is_never_a_nan_a_gap_or_a_byte_outside() -> None:
    rounded = Comparison(4, 1, False, nmse=1e-12, max_abs=1e-6, where=(0, 0, 0, 0))
    assert rounded.within(1e-11)
    assert not rounded.within(0.0)
    assert not rounded
    for changed in (
        replace(rounded, nmse=2e-11),
        replace(rounded, nmse=float("nan")),
        replace(rounded, max_abs=INF),
        replace(rounded, outside=True),
        replace(rounded, where=None),
    ):
        assert not changed.within(1e-11)
