"""Whole models on the NPU: no node is left to the CPU, and what comes out is what llama.cpp's own CPU gives."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.commands import Cli, assert_refused, fresh, process
from kit.models import Models, requantized
from kit.support import choose
from numpy.typing import NDArray

import graph_runner
from ggml_backend_npu import Op, default_backend
from graph_runner.bench.memory import bench_memory
from graph_runner.run import token_graph
from graph_runner.run.session import Decoder, DeviceName, Sampler, Session, SessionError, Settings, generate
from graph_runner.run.token_graph import GraphRunner

PROMPT = "The capital of France is"
SETTINGS = Settings(n_ctx=512, threads=2)
TINY = ["llama", "moe", "gpt-oss", "rwkv7", "mamba"]
OF_DEMO = ["demo", "demo-q8_0", "demo-q4_0"]  # of quantised weights
NAMES = [*TINY, *(pytest.param(name, marks=pytest.mark.slow) for name in OF_DEMO)]

FLOATS, QUANTISED = 1e-6, 1e-5  # normalised mean squared error of logits, by what the matrices are

Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def file(model: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a model: also "demo-q8_0" and "demo-q4_0"."""
    folder = tmp_path_factory.mktemp("requantised")

    def find(name: str) -> Path:
        base, _, type = name.partition("-q")
        path = folder / f"{name}.gguf"
        if not type:
            return model(name)
        return path if path.exists() else requantized(model(base), f"q{type}", path)

    return find


@dataclass(frozen=True)
class OnTheCpu:
    """What llama.cpp's CPU makes of a model: 64 tokens, and the logits that each is picked from."""

    tokens: list[int]
    logits: list[Logits]
    bound: float


@pytest.fixture(scope="module")
def on_the_cpu(file: Callable[[str], Path]) -> Callable[..., OnTheCpu]:
    """Where the prompt is decoded token by token, the CPU adds up its f16 products in another order than at once."""

    @cache
    def decoded(name: str, *, by_token: bool = False) -> OnTheCpu:
        with Session(file(name), SETTINGS) as session:
            prompt = session.tokenize(PROMPT)
            for part in [[token] for token in prompt] if by_token else [prompt]:
                session.decode(part)
            logits = [session.logits()]
            while len(logits) < 64:
                session.decode([picked(logits[-1])])
                logits.append(session.logits())
        return OnTheCpu([*map(picked, logits)], logits, QUANTISED if name in OF_DEMO else FLOATS)

    return decoded


@pytest.fixture(autouse=True)
def takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, ops="all")
    choose(monkeypatch, matmul="exact")


def along(session: Decoder, prompt: list[int], tokens: list[int]) -> list[Logits]:
    """Logits behind a prompt, and behind each token but the last."""
    found = []
    for part in [prompt, *([token] for token in tokens[:-1])]:
        session.decode(part)
        found.append(session.logits())
    return found


def picked(logits: Logits) -> int:
    return Sampler()(logits)


def nmse(actual: Logits, expected: Logits) -> float:
    error = actual.astype(np.float64) - expected
    return float((error**2).sum() / (expected.astype(np.float64) ** 2).sum())


def assert_as_on_the_cpu(found: list[Logits], cpu: OnTheCpu) -> None:
    """The same tokens, from logits as near as they have to be.

    Of quantised weights that takes every byte: the CPU quantises activations too, and where one comes to lie on the
    other side of a step, by the last bit of a cosine, all layers behind it see another.
    """
    errors = [nmse(ours, theirs) for ours, theirs in zip(found, cpu.logits, strict=True)]
    assert [*map(picked, found)] == cpu.tokens, errors
    assert max(errors) < cpu.bound


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", NAMES)
def test_every_node_is_on_the_npu_and_the_text_is_the_cpus(name: str, file: Any, on_the_cpu: Any) -> None:
    with Session(file(name), replace(SETTINGS, device="npu")) as session:
        found = along(session, session.tokenize(PROMPT), on_the_cpu(name).tokens)
        assert session.left_to_the_cpu == {}
        assert session.npu_nodes == session.nodes
        assert session.splits == "1"
    assert_as_on_the_cpu(found, on_the_cpu(name))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", NAMES)
