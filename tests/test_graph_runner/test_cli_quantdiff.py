"""ggml-npu quantdiff: what it prints and writes, its page, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from kit.browser import Browser
from kit.commands import Cli, assert_refused, strict_json
from kit.models import write_tiny_moe
from kit.quantised import TEXT, write_pair

from graph_runner.reports.quantdiff import quantdiff_html


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models of one, one of another, a text, and one that is too short."""
    folder = tmp_path_factory.mktemp("models")
    write_pair(folder)
    write_tiny_moe(folder / "other.gguf")
    (folder / "text.txt").write_text(TEXT)
    (folder / "short.txt").write_text("hello")
    return folder


def words(folder: Path, *more: object) -> list[object]:
    return ["quantdiff", folder / "big.gguf", folder / "small.gguf", "-f", folder / "text.txt", "-c", 32, *more]


def test_what_it_prints(cli: Cli, folder: Path) -> None:
    outcome = cli(*words(folder, "--bpw", 6, "--types", "q4_0,q5_0,q8_0", "--chunks", 2))
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[2] == "text of 64 tokens in chunks of 32, 30 tokens scored; tensors put back on 32 tokens"
    assert re.search(r"^KL divergence +0\.\d{6} \+- 0\.\d{6} nats +0\.\d{6} \+- 0\.\d{6} nats$", outcome.out, re.M)
    assert re.search(r"^output\.weight +0\.03 +0\.0\d+ +0\.0\d+ +\d\.\d+$", outcome.out, re.M)  # of kinds
    assert re.search(r"^blk\.\d\.\S+ +q4_0 +0\.01 +-?0\.\d+ +0\.\d+ +\S+ +7\.\d+e-03 +\S+ +0$", outcome.out, re.M)
    (most,) = (line for line in lines if re.match(r"cost most, \d\.\d\d MiB more together: ", line))
    assert len(re.findall(r"\S+\.weight", most)) == 5
    assert "... and 6 more tensors" in lines
    assert "  --tensor-type '^token_embd\\.weight$=" in outcome.out
    assert re.fullmatch(
        r"KL divergence \S+ \+- \S+ nats at 4\.\d\d bits per weight; \S+ costs most for its bytes; "
        r"with the types chosen \S+ \+- \S+ at 5\.\d\d", lines[-1]
    )  # fmt: skip


