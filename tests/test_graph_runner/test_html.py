"""The page of a diff: what it says, that data stays text, and how it works in a browser."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.browser import Browser
from kit.pages import NASTY, Page, assert_alone

from graph_runner.reports.explorer import COLOURS, explorer_json
from graph_runner.reports.html import VERDICTS, diff_html

OPS = ("GET_ROWS", "MUL_MAT", "ADD", "CPY", "CONT", "SET_ROWS", "SOFT_MAX", "ROPE")
BINS = 24
WRONG = {"inherited": (1e-14, 1e-3), "amplified": (1e-9, 1e-2), "introduced": (1e-2, 1e-2), "rounding": (1e-15, 1e-15)}


def comparison(
    random: np.random.Generator, n_bytes: int, nmse: float | None, where: list[int] | None
) -> dict[str, Any]:
    """A comparison of bytes that differ; nmse None: a value is not finite."""
    ulp = (random.random(BINS) * 4000 * np.exp(-np.arange(BINS) / 2)).astype(int).tolist()
    return {
        "n_bytes": n_bytes,
        "n_different": n_bytes // 3,
        "outside": False,
        "nmse": nmse,
        "max_abs": None if nmse is None else nmse**0.5,
        "max_rel": None if nmse is None else nmse**0.4,
        "cosine": None if nmse is None else 1 - nmse,
        "ulp": ulp,
        "nan": [0, 3 if nmse is None else 0],
        "inf": [0, 0],
        "where": where,
        "blocks": None,
    }


def heat(random: np.random.Generator, rows: int, cols: int, ne0: int, n_rows: int) -> dict[str, Any]:
    values: list[float | None] = [
        *map(float, (10 ** (-6 * random.random(rows * cols))) * (random.random(rows * cols) < 0.7))
    ]
    values[cols // 2] = None
    return {"rows": rows, "cols": cols, "values": values, "ne0": ne0, "n_rows": n_rows}


def made_node(random: np.random.Generator, step: int, index: int, verdict: str) -> dict[str, Any]:
    op, n_bytes = OPS[index % len(OPS)], 4 * 64 * 26
    exact = {"n_bytes": n_bytes, "n_different": 0, "outside": False}
    node: dict[str, Any] = {
        "step": step, "index": index, "op": op, "name": f"blk.{index // 8}.{op.lower()}-{index}",
        "types": "f32 i64 -> q8_0" if op == "SET_ROWS" else "f32 f32 -> f32", "ne": [64, 26, 1, 1],
        "device": "CPU" if op == "MUL_MAT" else "NPU", "verdict": verdict, "failure": None, "diagnosis": None,
        "noise": None, "isolated": exact, "mirrored": exact, "cumulative": exact, "heat": None, "wrong_in": "",
        "reproducer": None, "replay": None, "test": None, "judged": None,
    }  # fmt: skip
    if verdict == "failed":
        node |= {"isolated": None, "cumulative": None, "failure": "KernelError: a kernel that does not come back"}
    elif verdict != "exact":
        spread = 10 ** random.normal(0, 0.6, 2)
        isolated, cumulative = (float(error * more) for error, more in zip(WRONG[verdict], spread, strict=True))
        node["noise"] = float(isolated * 1e14)
        node["judged"] = {"row": 3, "n_rows": 26, "error": isolated, "limit": 1e-11, "against": "the reference"}
        node["isolated"] = comparison(random, n_bytes, isolated, [0, 0, 3, 17])
        node["cumulative"] = comparison(random, n_bytes, cumulative, [0, 0, 0, 0])
    if verdict == "introduced":
        node["diagnosis"] = "Reading the second source with nb[2] ignored gives exactly the device's bytes."
        node |= {
            "wrong_in": "isolated",
            "reproducer": f"kept/{step}-{index}.gguf",
            "replay": f"ggml-npu replay kept/{step}-{index}.gguf",
            "test": f"ggml-npu test -o {op}",
        }
        node["heat"] = heat(random, 26, 64, 64, 26)
        blocks = {"n_blocks": 52, "n_different": 17, "n_scale": 0, "n_quants": 17, "off_by_one": 30, "off_by_more": 4}
        node["isolated"]["blocks"] = blocks | {"swapped_nibbles": 0, "rounding": "simd"}
    return node


def made_diff(per_step: int = 200, steps: int = 3, *, clean: bool = False) -> dict[str, Any]:
    """A diff of a prompt and steps: exact up to a node that introduces an error, which is inherited from there on."""
    random = np.random.default_rng(5)
    nodes = []
    for step in range(steps):
        for index in range(per_step):
            verdict = "rounding" if index % 8 == 6 else "exact"
            if not clean and (step or index > per_step // 3):
                draw = random.random()
                verdict = "inherited" if draw < 0.6 else "amplified" if draw < 0.64 else verdict
            nodes.append(made_node(random, step, index, verdict))
    first = per_step // 3
    if not clean:
        for place in (first, first + per_step, 2 * per_step - 3):
            node = nodes[place]
            nodes[place] = made_node(random, node["step"], node["index"], "introduced")
        nodes[first + 9] = made_node(random, 0, first + 9, "failed")
        not_finite = nodes[per_step + 5] = made_node(random, 1, 5, "introduced")
        not_finite["isolated"] |= comparison(random, 4 * 64 * 26, None, None)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for node in nodes:
        groups.setdefault((node["op"], node["types"]), []).append(node)
    return {
        "schema": "ggml-npu diff 5", "model": "models/llama.gguf", "description": "llama 135M Q8_0", "ggml": "0.9.4",
        "reference": "CPU", "device": "NPU", "q8_0_rounding": "simd", "prompt": "The capital of France is",
        "text": " Paris.\n\nThe", "n_prompt": 26, "steps": steps - 1, "cache_type_k": "f16", "cache_type_v": "f16",
        "flash_attention": "off", "passed": clean, "device_options": {"memory": "host", "matmul": "exact"},
        "verdict": f"{len(nodes):,} nodes compared, every byte equals ggml's CPU" if clean
        else f"4 of {len(nodes):,} nodes introduced an error; the first is step 0, node {first}",
        "first_introduced": None if clean else first,
        "summary": [
            {"op": op, "types": types, "nodes": len(own), "nmse": None if op == "ROPE" else 1e-3, "max_abs": 0.25}
            | {verdict: sum(node["verdict"] == verdict for node in own) for verdict in VERDICTS}
            for (op, types), own in sorted(groups.items())
        ],
        "refused": [{"op": "CPY", "reason": "f32 -> iq2_xs needs an importance matrix", "nodes": 3}],
        "states": []
        if clean
        else [{"tensor": "cache_k_l0", "step": 1, "node": first, "cells": [26, 27], "n_cells": 9}],
        "nodes": nodes,
    }  # fmt: skip


def nasty_diff() -> dict[str, Any]:
    """A diff of which every text is an attack."""
    data = made_diff(20)
    for key in ("model", "description", "ggml", "prompt", "text", "verdict", "device", "reference", "flash_attention"):
        data[key] = NASTY
    for node in data["nodes"]:
        node |= {"name": NASTY, "op": NASTY, "types": NASTY, "diagnosis": NASTY}
    data["refused"] = [{"op": NASTY, "reason": NASTY, "nodes": 1}]
    data["states"] = [{"tensor": NASTY, "step": 0, "node": NASTY, "cells": [0], "n_cells": 1}]
    data["summary"] = [{"op": NASTY, "types": NASTY, "nodes": 1}]
    return data


# the file


def test_the_data_is_in_the_page_as_it_was_given() -> None:
    data = made_diff(20)
    assert json.loads(Page(diff_html(data)).scripts[0]) == data


def test_no_text_of_the_data_becomes_a_tag_or_ends_the_script() -> None:
    nasty, plain = diff_html(nasty_diff()), diff_html(made_diff(20))
    page = Page(nasty)
    assert len(page.scripts) == 2
    assert page.scripts[1] == Page(plain).scripts[1]
    assert json.loads(page.scripts[0])["nodes"][0]["name"] == NASTY
    assert not re.search(r"[<>&\u2028\u2029]", page.scripts[0])
    assert not [tag for tag, attributes in page.tags if tag == "img" or "onerror" in attributes]
    assert "<script>alert" not in nasty
    nasty.encode()  # half a surrogate pair is nothing that a file could hold


def test_the_page_names_nothing_that_lies_elsewhere() -> None:
    assert_alone(Page(diff_html(made_diff(20))))


def test_verdict_and_first_wrong_node_are_readable_without_a_script() -> None:
    html = diff_html(made_diff(60)).split("<main>")[0]
    assert "4 of 180 nodes introduced an error" in html
    assert "step 0, node 20" in html
    assert "Reading the second source with nb[2] ignored" in html


def test_missing_keys_are_left_out() -> None:
    nodes = [
        {"step": 0, "index": 0, "op": "CPY", "name": "x", "types": "f32 -> f32", "ne": [1, 1, 1, 1], "verdict": "exact"}
    ]
    assert "First node that introduced" not in diff_html({"nodes": nodes})
    assert "First node that introduced" not in diff_html({"nodes": []})


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        diff_html({"nodes": [], "noise": float("nan")})


# Model Explorer


def test_node_data_has_a_number_and_a_colour_of_each_node() -> None:
    data = made_diff()
    found = explorer_json(data)
    json.dumps(found, allow_nan=False)
    results = found["results"]
    assert len(results) == len(data["nodes"])
    assert all(set(result) == {"value", "bgColor", "textColor"} for result in results.values())
    first = data["nodes"][data["first_introduced"]]
    assert results["0/66 blk.8.add-66"]["value"] == first["isolated"]["nmse"]
    assert results["0/66 blk.8.add-66"]["bgColor"] == COLOURS["introduced"]
    assert results["0/0 blk.0.get_rows-0"] == {"value": 0.0, "bgColor": COLOURS["exact"], "textColor": "#000000"}
    largest = [name for name, result in results.items() if result["value"] == sys.float_info.max]
    assert largest == ["1/5 blk.0.set_rows-5", "0/75 blk.9.cpy-75"]


@pytest.mark.parametrize("worse_first", [False, True])
def test_of_a_node_and_a_fused_operator_on_it_the_worse_is_kept(worse_first: bool) -> None:
    random = np.random.default_rng(1)
    nodes = [made_node(random, 0, 4, verdict) | {"name": "x"} for verdict in ("rounding", "introduced")]
    results = explorer_json({"nodes": nodes[::-1] if worse_first else nodes})["results"]
    assert [result["bgColor"] for result in results.values()] == [COLOURS["introduced"]]


# in a browser


Open = Callable[..., Browser]


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens the page of a diff; at the end, the page's console has to be empty, and nothing else asked for."""

    def call(data: dict[str, Any], fragment: str = "") -> Browser:
        file = tmp_path / "diff.html"
        file.write_text(diff_html(data), encoding="utf-8")
        browser.open(file, fragment)
        return browser

    yield call
    assert {address.split("#")[0] for address in browser.requests()} == {(tmp_path / "diff.html").as_uri()}
    assert browser.complaints == []


