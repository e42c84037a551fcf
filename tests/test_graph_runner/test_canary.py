"""Canaries: the judge sees every fault that is planted into a copy, a judge that is blind is caught, and a run does not
change by them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.commands import WRONG_CONT, Cli, fresh, kernel_file
from kit.diffs import planted, run
from kit.models import Models
from tools.canaries import MODELS, found

from ggml_backend_npu import Memory, Node, Tensor, default_backend
from ggml_backend_npu.ops import OWN
from graph_runner.base.console import Console
from graph_runner.base.errors import BlindError
from graph_runner.diff import judge
from graph_runner.diff.alone import Alone
from graph_runner.diff.canary import Canaries, Planter
from graph_runner.diff.judge import Judge
from graph_runner.diff.own import Mirrored, OwnNode, OwnRun
from graph_runner.diff.run import DiffResult
from graph_runner.diff.turns import Compared, Turn
from graph_runner.judging import noise, rules
from graph_runner.judging.compare import Comparison, compare
from graph_runner.judging.copies import Copied, copy
from graph_runner.judging.results import NodeResult, Verdict
from graph_runner.judging.rules import Rules
from graph_runner.reports.diff_report import diff_json, print_diff

KINDS = {
    "a flipped bit",
    "a flipped sign",
    "swapped rows",
    "a stale tensor",
    "a row left out",
    "a scale slightly off",
}
Patch = pytest.MonkeyPatch


def canaries(result: DiffResult) -> Canaries:
    assert result.canaries is not None
    return result.canaries


def printed(result: DiffResult) -> list[str]:
    written = StringIO()
    print_diff(result, Console(file=written, width=200))
    return written.getvalue().splitlines()


# seen


@pytest.mark.some(1)
@pytest.mark.parametrize("name", [name for name, _ in MODELS])
def test_each_kind_is_seen_in_each_model(model: Models, name: str) -> None:
    result = run(model(name), steps=1, canary=1)
    assert result, result.wrong[:1]
    assert {each.kind for each in canaries(result).seen} == KINDS
    ways = {each.way.partition(" from")[0] for each in canaries(result).seen}
    assert ways == {"alone", "in the own run"}
    assert canaries(result).missed == []


@pytest.mark.daily(4)
@pytest.mark.slow
def test_a_hundred_diffs_of_other_seeds(tmp_path: Path, turn: int) -> None:
    rows = [*found(tmp_path, 100, first=100 * turn)]
    assert len(rows) >= 100
    assert [row for row in rows if row.wrong] == []


def test_the_report_says_what_was_planted_and_how_to_plant_it_again(model: Models) -> None:
    result = run(model("llama"), canary=7)
    named = canaries(result).named
    assert named is not None
    line, verdict = printed(result)[-2:]
    assert line.startswith(f"canary: {named.kind} of {named.op} {named.name!r} seen, as were all ")
    assert "(--canary 7); by its own count NPU computed " in line
    assert verdict.startswith("right")
    data = diff_json(result)["canary"]
    assert (data["seed"], len(data["planted"])) == (7, len(canaries(result).seen))
    assert f"canary: {data['text']}" in line
    again = run(model("llama"), canary=7)
    assert canaries(again).seen == canaries(result).seen
    assert canaries(run(model("llama"), canary=8)).seen != canaries(result).seen


def test_nothing_that_a_run_computes_changes(model: Models, monkeypatch: Patch) -> None:
    """Each byte of each node and of the logits: fingerprints say whether the bytes are the same."""
    prints: list[dict[tuple[int, int], int]] = []
    finish = Judge.finish

    def finished(judge: Judge, **keywords: bool) -> None:
        finish(judge, **keywords)
        prints.append(dict(judge.fingerprints))

    monkeypatch.setattr(Judge, "finish", finished)
    for name in ("llama", "rwkv7"):
        prints.clear()
        with_them = run(model(name), canary=3)
        with monkeypatch.context() as patch:
            patch.setattr(Planter, "look", lambda *_: None)
            without = run(model(name), canary=3)
        assert canaries(with_them).seen
        assert not canaries(without).seen
        half = len(prints) // 2
        assert prints[:half] == prints[half:]
        assert with_them.nodes == without.nodes
        assert (with_them.text, with_them.ending, with_them.states) == (without.text, without.ending, without.states)


def test_a_wrong_device_is_wrong_not_blind(model: Models) -> None:
    def off(dst: Tensor, src: Tensor) -> None:
        OWN["CONT"].define(dst, src)
        dst.view()[...] += 1

    with default_backend().ops.having(planted("CONT", off)):
        result = run(model("llama"), canary=2)
    assert {node.op for node in result.wrong} == {"CONT"}
    assert canaries(result).seen


def test_what_a_user_allows_is_not_planted(model: Models, tmp_path: Path) -> None:
    """With a bound of 1 nearly anything is right, and the user has asked for it."""
    file = tmp_path / "wide.toml"
    file.write_text('["*"]\n"*" = 1\n')
    result = run(model("llama"), canary=1, rules=Rules(file), ops={"MUL_MAT"}, steps=0)
    assert result
    assert not [each for each in canaries(result).seen if each.op == "MUL_MAT"]
    assert [each for each in canaries(run(model("llama"), canary=1, rules=Rules("gpu"))).seen if each.way == "alone"]


# a judge that is blind


def of_first(size: int) -> Callable[..., Comparison]:
    """Compares the first bytes alone; the last ones if `size` is negative."""

    def compared(reference: Tensor, result: Tensor, outside: bool = False) -> Comparison:
        a, b = (Memory(x.address, x.nbytes, owner=x.memory).bytes() for x in (reference, result))
        part = slice(size) if size > 0 else slice(size, None)
        alike = np.array_equal(a[part], b[part])
        return Comparison(a.size, 0, outside) if alike else compare(reference, result, outside)

    return compared


def with_numbers(of: Callable[[Any, Any], Any]) -> Callable[[Patch], None]:
    """A judge that compares and measures other numbers than the device's: of(expected, actual)."""

    def seen(expected: Tensor, actual: Tensor) -> Tensor:
        if actual.type not in ("f32", "f16") or actual.ne != expected.ne:
            return actual
        made = copy(actual.unpacked())
        made.view()[...] = of(expected.unpacked().view(), made.view())
        return made

    def break_(patch: Patch) -> None:
        allows = Rules.allows

        def compared(reference: Tensor, result: Tensor, outside: bool = False) -> Comparison:
            return compare(reference, seen(reference, result), outside)

        def allowed(own: Rules, node: Node, expected: Tensor, actual: Tensor, found: Comparison) -> bool:
            return allows(own, node, expected, seen(expected, actual), found)

        patch.setattr(judge, "compare", compared)
        patch.setattr(Rules, "allows", allowed)

    return break_