def test_its_json(cli: Cli, folder: Path) -> None:
    outcome = cli(*words(folder, "--tensors", 1, "--bpw", 6, "--json", "-"))
    data = strict_json(outcome.out)
    assert [*data] == [
        "schema", "verdict", "big", "small", "chunk", "threads", "flash_attention", "cache_type_k", "cache_type_v",
        "n_tokens", "n_put_back", "scores", "kinds", "layers", "bins", "tensors", "most", "proposal",
    ]  # fmt: skip
    assert data["schema"] == "ggml-npu quantdiff 1"
    assert [*data["big"]] == ["model", "bytes", "bpw"]
    assert [*data["scores"]] == ["n", "kl", "same_top", "perplexity", "perplexity_base", "ratio"]
    assert [*data["kinds"][0]] == ["kind", "bytes", "gain", "per_mib"]
    assert [each["layer"] for each in data["layers"]] == [0, 1]
    tensor = data["tensors"][0]
    assert [*tensor] == ["name", "layer", "kind", "type_big", "type_small", "n_weights", "error", "cost"]
    assert [*tensor["error"]] == ["squared", "nmse", "worst", "worst_at", "outliers", "histogram"]
    assert len(tensor["error"]["histogram"]) == len(data["bins"]) - 1
    assert sum(each["cost"] is not None for each in data["tensors"]) == 1
    assert [*data["proposal"]] == ["bpw", "predicted", "scores", "types", "command"]
    assert data["proposal"]["types"].keys() == {each["name"] for each in data["tensors"]}


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("models", "more", "says"),
    [
        ("big.gguf none.gguf", [], ["model '", "none.gguf'", "no such file"]),
        ("big.gguf text.txt", [], ["text.txt'", "not a GGUF file"]),
        ("big.gguf other.gguf", [], ["tensor 'blk.0.ffn_gate.weight' is not in 'other.gguf'"]),
        ("big.gguf big.gguf", [], ["every tensor has the same bytes"]),
        ("big.gguf small.gguf", ["-f", "short.txt"], ["text of 7 tokens", "a chunk of 32"]),
        ("big.gguf small.gguf", ["-f", "big.gguf"], ["big.gguf'", "UTF-8"]),
        ("big.gguf small.gguf", ["--bpw", "1"], ["--bpw 1", "the smallest"]),
        ("big.gguf small.gguf", ["--bpw", "6", "--types", "iq1_s"], ["--types 'iq1_s'"]),
        ("big.gguf small.gguf", ["--types", "q8_0"], ["--types 'q8_0'", "--bpw"]),
        ("big.gguf small.gguf", ["-c", "4"], ["--ctx-size", "16"]),
        ("big.gguf small.gguf", ["--json", "small.gguf"], ["--json", "is what SMALL reads"]),
    ],
    ids=lambda each: each.replace(" ", "-") if isinstance(each, str) else " ".join(each)[:24],
)
def test_refusals(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, models: str, more: list[str], says: list[str]
) -> None:
    monkeypatch.chdir(folder)
    assert_refused(cli("quantdiff", *models.split(), "-f", "text.txt", "-c", 32, *more), *says)


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    """The page of a comparison of two layers, three kinds and one tensor of no layer; one was not measured."""
    error = {"squared": 1.0, "nmse": 7e-3, "worst": 0.02, "worst_at": [3, 1], "outliers": 2, "histogram": [0] * 40}
    error["histogram"] = [0] * 20 + [5, 50, 500] + [0] * 17
    gain = {"value": 1e-3, "error": 1e-4}
    cost = {"bytes": 1 << 20, "gain": gain, "per_mib": 1e-3}
    tensors: list[dict[str, Any]] = [
        {"name": name, "layer": layer, "kind": kind, "type_big": "f16", "type_small": "q4_0", "n_weights": 1 << 20,
         "error": error, "cost": cost | {"per_mib": 1e-3 * (1 + i), "gain": gain | {"value": 1e-3 * (i - 1)}}}
        for i, (name, layer, kind) in enumerate(
            [("token_embd.weight", None, "token_embd.weight")]
            + [(f"blk.{n}.{kind}", n, kind) for n in (0, 1) for kind in ("attn_q.weight", "ffn_<b>down.weight")]
        )
    ]  # fmt: skip
    tensors[2]["cost"] = None
    mean = {"value": 0.5, "error": 0.1}
    scores = {"n": 31} | dict.fromkeys(("kl", "same_top", "perplexity", "perplexity_base", "ratio"), mean)
    data = {
        "verdict": "KL divergence <b>", "big": {"model": "big", "bytes": 1, "bpw": 16.0}, "chunk": 64,
        "small": {"model": "</script>small", "bytes": 1, "bpw": 4.5}, "n_tokens": 128, "n_put_back": 64,
        "scores": scores, "kinds": [{"kind": "attn_q.weight"} | cost], "layers": [{"layer": 0} | cost],
        "bins": [-8 + k / 4 for k in range(41)], "tensors": tensors, "proposal": None,
    }  # fmt: skip
    file = folder / "page.html"
    file.write_text(quantdiff_html(data))
    return file


def test_data_of_the_page_stays_text(page: Path) -> None:
    text = page.read_text()
    assert "<b>" not in text
    assert text.count("</script>") == 2
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_the_command_writes_the_page(cli: Cli, folder: Path) -> None:
    outcome = cli(*words(folder, "--tensors", 0, "--html", "-"))
    assert outcome.out.startswith("<!doctype html>")
    assert "blk.1.ffn_up.weight" in outcome.out


CHOSEN = "document.querySelector('#heat [aria-selected=true]').dataset.tensor"


def test_the_page_in_a_browser(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert len(browser.texts("#heat td[role=gridcell]")) == 5
    assert browser.run(CHOSEN) == "blk.1.ffn_<b>down.weight"  # it has the most for each MiB
    browser.run("document.querySelector('#heat [aria-selected=true]').focus()")
    for key, expected in (
        ("ArrowLeft", "blk.1.attn_q.weight"), ("ArrowUp", "blk.0.attn_q.weight"), ("ArrowUp", "blk.0.attn_q.weight"),
        ("ArrowRight", "blk.0.ffn_<b>down.weight"),
    ):  # fmt: skip
        browser.key(key)
        assert browser.run(CHOSEN) == expected
    assert browser.run("document.activeElement.dataset.tensor") == "blk.0.ffn_<b>down.weight"
    assert "not measured" in browser.texts("#tensor td")
    assert len(browser.texts("#tensor .histogram rect")) == 40
    browser.click('[data-sort="name"]')
    assert browser.texts("#rows th")[0] == "blk.0.attn_q.weight"
    browser.open(page, "tensor=token_embd.weight&metric=nmse")
    assert browser.run(CHOSEN) == "token_embd.weight"
    assert browser.run("document.getElementById('metric').value") == "nmse"
    assert browser.complaints == []
    assert (
        browser.requests() == [f"{page.as_uri()}#tensor=token_embd.weight&metric=nmse"] or len(browser.requests()) == 1
    )


def test_the_page_at_400_pixels(browser: Browser, page: Path) -> None:
    browser.resize(400, 800)
    browser.open(page)
    assert browser.run("document.documentElement.scrollWidth") <= 400
    browser.resize(1366, 900)