def test_the_graph_of_a_token_runs_without_llama_cpp(name: str, file: Any, on_the_cpu: Any) -> None:
    with Session(file(name), replace(SETTINGS, device="npu")) as session:
        runner = GraphRunner(session)
        prompt = session.tokenize(PROMPT)
        cpu = on_the_cpu(name, by_token=True)
        found = along(runner, prompt, cpu.tokens)
        first, others = 1, 1 if session.window == 0 else 2  # which mask has a window shows behind its first tokens
        assert (runner.n_asked, runner.n_run) == (first + others, len(prompt) + 63 - first - others)
        assert sum(session.nodes.values()) < sum(runner.nodes.values()) / 8
    assert_as_on_the_cpu(found, cpu)


@pytest.mark.some(1)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("flash_attention", ["on", "off"])
@pytest.mark.parametrize(("name", "n_asked"), [("llama", 3), ("gpt-oss", 4)])
def test_a_graph_is_taken_again_where_a_cache_shows_more_or_begins_anew(
    name: str, n_asked: int, flash_attention: Any, model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache shows 256 cells more at a time; that of gpt-oss's window has no more, and takes the oldest again."""
    monkeypatch.setattr(graph_runner.run.session, "N_BATCH", 8)
    settings = replace(SETTINGS, device="npu", flash_attention=flash_attention)
    tokens = [260 + token % 90 for token in range(270)]
    with Session(model(name), settings) as session:
        runner = GraphRunner(session)
        runner.decode(tokens)
        found = runner.logits()
    assert runner.n_asked == n_asked
    with Session(model(name), settings) as session:
        for token in tokens:
            session.decode([token])
        np.testing.assert_array_equal(found, session.logits())


@pytest.mark.usefixtures("backend")
def test_what_cannot_be_run_without_llama_cpp_is_named(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str) -> None:
        with Session(model("llama"), replace(SETTINGS, device="npu")) as session:
            runner = GraphRunner(session)
            with pytest.raises(SessionError, match=match):
                runner.decode([1, 2])

    with default_backend().ops.having(Op("ROPE", lambda dst: None, refuse=lambda dst: "as a test")):
        refused("4 ROPE nodes of a token are left to the CPU: as a test")
    with monkeypatch.context() as patch:
        patch.delitem(token_graph._RULES, "inp_pos")
        refused("input 'inp_pos': how llama.cpp sets it is not known here")
    with monkeypatch.context() as patch:
        patch.setitem(token_graph._RULES, "out_ids", (lambda found, now: 1,))
        refused("input 'out_ids'")


def test_nodes_that_are_left_to_the_cpu_are_named_with_the_reason(cli: Cli) -> None:
    with default_backend().ops.having(Op("ROPE", lambda dst: None, refuse=lambda dst: "as a test")):
        outcome = cli("run", "tiny", "--all", "-n", "2")
    assert outcome.code == 0
    assert "left to the CPU: ROPE 8 (as a test)\n" in outcome.err


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("memory", ["host", "device"])
def test_run_says_that_every_node_was_on_the_npu(memory: str, tiny_text: str) -> None:
    exact = os.environ | {"GGML_NPU_MATMUL": "exact"}
    outcome = fresh("run", "tiny", "--all", "--memory", memory, "--threads", 1, env=exact)
    assert outcome.code == 0, outcome.err
    assert outcome.out == tiny_text + "\n"
    assert "every node on the NPU, 1 split a token\n" in outcome.err


def test_run_without_llama_cpps_graph(cli: Cli, tiny: Path) -> None:
    with Session(tiny, SETTINGS) as session:
        *before, last = session.tokenize(PROMPT)
        for token in before:
            session.decode([token])
        expected = b"".join(map(session.piece, generate(session, [last], 64, Sampler()))).decode()
    outcome = cli("run", "tiny", "--no-llama-graph", "--threads", 1)
    assert outcome.code == 0, outcome.err
    assert outcome.out == expected + "\n"
    assert "tokens: 87 without llama.cpp's graph, 2 to get it\n" in outcome.err
    assert_refused(cli("run", "tiny", "--no-llama-graph", "--device", "cpu"), "--device is cpu")
    with Session(tiny, SETTINGS) as session, pytest.raises(SessionError, match="on the NPU with host memory alone"):
        GraphRunner(session)
    assert_refused(cli("run", "tiny", "--no-llama-graph", "--profile", "ascend-310p"), "left to the CPU")


@pytest.mark.slow
def test_weights_are_in_the_devices_memory_once() -> None:
    """SmolLM2's embeddings are its output matrix too."""
    script = """
import ggml_backend_npu
from ggml_backend_npu import default_backend
from graph_runner.base.models import demo_file
from graph_runner.run.session import Session, Settings
default_backend().options = default_backend().options.updated({"ops": "all", "memory": "device", "device_type": "gpu"})
with Session(demo_file(), Settings(device="npu", gpu_layers=99)) as session:
    memory = ggml_backend_npu.register().memory
    session.decode([1, 2, 3])
    print(demo_file().stat().st_size, memory.used, session.left_to_the_cpu)
"""
    outcome = process(sys.executable, "-c", script)
    size, used, left = outcome.out.split(maxsplit=2)
    assert left.strip() == "{}"
    assert int(used) < int(size) + (160 << 20)  # caches of 512 cells, and what is computed of 512 tokens


@pytest.mark.slow
def test_memory_is_not_much_more_than_llama_cpps(model: Models) -> None:
    found = bench_memory(model("demo"), [504, 3575, 282, 4649] * 128, threads=1)
    ((theirs,),) = found.others.values()
    assert found.median < 1.3 * theirs + 300, theirs


PAGE = """Bread is flour, water, salt and time. The flour holds starch, which yeast cannot eat, and enzymes that cut the
starch into sugar, which it can. Mix water into the flour and wait half an hour before you do anything else: the
enzymes begin their work, and two proteins join into gluten, the net that will later hold the gas. A dough that has
been left alone for that long needs half the kneading.

Yeast works fastest at the temperature of a warm hand, but flavour comes from slowness. In a cold cellar the same
dough rises over a night instead of an hour, and bacteria that live beside the yeast have the time to make acids. A
baker who wants a sour loaf keeps the dough cool, and a baker who wants a mild one keeps it warm and short. Salt slows
both down; without it the dough rises too fast, tears, and tastes of nothing.

How do you know that a loaf is ready for the oven? Press it with a wet finger. If the hole fills at once, it needs more
time. If it stays as it is, you have waited too long. If it comes back slowly, and not quite all the way, heat the oven
as hot as it will go, and put a pan of water below. The steam keeps the skin soft for the first ten minutes, so that
the loaf can grow; after that you want a dry heat, for the crust. Cut the top with a sharp knife before it goes in, or
it will choose for itself where to burst.

A loaf of one kilogram takes about fifty minutes. Knock on its bottom: it should sound hollow, like a door with an
empty room behind it. Then comes the hardest part, which is to leave it alone. While it cools, the starch sets, and
the water that is left in the middle moves outward. Bread that is cut hot is gummy, and goes stale by the evening.
Bread that has cooled for two hours keeps for four days in a cloth, and for a week in a box, and on the third day it
makes the best toast of all."""


@pytest.mark.daily(3)
@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_the_perplexity_of_a_page_is_the_cpus(model: Models) -> None:
    cpu, npu = (perplexity(model("demo"), device) for device in ("cpu", "npu"))
    assert abs(npu / cpu - 1) < 1e-3


def perplexity(file: Path, device: DeviceName) -> float:
    """e to the mean surprise at a page's tokens, each behind those before."""
    surprise = []
    with Session(file, replace(SETTINGS, device=device)) as session:
        tokens = session.tokenize(PAGE)
        for token, following in pairwise(tokens):
            session.decode([token])
            logits = session.logits().astype(np.float64)
            surprise.append(np.logaddexp.reduce(logits) - logits[following])
    assert len(surprise) > 300
    return float(np.exp(np.mean(surprise)))
