"""ggml-npu run: its text, its table, its prompt, threads and context; and what a session refuses."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from kit.commands import Cli, assert_refused, fresh

from graph_runner.base.limits import MOST_THREADS
from graph_runner.run.session import Sampler, Session, SessionError, Settings, generate

# text and table


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
def test_verbose_shows_the_log_of_llama_cpp() -> None:
    outcome = fresh("run", "tiny", "-n", "1", "--verbose")
    assert outcome.code == 0
    assert "llama_context" in outcome.err


# the prompt


def test_a_prompt_from_a_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("abc")
    assert cli("run", "tiny", "-n", "2", "-f", file).out == cli("run", "tiny", "-n", "2", "-p", "abc").out
    assert_refused(cli("run", "tiny", "-f", file, "-p", "x"), "--file", "--prompt")
    assert_refused(cli("run", "tiny", "-f", tmp_path / "none"), "--file", "No such file")
    file.write_bytes(b"\xff")
    assert_refused(cli("run", "tiny", "-f", file), "--file", "not UTF-8 at byte 0")


def test_a_prompt_tells_how_far_it_is(tiny: Path) -> None:
    seen: list[int] = []
    with Session(tiny, Settings(n_ctx=1024)) as session:
        tokens = session.tokenize("a" * 700)
        assert [*generate(session, tokens, 1, Sampler(), seen.append)]
    assert seen == [512, len(tokens)]


def test_a_prompt_beyond_the_training_context_is_told(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.gguf"
    file.write_bytes(tiny.read_bytes())
    reader = GGUFReader(file, "r+")
    field = reader.fields["llama.context_length"]
    field.parts[field.data[0]][0] = 16
    reader.data.flush()
    outcome = cli("run", file, "-n", "4")
    assert outcome.code == 0
    assert "ggml-npu: 26 + 4 tokens are more than the 16 that the model was trained for" in outcome.err


def test_cells_of_the_context(cli: Cli) -> None:
    assert cli("run", "tiny", "-n", "4", "-c", "1024").code == 0
    outcome = cli("run", "tiny", "-n", "600", "-c", "256")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1] == "ggml-npu: context of 256 cells is full"


# threads and caches


@pytest.mark.some(4)
@pytest.mark.parametrize("count", [MOST_THREADS + 1, 32768, 100_000, 99_999_999_999, -1])
@pytest.mark.parametrize("command", ["run", "diff", "coverage"])
def test_threads_have_a_bound(cli: Cli, command: str, count: int) -> None:
    assert_refused(cli(command, "tiny", "--threads", count), "'--threads'", f"see ggml-npu {command} -h")


def test_the_most_threads_work(cli: Cli) -> None:
    assert cli("run", "tiny", "-n", "2", "--threads", MOST_THREADS).code == 0


def test_a_session_has_the_same_bounds(tiny: Path) -> None:
    with pytest.raises(SessionError, match=f"threads 100000: must be 0 to {MOST_THREADS}"):
        Session(tiny, Settings(threads=100_000))
    with pytest.raises(SessionError, match="cache_type_k 'q8': must be one of f32 f16 "):
        Session(tiny, Settings(cache_type_k="q8"))


def test_a_wrong_option_is_not_blamed_on_the_model(cli: Cli) -> None:
    outcome = cli("run", "tiny", "--flash-attn", "off", "--cache-type-v", "q4_0")
    assert_refused(outcome, "cache type q4_0 of V", "flash attention, which is off")
    assert "model" not in outcome.err


def test_a_session_has_no_logits_before_a_token(tiny: Path) -> None:
    with Session(tiny, Settings()) as session, pytest.raises(SessionError, match="no token has been decoded"):
        session.logits()