def points(page: Browser, selector: str = ".dots") -> int:
    return sum(
        path.count("M")
        for path in page.run(f"[...document.querySelectorAll('#plot {selector}')].map(p => p.getAttribute('d'))")
    )


@pytest.mark.slow
def test_a_page_has_its_verdict_plot_tables_and_first_wrong_node(opened: Open) -> None:
    data = made_diff()
    page = opened(data)
    assert page.texts("h1") == [data["verdict"]]
    assert page.texts("#count") == ["600 nodes"]
    assert points(page, ".isolated") == 600
    assert points(page, ".cumulative") == 599  # the node that failed has none
    assert points(page, ".isolated.introduced") == 4
    assert page.texts("#plot .step-name") == ["prompt", "step 1", "step 2"]
    assert {"no number", "0", "1e-2"} <= {*page.texts("#plot text")}
    assert page.texts("#rows [aria-selected=true] td")[:3] == ["0 / 66", "ADD", "blk.8.add-66"]
    assert page.texts("#detail .diagnosis") == [data["nodes"][66]["diagnosis"]]
    assert len(page.texts("#summary tbody tr")) == len(OPS)
    assert page.texts("#refused td") == ["3", "f32 -> iq2_xs needs an importance matrix"]
    assert page.texts("#states td") == ["1", "ADD blk.8.add-66", "2 of 9: 26-27"]
    assert 20 < len(page.texts("#rows .row")) < 100