def itself(patch: Patch) -> None:
    patch.setattr(judge, "compare", lambda reference, result, outside=False: compare(reference, reference, outside))


def itself_in_the_own_run(patch: Patch) -> None:
    def mirrored(own: Judge, node: OwnNode, cumulative: Comparison | None, right: Any = Judge._mirrored) -> Any:
        found = right(own, node, cumulative)
        if found is None:
            return None
        each = Mirrored(found.node, found.node, found.expected, found.expected, found.before())
        return own._compared(each, compare(found.expected, found.expected), found.failure)

    patch.setattr(Judge, "_mirrored", mirrored)


def mirrored_in_itself(patch: Patch) -> None:
    """What the reference is to compute again is read from the device's own run."""
    both = Judge._both
    patch.setattr(Judge, "_both", lambda own, node: (pair := both(own, node)) and (pair[1], pair[1]))
    right = OwnRun.mirrored

    def mirrored(own: OwnRun, node: OwnNode) -> Mirrored | None:
        found = right(own, node)
        return None if found is None else replace(found, expected=found.actual)

    patch.setattr(OwnRun, "mirrored", mirrored)


def result_not_read(patch: Patch) -> None:
    judged = Alone._judged

    def of_the_reference(own: Alone, turn: Turn, *arguments: Any) -> Compared:
        with patch.context() as inner:
            inner.setattr(Copied, "result", turn.node.dst)
            return judged(own, turn, *arguments)

    patch.setattr(Alone, "_judged", of_the_reference)


def tolerance_of_one(patch: Patch) -> None:
    patch.setattr(Rules, "bound", lambda own, op, type: 1.0)


def table_of_ones(patch: Patch) -> None:
    made = Rules.__init__

    def init(own: Rules, *arguments: Any) -> None:
        made(own, *arguments)
        own._table = {op: {"*": 1.0} for op in own._table}

    patch.setattr(Rules, "__init__", init)


def one_error_for_all(patch: Patch) -> None:
    """The whole tensor is judged, not its rows, and by a percent."""
    patch.setattr(Rules, "allows", lambda own, node, expected, actual, found: found.nmse <= 1e-2)


def alone(name: str, value: Any, of: Any = judge) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(of, name, value)


