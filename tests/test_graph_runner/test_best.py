"""`bench best` and `bench depth`: what llama.cpp's own benchmarks print, with the plugin and without. The programs here
print as those do that the commands build (llama-bench -o jsonl, llama-batched-bench --output-format jsonl)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from graph_runner.base.errors import BenchError
from graph_runner.bench.best import LLAMA_CPP, bench_best, bench_depth
from graph_runner.bench.measure import Measurement
from graph_runner.tools import suites

BENCH = """
assert ("--repack" in sys.argv) == has_plugin
fast = 2.0 if has_plugin else 1.0
options = dict(zip(sys.argv[1:], sys.argv[2:]))
for flash, depth in itertools.product(*(map(int, options.get(name, "0").split(",")) for name in ("-fa", "-d"))):
    for n_prompt, n_gen in ((512, 0), (0, 32)):
        speed = fast * (1 + flash) * (n_prompt or n_gen) / (1 + depth)
        row = {"backends": backends, "n_prompt": n_prompt, "n_gen": n_gen, "flash_attn": flash, "avg_ts": speed}
        print(json.dumps(row | {"n_depth": depth, "type_k": options.get("-ctk", "f16")}))
"""
BATCHED = """
types = dict.fromkeys(["CPU", *(["NPU"] if os.environ.get("GGML_NPU_MEMORY") == "device" and loads else [])])
_, _, buffer_type = sys.argv[sys.argv.index("-ot") + 1].partition("=")
if buffer_type not in types:
    sys.exit('error while handling argument "-ot": unknown buffer type')
if "--list-devices" in sys.argv:
    sys.exit(0)
assert ("--no-repack" in sys.argv) == has_plugin
flash = sys.argv[sys.argv.index("-fa") + 1]
print("llama_context: some line of its log")
prompts, sequences = (map(int, sys.argv[sys.argv.index(name) + 1].split(",")) for name in ("-npp", "-npl"))
for pp, n in itertools.product(prompts, list(sequences)):
    speed = n * (3.0 if has_plugin else 2.0) / (1 if flash == "off" else 2)
    row = json.dumps({"pp": pp, "pl": n, "speed_pp": 10 * speed, "speed_tg": speed})
    print(row[:9], end="", flush=True)  # a full buffer ends anywhere
    print("llama_context: a line of its log", file=sys.stderr, flush=True)
    print(row[9:], flush=True)
"""
HEAD = """#!{python}
import itertools, json, os, sys
has_plugin = loads = 'GGML_BACKEND_PATH' in os.environ
backends = {backends}
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of programs that print."""
    for name, text in (("llama-bench", BENCH), ("llama-batched-bench", BATCHED)):
        head = HEAD.format(python=sys.executable, backends="'NPU' if has_plugin else 'CPU'")
        (tmp_path / name).write_text(head + text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(suites, "build", lambda programs: tmp_path)
    monkeypatch.setenv("GGML_BACKEND_PATH", "of the user")  # which llama.cpp alone must not have
    return tmp_path


def measured() -> dict[str, Measurement]:
    return {each.what: each for each in bench_best(Path("model.gguf"), rounds=2, threads=2)}


@pytest.mark.usefixtures("programs")
def test_each_setting_is_compared_with_llama_cpps_better_one() -> None:
    found = measured()
    assert {each.group for each in found.values()} == {"llama-bench", "sequences", "new lengths"}
    prompt = found["prompt of 512, flash attention off"]
    assert prompt.values == [1024.0, 1024.0]
    assert prompt.others == {LLAMA_CPP: [1024.0, 1024.0]}  # with flash attention
    assert prompt.ratio(LLAMA_CPP) == 1
    assert found["32 tokens, flash attention on"].ratio(LLAMA_CPP) == 2
    assert found["16 tokens, 8 sequences, flash attention off"].ratio(LLAMA_CPP) == 1.5
    assert found["16 tokens, 8 sequences, flash attention on"].ratio(LLAMA_CPP) == 0.75
    assert found["prompt of 64, 1 sequence, flash attention off"].values == [30.0, 30.0]
    assert found["prompt of 333, a new length, flash attention on"].values == [15.0, 15.0]
    assert len(found) == 2 * (2 + 2 * 6 + 4)


@pytest.mark.usefixtures("programs")
def test_after_many_tokens_and_with_other_caches() -> None:
    found = {each.what: each for each in bench_depth(Path("model.gguf"), rounds=1, threads=2)}
    assert {each.group for each in found.values()} == {"llama-bench", "caches"}
    assert found["32 tokens, flash attention off"].ratio(LLAMA_CPP) == 1
    assert found["prompt of 512 after 1,024, flash attention on"].values == [2 * 2 * 512 / 1025]
    assert found["32 tokens after 16,384, flash attention on"].ratio(LLAMA_CPP) == 2
    assert found["32 tokens after 4,096, cache of q5_0, flash attention on"].others == {LLAMA_CPP: [2 * 32 / 4097]}
    assert len(found) == 2 * (2 * 3 + 1 + 4)


def test_programs_that_do_not_load_the_plugin_are_not_compared(programs: Path) -> None:
    text = (programs / "llama-bench").read_text()
    (programs / "llama-bench").write_text(text.replace("'NPU' if has_plugin else 'CPU'", "'CPU'"))
    with pytest.raises(BenchError, match="llama-bench has no device NPU, but CPU"):
        measured()


def test_a_program_of_many_sequences_without_the_plugin_is_not_compared(programs: Path) -> None:
    """llama-batched-bench does not say what it runs on, and may not read GGML_BACKEND_PATH."""
    text = (programs / "llama-batched-bench").read_text()
    (programs / "llama-batched-bench").write_text(text.replace("types =", "loads = False\ntypes ="))
    with pytest.raises(BenchError, match=r"llama-batched-bench has no device NPU: .*unknown buffer type"):
        measured()