def test_a_clean_run(opened: Open) -> None:
    page = opened(made_diff(40, clean=True))
    assert page.texts("h1.passed")
    assert not page.texts(".first")
    assert page.texts("#detail") == ["Choose a node in the plot or in the table."]
    assert points(page, ".isolated.exact") == page.run(
        "document.querySelectorAll('.chip')[0].textContent.match(/\\d+/)[0]*1"
    )


@pytest.mark.parametrize("nodes", [[], made_diff(5)["nodes"][:1]], ids=["none", "one"])
def test_a_diff_of_hardly_anything(opened: Open, nodes: list[dict[str, Any]]) -> None:
    page = opened({"nodes": nodes, "verdict": "no node was compared"})
    assert page.texts("#count") == [f"{len(nodes)} nodes"]


def test_typing_narrows_the_rows_and_the_plot(opened: Open) -> None:
    page = opened(made_diff())
    page.click("#q")
    page.type("ADD blk.8.")
    assert page.texts("#count") == ["3 of 600 nodes"]
    assert page.texts("#rows .row td:nth-child(3)") == ["blk.8.add-66"] * 3
    assert points(page, ".isolated") == 3
    assert page.run("location.hash") == "#q=ADD+blk.8."
    page.click("#clear")
    assert page.texts("#count") == ["600 nodes"]
    page.type("no such node")
    assert page.texts("#count") == ["0 of 600 nodes"]
    assert page.run("document.querySelector('#none').checkVisibility()")


