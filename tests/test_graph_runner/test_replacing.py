"""Nodes that the reference computes in the device's own run tell whether they make its end wrong:
`graph_runner.bisect.replacing`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kit.backends import blas
from kit.commands import Cli, assert_refused, fresh, strict_json
from kit.diffs import PROMPT
from kit.models import Models
from kit.whole import FAULT, SCALES, Memory, at, spoiling

from graph_runner.base.errors import BadInputError
from graph_runner.base.settings import Settings
from graph_runner.bisect.replacing import chosen, replaced, suspects
from graph_runner.bisect.whole import Whole, WholeOptions
from graph_runner.diff.result import Replaced
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.reports.replaced import replaced_json, replaced_line

SETTINGS = Settings(flash_attention="off", threads=1)
OPTIONS = WholeOptions(steps=1, settings=SETTINGS)


def ends(
    file: Path, *wanted: str | tuple[str, ...], memory: Memory = "host", spoilt: str = "ffn_swiglu-1"
) -> list[Replaced]:
    found: list[Replaced] = []
    backend = spoiling({"SWIGLU": at(spoilt)}, memory=memory)
    replaced(file, PROMPT, OPTIONS, backend, wanted, found.append)
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("memory", ["host", "device"])
def test_the_wrong_node_alone_heals_the_end(model: Models, memory: Memory) -> None:
    first, wrong, layer, op = ends(model("llama"), "ffn_swiglu-0", "ffn_swiglu-1", "layer1", "swiglu", memory=memory)
    assert not first
    assert first.after == first.before > first.limit
    assert wrong
    assert wrong.after == 0
    assert layer
    assert "has to run on the device" in layer.why  # the cells of the cache
    assert op
    assert replaced_line(wrong) == f"replacing ffn_swiglu-1 alone heals the end: NMSE {wrong.before:.2e} -> 0"
    assert replaced_json(first)["heals"] is False


def test_a_node_with_wrong_inputs_does_not_heal_it(model: Models) -> None:
    """What lies before it stays wrong, though all of the run goes through it."""
    after, last = ends(model("llama"), "ffn_out-0", "result_output", spoilt="ffn_swiglu-0")
    assert not after
    assert not last
    assert after.after == after.before


@pytest.mark.slow
@pytest.mark.daily(2)
def test_suspects_are_tried_until_the_end_heals(model: Models) -> None:
    backend = spoiling({"SWIGLU": at("ffn_swiglu-0", "ffn_swiglu-1"), "MUL": at("ffn_norm-1")})
    result = diff(model("llama"), PROMPT, DiffOptions(steps=0, settings=SETTINGS, backend=backend))
    groups = suspects(result)
    of_op, every = ("ffn_swiglu-0", "ffn_swiglu-1"), ("ffn_swiglu-0", "ffn_norm-1", "ffn_swiglu-1")
    assert groups == [("ffn_swiglu-0",), of_op, every]
    found: list[Replaced] = []
    replaced(model("llama"), PROMPT, replace(OPTIONS, steps=0), backend, [*groups, ("ffn_out-0",)], found.append)
    assert [bool(each) for each in found] == [False, False, True]
    assert found[1].what == "the 2 nodes of SWIGLU"
    assert found[2].what == "the 3 nodes of MUL and SWIGLU"


def test_a_diff_that_is_right_has_no_suspects(model: Models) -> None:
    assert suspects(diff(model("llama"), PROMPT, DiffOptions(steps=0, settings=SETTINGS))) == []


def test_items_select_nodes(model: Models) -> None:
    whole = Whole(model("llama"), PROMPT, OPTIONS, spoiling({}))
    whole.prepare()
    units = [unit.name for unit in whole.units]
    assert chosen("*", whole) == units
    assert chosen("swiglu", whole) == ["ffn_swiglu-0", "ffn_swiglu-1"]
    assert chosen("ffn_out-?, 0", whole)[2:] == units[:1]
    layers = [chosen(f"layer{layer}", whole) for layer in (0, 1)]
    assert chosen("layers0-1", whole) == layers[0] + layers[1]
    assert {name.replace("0", "1") for name in layers[0]} <= {*layers[1]}
    assert {*units} - {*layers[0], *layers[1]} == {"embd", "norm", "result_norm", "result_output"}
    for text, why in (
        ("ffn_nothing", "no node is 'ffn_nothing'"),
        ("layer7", "layer7"),
        ("0:MUL", "step"),
        ("", "empty"),
    ):
        with pytest.raises(BadInputError, match=why):
            chosen(text, whole)


@pytest.mark.slow
@pytest.mark.daily(3)
def test_the_command_offers_it(tmp_path: Path) -> None:
    kernels, written = tmp_path / "wrong.py", tmp_path / "result.json"
    kernels.write_text(FAULT.format(does=SCALES))
    words = (
        "--all",
        "--kernels",
        kernels,
        "-n",
        0,
        "--json",
        written,
        "--reproducers",
        tmp_path,
        "--replace",
        "layer0",
    )
    outcome = fresh("diff", "tiny", *words)
    assert outcome.code == 1, outcome.err
    assert "replacing SWIGLU 'ffn_swiglu-1' alone heals the end: NMSE " in outcome.out
    asked, offered = strict_json(written.read_text())["replaced"]
    assert (asked["what"], asked["heals"]) == ("layer0", False)
    assert (offered["nodes"], offered["heals"], offered["after"]) == (["ffn_swiglu-1"], True, 0)


def test_what_cannot_be_replaced_is_refused(cli: Cli) -> None:
    assert_refused(cli("diff", "tiny", "--reference", "npu", "--replace", "MUL"), "--replace 'MUL'", "--reference cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("item", "word"), [("ffn_nothing", "no node"), ("2:MUL", "step"), ("MUL,", "empty")])
def test_an_item_that_is_none_is_refused(item: str, word: str) -> None:
    assert_refused(fresh("diff", "tiny", "-n", 0, "--replace", item), item, word)


@pytest.mark.conformance
def test_products_of_a_library_are_replaced(tmp_path: Path) -> None:
    library, written = blas(tmp_path, "SCALED"), tmp_path / "result.json"
    prompt = "The capital of France is a city that many people visit each year, and its name is"
    words = ("--device", "BLAS", "--backend", library, "-p", prompt, "-n", 0, "--json", written)
    outcome = fresh("diff", "tiny", *words, "--reproducers", tmp_path, "--replace", "MUL_MAT")
    assert outcome.code == 1, outcome.err
    assert strict_json(written.read_text())["replaced"][0]["after"] == 0
