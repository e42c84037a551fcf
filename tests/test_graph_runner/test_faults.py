"""Faults planted in kernels, looked for in whole models: the first wrong node is named, with what is wrong about it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from kit.diffs import FLASH_OFF, PROMPT, QUANTISED, planted
from kit.faults import Fault, corpus, fault
from kit.models import Models
from kit.nodes import src
from kit.planted import Place, known, raised_at, walk
from kit.support import Scene

from ggml_backend_npu import Node, Tensor, default_backend
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.numerics import PLAIN
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.movers import convert as to_type
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.registry.entry import Op
from ggml_backend_npu.registry.params import Params
from graph_runner.base.console import Console
from graph_runner.cli import main
from graph_runner.diagnosis import diagnose
from graph_runner.diff.run import DiffOptions, DiffResult, diff
from graph_runner.judging.results import Verdict
from graph_runner.reports.diff_report import diff_json, print_diff
from graph_runner.trace import read_trace, replay
from quant import ROUNDINGS

Kernel = Callable[..., None]
BEHIND = (Verdict.EXACT, Verdict.ROUNDING, Verdict.INHERITED, Verdict.AMPLIFIED)


def rounds_apart(node: Node) -> bool:
    """Whether the two q8_0 quantisers give other blocks for what the node quantises."""
    values = src(node).view()
    blocks = [to_type(values, "f32", "q8_0", numerics=replace(PLAIN, rounding=rounding)) for rounding in ROUNDINGS]
    return node.dst.type == "q8_0" and not np.array_equal(blocks[0], blocks[1])


@fault("SET_ROWS", settings=QUANTISED, at=rounds_apart)
def rounds_otherwise(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["SET_ROWS"].define(dst, src, ids)
    if dst.type == "q8_0":
        other = next(rounding for rounding in ROUNDINGS if rounding != default_backend().numerics.rounding)
        numerics = replace(PLAIN, rounding=other)
        dst.view()[:, :, ids.view().reshape(-1)] = to_type(src.view(), src.type, dst.type, numerics=numerics)


@dataclass(frozen=True)
class Named:
    """A fault, and what is said of it.

    says    what the diagnosis begins with
    behind  whether the device's own run goes on after it: not if damage is done to what lies around the output
    prompts  of which the first is taken that has a node that the fault gets wrong
    """

    fault: Fault
    says: str
    behind: bool = True
    prompts: tuple[str, ...] = (PROMPT,)


def first_wrong(file: Path, named: Named) -> tuple[str, Place, Node]:
    """A prompt, and the first node that a fault gets wrong in it and a token after it."""
    found: list[tuple[Place, Node]] = []

    def look(place: Place, node: Node) -> None:
        if not found and node.op == named.fault.op and named.fault.at(node):
            found.append((place, node))

    for prompt in named.prompts:
        walk(file, named.fault, look, prompt)
        if found:
            return prompt, *found[0]
    raise AssertionError("no prompt has such a node")


FAULTS = {
    "GET_ROWS that ignores nb[2]": Named(
        corpus()["get_rows_without_nb2"],
        "GET_ROWS takes index 0 of dimension 2 of src0 for all: with nb[2] 0 in place of 32 ",
    ),
    "CPY that ignores a view's offset": Named(
        corpus()["cpy_without_offset"],
        "CPY ignores the offset of src0: it reads from byte 0 of the root in place of byte 12288, ",
    ),
    "SET_ROWS with an index off by one": Named(
        corpus()["set_rows_next_cell"],
        "SET_ROWS writes row id + 1 in place of row id, for each id of src1 (the row ids)",
    ),
    "SET_ROWS with an index off by one, of transposed values": Named(
        replace(corpus()["set_rows_next_cell"], settings=FLASH_OFF),
        "SET_ROWS writes row id + 1 in place of row id, for each id of src1 (the row ids)",
    ),
    "Q4_0 with nibbles swapped": Named(
        corpus()["set_rows_swaps_nibbles"],
        "SET_ROWS swaps the two nibbles of each byte: 52 of ",
    ),
    "Q8_0 with the other rounding": Named(
        rounds_otherwise,
        "SET_ROWS rounds as ggml's ",
        prompts=("one two three " * 40, "four five six " * 80, "Once upon a time " * 120),
    ),
    "SOFT_MAX without its mask": Named(
        corpus()["soft_max_without_mask"],
        "SOFT_MAX leaves out src1 (the mask), which gives exactly these bytes",
    ),
    "CONT that writes one row too many": Named(
        corpus()["cont_one_row_too_many"],
        "CONT writes up to 512 bytes behind dst: one row too many; dst itself is right",
        behind=False,
    ),
    "NaN in one row": Named(
        corpus()["cont_nan_in_a_row"],
        "CONT gives NaN in row 3, where the reference has none; the others are right",
    ),
}


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["ggml-npu", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code


def printed(result: DiffResult) -> list[str]:
    text = io.StringIO()
    print_diff(result, Console(file=text, width=200))
    return text.getvalue().splitlines()


@pytest.mark.some(1)
@pytest.mark.daily(2)
@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(
    model: Models, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named, fault = FAULTS[name], FAULTS[name].fault
    file = model(fault.model)
    prompt, place, node = first_wrong(file, named)
    with default_backend().ops.having(*fault.ops):
        result = diff(file, prompt, DiffOptions(steps=1, settings=fault.settings, reproducers=tmp_path))
    assert not result
    first = result.wrong[0]
    assert Place(first.step, first.index, first.op, first.name) == place
    assert first.verdict is Verdict.INTRODUCED
    assert first.diagnosis is not None
    assert first.diagnosis.startswith(named.says)

    at = next(i for i, each in enumerate(result.nodes) if each is first)
    in_front, behind = result.nodes[:at], result.nodes[at + 1 :]
    assert {each.verdict for each in in_front} <= {Verdict.EXACT, Verdict.ROUNDING}
    assert all(each.verdict in BEHIND for each in behind if each.op != fault.op)
    assert any(each.verdict in (Verdict.INHERITED, Verdict.AMPLIFIED) for each in behind) == named.behind
    assert (result.stopped is None) == named.behind

    lines = printed(result)
    assert lines[0] == "the first wrong node:"
    assert lines[1].startswith(f"step {place.step} node {place.index}: {node.op} {node.name!r} {first.types} ne ")
    assert lines[2] == first.diagnosis

    saved = tmp_path / f"{place.step}-{place.index}-{node.op}.gguf"
    assert [each.node.name for each in read_trace(saved)] == [node.name]
    assert first.reproducer == str(saved)
    with default_backend().ops.having(*fault.ops):
        (again,) = replay(saved).wrong
    assert (again.op, again.name, again.verdict) == (first.op, first.name, Verdict.INTRODUCED)
    assert exit_code(monkeypatch, "replay", saved) == 0
    assert "1 nodes replayed, every byte as in the trace" in capsys.readouterr().out


def only(fault: Fault, name: str) -> Op:
    """The op with the fault in nodes of one name alone."""
    right = OWN[fault.op]

    def soft_max(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: Params) -> None:
        (fault.kernel if dst.name == name else right.define)(dst, x, mask, sinks, params=params)

    def with_ids(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        (fault.kernel if dst.name == name else right.define)(dst, src, ids)

    def plain(dst: Tensor, src: Tensor) -> None:
        (fault.kernel if dst.name == name else right.define)(dst, src)

    kernels: dict[int, Kernel] = {1: plain, 2: with_ids, 3: soft_max}
    return planted(fault.op, kernels[right.n_src])


@pytest.mark.some(2)
@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("name", [name for name, named in FAULTS.items() if named.behind])
def test_behind_a_fault_nothing_is_blamed_for_it(model: Models, name: str) -> None:
    """One node is wrong, in each step at most; nodes of the same op that get its errors are not."""
    fault = FAULTS[name].fault
    file = model(fault.model)
    prompt, place, node = first_wrong(file, FAULTS[name])
    with default_backend().ops.having(only(fault, node.name)):
        result = diff(file, prompt, DiffOptions(steps=1, settings=fault.settings))
    assert (result.wrong[0].step, result.wrong[0].index) == (place.step, place.index)
    assert {(each.op, each.name) for each in result.wrong} == {(node.op, node.name)}
    assert all(each.verdict in BEHIND for each in result.nodes if each.name != node.name)
    assert result.stopped is None
    last = result.nodes[-1]
    assert last.verdict in (Verdict.INHERITED, Verdict.AMPLIFIED)
    assert last.isolated
    assert last.cumulative is not None
    assert last.cumulative.n_different > 0


@pytest.mark.usefixtures("as_before")
def test_a_kernel_that_fails_is_named_and_saved(
    model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = corpus()["cont_raises"]
    place = known(model("llama"), fault)[0]
    with default_backend().ops.having(*fault.ops):
        result = diff(model("llama"), PROMPT, DiffOptions(steps=0, settings=FLASH_OFF, reproducers=tmp_path))
    first = result.wrong[0]
    assert (Place(first.step, first.index, first.op, first.name), first.verdict) == (place, Verdict.FAILED)
    where = f"({fault.path.name} line {raised_at(fault)})"
    assert printed(result)[1].endswith(f": failed: ValueError: no rows today {where}")
    assert result.stopped is not None
    saved = tmp_path / f"{place.step}-{place.index}-CONT.gguf"
    with default_backend().ops.having(*fault.ops):
        (again,) = replay(saved).wrong
    assert (again.verdict, again.failure) == (
        Verdict.FAILED,
        f"{again.op} node {again.name!r}: ValueError: no rows today {where}",
    )
    assert exit_code(monkeypatch, "replay", saved) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("as_before")
def test_the_command_names_a_fault_and_saves_it(
    backend: Plugin, model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named, saved = FAULTS["NaN in one row"], tmp_path / "saved"
    kernels = named.fault.written(tmp_path)
    saved.mkdir()
    prompt, place, node = first_wrong(model("llama"), named)
    command = ("diff", model("llama"), "--prompt", prompt, "-n", "0", "--reproducers", saved)
    assert exit_code(monkeypatch, *command, "--kernels", kernels) == 1
    lines = capsys.readouterr().out.splitlines()
    trace = saved / f"{place.step}-{place.index}-CONT.gguf"
    assert lines[0] == "the first wrong node:"
    assert lines[1].startswith(
        f"step {place.step} node {place.index}: CONT {node.name!r} f32 -> f32 ne {list(node.dst.ne)}: "
    )
    assert lines[2] == named.says
    assert lines[3] == f"compute it again without the model: ggml-npu replay {trace} --kernels {kernels}"
    assert exit_code(monkeypatch, "replay", trace) == 0
    assert exit_code(monkeypatch, *lines[3].split()[-4:]) == 1


def test_get_rows_that_ignores_a_stride_between_matrices_that_lie_apart(backend: Plugin) -> None:
    """No model here has a source of GET_ROWS with rows left out between its matrices: a graph of one node."""
    rng = np.random.default_rng(0)
    with Scene(backend.ggml, "CPU") as scene:
        table = scene.root("f32", (8, 6, 3, 1), rng.standard_normal(144).astype(np.float32))
        view = scene.view(table, (8, 4, 3, 1), (32, 192, 576))
        ids = scene.root("i32", (2, 3, 1, 1), np.array([[0, 3], [1, 2], [3, 0]], np.int32))
        built = scene.op("get_rows", view, ids)
        scene.fill(built)
        assert scene.compute(built) == 0
        node = convert.node(scene.ggml, built)
        first, rows = node.src[:2]
        assert first is not None
        actual, before = (Tensor.of(np.zeros(node.dst.ne[::-1], np.float32)) for _ in range(2))
        OWN["GET_ROWS"].define(actual, replace(first, nb=(4, 32, 4 * 32, 576)), rows)
        assert diagnose(node, node.dst, actual, before, False) == (
            "GET_ROWS ignores nb[2] of src0: with 128 in place of 192 it gives exactly these bytes"
        )
        OWN["GET_ROWS"].define(actual, first, rows)
        assert diagnose(node, node.dst, actual, before, False) is None


@pytest.mark.usefixtures("as_before")
def test_the_report_names_the_row_that_was_judged(model: Models) -> None:
    """Its error and its limit, not only the error of the whole tensor, which one row hardly moves."""

    def one_row(dst: Tensor, x: Tensor, params: Params) -> None:
        OWN["RMS_NORM"].define(dst, x, params=params)
        if dst.ne[1] > 3:
            dst.view()[0, 0, 3] *= np.float32(1 + 1e-5)

    with default_backend().ops.having(planted("RMS_NORM", one_row)):
        result = diff(model("llama"), PROMPT, DiffOptions(steps=0, settings=FLASH_OFF))
    judged = result.wrong[0].judged
    assert judged is not None
    assert judged.row == 3
    assert judged.limit < judged.error < 1e-9
    (line,) = [line for line in printed(result) if line.startswith("step 0") and "; judged: " in line][:1]
    assert f"; judged: row 3 of {judged.n_rows} rows is {judged.error:.2e} from the " in line
    assert line.endswith(f", the limit is {judged.limit:.2e}")
    assert diff_json(result)["nodes"][result.nodes.index(result.wrong[0])]["judged"]["row"] == 3
