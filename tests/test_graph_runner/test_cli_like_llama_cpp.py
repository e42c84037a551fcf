"""What users of llama.cpp type: its names of options, LoRA adapters, models that are for something else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.commands import Cli, assert_refused, strict_json
from kit.encoders import write_tiny_bert
from kit.models import write_lora

from graph_runner.cli.app import COMMANDS, function_of
from graph_runner.cli.command import _spelled, parameters_of

# names of options


OPTIONS = {"--flash-attn", "--cache-type-k", "--cache-type-v", "--threads", "--gpu-layers", "--device", "--prompt"}
SPELLED = {
    "-fa on -p x": "--flash-attn on --prompt x",
    "-fa 1 -t 4": "--flash-attn on --threads 4",
    "-fa -1": "--flash-attn auto",
    "-fa off": "--flash-attn off",
    "-fa maybe": "--flash-attn maybe",
    "-fa --prompt x": "--flash-attn on --prompt x",
    "--prompt x -fa": "--prompt x --flash-attn on",
    "--prompt -fa": "--prompt -fa",
    "--prompt --prompt -fa": "--prompt --prompt --flash-attn on",
    "-ctk q8_0 -ctv q4_0": "--cache-type-k q8_0 --cache-type-v q4_0",
    "-ngl 99": "--gpu-layers 99",
    "--n-gpu-layers all": "--gpu-layers all",
    "-dev NPU": "--device NPU",
    "-m tiny -fa on": "tiny --flash-attn on",
    "--model=x": "--model=x",
    "-s 4": "-s 4",
    "-- -fa": "-- -fa",
}


@pytest.mark.parametrize(("typed", "ours"), SPELLED.items())
def test_names_of_options_are_taken_as_llama_cpp_has_them(typed: str, ours: str) -> None:
    taking = OPTIONS - {"--all"}
    words = [*_spelled(typed.split(), OPTIONS, taking | {"-p"})]
    assert words == ours.replace("--prompt x", "-p x" if "-p x" in typed else "--prompt x").split()


def test_bench_has_a_model_by_its_name(cli: Cli) -> None:
    assert_refused(cli("bench", "decode", "-m", "none.gguf"), "none.gguf", "no such file")


LLAMA_CPP = {
    "flash_attn": ("-fa", "on", "off"), "cache_type_k": ("-ctk", "q8_0", "q9"), "cache_type_v": ("-ctv", "f32", "q9"),
    "threads": ("-t", "1", "none"), "gpu_layers": ("-ngl", "99", "some"),
}  # fmt: skip


@pytest.mark.some(1)
@pytest.mark.daily(2)
@pytest.mark.parametrize("name", LLAMA_CPP)
def test_every_command_with_an_option_has_its_short_name(cli: Cli, name: str) -> None:
    short, _, wrong = LLAMA_CPP[name]
    commands = [each for each in COMMANDS if name in {parameter.name for parameter in parameters_of(function_of(each))}]
    assert {"run", "diff", "capture", "coverage"} <= {*commands, *(["capture"] if name == "gpu_layers" else [])}
    for command in commands:
        outcome = cli(command, short, "maybe" if name == "flash_attn" else wrong)
        assert_refused(outcome, f"'--{name.replace('_', '-')}'")


@pytest.mark.usefixtures("backend")
def test_a_command_line_of_llama_cpp(cli: Cli) -> None:
    words = "-m tiny -p Once -n 3 -fa on -ctk q8_0 -ctv q4_0 -t 1 --temp 0 -s 1 -dev cpu"
    ours = "tiny --prompt Once -n 3 --flash-attn on --cache-type-k q8_0 --cache-type-v q4_0 --threads 1 --device cpu"
    outcome = cli("run", *words.split())
    assert outcome.code == 0
    assert outcome.out == cli("run", *ours.split()).out


@pytest.mark.slow
def test_layers_are_offloaded(cli: Cli) -> None:
    outcome = cli("coverage", "tiny", "-ngl", "99", "--all", "--json", "-")
    assert strict_json(outcome.out)["device_type"] == "gpu"


# adapters


LORA = {"blk.0.attn_q": (64, 128), "blk.1.ffn_down": (128, 64)}


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora(tmp_path_factory.mktemp("lora") / "lora.gguf", LORA)


def test_an_adapter_is_computed_and_compared(cli: Cli, lora: Path) -> None:
    plain, adapted = (
        strict_json(cli("diff", "tiny", "-n", "0", "--all", "--in-process", "--json", "-", *words).out)
        for words in ([], ["--lora", lora])
    )
    assert plain["passed"]
    assert adapted["passed"]
    assert plain["text"] == adapted["text"] == ""
    names = {node["name"] for node in adapted["nodes"]} - {node["name"] for node in plain["nodes"]}
    more = {op: _count(adapted, op) - _count(plain, op) for op in ("MUL_MAT", "SCALE", "ADD")}
    assert more == {"MUL_MAT": 4, "SCALE": 2, "ADD": 2}, names


def _count(data: dict[str, list[dict[str, str]]], op: str) -> int:
    return sum(node["op"] == op for node in data["nodes"])


@pytest.mark.slow
def test_an_adapter_in_every_command(cli: Cli, lora: Path, tmp_path: Path) -> None:
    added: list[str | Path] = ["--lora", lora]
    ways: tuple[list[str | Path], ...] = (
        [],
        added,
        [*added, "--all"],
        [*added, "--no-llama-graph"],
        [*added, "--device", "cpu"],
    )
    plain, *adapted = (cli("run", "tiny", "-n", "8", *words).out for words in ways)
    assert {plain, *adapted} == {plain, adapted[0]}
    assert plain != adapted[0]
    trace = tmp_path / "trace.gguf"
    assert cli("capture", "tiny", "--lora", lora, "-n", "0", "--nodes", "SCALE", "-o", trace).code == 0
    assert re.search(r"^SCALE .* 2 +0 +0 ", cli("replay", trace).out, re.MULTILINE)


@pytest.mark.slow
def test_an_adapter_has_splits(cli: Cli, lora: Path) -> None:
    plain, adapted = (
        strict_json(cli("coverage", "tiny", "--json", "-", *words).out)["graphs"]["token"]
        for words in ([], ["--lora", lora])
    )
    assert adapted["nodes"] == plain["nodes"] + 8
    assert adapted["splits"] > plain["splits"]


def test_what_is_no_adapter(cli: Cli, lora: Path, tiny: Path, tmp_path: Path) -> None:
    wrong = write_lora(tmp_path / "wrong.gguf", {"blk.0.attn_q": (32, 128)})
    assert_refused(cli("run", "tiny", "--lora", wrong), f"adapter '{wrong}'", "incorrect shape")
    assert_refused(cli("run", "tiny", "--lora", tiny), f"adapter '{tiny}'", "to be 'adapter'")
    assert_refused(cli("run", "tiny", "--lora", tmp_path / "none"), f"adapter '{tmp_path / 'none'}': no such file")
    assert_refused(cli("capture", "tiny", "-o", lora, "--lora", lora), "is what --lora reads")


# models that are for something else


def test_a_model_of_embeddings_has_no_text(cli: Cli, tmp_path: Path) -> None:
    model = write_tiny_bert(tmp_path / "bert.gguf")
    assert_refused(cli("run", model, "-p", "a b"), "the model has no text", "embeddings")
