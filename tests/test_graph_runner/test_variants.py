"""A device compared with itself under other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from kit.commands import Cli, assert_refused
from kit.diffs import FLASH_OFF, FLASH_ON, QUANTISED, run
from kit.models import Models, add_experts
from llama_cpp import llama_cpp

from graph_runner.base import variants
from graph_runner.base.errors import BadInputError, SessionError
from graph_runner.base.settings import Settings
from graph_runner.base.tiny import TinyModel, spm_vocabulary
from graph_runner.base.variants import Variant, Variants
from graph_runner.diff.kinds import Cpu
from graph_runner.diff.run import DiffOptions, DiffResult, diff
from graph_runner.judging.results import Fate, Verdict
from graph_runner.reports.diff_report import diff_json
from graph_runner.run.session import Session
from quant.kernels.processor import announces_amx

repacks = pytest.mark.skipif(announces_amx(), reason="this processor announces AMX, with which repacking may crash")


class Quantised(TinyModel):
    """Matrices in q4_0, which ggml's CPU repacks."""

    def linear(self, name: str, n_in: int, *n_out: int, bias: bool = False) -> None:
        self.weight(f"{name}.weight", self.random(n_in, *n_out, std=n_in**-0.5), GGMLQuantizationType.Q4_0)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Quantised(tmp_path_factory.mktemp("q4_0") / "tiny.gguf", "llama", spm_vocabulary(), n_layer=1, n_ff=256)
    made.llama()
    return made.save()


def params_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> list[object]:
    """A parameter of each context that is made."""
    seen, made = [], llama_cpp.llama_init_from_model

    def noting(of: object, params: Any) -> object:
        seen.append(getattr(params, name))
        return made(of, params)

    monkeypatch.setattr(llama_cpp, "llama_init_from_model", noting)
    return seen


def beside(file: Path, reference: str, device: str, steps: int = 1, **options: Any) -> DiffResult:
    found = Variants.of(("CPU", reference.split()), ("CPU", device.split()))
    return run(file, steps=steps, device="CPU", variants=found, **options)


WRONG = {
    ("CPU", "threads"): "must be NAME=VALUE; CPU has: threads flash-attn repack",
    ("CPU", "threads=0"): "must be 1 to",
    ("CPU", "threads=²"): "must be 1 to",
    ("CPU", "flash-attn=auto"): "must be off or on",
    ("CPU", "matmul=fast"): "CPU has: ",
    ("NPU", "threads=1"): "NPU has: matmul kernels",
    ("NPU", "matmul=slow"): "must be exact or fast",
    ("Vulkan0", "repack=on"): "Vulkan0 has: op-offload",
}


@pytest.mark.parametrize(("given", "says"), WRONG.items(), ids=map(" ".join, WRONG))
def test_settings_that_a_device_does_not_have(given: tuple[str, str], says: str) -> None:
    with pytest.raises(BadInputError) as error:
        Variant.of([given[1]], given[0], "--device-with")
    assert str(error.value).startswith(f"--device-with {given[1]!r}: ")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("reference", "device", "says"),
    [
        ("CPU repack=on", "CPU", "--reference-with 'repack=on': repacked weights cannot be read"),
        ("NPU", "CPU threads=2", "--device-with 'threads=2': --device CPU needs --reference CPU"),
        ("CPU flash-attn=off", "NPU", "--reference-with 'flash-attn=off': changes the graph"),
        ("CPU", "CPU threads=1 threads=2", "--device-with 'threads=2': threads is given twice"),
    ],
)
def test_settings_that_two_sides_cannot_have(
    reference: str, device: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "announces_amx", lambda: False)
    (a, *of_a), (b, *of_b) = reference.split(), device.split()
    with pytest.raises(BadInputError) as error:
        Variants.of((a, of_a), (b, of_b))
    assert str(error.value).startswith(says)


