"""Faults planted in kernels, looked for in whole models: the first wrong node is named, with what is wrong about it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from kit.diffs import FLASH_OFF, FLASH_ON, PROMPT, QUANTISED
from kit.models import Models
from kit.support import Scene
from rich.console import Console

from ggml_backend_npu import Memory, Node, Tensor, default_backend
from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.ggml.numerics import PLAIN
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.movers import convert as to_type
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.registry.entry import Op
from ggml_backend_npu.registry.params import Params
from graph_runner.cli import main
from graph_runner.diagnosis import diagnose
from graph_runner.diff.run import DiffOptions, DiffResult, diff
from graph_runner.judging.blocks import swapped
from graph_runner.judging.results import Verdict
from graph_runner.reports.diff_report import diff_json, print_diff
from graph_runner.run.session import Sampler, Session, Settings, context_for
from graph_runner.trace import read_trace, replay
from quant import ROUNDINGS

Kernel = Callable[..., None]
BEHIND = (Verdict.EXACT, Verdict.ROUNDING, Verdict.INHERITED, Verdict.AMPLIFIED)

# kernels, each with one fault; all else is left to the definition


def ignores_nb2(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["GET_ROWS"].define(dst, replace(src, nb=(*src.nb[:2], 0, src.nb[3])), ids)


def ignores_offset(dst: Tensor, src: Tensor) -> None:
    OWN["CPY"].define(dst, replace(src, offset=0))


def next_cell(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["SET_ROWS"].define(dst, src, Tensor.of(ids.view() + 1))


def swaps_nibbles(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["SET_ROWS"].define(dst, src, ids)
    if dst.type == "q4_0":
        rows = ids.view().reshape(-1)
        dst.view()[:, :, rows] = swapped(dst.view()[:, :, rows])


def rounds_otherwise(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["SET_ROWS"].define(dst, src, ids)
    if dst.type == "q8_0":
        other = next(rounding for rounding in ROUNDINGS if rounding != default_backend().numerics.rounding)
        numerics = replace(PLAIN, rounding=other)
        dst.view()[:, :, ids.view().reshape(-1)] = to_type(src.view(), src.type, dst.type, numerics=numerics)


def leaves_out_the_mask(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: Params) -> None:
    OWN["SOFT_MAX"].define(dst, x, None, sinks, params=params)


def one_row_too_many(dst: Tensor, src: Tensor) -> None:
    OWN["CONT"].define(dst, src)
    Memory(dst.end, dst.nb[1]).bytes()[:] = 0


def nan_in_row_3(dst: Tensor, src: Tensor) -> None:
    OWN["CONT"].define(dst, src)
    if dst.ne[1] > 3:
        dst.view()[0, 0, 3] = np.nan


@dataclass(frozen=True)
class Fault:
    """A kernel with a fault.

    at      whether a node is the first one that it gets wrong
    says    what the diagnosis begins with
    behind  whether the device's own run goes on behind it: not where damage is done to what lies around the output
    prompts  of which the first is taken that has such a node
    """

    kernel: Kernel
    op: str
    model: str
    settings: Settings
    at: Callable[[Node], bool]
    says: str
    behind: bool = True
    prompts: tuple[str, ...] = (PROMPT,)

    @property
    def planted(self) -> Op:
        return Op(self.op, self.kernel, OWN[self.op].types, OWN[self.op].refuse, params=OWN[self.op].params)


class First:
    """Observer of ggml's CPU that looks for the first node that a fault gets wrong."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self.step, self._index = 0, -1
        self.found: tuple[int, int, Node] | None = None

    def before(self, address: int) -> bool:
        if not convert.computes(convert.op_name(lib.ggml(), address)):
            return False
        self._index += 1
        node = convert.node(lib.ggml(), address)
        if self.found is None and node.op == self._fault.op and self._fault.at(node):
            self.found = self.step, self._index, node
        return True

    def after(self, address: int) -> None:
        pass

    def next_step(self) -> None:
        self.step, self._index = self.step + 1, -1


def first_wrong(file: Path, fault: Fault) -> tuple[str, int, int, Node]:
    """A prompt, and step and place of the first node that a fault gets wrong in it and a token behind it."""
    for prompt in fault.prompts:
        seen = First(fault)
        with Session(file, replace(fault.settings, n_ctx=context_for(prompt, 1)), observer=seen) as session:
            session.decode(session.tokenize(prompt))
            seen.next_step()
            session.decode([Sampler()(session.logits())])
        if seen.found is not None:
            return prompt, *seen.found
    raise AssertionError("no prompt has such a node")


