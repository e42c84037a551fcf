"""ggml-npu diff: its table and verdict, the first wrong node, JSON and pages, and wrong nodes that it keeps."""

from __future__ import annotations

import html
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from kit.commands import MOVERS, WRONG_CONT, Cli, fresh, kernel_file, strict_json

from graph_runner.cli.options import PROMPT
from graph_runner.reports.diff_report import SCHEMA


@pytest.mark.usefixtures("backend")
def test_diff_in_a_fresh_process_prints_a_table_and_a_verdict() -> None:
    outcome = fresh("diff", "tiny")
    assert outcome.code == 0
    assert outcome.err == ""
    rows = re.findall(r"^(\w+) +([\w ]+ -> \w+) +(\d+) +(\d+) +(\d+) ", outcome.out, re.MULTILINE)
    assert [row for row in rows if row[0] in MOVERS] == [
        ("CONT", "f32 -> f32", "10", "0", "0"),
        ("GET_ROWS", "f32 i32 -> f32", "10", "0", "0"),
        ("GET_ROWS", "q8_0 i32 -> f32", "5", "0", "0"),
        ("SET_ROWS", "f32 i64 -> f16", "20", "0", "0"),
    ]
    rounded = sum(int(rounded) for _, _, _, rounded, _ in rows)
    compared = rounded + sum(int(equal) for _, _, equal, _, _ in rows)
    verdict = f"right: {compared} nodes compared, every byte equals ggml's CPU"
    if rounded:
        verdict = f"right within rounding: {compared} nodes compared, {rounded} differ from ggml's CPU by rounding"
    assert outcome.out.endswith(f"{verdict}\n")


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("ops", ["GET_ROWS,CONT", " get_rows , cont,"])
def test_diff_of_chosen_ops(cli: Cli, ops: str) -> None:
    outcome = cli("diff", "tiny", "-n", "0", "--ops", ops)
    assert outcome.code == 0
    assert set(re.findall(r"^([A-Z_]+) ", outcome.out, re.MULTILINE)) == {"CONT", "GET_ROWS"}


@pytest.mark.slow
def test_diff_that_compared_nothing_fails(cli: Cli) -> None:
    outcome = cli("diff", "tiny", "-n", "0", "--ops", "DUP,SQR")
    assert outcome.code == 1
    assert outcome.out.splitlines()[-1] == "not judged: no node was compared: the model has no DUP and no SQR"


@pytest.mark.slow
def test_diff_writes_json_to_a_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "diff.json"
    file.write_text("older")
    outcome = cli("diff", "tiny", "-n", "1", "--json", file, "--flash-attn", "on", "--cache-type-k", "q8_0")
    assert outcome.code == 0
    assert "right within rounding: " in outcome.out
    data = strict_json(file.read_text())
    assert [*data] == [
        *(
            "schema",
            "model",
            "description",
            "ggml",
            "reference",
            "device",
            "reference_with",
            "device_with",
            "builds",
            "device_options",
            "q8_0_rounding",
            "promises",
            "prompt",
            "text",
            "n_prompt",
        ),
        *("steps", "threads", "sequences", "draft", "cache_type_k", "cache_type_v", "flash_attention", "strict"),
        *("passed", "verdict", "answer", "scope", "canary", "order"),
        *(
            "own_run",
            "stopped",
            "first_introduced",
            "states",
            "strays",
            "remarks",
            "notes",
            "replaced",
            "spoilt",
            "faults",
            "ending",
        ),
        *("summary", "refused", "nodes"),
    ]
    assert (data["schema"], data["passed"], data["prompt"], data["n_prompt"]) == (SCHEMA, True, PROMPT, 26)
    assert (data["cache_type_k"], data["cache_type_v"], data["flash_attention"]) == ("q8_0", "f16", "on")
    compared = [node for node in data["nodes"] if node["isolated"] is not None]
    assert sum(group["nodes"] for group in data["summary"]) == len(compared)
    assert {node["step"] for node in data["nodes"]} == {0, 1}
    first = data["nodes"][0]
    assert first | {"index": 0, "op": "GET_ROWS", "types": "q8_0 i32 -> f32", "ne": [64, 26, 1, 1]} == first
    equal = {"n_bytes": 64 * 26 * 4, "n_different": 0, "outside": False}
    assert (first["verdict"], first["isolated"], first["cumulative"]) == ("exact", equal, equal)
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.slow
def test_diff_writes_json_alone_to_stdout(cli: Cli) -> None:
    outcome = cli("diff", "tiny", "-n", "1", "--json", "-")
    assert outcome.code == 0
    assert strict_json(outcome.out)["passed"]
    assert "nodes compared" in outcome.err


