"""The commands record and compare: `graph_runner.record.run` as users see it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from kit.commands import Cli, assert_refused, fresh, strict_json
from kit.diffs import PROMPT
from kit.models import Models
from kit.pages import Page
from kit.whole import FAULT, half_as_much_again, spoiling

from ggml_backend_npu import Tensor
from graph_runner.base.settings import Settings
from graph_runner.record import RecordOptions, record, write_run

KEYS = {
    "schema", "passed", "verdict", "a", "b", "differing", "steps", "first", "compared", "differ", "not_compared",
    "layers", "by_step", "ends", "same_state", "origins",
}  # fmt: skip
FIRST = {
    "step", "place", "other_place", "tokens", "op", "name", "layer", "nmse", "is_exact", "before", "text",
}  # fmt: skip


@pytest.fixture(scope="module")
def records(model: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a record of the NPU, one with a fault, and one of the CPU's end after another prompt."""
    folder = tmp_path_factory.mktemp("records")

    def spoils(dst: Tensor) -> None:
        if dst.name == "ffn_swiglu-1":
            half_as_much_again(dst)

    options = RecordOptions("NPU", steps=1, settings=Settings(flash_attention="off", threads=1))
    on_cpu = replace(options, device="CPU", is_watched=False)
    for name, prompt, asked, backend in (
        ("right", PROMPT, options, spoiling({"SWIGLU": lambda dst: None})),
        ("wrong", PROMPT, options, spoiling({"SWIGLU": spoils})),
        ("ends", "hello", on_cpu, spoiling({})),
    ):
        write_run(folder / f"{name}.gguf", record(model("llama"), prompt, asked, backend))
    return folder


def test_what_was_recorded_is_said(tmp_path: Path) -> None:
    done = fresh("record", "tiny", "-n", 4, "-o", tmp_path / "run.gguf", "--threads", 1)
    assert done.err.startswith("30 tokens in 5 steps, 250 results of nodes, ")
    assert float(done.err.split(" results of nodes, ")[1].split(" bytes each")[0]) <= 64, "of a short run, too"


def test_a_record_is_equal_to_itself(cli: Cli, records: Path) -> None:
    done = cli("compare", records / "right.gguf", records / "right.gguf")
    assert done.code == 0
    assert done.out.endswith("equal: 100 results of nodes in 2 steps\n")


def test_a_fault_is_found_and_json_and_page_say_the_same(cli: Cli, records: Path, tmp_path: Path) -> None:
    written, page = tmp_path / "result.json", tmp_path / "result.html"
    words = "compare", records / "right.gguf", records / "wrong.gguf", "--json", written, "--html", page
    done = cli(*words)
    assert done.code == 1
    assert "first at SWIGLU 'ffn_swiglu-1', node " in done.out.splitlines()[-1]
    data = strict_json(written.read_text())
    assert {*data} == KEYS
    assert {*data["first"]} == FIRST
    assert (data["passed"], data["first"]["layer"]) == (False, 1)
    (begin,) = data["origins"]["begins"]
    assert (begin["kind"], begin["nodes"]) == ("SWIGLU ffn_swiglu-*", 2)
    assert re.search(r"differs, and all that it reads is equal +SWIGLU ffn_swiglu-\* +2 ", done.out)
    assert data["verdict"] == done.out.splitlines()[-1]
    assert [each["step"] for each in data["by_step"]] == [0, 1]
    assert sum(each["compared"] for each in data["by_step"]) == data["compared"]
    assert sum(each["differing"] for each in data["by_step"]) == data["differ"]
    assert Page(page.read_text()).data == data


def test_another_prompt(cli: Cli, records: Path) -> None:
    done = cli("compare", records / "right.gguf", records / "ends.gguf")
    assert done.code == 1
    assert "step 0 and all after it have other tokens" in done.out
    assert "settings.device" in done.out


def test_what_is_no_record_is_refused(cli: Cli, records: Path, tmp_path: Path) -> None:
    good = records / "right.gguf"
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(good.read_bytes()[:-20])
    for bad, why in ((cut, "is cut off or was changed"), (tmp_path / "none.gguf", "no such file")):
        assert_refused(cli("compare", good, bad), why)
    assert_refused(cli("record", "tiny", "-o", tmp_path / "x.gguf", "--like", cut), "is cut off or was changed")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--unwatched", "--data", "CONT"], "--data 'CONT'"),
        pytest.param(["--data", "FLUX"], "--data 'FLUX': no node of this run", marks=pytest.mark.slow),
        (["--all"], "--all"),
        pytest.param(["--device", "cuda9"], "device 'cuda9': there is none", marks=pytest.mark.slow),
        (["--batch", "513"], "--batch"),
    ],
)
def test_what_cannot_be_recorded_is_refused(cli: Cli, tmp_path: Path, options: list[str], why: str) -> None:
    assert_refused(cli("record", "tiny", "-n", 0, "-o", tmp_path / "x.gguf", *options), why)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_run_that_a_kernel_ends_leaves_no_file(tmp_path: Path) -> None:
    kernels = tmp_path / "wrong.py"
    kernels.write_text(FAULT.format(does="os.kill(os.getpid(), 11)"))
    done = fresh("record", "tiny", "-o", tmp_path / "x.gguf", "--device", "npu", "--all", "--kernels", kernels)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[1:] == [done.err.splitlines()[-1]], "after the line on the kernels"
    assert done.err.endswith("llama.cpp ended by SIGSEGV\n")
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.py"]


@pytest.mark.slow
def test_a_run_like_another_has_its_tokens(cli: Cli, records: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.gguf"
    words = ["record", "tiny", "-o", again, "--like", records / "right.gguf", "--device", "npu", "--all"]
    assert cli(*words).code == 0
    assert "have other tokens" not in cli("compare", records / "right.gguf", again).out
    assert_refused(cli("record", "tiny", "-o", again, "--like", again), "is what --like reads")


@pytest.mark.slow
@pytest.mark.daily(7)
def test_a_fault_in_token_1500_of_layer_7_is_the_first(tmp_path: Path) -> None:
    """Of SmolLM2 over 2,000 tokens, in one value: found in its step, and with a step for each token, at it."""
    kernels, text = tmp_path / "wrong.py", tmp_path / "text.txt"
    does = "at = seen.setdefault(0, 0); seen[0] = at + dst.ne[1]; at <= 1500 < at + dst.ne[1] and spoil(dst, 1500 - at)"
    spoil = "def spoil(dst, at):\n    dst.view()[..., at, 5] += 0.001\n"
    wrong = f"seen = {{}}\n{spoil}{FAULT.format(does=does)}".replace("ffn_swiglu-1", "ffn_swiglu-7")
    text.write_text(" ".join(f"The number {n} comes after the number {n - 1}." for n in range(1, 125)))
    words = ["record", "demo", "-f", text, "-n", 0, "--device", "npu", "--all"]
    for name, source in {"right": wrong.replace("1500 <", "-1 <").replace("<= 1500", "<= -1"), "wrong": wrong}.items():
        kernels.write_text(source)
        done = fresh(*words, "--kernels", kernels, "-o", tmp_path / f"{name}.gguf")
        assert done.code == 0, done.err
    done = fresh("compare", tmp_path / "right.gguf", tmp_path / "wrong.gguf")
    assert done.code == 1
    assert "first at SWIGLU 'ffn_swiglu-7', node " in done.out.splitlines()[-1]
    assert "of step 2 (tokens 1,024 to 1,535)" in done.out.splitlines()[-1]