def any_of_op(node: Node) -> bool:
    return True


def source(node: Node) -> Tensor:
    assert node.src[0] is not None
    return node.src[0]


def rounds_apart(node: Node) -> bool:
    """Whether the two q8_0 quantisers give other blocks for what the node quantises."""
    values = source(node).view()
    blocks = [to_type(values, "f32", "q8_0", numerics=replace(PLAIN, rounding=rounding)) for rounding in ROUNDINGS]
    return node.dst.type == "q8_0" and not np.array_equal(*blocks)


FAULTS = {
    "GET_ROWS that ignores nb[2]": Fault(
        ignores_nb2, "GET_ROWS", "moe", FLASH_OFF, lambda node: source(node).ne[2] > 1,
        "GET_ROWS takes index 0 of dimension 2 of src0 for all: with nb[2] 0 in place of 32 ",
    ),
    "CPY that ignores a view's offset": Fault(
        ignores_offset, "CPY", "rwkv7", FLASH_OFF, lambda node: node.dst.n_elements > 0 and source(node).offset > 0,
        "CPY ignores the offset of src0: it reads from byte 0 of the root in place of byte 12288, ",
    ),
    "SET_ROWS with an index off by one": Fault(
        next_cell, "SET_ROWS", "llama", FLASH_ON, any_of_op,
        "SET_ROWS writes row id + 1 in place of row id, for each id of src1 (the row ids)",
    ),
    "SET_ROWS with an index off by one, of transposed values": Fault(
        next_cell, "SET_ROWS", "llama", FLASH_OFF, any_of_op,
        "SET_ROWS writes row id + 1 in place of row id, for each id of src1 (the row ids)",
    ),
    "Q4_0 with nibbles swapped": Fault(
        swaps_nibbles, "SET_ROWS", "llama", QUANTISED, lambda node: node.dst.type == "q4_0",
        "SET_ROWS swaps the two nibbles of each byte: 52 of ",
    ),
    "Q8_0 with the other rounding": Fault(
        rounds_otherwise, "SET_ROWS", "llama", QUANTISED, rounds_apart,
        "SET_ROWS rounds as ggml's ", prompts=("one two three " * 40, "four five six " * 80, "Once upon a time " * 120),
    ),
    "SOFT_MAX without its mask": Fault(
        leaves_out_the_mask, "SOFT_MAX", "llama", FLASH_OFF, any_of_op,
        "SOFT_MAX leaves out src1 (the mask), which gives exactly these bytes",
    ),
    "CONT that writes one row too many": Fault(
        one_row_too_many, "CONT", "llama", FLASH_OFF, any_of_op,
        "CONT writes up to 512 bytes behind dst: one row too many; dst itself is right", behind=False,
    ),
    "NaN in one row": Fault(
        nan_in_row_3, "CONT", "llama", FLASH_OFF, lambda node: node.dst.ne[1] > 3,
        "CONT gives NaN in row 3, where the reference has none; the others are right",
    ),
}  # fmt: skip


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