def test_the_address_holds_search_filters_order_and_node(opened: Open) -> None:
    data = made_diff()
    page = opened(data, "verdict=introduced,failed&sort=isolated&node=75&metric=max_abs")
    assert page.texts("#count") == ["5 of 600 nodes"]
    order = page.texts("#rows .row td:first-child")
    assert order[:2] == ["0 / 75", "1 / 5"]  # no number at all comes first
    assert page.texts("#detail .diagnosis") == [data["nodes"][75]["failure"]]
    assert page.run("document.querySelector('#metric').value") == "max_abs"
    page.click(".chip.failed")
    assert page.texts("#count") == ["4 of 600 nodes"]
    assert "verdict=introduced&" in page.run("location.hash")


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "fragment", ["node=600", "node=length", "sort=x&metric=y", "verdict=none", "q=%FF%&&=", "step=9"]
)
def test_an_address_of_nonsense(opened: Open, fragment: str) -> None:
    assert opened(made_diff(), fragment).texts("h1")


def test_op_and_step_filter_and_a_step_fills_the_plot(opened: Open) -> None:
    page = opened(made_diff(), "op=CONT&step=1")
    assert page.texts("#count") == ["25 of 600 nodes"]
    assert {*page.texts("#rows .row td:nth-child(2)")} == {"CONT"}
    assert page.texts("#plot .step-name") == ["step 1"]


def test_a_click_into_the_plot_chooses_the_node(opened: Open) -> None:
    page = opened(made_diff(), "verdict=failed")
    page.run("document.querySelector('#plot').scrollIntoView({block: 'center'})")
    where = "(b => [b.x + b.width / 2, b.y + b.height / 2])(document.querySelector('#plot .dots').getBBox())"
    x, y = page.run(where)
    left, top = page.run("(b => [b.x, b.y])(document.querySelector('#plot').getBoundingClientRect())")
    page.press(left + x, top + y)
    assert page.texts("#tip p:first-child") == ["step 0, node 75: CPY blk.9.cpy-75"]
    assert page.texts("#detail .title") == ["CPY blk.9.cpy-75"]
    assert page.run("location.hash") == "#verdict=failed&node=75"


def test_the_plot_and_the_table_by_keyboard(opened: Open) -> None:
    page = opened(made_diff())
    page.run("document.querySelector('#plot').focus()")
    page.key("ArrowRight")
    assert page.texts("#tip p:first-child") == ["step 0, node 67: CPY blk.8.cpy-67"]
    page.key("Enter")
    assert page.texts("#detail .title") == ["CPY blk.8.cpy-67"]
    page.run("document.querySelector('#nodes').focus()")
    page.key("ArrowDown")
    assert page.texts("#detail .title") == ["CONT blk.8.cont-68"]
    page.key("End")
    assert page.texts("#rows [aria-selected=true] td:first-child") == ["2 / 199"]
    active = page.run("document.querySelector('#nodes').getAttribute('aria-activedescendant')")
    assert page.run(f"document.getElementById('{active}').getAttribute('aria-rowindex')") == "601"


@pytest.mark.slow
def test_the_chosen_node_has_metrics_histogram_heat_map_and_blocks(opened: Open) -> None:
    data = made_diff()
    data["nodes"][66]["nb"] = [4, 256, 6656, 6656]
    page = opened(data)
    found = data["nodes"][66]["isolated"]
    commands = page.texts("#detail .place code")
    assert commands == ["ggml-npu replay kept/0-66.gguf", data["nodes"][66]["test"]]
    shown = dict(zip(page.texts("#detail tbody th"), page.texts("#detail tbody th + td"), strict=True))
    assert shown["bytes that differ"] == f"{found['n_different']:,} (33.3 %)"
    assert float(shown["NMSE"]) == pytest.approx(found["nmse"], rel=1e-3)
    assert float(shown["cosine"]) == pytest.approx(found["cosine"], abs=1e-8)
    assert shown["first at [i3, i2, i1, i0]"] == "[0, 0, 3, 17]"
    assert shown["strides nb"] == "4, 256, 6656, 6656"
    assert (shown["that differ"], shown["rounding used"]) == ("17", "simd")
    assert f"0: {found['ulp'][0]:,}, " in page.run("document.querySelector('.histogram').getAttribute('aria-label')")
    pixels = "document.querySelector('.heat').getContext('2d').getImageData(0, 0, 64, 26).data.buffer"
    assert page.run(f"new Set(new Uint32Array({pixels})).size") > 50
    assert "1 not finite" in page.texts("#detail figcaption")[1]