BLIND: dict[str, Callable[[Patch], None]] = {
    "a comparison that returns equal": alone("compare", lambda a, b, outside=False: Comparison(a.nbytes, 0, outside)),
    "the reference compared with itself": itself,
    "the reference compared with itself in the own run": itself_in_the_own_run,
    "the own run compared with itself": mirrored_in_itself,
    "the device's result is not read": result_not_read,
    "the first bytes alone": alone("compare", of_first(32)),
    "the first half alone": alone(
        "compare", lambda a, b, outside=False: of_first(max(1, a.nbytes // 2))(a, b, outside)
    ),
    "the last bytes alone": alone("compare", of_first(-32)),
    "a tolerance of 1": tolerance_of_one,
    "a table of tolerances of 1": table_of_ones,
    "rules that say yes": alone("allows", lambda *_: True, Rules),
    "one error for the whole tensor": one_error_for_all,
    "NaN is right": with_numbers(lambda expected, actual: np.where(np.isnan(actual), expected, actual)),
    "signs are ignored": with_numbers(lambda expected, actual: np.copysign(actual, expected)),
    "order is ignored": with_numbers(
        lambda expected, actual: (
            expected if np.array_equal(np.sort(expected, axis=None), np.sort(actual, axis=None)) else actual
        )
    ),
    "what is larger than a half is right": with_numbers(
        lambda expected, actual: np.where(np.abs(expected) > np.abs(expected).max() / 2, expected, actual)
    ),
    "terms without end": alone("size", lambda node, truth: np.full(truth.shape, 1e30), noise),
    "no row is far off": alone("_errors", lambda node, actual, *_: np.zeros(actual.size // actual.shape[-1]), rules),
    "a wrong comparison is no wrong verdict": alone("_wrong", lambda looked_at: None),
    "a wrong verdict is no wrong node": alone("__bool__", lambda node: True, NodeResult),
    "a wrong node is no wrong diff": alone("__bool__", lambda result: True, DiffResult),
}


@pytest.mark.some(1)
@pytest.mark.daily(4)
@pytest.mark.parametrize("how", BLIND)
def test_a_blind_judge_is_caught_each_time(model: Models, how: str, monkeypatch: Patch) -> None:
    for seed in range(3):
        with monkeypatch.context() as patch:
            BLIND[how](patch)
            with pytest.raises(BlindError, match=r"^the judge is blind: it calls "):
                run(model("llama"), steps=0, canary=seed)


@pytest.mark.daily(4)
@pytest.mark.slow
@pytest.mark.parametrize("how", BLIND)
def test_a_blind_judge_is_caught_in_each_model(model: Models, how: str, monkeypatch: Patch) -> None:
    for seed, name in enumerate(("moe", "gpt-oss", "rwkv7", "mamba", "llama-q4_0", "mpt")):
        file = model(name)
        with monkeypatch.context() as patch:
            BLIND[how](patch)
            with pytest.raises(BlindError, match=r"^the judge is blind: it calls "):
                run(file, steps=1, canary=seed)


def test_the_command_of_a_blind_judge_ends_with_3_and_one_line(cli: Cli, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Rules, "allows", lambda *_: True)
    outcome = cli("diff", "tiny", "-n", "0", "--in-process", "--canary", "5")
    assert (outcome.code, outcome.out) == (3, "")
    line = r"ggml-npu: the judge is blind: it calls right what is wrong: [A-Z_]+ '.*' \(step 0 node \d+, .*\) with .*"
    assert re.fullmatch(f"{line}; --canary 5\n", outcome.err)


@pytest.mark.slow
def test_a_judge_that_a_kernel_file_blinds(tmp_path: Path) -> None:
    """In the process of the device."""
    text = "from graph_runner.judging.rules import Rules\nRules.allows = lambda *_: True\n"
    text += WRONG_CONT.format(value="x")
    outcome = fresh("diff", "tiny", "-n", "0", "--kernels", kernel_file(tmp_path, text))
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.splitlines()[-1].startswith("ggml-npu: the judge is blind: it calls right what is wrong: ")


# what hides a fault


def test_terms_that_cancel_hide_a_small_fault_without_an_alarm() -> None:
    """x + y with y near -x: what is rounded on the way is a thousand times the result."""
    random = np.random.default_rng(1)
    x = random.standard_normal((1, 1, 8, 32)).astype(np.float32) * 1e3
    y = -x + random.standard_normal(x.shape).astype(np.float32)
    w, xy = np.ones((1, 1, 32, 64), np.float32), np.concatenate([x, y], axis=-1)
    dst = Tensor.of((xy.astype(np.float64) @ w[0, 0].T).astype(np.float32))
    node = Node("MUL_MAT", dst, (Tensor.of(w), Tensor.of(xy)), bytes(64))
    planter = Planter(Rules(), 1)
    right = Compared("isolated", node, node, lambda: None, dst, dst, compare(dst, dst), True)

    def again(bad: Tensor) -> NodeResult:
        allowed = Rules().allows(node, dst, bad, compare(dst, bad))
        return NodeResult(0, 0, "MUL_MAT", "", "", dst.ne, Verdict.ROUNDING if allowed else Verdict.FAILED)

    planter.look("alone", right, again)
    assert planter.found.hidden > 0
    assert planter.found.missed == []
    assert "a row left out" in {each.kind for each in planter.found.seen}
    planter.found.refuse_a_blind_judge()