@pytest.mark.some(3)
@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(
    model: Models, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault, file = FAULTS[name], model(FAULTS[name].model)
    prompt, step, index, node = first_wrong(file, fault)
    with default_backend().ops.having(fault.planted):
        result = diff(file, prompt, DiffOptions(steps=1, settings=fault.settings, reproducers=tmp_path))
    assert not result
    first = result.wrong[0]
    assert (first.step, first.index, first.op, first.name) == (step, index, node.op, node.name)
    assert first.verdict is Verdict.INTRODUCED
    assert first.diagnosis is not None
    assert first.diagnosis.startswith(fault.says)

    place = next(i for i, each in enumerate(result.nodes) if each is first)
    in_front, behind = result.nodes[:place], result.nodes[place + 1 :]
    assert {each.verdict for each in in_front} <= {Verdict.EXACT, Verdict.ROUNDING}
    assert all(each.verdict in BEHIND for each in behind if each.op != fault.op)
    assert any(each.verdict in (Verdict.INHERITED, Verdict.AMPLIFIED) for each in behind) == fault.behind
    assert (result.stopped is None) == fault.behind

    lines = printed(result)
    assert lines[0] == "the first wrong node:"
    assert lines[1].startswith(f"step {step} node {index}: {node.op} {node.name!r} {first.types} ne ")
    assert lines[2] == first.diagnosis

    saved = tmp_path / f"{step}-{index}-{node.op}.gguf"
    assert [each.node.name for each in read_trace(saved)] == [node.name]
    assert first.reproducer == str(saved)
    with default_backend().ops.having(fault.planted):
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

    kernel = {0: plain, 1: with_ids, 2: soft_max}[right.n_src - 1]
    return Op(fault.op, kernel, right.types, right.refuse, params=right.params)


@pytest.mark.some(2)
@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.behind])
def test_behind_a_fault_nothing_is_blamed_for_it(model: Models, name: str) -> None:
    """One node is wrong, in each step at most; nodes of the same op that get its errors are not."""
    fault, file = FAULTS[name], model(FAULTS[name].model)
    prompt, step, index, node = first_wrong(file, fault)
    with default_backend().ops.having(only(fault, node.name)):
        result = diff(file, prompt, DiffOptions(steps=1, settings=fault.settings))
    assert (result.wrong[0].step, result.wrong[0].index) == (step, index)
    assert {(each.op, each.name) for each in result.wrong} == {(node.op, node.name)}
    assert all(each.verdict in BEHIND for each in result.nodes if each.name != node.name)
    assert result.stopped is None
    last = result.nodes[-1]
    assert last.verdict in (Verdict.INHERITED, Verdict.AMPLIFIED)
    assert last.isolated
    assert last.cumulative is not None
    assert last.cumulative.n_different > 0


WRONG_CONT = """
import numpy as np
from ggml_backend_npu import op

@op("CONT", types=[("f32", "f32")])
def cont(dst, src):
    dst.view()[...] = src.view().reshape(dst.ne[::-1])
    if dst.ne[1] > 3:
        dst.view()[0, 0, 3] = np.nan
"""


def fails(dst: Tensor, src: Tensor) -> None:
    raise ValueError("no rows today")


@pytest.mark.usefixtures("as_before")
def test_a_kernel_that_fails_is_named_and_saved(
    model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = Fault(fails, "CONT", "llama", FLASH_OFF, any_of_op, "")
    prompt, step, index, node = first_wrong(model("llama"), fault)
    with default_backend().ops.having(fault.planted):
        result = diff(model("llama"), prompt, DiffOptions(steps=0, settings=FLASH_OFF, reproducers=tmp_path))
    first = result.wrong[0]
    assert (first.step, first.index, first.name, first.verdict) == (step, index, node.name, Verdict.FAILED)
    where = f"({Path(__file__).name} line {fails.__code__.co_firstlineno + 1})"
    assert printed(result)[1].endswith(f": failed: ValueError: no rows today {where}")
    assert result.stopped is not None
    saved = tmp_path / f"{step}-{index}-CONT.gguf"
    with default_backend().ops.having(fault.planted):
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
    kernels, saved = tmp_path / "own.py", tmp_path / "saved"
    kernels.write_text(WRONG_CONT)
    saved.mkdir()
    prompt, step, index, node = first_wrong(model("llama"), FAULTS["NaN in one row"])
    command = ("diff", model("llama"), "--prompt", prompt, "-n", "0", "--reproducers", saved)
    assert exit_code(monkeypatch, *command, "--kernels", kernels) == 1
    lines = capsys.readouterr().out.splitlines()
    trace = saved / f"{step}-{index}-CONT.gguf"
    assert lines[0] == "the first wrong node:"
    assert lines[1].startswith(f"step {step} node {index}: CONT {node.name!r} f32 -> f32 ne {list(node.dst.ne)}: ")
    assert lines[2] == FAULTS["NaN in one row"].says
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

    of = OWN["RMS_NORM"]
    with default_backend().ops.having(Op("RMS_NORM", one_row, of.types, of.refuse, params=of.params)):
        result = diff(model("llama"), PROMPT, DiffOptions(steps=0, settings=FLASH_OFF))
    judged = result.wrong[0].judged
    assert judged is not None
    assert judged.row == 3
    assert judged.limit < judged.error < 1e-9
    (line,) = [line for line in printed(result) if line.startswith("step 0") and "; judged: " in line][:1]
    assert f"; judged: row 3 of {judged.n_rows} rows is {judged.error:.2e} from the " in line
    assert line.endswith(f", the limit is {judged.limit:.2e}")
    assert diff_json(result)["nodes"][result.nodes.index(result.wrong[0])]["judged"]["row"] == 3