def test_values_that_are_not_finite_are_said_and_stand_above_the_axis(opened: Open) -> None:
    data = made_diff()
    page = opened(data, "node=205&step=1&q=1/5 set_rows")
    shown = dict(zip(page.texts("#detail tbody th"), page.texts("#detail tbody th + td"), strict=True))
    assert (shown["NMSE"], shown["NaN, reference / device"]) == ("not finite", "0 / 3")
    top, bottom = page.run(
        "['isolated', 'cumulative'].map(s => document.querySelector(`#plot .dots.${s}.introduced`).getBBox().y)"
    )
    assert top < 30 < bottom


def test_text_of_the_data_stays_text_in_a_browser(opened: Open) -> None:
    page = opened(nasty_diff(), "verdict=introduced")
    as_it_is = NASTY.replace("\udc80", "\\x80")
    assert page.run("document.scripts.length") == 2
    assert page.run("document.images.length") == 0
    assert page.texts("h1") == [as_it_is]
    assert page.run("document.querySelector('#rows .row td:nth-child(3)').textContent").startswith(NASTY[:-1])
    assert page.run("document.querySelector('#detail .diagnosis').textContent").startswith(NASTY[:-1])


def test_light_and_dark(opened: Open, browser: Browser) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        page = opened(made_diff(40))
        seen[scheme] = page.run("getComputedStyle(document.body).backgroundColor")
    browser.prefer("light")
    assert seen == {"light": "rgb(246, 245, 242)", "dark": "rgb(21, 24, 27)"}


@pytest.mark.slow
def test_ten_thousand_nodes_load_and_filter_in_reasonable_time(opened: Open) -> None:
    page = opened(made_diff(2000, steps=5))
    assert page.texts("#count") == ["10,000 nodes"]
    assert points(page, ".isolated") == 10_000
    assert page.run("performance.timing.loadEventEnd - performance.timing.navigationStart") < 10_000
    assert len(page.texts("#rows .row")) < 100
    typed = "(() => { const begin = performance.now(); const q = document.querySelector('#q'); q.value = 'blk.8.';"
    typed += " q.dispatchEvent(new Event('input')); return performance.now() - begin; })()"
    assert page.run(typed) < 2000
    assert page.texts("#count") == ["40 of 10,000 nodes"]
    page.run("(document.querySelector('#clear').click(), document.querySelector('#scroll').scrollTop = 28 * 9000)")
    assert "4 / 1001" in page.texts("#rows .row td:first-child")


@pytest.mark.parametrize("width", [360, 480, 768, 1366])
def test_the_verdict_is_in_sight_on_any_screen(opened: Open, width: int) -> None:
    page = opened(made_diff(40))
    page.resize(width, 800)
    right = page.run("document.querySelector('#rows .row td:nth-child(5)').getBoundingClientRect().right")
    assert 0 < right <= width
    assert page.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [400, 1200])
def test_no_fact_is_cut_off(opened: Open, width: int) -> None:
    data = made_diff(40)
    data["device_options"] = {"memory": "host", "ops": "default", "kernels": f"cont.py sha256:{'0a' * 32}"}
    page = opened(data)
    page.resize(width, 800)
    cut = "[...document.querySelectorAll('.facts dd')].filter(d => d.scrollWidth > d.clientWidth).length"
    assert page.run(cut) == 0
    assert page.run("document.documentElement.scrollWidth") <= width


def test_keys_search_and_go_from_one_wrong_node_to_the_next(opened: Open) -> None:
    page = opened(made_diff())
    begin = page.texts("#rows [aria-selected=true] td")[0]
    page.key("n")
    later = page.texts("#rows [aria-selected=true] td")[0]
    assert later == "0 / 75"
    page.key("p")
    assert page.texts("#rows [aria-selected=true] td")[0] == begin
    page.key("/")
    assert page.run("document.activeElement.id") == "q"
    page.type("rope")
    page.key("n")
    assert page.texts("#rows [aria-selected=true] td")[:1] in ([], [begin])
    page.key("Escape")
    assert page.run("document.activeElement.id") != "q"
