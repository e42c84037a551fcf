"""The page of two recorded runs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from kit.browser import Browser
from kit.pages import NASTY, Page, assert_alone

from graph_runner.record.comparing import Comparison, Drift, Ends, Parting
from graph_runner.record.origins import Origin, Origins
from graph_runner.reports.record import compare_html, comparison_json

FIRST = Parting(1, 14, 11, (8, 15), "MUL_MAT", "attn_out-1", 1, 6.4e-7, False, 209)
PART = Comparison(
    "a.gguf", "b.gguf", [("settings.flash_attention", "off", "on")], (4, 4), FIRST, 600, 90,
    Counter(SET_ROWS=4), Counter(SOFT_MAX=8), Counter(FLASH_ATTN_EXT=7),
    [Drift(0, 200), Drift(1, 200, 60, 1e-3, "ffn_out-1", 2), Drift(None, 200, 30, float("inf"), "result_output", 1)],
    [Drift(None, 200), Drift(None, 200, 50, float("inf"), "result_output", 1), Drift(1, 200, 40, 1e-3, "ffn_out-1", 2)],
    [Ends(0, True, True, 0, 0), Ends(1, False, True, 1e-5, 2e-6), Ends(2, False, False, 1e-3, 3e-4)],
    3, None, Origins(begins={"MUL_MAT attn_out-*": Origin(40, 1e-3)}, inherits=50),
)  # fmt: skip
EQUAL = Comparison(
    "a.gguf", "b.gguf", [], (1, 1), compared=3, layers=[Drift(0, 3)], by_step=[Drift(None, 3)],
    ends=[Ends(0, True, True, 0, None)], same_state=True,
)  # fmt: skip
DATA = comparison_json(PART)


def test_the_page_holds_the_json_of_the_command() -> None:
    assert Page(compare_html(DATA)).data == json.loads(json.dumps(DATA))


def test_no_text_of_the_data_becomes_a_tag_or_ends_the_script() -> None:
    drifts = [Drift(0, 2, 1, 1e-3, NASTY, 0)]
    ops = Counter({NASTY: 1})
    nasty = replace(
        PART, a=NASTY, b=NASTY, differing=[(NASTY, NASTY, NASTY)], first=replace(FIRST, op=NASTY, name=NASTY),
        layers=drifts, by_step=drifts, shapes=ops, alone_a=ops, alone_b=ops,
        origins=Origins(begins={NASTY: Origin(1, 1e-3)}),
    )  # fmt: skip
    html = compare_html(comparison_json(nasty))
    page = Page(html)
    assert len(page.scripts) == 2
    assert "<script>alert" not in html
    assert not [tag for tag, attributes in page.tags if tag == "img" or "onerror" in attributes]
    html.encode()


def test_the_page_names_nothing_that_lies_elsewhere() -> None:
    assert_alone(Page(compare_html(DATA)))


def test_all_but_the_picture_is_readable_without_a_script() -> None:
    html = compare_html(DATA).partition('<script type="application/json"')[0]
    for text in (
        "MUL_MAT &#39;attn_out-1&#39;, node 14 of step 1 (tokens 8 to 15)", "NMSE some 6.4e-07, layer 1; 209 results",
        "in b.gguf it is node 11", "600 compared, 90 differ", "others from step 3 on", "1 of 3 steps equal",
        "<code>ffn_out-1</code>, step 2", "not finite", ">3.0e-04<", "another</td>", "MUL_MAT attn_out-*",
        "no partner, of a.gguf", "FLASH_ATTN_EXT", "another type or shape", "settings.flash_attention",
    ):  # fmt: skip
        assert text in html, text


def test_what_is_equal_has_neither_parting_nor_tables() -> None:
    html = compare_html(comparison_json(EQUAL)).partition('<script type="application/json"')[0]
    assert '<h1 class="passed">equal: 3 results' in html
    assert "<table" not in html


# in a browser


def opened(browser: Browser, tmp_path: Path, comparison: Comparison, fragment: str = "") -> Browser:
    file = tmp_path / "page.html"
    file.write_text(compare_html(comparison_json(comparison)))
    browser.open(file, fragment)
    assert browser.complaints == []
    assert len(browser.requests()) == 1
    return browser


def test_the_page_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, PART)
    count = (
        "[...document.querySelectorAll('#drift .dots')].map(path => (path.getAttribute('d').match(/M/g) ?? []).length)"
    )
    assert page.run(count) == [3, 0]
    assert page.texts("#drift svg > text")[-3:] == ["0", "1", "none"]
    page.run("document.querySelector('#drift svg').focus()")
    assert page.texts("#drift .tip p") == [
        "layer 1", "60 of 200 nodes differ", "worst NMSE 1.0e-3 at ffn_out-1, step 2", "here the runs part first",
    ]  # fmt: skip
    page.key("ArrowRight")
    assert "worst NMSE not finite at result_output, step 1" in page.texts("#drift .tip p")
    page.run("(s => { s.value = 'steps'; s.dispatchEvent(new Event('change')); })(document.querySelector('#along'))")
    assert page.run("location.hash") == "#along=steps"
    assert page.run(count) == [3, 3]
    page.run("document.querySelector('#drift svg').focus()")
    page.key("End")
    assert page.texts("#drift .tip p")[-1] == "logits: NMSE 1.0e-3, KL divergence 3.0e-4; another most likely token"


@pytest.mark.slow
def test_ends_alone_are_drawn_by_step(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, replace(PART, first=None, layers=[], by_step=[]), "along=layers")
    assert page.texts("#along option") == ["steps"]
    assert page.run("document.querySelectorAll('#drift .dots')[1].getAttribute('d').match(/M/g).length") == 3


@pytest.mark.parametrize("comparison", [PART, EQUAL], ids=["part", "equal"])
def test_the_page_at_400_pixels(browser: Browser, tmp_path: Path, comparison: Comparison) -> None:
    page = opened(browser, tmp_path, comparison)
    browser.resize(400, 800)
    assert page.run("document.documentElement.scrollWidth") <= 400
    browser.resize(1366, 900)
