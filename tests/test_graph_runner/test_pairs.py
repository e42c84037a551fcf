"""Nodes of two graphs that are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.models import Models
from kit.whole_device import NAME, whole

from ggml_backend_npu.ggml import lib
from graph_runner.base.tiny import write_tiny_llama
from graph_runner.diff.pairs import Listing, Pairs
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.run.devices import Devices
from graph_runner.run.session import Session, Settings

PROMPT = "The capital of France is"


def listing(*steps: str) -> Listing:
    found = Listing(lib.ggml())
    found.keys = [[(name,) for name in step] for step in steps]
    return found


def test_nodes_pair_in_order_step_by_step() -> None:
    pairs = Pairs.of(listing("abcde", "ab"), listing("axyde", "ba"))
    assert [pairs.device(0, place) for place in range(5)] == [0, None, None, 3, 4]
    assert [pairs.reference(0, place) for place in range(5)] == [0, None, None, 3, 4]
    paired = [(place, pairs.device(1, place)) for place in range(2) if pairs.device(1, place) is not None]
    assert len(paired) == 1, "pairs do not cross"
    assert [each.total() for each in pairs.alone] == [3, 3]


def test_each_node_is_its_own_partner_if_graphs_are_the_same() -> None:
    assert (Pairs().device(3, 7), Pairs().reference(3, 7)) == (7, 7)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole(tmp_path_factory.mktemp("whole"))


@pytest.mark.some(1)
@pytest.mark.parametrize(("fault", "wrong"), [("ANOTHER_ORDER", set()), ("ANOTHER_ORDER_AND_ONE_NODE", {"SWIGLU"})])
def test_a_backend_that_orders_nodes_otherwise_is_judged(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, wrong: set[str]
) -> None:
    """As ggml's Vulkan and Metal backends do in graph_optimize: ffn_up before ffn_gate, V before Q."""
    monkeypatch.setenv("WHOLE_FAULT", fault)
    options = DiffOptions(steps=1, device=NAME, devices=Devices((library,)))
    result = diff(write_tiny_llama(tmp_path / "llama.gguf"), PROMPT, options)
    assert {node.op for node in result.wrong} == wrong
    assert bool(result) == (not wrong)
    assert result.is_unobserved == (not wrong)
    names = [node.name for node in result.nodes if node.step == 0]
    assert names.index("ffn_gate-0") < names.index("ffn_up-0"), "results come in the reference's order"
    assert all(node.mirrored is not None for node in result.nodes if node.name in ("ffn_up-0", "ffn_gate-0", "Vcur-1"))


def test_a_listing_knows_nodes_by_their_names(model: Models) -> None:
    """A name that ggml has numbered is none: attention without flash attention and with it."""
    keys = []
    for flash in ("off", "on"):
        found = Listing(lib.ggml())
        with Session(model("llama"), Settings(flash_attention=flash, threads=1), observer=found) as session:
            session.decode([1, 2, 3])
        keys.append(found)
    pairs = Pairs.of(*keys)
    left = [{*keys[0].keys[0][place][:1]} for place in range(50) if pairs.device(0, place) is None]
    assert {str(op) for each in left for op in each} == {"MUL_MAT", "SOFT_MAX", "CONT", "SET_ROWS"}
    assert pairs.alone[1] == {"FLASH_ATTN_EXT": 2, "SET_ROWS": 2}
    for place in range(50):
        partner = pairs.device(0, place)
        if partner is not None:
            assert keys[0].keys[0][place] == keys[1].keys[0][partner]