@pytest.mark.slow
def test_diff_writes_json_into_what_is_no_regular_file(cli: Cli, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    both_ends = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    assert cli("diff", "tiny", "-n", "0", "--ops", "CONT", "--json", pipe).code == 0
    assert stat.S_ISFIFO(pipe.stat().st_mode), "the pipe was replaced by a file"
    assert strict_json(os.read(both_ends, 1 << 16).decode())["passed"]
    os.close(both_ends)


# wrong kernels


@pytest.mark.some(1)
@pytest.mark.parametrize("value", ["x * 2", "np.nan", "np.inf", "-x"])
def test_diff_names_the_first_wrong_node_and_exits_with_1(cli: Cli, tmp_path: Path, value: str) -> None:
    kernels = kernel_file(tmp_path, WRONG_CONT.format(value=value))
    command = ("diff", "tiny", "-n", "1", "--ops", "CONT,GET_ROWS", "--kernels", kernels)
    outcome = cli(*command)
    assert outcome.code == 1
    assert outcome.err == f"kernels of {kernels}: CONT (replaced)\n"
    assert outcome.out.endswith("wrong: 4 of 100 nodes differ from ggml's CPU\n")
    beginning, described, *_ = outcome.out.splitlines()
    assert beginning == "the first wrong node:"
    first = re.match(r"step 0 node (\d+): CONT 'kqv_out-0' f32 -> f32 .* first at \[0, 0, 0, 0\]", described)
    assert first is not None

    data = strict_json(cli(*command, "--json", "-").out)
    different = [node for node in data["nodes"] if not node["passed"]]
    assert (data["passed"], len(different)) == (False, 4)
    assert (different[0]["index"], different[0]["name"]) == (int(first[1]), "kqv_out-0")
    assert different[0]["isolated"]["where"] == [0, 0, 0, 0]
    assert different[0]["isolated"]["n_different"] > 0


def page_data(html: str) -> dict[str, Any]:
    """The data that a page holds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return strict_json(found[1])


@pytest.mark.slow
def test_diff_writes_a_page_and_node_data(cli: Cli, tmp_path: Path) -> None:
    kernels = kernel_file(tmp_path, WRONG_CONT.format(value="x * 2"))
    page, explorer = tmp_path / "diff.html", tmp_path / "explorer.json"
    command = ("diff", "tiny", "-n", "1", "--ops", "CONT,GET_ROWS", "--kernels", kernels)
    outcome = cli(*command, "--html", page, "--model-explorer", explorer)
    assert outcome.code == 1
    assert {*tmp_path.iterdir()} == {kernels, page, explorer}
    data = page_data(page.read_text())
    first = data["nodes"][data["first_introduced"]]
    assert (first["op"], first["name"], first["verdict"]) == ("CONT", "kqv_out-0", "introduced")
    assert "wrong: 4 of 100 nodes differ from ggml's CPU" in page.read_text().split("<main>")[0].replace("&#39;", "'")
    results = strict_json(explorer.read_text())["results"]
    assert results[f"0/{first['index']} kqv_out-0"]["value"] == pytest.approx(1.0)
    assert results["0/0 embd"]["value"] == 0


@pytest.mark.slow
def test_diff_writes_a_page_alone_to_stdout(cli: Cli) -> None:
    outcome = cli("diff", "tiny", "-n", "0", "--ops", "CONT", "--html", "-")
    assert outcome.code == 0
    assert outcome.out.startswith("<!doctype html>")
    assert outcome.out.endswith("</html>\n")
    assert "nodes compared" in outcome.err


@pytest.mark.slow
@pytest.mark.daily(2)
def test_diff_says_why_a_kernel_failed(cli: Cli, tmp_path: Path) -> None:
    kernels = kernel_file(tmp_path, WRONG_CONT.format(value="x.shapes"))
    outcome = cli("diff", "tiny", "-n", "0", "--kernels", kernels, "--json", "-")
    assert outcome.code == 1
    line = 1 + next(i for i, text in enumerate(kernels.read_text().splitlines()) if "shapes" in text)
    reason = f"AttributeError: 'numpy.ndarray' object has no attribute 'shapes' ({kernels.name} line {line})"
    assert f"failed: {reason}" in outcome.err
    data = strict_json(outcome.out)
    assert {node["failure"] for node in data["nodes"]} == {None, reason}
    assert data["stopped"].endswith(reason)


# wrong nodes that are kept


WRONG = "from ggml_backend_npu import op\n@op('CONT')\ndef cont(dst, x):\n    dst.view()[...] = 0\n"


@pytest.mark.daily(4)
@pytest.mark.slow
def test_a_diff_needs_no_folder_to_keep_wrong_nodes_in(tmp_path: Path) -> None:
    kernels, file = kernel_file(tmp_path, WRONG), tmp_path / "file"
    file.touch()
    command = ["diff", "tiny", "-n", "0", "--ops", "CONT", "--kernels", kernels]
    outcome = fresh(*command, env=os.environ | {"XDG_CACHE_HOME": str(file)})
    assert outcome.code == 1
    assert f"ggml-npu: wrong nodes are not kept: '{file}" in outcome.err
    assert "wrong: " in outcome.out


@pytest.mark.slow
def test_a_diff_goes_on_where_wrong_nodes_cannot_be_kept(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    kernels = kernel_file(tmp_path, WRONG + f"    import shutil; shutil.rmtree({str(folder)!r}, ignore_errors=True)\n")
    outcome = cli("diff", "tiny", "-n", "0", "--ops", "CONT", "--kernels", kernels, "--reproducers", folder)
    assert outcome.code == 1
    assert outcome.err.count("ggml-npu: wrong nodes are not kept: trace '") == 1
    assert "wrong: " in outcome.out


def test_the_test_of_a_node_is_one_command_everywhere(cli: Cli, tmp_path: Path) -> None:
    """On the terminal, in the JSON and on the page."""
    kernels = kernel_file(tmp_path, WRONG_CONT.format(value="x + 1"))
    words = ["diff", "tiny", "-n", "0", "--ops", "CONT", "--in-process", "--kernels", kernels]
    outcome = cli(*words, "--json", tmp_path / "diff.json", "--html", tmp_path / "diff.html")
    assert outcome.code == 1
    data = strict_json((tmp_path / "diff.json").read_text())
    test = data["nodes"][data["first_introduced"]]["test"]
    assert test.startswith(f"ggml-npu test {kernels} -o CONT -p ")
    assert f"nearest test cases of ggml: {test}\n" in outcome.out
    assert f"{html.escape(test).replace('&#x27;', '&#39;')}</code>" in (tmp_path / "diff.html").read_text()
