"""Hazards of whole models: none in what llama.cpp and this project run, and what is planted into a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from kit.backends import blas, rpc_library, served
from kit.models import write_tiny_gpt_oss, write_tiny_mamba, write_tiny_moe, write_tiny_rwkv7
from kit.optimising import cells_last, optimise, second_product_first
from kit.whole_faults import fuses_residual
from tools.architectures import models

from ggml_backend_npu import Backend, Options
from graph_runner.base.settings import Settings
from graph_runner.base.tiny import write_tiny_llama
from graph_runner.hazards import Kind, check
from graph_runner.hazards.graph import COPY
from graph_runner.hazards.watching import HazardOptions, watched
from graph_runner.run.devices import Devices
from graph_runner.tools.suites import folder

PROMPT = "The capital"
LONG = "abcd " * 40  # of 40 tokens: ggml-blas takes products of 32 columns and more
OFF = Settings(flash_attention="off")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "llama.gguf")


@pytest.mark.some(2)
@pytest.mark.daily(2)
@pytest.mark.parametrize("write", [write_tiny_moe, write_tiny_gpt_oss, write_tiny_mamba, write_tiny_rwkv7])
def test_models_have_none(write: Callable[[Path], Path], tmp_path: Path) -> None:
    backend = Backend(options=Options(ops="all"))
    graphs = watched(write(tmp_path / "model.gguf"), PROMPT, HazardOptions(settings=OFF), backend)
    assert [graph.name for graph in graphs] == ["prompt", "token 1"]
    assert [str(found) for graph in graphs for found in check(graph).findings] == []
    assert all(graph.is_as_built for graph in graphs)
    assert all(len(graph.nodes) > 40 for graph in graphs)


@pytest.mark.parametrize("ops", ["default", "all"])
def test_memory_of_a_device_has_none_and_splits_have_their_inputs(llama: Path, ops: str) -> None:
    kind = "gpu" if ops == "all" else "accel"
    backend = Backend(options=Options(ops=ops, memory="device", device_type=kind))
    settings = replace(OFF, gpu_layers=999 if ops == "all" else 0)
    graphs = watched(llama, PROMPT, HazardOptions(settings=settings), backend)
    assert [str(found) for graph in graphs for found in check(graph).findings] == []
    copies = [node for graph in graphs for node in graph.nodes if node.op == COPY]
    assert copies
    assert any(copy.reads for copy in copies) == (ops == "default")  # else all are inputs of the graph


@pytest.mark.parametrize("sequences", [1, 2])
def test_sequences_run_together(llama: Path, sequences: int) -> None:
    settings = replace(OFF, sequences=sequences)
    graphs = watched(llama, PROMPT, HazardOptions(settings=settings), Backend(options=Options(ops="all")))
    assert [str(found) for graph in graphs for found in check(graph).findings] == []
    tensors = [[each.tensor for node in graph.nodes for each in (*node.reads, *node.writes)] for graph in graphs]
    found = [max(tensor.ne[3] for tensor in of_graph) for of_graph in tensors]
    alone = [1] * (sequences - 1)  # the first begins before the second, which has fewer tokens
    assert found == [*alone, *[sequences] * (len(graphs) - len(alone))]


def test_a_prompt_of_several_batches_has_a_graph_for_each(tmp_path: Path) -> None:
    backend = Backend(options=Options(ops="all"))
    graphs = watched(write_tiny_moe(tmp_path / "moe.gguf"), "ab " * 600, HazardOptions(steps=0, settings=OFF), backend)
    assert [graph.name for graph in graphs][:2] == ["prompt", "prompt, graph 2"]
    assert [sum(len(step.nodes) == 6 for step in graph.order) for graph in graphs] == [2] * len(graphs)
    assert all(graph.is_as_built and check(graph) for graph in graphs)


def test_splits_of_one_device_that_follow_each_other(tmp_path: Path) -> None:
    """Weights that lie on the device are copied to the CPU where a node reads them, which begins a split: their copies
    lie in the same memory, one after another."""
    backend = Backend(options=Options(memory="device"))
    graphs = watched(write_tiny_gpt_oss(tmp_path / "gpt-oss.gguf"), PROMPT, HazardOptions(settings=OFF), backend)
    sinks = [node for node in graphs[0].nodes if node.op == COPY and "attn_sinks" in node.name]
    assert len({node.writes[0].tensor.address for node in sinks}) == 1 < len(sinks)
    assert [str(found) for graph in graphs for found in check(graph).findings] == []


def test_operators_are_seen_as_such(tmp_path: Path) -> None:
    backend = Backend(options=Options(ops="all"))
    graphs = watched(write_tiny_moe(tmp_path / "moe.gguf"), PROMPT, HazardOptions(settings=OFF), backend)
    sizes = [len(step.nodes) for step in graphs[0].order if len(step.nodes) > 1]
    assert sizes == [6, 6]  # the routing of each layer


def test_a_fusion_that_leaves_out_what_a_later_node_reads(llama: Path) -> None:
    found = [each for graph in watched(llama, PROMPT, HazardOptions(steps=0, settings=OFF), fuses_residual())
             for each in check(graph).findings]  # fmt: skip
    assert {each.kind for each in found} == {Kind.LEFT_OUT}
    assert str(found[0]).startswith("left out by a fusion: ADD 'l_out-0' (at ")
    assert "reads the result of ADD 'ffn_inp-0'" in str(found[0])


def test_an_order_that_an_optimiser_may_choose_is_right(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimise(monkeypatch, second_product_first)
    backend = Backend(options=Options(ops="all"))
    (graph,) = watched(llama, PROMPT, HazardOptions(steps=0, settings=OFF), backend)
    assert graph.is_as_built
    assert [step.nodes[0] for step in graph.order] != [*range(len(graph.nodes))]
    assert [str(each) for each in check(graph).findings] == []


def test_cells_that_an_optimiser_has_written_after_they_were_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimise(monkeypatch, cells_last)
    backend = Backend(options=Options(ops="all"))
    (graph,) = watched(llama, PROMPT, HazardOptions(steps=0, settings=OFF), backend)
    found = check(graph).findings
    assert [each.kind for each in found] == [Kind.TOO_EARLY]
    assert str(found[0]).startswith("read before it is written: MUL_MAT 'kq-0' (at ")
    assert "reads what SET_ROWS 'cache_k_l0 (view)' (at 49) has not written yet" in str(found[0])


@pytest.mark.daily(4)
@pytest.mark.conformance
@pytest.mark.parametrize("ops", ["default", "all"])
@pytest.mark.parametrize("memory", ["host", "device"])
@pytest.mark.parametrize("flash_attention", ["off", "on"])
def test_no_model_of_test_llama_archs_has_any(ops: str, memory: str, flash_attention: Literal["on", "off"]) -> None:
    backend = Backend(options=Options(ops=ops, memory=memory))
    options = HazardOptions(settings=Settings(flash_attention=flash_attention))
    found = []
    for model in models(folder().with_name("models")):
        for graph in watched(model, PROMPT, options, backend):
            found += [f"{model.stem}, {graph.name}: {each}" for each in check(graph).findings]
            assert graph.is_as_built, model
    assert found == []


@pytest.fixture(scope="module")
def partners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devices]:
    made = tmp_path_factory.mktemp("partners")
    with served(made / "server.log") as (address, _):
        yield Devices((rpc_library(), blas(made)), (address,))


@pytest.mark.conformance
@pytest.mark.parametrize(("device", "layers"), [("RPC0", 999), ("RPC0", 1), ("BLAS", 0)])
@pytest.mark.parametrize(("flash_attention", "sequences"), [("off", 1), ("on", 2)])
def test_no_model_of_test_llama_archs_has_any_on_other_devices(
    partners: Devices, device: str, layers: int, flash_attention: Literal["on", "off"], sequences: int, turn: int
) -> None:
    """An eighth of the models each day, and the one that changes devices most often."""
    settings = Settings(flash_attention=flash_attention, sequences=sequences, gpu_layers=layers, threads=1)
    files, found = models(folder().with_name("models")), []
    for model in {*files[turn % 8 :: 8], *(file for file in files if file.stem == "kimi-k3-moe")}:
        for graph in watched(model, LONG, HazardOptions(device, partners, settings=settings)):
            found += [f"{model.stem}, {graph.name}: {each}" for each in check(graph).findings]
            assert graph.is_as_built, model
    assert found == []
