"""The page of a timeline, and that of two."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.browser import Browser
from kit.commands import Cli, assert_refused, strict_json
from kit.pages import NASTY, Page, assert_alone
from kit.timelines import node, timeline

from graph_runner.reports.timeline import timeline_html, timeline_json
from graph_runner.timeline.events import Timeline, trace_json


def made(times: int = 1, device: str = "NPU") -> Timeline:
    """A timeline of three steps, two layers and a node in none, in ms."""
    nodes = [
        node(step, place, op, name, times * 1_000_000 * ms, device)
        for step in range(3)
        for place, (op, name, ms) in enumerate(
            [("GET_ROWS", "embd", 1), ("MUL_MAT", "Qcur-0", 8), ("ADD", "l_out-0", 2), ("MUL_MAT", "Qcur-1", 4)]
        )
    ]
    return timeline(*nodes, walls=[times * 20_000_000] * 3, device=device, measured={device: "inside"})


ONE = timeline_json([made()], ["a.json"])
TWO = timeline_json([made(), made(3, "CPU")], ["a.json", "b.json"])


def test_the_data_is_in_the_page_as_it_was_given() -> None:
    for data in (ONE, TWO):
        assert Page(timeline_html(data)).data == json.loads(json.dumps(data))
    assert len(timeline_html(ONE)) < len(timeline_html(TWO)) < 60_000


def test_no_text_of_the_data_becomes_a_tag_or_ends_the_script() -> None:
    nodes = [node(0, 0, NASTY, f"{NASTY}-0", 10, NASTY), node(0, 1, "ADD", "x", 3, NASTY)]
    texts: dict[str, Any] = {"model": NASTY, "description": NASTY, "machine": NASTY, "ggml": NASTY, "device": NASTY}
    texts |= {"settings": {NASTY: NASTY}, "measured": {NASTY: NASTY}}
    nasty = timeline(*nodes, **texts)
    for timelines in ([nasty], [nasty, made()], [made(), nasty]):
        html = timeline_html(timeline_json(timelines, [NASTY, f"{NASTY}/b"][: len(timelines)]))
        page = Page(html)
        assert len(page.scripts) == 2
        assert "<script>alert" not in html
        assert not [tag for tag, attributes in page.tags if tag == "img" or "onerror" in attributes]
        assert page.data["timelines"][0]["name"] == NASTY
        html.encode()


def test_the_page_names_nothing_that_lies_elsewhere() -> None:
    for data in (ONE, TWO):
        assert_alone(Page(timeline_html(data)))


def test_run_and_table_are_readable_without_a_script() -> None:
    html = timeline_html(ONE).partition('<script type="application/json"')[0]
    for text in (
        "14 tokens in 3 steps", "60.00 ms, of which nodes 75.0%", "1.03 times as long", "1.0 GB/s copied", "threads 1",
        ">MUL_MAT<", ">36.00<", ">60.0%<", ">0.5<", ">50%<",
    ):  # fmt: skip
        assert text in html


def test_the_command_writes_the_numbers_of_its_file(cli: Cli, tmp_path: Path) -> None:
    """Of one timeline and of two; and nothing else where the page is stdout."""
    for name, each in (("a", made()), ("b", made(3))):
        (tmp_path / f"{name}.json").write_text(json.dumps(trace_json(each)))
    done = cli("timeline", tmp_path / "a.json", "--html", "-")
    assert done.code == 0
    assert done.out.startswith("<!doctype html>")
    assert done.out.endswith("</html>\n")
    data = Page(done.out).data
    assert data["timelines"][0]["wall"] == 60_000_000
    assert [(each["op"], each["of"][0]["ns"]) for each in data["ops"]][:2] == [
        ("MUL_MAT", 36_000_000), ("ADD", 6_000_000),
    ]  # fmt: skip
    assert data["longest"][0]["id"] == "step 0 node 1, MUL_MAT 'Qcur-0'"
    assert (data["longest"][0]["of"][0]["count"], data["longest"][0]["of"][0]["ns"]) == (3, 24_000_000)
    written = tmp_path / "two.html"
    assert cli("timeline", tmp_path / "a.json", tmp_path / "b.json", "--html", written).code == 0
    data = Page(written.read_text()).data
    assert data["verdict"] == "b.json took 180.00 ms, 3.00 times as long as a.json, which took 60.00 ms"
    assert [row["ns"] for row in data["ops"][0]["of"]] == [36_000_000, 108_000_000]


def test_a_log_has_no_page(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("nothing")
    page = tmp_path / "page.html"
    assert_refused(cli("timeline", tmp_path / "a.log", "--html", page), "--html", "does not say when nodes began")
    assert not page.exists()


@pytest.mark.slow
def test_a_run_has_a_file_and_a_page(cli: Cli, tmp_path: Path) -> None:
    files = tmp_path / "t.json", tmp_path / "t.html"
    assert cli("timeline", "tiny", "-n", 1, "--threads", 1, "-o", files[0], "--html", files[1]).code == 0
    trace, page = strict_json(files[0].read_text()), Page(files[1].read_text()).data
    nodes = [each for each in trace["traceEvents"] if each.get("cat") == "node"]
    assert sum(row["count"] for op in page["ops"] for row in op["of"]) == len(nodes)
    assert {each["id"] for each in page["longest"]} <= {each["args"]["id"] for each in nodes}


# in a browser


def opened(browser: Browser, tmp_path: Path, data: dict[str, Any], fragment: str = "") -> Browser:
    file = tmp_path / "page.html"
    file.write_text(timeline_html(data))
    browser.open(file, fragment)
    assert browser.complaints == []
    assert len(browser.requests()) == 1
    return browser


def test_the_page_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, ONE)
    assert len(page.texts("#steps rect.bar")) == 3 * 4  # ops, and what is outside of nodes
    assert page.texts("#layers svg > text")[-3:] == ["0", "1", "none"]
    heights = page.run("[...document.querySelectorAll('#steps rect.bar')].map(bar => +bar.getAttribute('height'))")
    assert heights[0] / heights[1] == pytest.approx(12 / 2, rel=1e-3)
    page.run("document.querySelector('#steps svg').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.key(key)
    assert page.texts("#steps .tip p")[:3] == ["step 1: 1 token", "20.00 ms", "MUL_MAT 12.00 ms, 60.0%"]
    page.key("Enter")
    assert page.run("location.hash") == "#step=1"
    assert page.texts("#layers-title") == ["Time by layer, step 1"]
    assert page.texts("#longest tbody th")[0] == "step 1 node 1, MUL_MAT 'Qcur-0'"
    page.run("document.querySelector('#layers svg').focus()")
    page.key("End")
    assert page.texts("#layers .tip p")[:2] == ["in no layer", "1.00 ms"]
    page.click('[data-sort="op"]')
    assert page.texts("#ops tbody th") == ["ADD", "GET_ROWS", "MUL_MAT", "outside of nodes"]
    page.click('[data-sort="ms"]')
    assert page.texts("#ops tbody th")[0] == "MUL_MAT"


@pytest.mark.slow
def test_an_address_of_nonsense(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, ONE, "step=9&by=x&sort=y&%FF")
    assert page.run("document.querySelector('#step').value") == ""
    assert len(page.texts("#longest tbody tr")) == 4


@pytest.mark.slow
def test_single_tokens_are_in_sight_beside_a_long_prompt(browser: Browser, tmp_path: Path) -> None:
    events = [
        replace(event, end=event.begin + 10 * event.duration) if event.args["step"] == 0 else event
        for event in made().events
    ]
    page = opened(browser, tmp_path, timeline_json([replace(made(), events=events)], ["a.json"]))
    assert page.run("document.querySelector('#by').value") == "token"


@pytest.mark.slow
def test_two_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, TWO, "sort=ratio")
    assert len(page.texts("#steps rect.bar")) == 2 * 3 * 4
    assert page.texts("#ops tbody tr")[0].split() == ["MUL_MAT", "6", "6", "36.00", "108.00", "3.00", "NPU,", "CPU"]
    assert page.texts("#longest tbody td")[:4] == ["3", "24.00", "72.00", "3.00"]
    page.run("document.querySelector('#layers svg').focus()")
    assert {"a.json: 30.00 ms", "b.json: 90.00 ms"} <= {*page.texts("#layers .tip p")}


@pytest.mark.parametrize("data", [ONE, TWO], ids=["one", "two"])
def test_the_page_at_400_pixels(browser: Browser, tmp_path: Path, data: dict[str, Any]) -> None:
    page = opened(browser, tmp_path, data)
    browser.resize(400, 800)
    assert page.run("document.documentElement.scrollWidth") <= 400
    browser.resize(1366, 900)