def test_repacking_is_refused_where_amx_is_announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(variants, "announces_amx", lambda: True)
    with pytest.raises(BadInputError, match="--device-with 'repack=on': this processor announces AMX"):
        Variant.of(["repack=on"], "CPU", "--device-with")
    Variant.of(["repack=off"], "CPU", "--device-with")
    (tmp_path / "cpuinfo").write_text("model name : x\nflags\t\t: avx512f amx_bf16 amx_tile\n")
    assert announces_amx(tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("model name : amx_\nflags\t\t: avx512f\n")
    assert not announces_amx(tmp_path / "cpuinfo")
    assert not announces_amx(tmp_path / "none")


def test_each_side_runs_with_its_own_threads(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = params_seen(monkeypatch, "n_threads")
    result = beside(model("llama"), "threads=1", "threads=2", steps=0)
    assert seen == [2, 1], "the device's session is opened first"
    assert result
    assert (result.reference, result.device) == ("CPU threads=1", "CPU threads=2")
    assert {node.on for node in result.nodes} == {"CPU threads=2"}
    assert result.fates == {Fate.JUDGED: 50}
    assert {node.verdict for node in result.nodes} == {Verdict.EXACT}
    assert diff_json(result)["verdict"] == "right: 50 nodes compared, every byte equals CPU threads=1"


def test_a_device_offloads_no_ops_if_it_is_told_so(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = params_seen(monkeypatch, "op_offload")
    for text in ("on", "off"):
        settings = Variant.of([f"op-offload={text}"], "Vulkan0", "--device-with").over(FLASH_OFF)
        with Session(model("llama"), settings):
            pass
    assert seen == [True, False]


@repacks
def test_repacked_weights_are_judged(quantised: Path) -> None:
    result = beside(quantised, "", "repack=on")
    assert result, result.wrong[:1]
    assert (result.reference, result.device) == ("CPU", "CPU repack=on")
    assert result.notes == [
        "CPU repack=on: 7 weights lie repacked, in memory that nobody can read: they are not compared, but taken to be "
        "the file's"
    ]
    products = [node for node in result.nodes if node.types == "q4_0 f32 -> f32"]
    assert len(products) == 14
    assert not all(node.isolated for node in products), "alone they are computed from repacked weights too"
    assert not all(node.mirrored for node in products)
    others = [node for node in result.nodes if node.types != "q4_0 f32 -> f32"]
    assert all(node.isolated and node.mirrored for node in others)
    assert result.ending is not None
    assert result.ending.nmse < 1e-3


@repacks
def test_what_repacked_weights_look_like_is_not_taken_for_weights(
    quantised: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of eight rows lie interleaved: read as they lie, they are other weights."""
    monkeypatch.setattr(Cpu, "hides", lambda self, storage: False)
    assert {node.op for node in beside(quantised, "", "repack=on", steps=0).wrong} == {"MUL_MAT"}


@repacks
def test_a_model_without_weights_to_repack_is_right_byte_for_byte(model: Models) -> None:
    result = beside(model("llama"), "", "repack=on", steps=0)
    assert result.notes == ["CPU repack=on: no weight of this model lies repacked"]
    assert diff_json(result)["verdict"].startswith("right: 50 nodes compared, every byte equals")


def test_graphs_that_differ_are_compared_where_they_are_the_same(model: Models) -> None:
    """Of 50 nodes and 44, 40 are in both."""
    result = beside(model("llama"), "flash-attn=off", "flash-attn=on", steps=1)
    assert not result
    data = diff_json(result)
    assert (data["answer"], data["passed"]) == ("not judged", False)
    assert "the graph of CPU flash-attn=on has no such node; what was judged is right" in data["verdict"]
    assert result.fates == {Fate.JUDGED: 80, Fate.NOT_JUDGED: 28}
    alone = {node.op for node in result.not_judged}
    assert alone == {"MUL_MAT", "SOFT_MAX", "CONT", "SET_ROWS", "FLASH_ATTN_EXT"}
    (note,) = result.notes
    assert note.startswith("llama.cpp makes other graphs of the two: 20 nodes of CPU flash-attn=off (8 MUL_MAT, ")
    assert "80 of the same name, op, types and ne are compared, and what each step gives" in note
    assert result.ending is not None
    assert 0 < result.ending.nmse < 1e-4
    assert result.ending.limit is None, "what the switch does is not measured by the switch"
    off = [node for node in result.nodes if node.cumulative is not None and not node.cumulative]
    assert off
    assert {node.verdict for node in off} == {Verdict.INHERITED}
    assert all(node.mirrored for node in off), "from the same inputs they are the same"


def test_a_model_without_attention_has_one_graph(model: Models) -> None:
    result = beside(model("mamba"), "flash-attn=off", "flash-attn=on", steps=0)
    assert result
    assert result.notes == []
    assert {node.verdict for node in result.nodes} == {Verdict.EXACT}


@pytest.mark.slow
@pytest.mark.daily(3)
def test_threads_show_in_attention_to_many_cells(model: Models) -> None:
    """Threads take parts of 512 cells or more, for one token: ggml-cpu adds each part in half floats."""
    found = Variants.of(("CPU", ["threads=1"]), ("CPU", ["threads=2"]))
    options = DiffOptions(
        steps=1, settings=FLASH_ON, device="CPU", variants=found, ops=["FLASH_ATTN_EXT", "ROPE"], canary=1
    )
    result = diff(model("llama"), "a" * 280, options)
    off = {(node.step, node.op) for node in result.nodes if node.mirrored is not None and not node.mirrored}
    assert off == {(1, "FLASH_ATTN_EXT")}
    alone = {(node.step, node.op) for node in result.nodes if node.isolated is not None and not node.isolated}
    assert alone == off, "nodes that are computed alone have the side's threads too"


@repacks
def test_repacked_experts(tmp_path: Path) -> None:
    made = Quantised(tmp_path / "moe.gguf", "llama", spm_vocabulary(), n_layer=1)
    made.attention_heads()
    made.writer.add_expert_count(4)
    made.writer.add_expert_used_count(2)
    made.embeddings()
    made.attention("blk.0")
    made.norm("blk.0.ffn_norm")
    add_experts(made, "blk.0", 4)
    result = beside(made.save(), "", "repack=on", steps=0)
    assert result, result.wrong[:1]
    experts = [node for node in result.nodes if node.op == "MUL_MAT_ID"]
    assert len(experts) == 3
    assert all(node.isolated is not None and node.mirrored is not None for node in experts)
    (note,) = result.notes
    assert note.startswith("CPU repack=on: 7 weights lie repacked")


def test_a_quantised_cache_needs_flash_attention_on_both_sides(model: Models) -> None:
    with pytest.raises(SessionError, match="cache type q4_0 of V: a quantised V cache needs flash attention"):
        beside(model("llama"), "flash-attn=off", "", settings=QUANTISED)


NEGATIVE = """
from ggml_backend_npu import op

@op("CONT")
def cont(dst, x):
    dst.view()[...] = {sign}x.view().reshape(dst.ne[::-1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["reference", "device"])
def test_a_file_of_kernels_beside_another(cli: Cli, tmp_path: Path, wrong: str) -> None:
    words, page = [], tmp_path / "page.html"
    for side in ("reference", "device"):
        file = tmp_path / f"{side}.py"
        file.write_text(NEGATIVE.format(sign="-" if side == wrong else ""))
        words += [f"--{side}", "npu", f"--{side}-with", f"kernels={file}"]
    outcome = cli("diff", "tiny", "-n", 0, "--ops", "CONT", *words, "--html", page)
    assert outcome.code == 1
    assert "step 0 node 13: CONT " in outcome.out
    assert f"differ from NPU kernels={tmp_path / 'reference.py'}" in outcome.out
    assert f"NPU kernels={tmp_path / 'device.py'} against NPU kernels={tmp_path / 'reference.py'}" in page.read_text()
    assert_refused(cli("diff", "tiny", *words, "--json", tmp_path / "device.py"), "--json", "--device-with")


@pytest.mark.slow
def test_products_by_blas_beside_exact_ones(cli: Cli) -> None:
    words = [
        "--reference",
        "npu",
        "--reference-with",
        "matmul=exact",
        "--device",
        "npu",
        "--device-with",
        "matmul=fast",
    ]
    outcome = cli("diff", "tiny", "--all", "-n", 0, *words)
    assert outcome.code == 0
    assert "NPU matmul=exact beside NPU matmul=fast" in outcome.out
    assert "right within rounding: " in outcome.out
    same = cli("diff", "tiny", "--all", "-n", 0, *words[:-1], "matmul=exact")
    assert "right: 52 nodes compared, every byte equals NPU matmul=exact" in same.out


def test_settings_of_a_variant_replace_those_of_both_sides() -> None:
    variant = Variant.of(["threads=1", "flash-attn=on"], "CPU", "--device-with")
    assert variant.over(Settings(threads=2)) == Settings(threads=1, flash_attention="on")
    assert not Variant()
    assert not Variants()
    assert Variants(variant)
