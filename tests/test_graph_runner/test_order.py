"""The order of the device's own run is a part of each diff: hazards make it wrong, and nodes that were moved are
compared with the same ones."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kit.backends import rpc_library, served
from kit.commands import fresh
from kit.diffs import FLASH_OFF, planted, run
from kit.models import Models
from kit.optimising import Change, cells_last, optimise, second_product_first
from kit.whole import at, spoiling
from kit.whole_faults import fuses_residual

from ggml_backend_npu import Backend, Options, Tensor
from ggml_backend_npu.device.backend import DeviceBackend
from ggml_backend_npu.device.sim import Simulator
from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.ops import OWN
from graph_runner.base.console import Console
from graph_runner.base.variants import Variants
from graph_runner.diff.run import DiffResult
from graph_runner.judging.results import Fate
from graph_runner.reports.diff_report import diff_json, print_diff
from graph_runner.reports.html import diff_html
from graph_runner.reports.scope import scope_line
from graph_runner.tools.triage import named


def every_op(**options: Any) -> Backend:
    return Backend(options=Options(ops="all", **options))


def printed(result: DiffResult) -> str:
    written = StringIO()
    print_diff(result, Console(file=written, width=400))
    return written.getvalue()


def gate_and_up(nodes: list[int]) -> list[int]:
    """In each layer the products of the gate and of what it gates change places, which have one op and one size."""
    names = [convert.node(lib.ggml(), node).name for node in nodes]
    nodes = list(nodes)
    for layer in range(2):
        places = [names.index(f"ffn_{part}-{layer}") for part in ("gate", "up") if f"ffn_{part}-{layer}" in names]
        if len(places) == 2:
            a, b = places
            nodes[a], nodes[b] = nodes[b], nodes[a]
    return nodes


@pytest.mark.parametrize("options", [{}, {"memory": "device", "device_type": "gpu"}])
def test_each_graph_is_checked_once(model: Models, options: dict[str, str]) -> None:
    result = run(model("llama"), steps=3, backend=every_op(**options))
    assert result, printed(result)
    assert [each.graph for each in result.order] == ["prompt", "token 1"]
    assert all(each.nodes >= 50 and each.reads > 100 and each.is_as_built for each in result.order)
    assert "; order of 2 graphs checked; " in scope_line(result)


def test_each_part_of_a_prompt_has_a_graph(model: Models) -> None:
    result = run(model("llama"), steps=0, backend=every_op(), settings=replace(FLASH_OFF, sequences=2))
    assert [each.graph for each in result.order] == ["prompt", "prompt, graph 2"]
    assert all(each.is_as_built for each in result.order)


@pytest.mark.parametrize("change", [second_product_first, gate_and_up])
def test_nodes_that_a_device_moves_are_compared_with_the_same(
    model: Models, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    optimise(monkeypatch, change)
    result = run(model("llama"), steps=1, backend=every_op(fusion="off"))
    assert result, printed(result)
    assert result.fates == {Fate.JUDGED: 100}
    assert len(result.notes) == 1
    assert result.notes[0].endswith("nodes later than CPU; each is compared with the same one")
    assert "; order of 2 graphs checked; " in scope_line(result)


def empty_first(nodes: list[int]) -> list[int]:
    """A GET_ROWS that gives no element runs before the one that comes before it."""
    each = [convert.node(lib.ggml(), node) for node in nodes]
    rows = [place for place, node in enumerate(each) if node.op == "GET_ROWS"]
    for before, place in pairwise(rows):
        if not each[place].dst.n_elements:
            return [*nodes[:before], nodes[place], *nodes[before:place], *nodes[place + 1 :]]
    return nodes


@pytest.mark.slow
@pytest.mark.daily(2)
def test_a_moved_node_may_be_empty(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the states that no sequence has; its ids lie in memory that the host cannot read."""
    optimise(monkeypatch, empty_first)
    result = run(model("rwkv7"), steps=0, backend=DeviceBackend(Simulator(memory=1 << 28)))
    assert result, printed(result)
    assert "each is compared with the same one" in result.notes[0]


def test_a_moved_node_that_is_wrong_is_named(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    optimise(monkeypatch, second_product_first)
    result = run(model("llama"), steps=0, backend=spoiling({"MUL_MAT": at("Kcur-0")}))
    assert [node.name for node in result.wrong] == ["Kcur-0"]
    assert result.hazards == []


def test_cells_that_are_set_after_they_were_read(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    optimise(monkeypatch, cells_last)
    result = run(model("llama"), steps=0, backend=every_op(fusion="off"))
    assert not result
    what = "MUL_MAT 'kq-0' (at 9) reads what SET_ROWS 'cache_k_l0 (view)' (at 49) has not written yet"
    right = "right: SET_ROWS 'cache_k_l0 (view)' (at 49) before MUL_MAT 'kq-0' (at 9)"
    lines = printed(result).splitlines()
    assert lines[0].startswith(f"prompt: read before it is written: {what}: ")
    assert " bytes at 0x" in lines[0]
    assert lines[0].endswith(right)
    assert lines[-1].startswith(f"wrong: 1 hazard: {what}; {right}")
    data = diff_json(result)
    assert (data["passed"], data["answer"], data["order"]["unknown"]) == (False, "wrong", "")
    (hazard,) = data["order"]["graphs"][0]["hazards"]
    assert hazard["text"] in lines[0]
    assert named(data) == hazard["text"]
    assert "read before it is written: MUL_MAT" in diff_html(data)


def test_a_value_that_a_fusion_leaves_out_and_a_later_node_reads(model: Models) -> None:
    result = run(model("llama"), steps=0, backend=fuses_residual())
    assert result.hazards
    assert str(result.hazards[0][1]).startswith("left out by a fusion: ADD 'l_out-0' (at ")
    assert "wrong: 3 hazards: ADD 'l_out-0' (at 21) reads the result of ADD 'ffn_inp-0'" in printed(result)


def test_the_order_of_a_run_that_stops_is_not_known(model: Models) -> None:
    def fails(dst: Tensor, x: Tensor, params: object) -> None:
        raise ValueError("no")

    ops = {**OWN, "RMS_NORM": planted("RMS_NORM", fails)}
    result = run(model("llama"), steps=1, backend=Backend(ops=ops.values(), options=Options(ops="all")))
    assert result.stopped is not None
    assert result.order == []
    assert "; order not checked: the run ended early; " in scope_line(result)


def test_graphs_of_two_kinds_are_checked_as_they_ran(model: Models) -> None:
    variants = Variants.of(("CPU", []), ("CPU", ["flash-attn=on"]))
    result = run(model("llama"), steps=0, reference="CPU", device="CPU", variants=variants)
    assert result.hazards == []
    assert "; order of 1 graph checked as it ran, since the graph of CPU" in scope_line(result)


@pytest.mark.slow
def test_what_another_process_runs_is_not_known(model: Models, tmp_path: Path) -> None:
    """In a process of its own: ggml aborts if a server is gone that its registry still has."""
    with served(tmp_path / "log") as (address, _):
        asked = "-n", 0, "--device", "RPC0", "--backend", rpc_library(), "--rpc", address
        outcome = fresh("diff", model("llama"), *asked)
    assert outcome.code == 0, outcome.out + outcome.err
    assert "; order not checked: another process runs the graphs of RPC0; " in " ".join(outcome.out.split())
