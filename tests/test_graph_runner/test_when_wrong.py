"""What docs/when-wrong.md says that a diff cannot see: devices that are wrong, and are called right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.diffs import FLASH_OFF, planted, run
from kit.models import Models

from ggml_backend_npu import Backend, Node, Tensor, default_backend
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.rope import Rope
from ggml_backend_npu.ops.softmax import SoftMax
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.registry.entry import Call, Op
from graph_runner.base.errors import BlindError
from graph_runner.diff.run import DiffOptions, DiffResult, diff
from graph_runner.judging.rules import Rules
from graph_runner.reports.scope import scope_json

PAGE = Path(__file__).resolve().parents[2] / "docs" / "when-wrong.md"
LONG = "The capital of France is " * 12  # 300 tokens and more


@pytest.fixture(autouse=True)
def as_before(backend: Plugin) -> Iterator[None]:
    yield
    backend.forget_plans()


def of(file: Path, kernel: Op, prompt: str = "The capital of France is", **options: Any) -> DiffResult:
    """A diff of a device that has a kernel of a user."""
    with default_backend().ops.having(kernel):
        given: dict[str, Any] = {"steps": 0, "settings": FLASH_OFF}
        return diff(file, prompt, DiffOptions(**(given | options)))


def soft_max_times(factor: float, least: int = 0) -> Op:
    """A SOFT_MAX that is off in rows of at least so many elements."""

    def soft_max(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, *, params: SoftMax) -> None:
        OWN["SOFT_MAX"].define(dst, x, mask, sinks, params=params)
        if dst.ne[0] > least:
            dst.view()[...] *= np.float32(factor)

    return planted("SOFT_MAX", soft_max)


def add(off: Any) -> Op:
    """An ADD whose results are made other ones."""

    def added(dst: Tensor, a: Tensor, b: Tensor) -> None:
        OWN["ADD"].define(dst, a, b)
        dst.view()[...] = off(dst.view())

    return planted("ADD", added)


def test_each_case_of_the_page_has_its_test() -> None:
    named = set(re.findall(r"`(test_\w+)` \|", PAGE.read_text()))
    here = {name for name in globals() if name.startswith("test_") and not name.startswith("test_each_case")}
    assert named == here


def test_a_rotation_is_not_seen_at_position_0(model: Models) -> None:
    def none(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, *, params: Rope) -> None:
        dst.view()[...] = x.view()

    result = of(model("llama"), planted("ROPE", none), prompt="")
    assert result
    assert {node.op for node in of(model("llama"), planted("ROPE", none), prompt="", see=True).wrong} == {"ROPE"}
    assert {"ROPE frequency base", "ROPE frequency scale"} <= {*scope_json(result)["blind"]}
    assert {node.op for node in of(model("llama"), planted("ROPE", none)).wrong} == {"ROPE"}


@pytest.mark.daily(3)
@pytest.mark.slow
def test_what_begins_beyond_the_context_is_not_seen(model: Models) -> None:
    kernel = soft_max_times(1.01, least=300)
    result = of(model("llama"), kernel)
    assert result
    assert scope_json(result)["tokens"] < 300
    assert {node.op for node in of(model("llama"), kernel, prompt=LONG).wrong} == {"SOFT_MAX"}


def test_numbers_that_do_not_come_are_not_seen(model: Models) -> None:
    assert of(model("llama"), add(lambda x: np.where(np.abs(x) > 1e4, 0, x)))
    assert not of(model("llama"), add(lambda x: np.where(np.abs(x) > 1e-4, 0, x)))


def test_an_error_within_the_bound_is_rounding(model: Models, tmp_path: Path) -> None:
    result = of(model("llama"), soft_max_times(1 + 1e-6))
    assert result
    exactly = tmp_path / "exactly.toml"
    exactly.write_text('[SOFT_MAX]\n"*" = 0\n')
    assert not of(model("llama"), soft_max_times(1 + 1e-6), rules=Rules(exactly))


def test_wide_tolerances_hide_a_percent(model: Models) -> None:
    assert of(model("llama"), soft_max_times(1.005), rules=Rules("gpu"))
    assert not of(model("llama"), soft_max_times(1.005))


def test_what_comes_once_in_a_thousand_calls_is_not_seen(model: Models) -> None:
    calls = count(1)
    assert of(model("llama"), add(lambda x: x + (next(calls) % 1000 == 0)))
    calls = count(1)
    assert not of(model("llama"), add(lambda x: x + (next(calls) % 10 == 0)))


def makes_wrong(op: str, patch: pytest.MonkeyPatch) -> None:
    """Each backend of this project computes an op wrongly."""
    right = Backend.bind

    def bind(backend: Backend, node: Node) -> Call:
        call = right(backend, node)

        def wrong() -> None:
            call()
            node.dst.view()[...] *= np.float32(1.01)

        return wrong if node.op == op else call

    patch.setattr(Backend, "bind", bind)


def test_nodes_that_are_left_out_are_not_seen(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    makes_wrong("MUL_MAT", monkeypatch)
    result = run(model("llama"), ops={"CONT"})
    assert result
    assert scope_json(result)["not_compared"]["MUL_MAT"] > 0
    assert {node.op for node in run(model("llama")).wrong} == {"MUL_MAT"}


def test_a_mistake_of_both_is_not_seen(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    makes_wrong("CONT", monkeypatch)
    assert run(model("llama"), reference="NPU")
    assert not run(model("llama"), reference="CPU")


@pytest.mark.slow
@pytest.mark.daily(2)
def test_what_takes_one_sequence_for_another_is_not_seen_in_one(model: Models) -> None:
    def soft_max(dst: Tensor, x: Tensor, mask: Tensor, sinks: Tensor | None, *, params: SoftMax) -> None:
        OWN["SOFT_MAX"].define(dst, x, replace(mask, nb=(*mask.nb[:3], 0)), sinks, params=params)

    kernel = planted("SOFT_MAX", soft_max)
    result = of(model("llama"), kernel)
    assert result
    assert scope_json(result)["sequences"] == 1
    wrong = of(model("llama"), kernel, settings=replace(FLASH_OFF, sequences=2)).wrong
    assert {node.op for node in wrong} == {"SOFT_MAX"}


def unseen(file: Path, kernel: Op, op: str) -> DiffResult:
    """A diff whose canaries are in no node of an op, by chance."""
    for seed in range(100):
        with suppress(BlindError):
            result = of(file, kernel, canary=seed)
            assert result.canaries is not None
            if op not in {each.op for each in result.canaries.seen}:
                return result
    pytest.fail(f"each run has a canary in {op}")


def test_a_judge_that_errs_in_an_op_without_a_canary_is_not_seen(
    model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last ADD of a step, after which other nodes come."""

    def added(dst: Tensor, a: Tensor, b: Tensor) -> None:
        OWN["ADD"].define(dst, a, b)
        dst.view()[...] += np.float32(dst.name == "l_out-1")

    right = Rules.allows
    monkeypatch.setattr(Rules, "allows", lambda rules, node, *rest: node.op == "ADD" or right(rules, node, *rest))
    result = unseen(model("llama"), planted("ADD", added), "ADD")
    assert "ADD" not in {node.op for node in result.wrong}
    monkeypatch.undo()
    assert {node.op for node in of(model("llama"), planted("ADD", added)).wrong} == {"ADD"}
