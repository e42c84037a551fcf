"""The clock of a profile: what it predicts, and, measured on this machine, how well it predicts ggml's own CPU."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from models import Models
from support import choose

from ggml_backend_npu import Node, Tensor, default_backend
from ggml_backend_npu.abi import lib
from ggml_backend_npu.abi.build import Builder
from ggml_backend_npu.clock import Clock
from ggml_backend_npu.profiles import FULL, Profile, ProfileError, load
from graph_runner.coverage import cover
from graph_runner.models import demo_file
from graph_runner.prediction import Timer
from graph_runner.session import Session, Settings
from graph_runner.tiny import TinyModel, spm_vocabulary

PROMPT = "once upon"
CHIP = Clock(memory=1e9, bus=1e8, launch=1e-6, operations={"f32": 1e9, "elements": 1e12, "f16": 1e10})
CPU = Clock(memory=1e8, operations={"f32": 1e8})


def of(*shape: int, type: Any = np.float32) -> Tensor:
    return Tensor.of(np.zeros(shape, type))


# what a node takes


@pytest.mark.parametrize(
    ("node", "seconds"),
    [
        (Node("ADD", of(2, 64), (of(2, 64), of(1, 64))), 1e-6 + (128 + 128 + 64) * 4 / 1e9),
        (Node("MUL_MAT", of(1, 8), (of(8, 64, type=np.float16), of(1, 64))), 1e-6 + (8 * 64 * 2 + 72 * 4) / 1e9),
        (Node("MUL_MAT", of(99, 8), (of(8, 64), of(99, 64))), 1e-6 + 2 * 8 * 64 * 99 / 1e9),
        (Node("GET_ROWS", of(2, 64), (of(99, 64), of(1, 2, type=np.int32))), 1e-6 + (256 * 4 + 8) / 1e9),
    ],
    ids=["bytes", "weights", "operations", "rows"],
)
def test_a_node_takes_what_takes_longer(node: Node, seconds: float) -> None:
    assert CHIP.seconds(node) == pytest.approx(seconds)


def test_an_op_has_a_rate_of_its_own() -> None:
    node = Node("SILU", of(64), (of(64),))
    assert replace(CHIP, operations={"SILU": 1e6, "elements": 1.0}).seconds(node) == pytest.approx(65e-6)


# what a graph takes


def test_what_one_reads_of_the_other_is_copied() -> None:
    timer = Timer(CHIP, CPU)
    x, y, z = of(1000), of(1000), of(1000)
    for dst, src in ((y, x), (z, y), (x, y)):
        timer.add(Node("SQR", dst, (src,)), computes=True)
    ops = ["SQR"] * 3
    here = timer.predict(ops, [True, True, True])
    assert here.transfer == 0
    assert here.total == pytest.approx(3 * (1e-6 + 8000 / 1e9))
    mixed = timer.predict(ops, [True, False, False])
    assert mixed.transfer == pytest.approx(4000 / 1e8)
    assert mixed.fallback["SQR"] == pytest.approx(2 * 8000 / 1e8)


def test_a_coverage_says_what_saves_time(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Clock(memory=1e15, bus=1e15)
    choose(monkeypatch, profile=replace(FULL, clock=(fast, CPU)))
    found = cover(model("llama"), PROMPT, settings=Settings(flash_attention="off"))
    now = found.token.predicted()
    assert now is not None
    assert now.fallback.total() > 0.9 * now.total
    best = found.write_next
    assert best is not None
    assert "MUL_MAT" in best.ops
    assert found.single[0].ops == ("MUL_MAT",)
    then = found.token.predicted(best.ops)
    assert then is not None
    assert best.saves[1] == pytest.approx(now.total - then.total)


def test_a_coverage_without_a_clock_predicts_nothing(
    model: Models, monkeypatch: pytest.MonkeyPatch, backend: object
) -> None:
    found = cover(model("llama"), PROMPT)
    assert found.token.predicted() is None
    assert not any(gain.saves != (0.0, 0.0) for gain in found.single)


# its profile

CLOCK = """
[clock]
memory = 1e11
bus = 1e10
launch = 5e-6
operations = { q8_0 = 4e12, f32 = 1e12, SOFT_MAX = 1e10, elements = 1e11 }
[host]
memory = 1e10
operations.f32 = 5e10
"""


@pytest.mark.slow
def test_a_profile_has_a_clock(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(CLOCK)
    profile = load(str(path))
    assert profile.ops is None
    assert profile.clock == (
        Clock(1e11, 1e10, 5e-6, {"q8_0": 4e12, "f32": 1e12, "SOFT_MAX": 1e10, "elements": 1e11}),
        Clock(1e10, operations={"f32": 5e10}),
    )
    path.write_text('ops = ["ADD"]' + CLOCK)
    assert set(load(str(path)).ops or ()) == {"ADD"}
    command = [sys.executable, "-m", "graph_runner", "coverage", "tiny", "--profile", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^token by the clock: [\d.,]+ tokens/s, [\d.]+ ms: .*on the CPU", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("line", "wrong", "said"),
    [
        ("memory = 1e11", "memory = 0", "line 3: memory=0: must be a number above zero"),
        ("memory = 1e11\n", "", "line 2: clock: needs memory, in bytes a second"),
        ("bus =", "buss =", "line 4: unknown key 'buss'; known: memory bus launch operations"),
        ("SOFT_MAX", "SOFTMAX", "line 6: unknown type or op 'SOFTMAX'; did you mean SOFT_MAX"),
        ("[host]", "[op.ADD]\n[host2]", "line 8: unknown key 'host2'; known: "),
        ("[host]\nmemory = 1e10\noperations.f32 = 5e10\n", "", "line 2: clock: needs [host] beside it"),
    ],
)
def test_what_is_wrong_in_a_clock_is_told(line: str, wrong: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    assert line in CLOCK
    path.write_text(CLOCK.replace(line, wrong, 1))
    with pytest.raises(ProfileError) as raised:
        load(str(path))
    assert str(raised.value).startswith(said)


# measured, where truth is known


def best(run: Callable[[], object], rounds: int = 7) -> float:
    """Seconds of the processor, in one thread: what others do meanwhile does not count."""
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        run()
        times.append(time.thread_time() - begin)
    return min(times)


def seconds(node: Callable[[Builder], int], *, n: int = 1, rounds: int = 7) -> float:
    """What ggml's CPU needs for a node, one of n alike in a graph."""
    with Builder(lib.ggml(), "CPU") as build:
        build.use_threads(1)
        nodes = [node(build) for _ in range(n)]
        graph = build.graph_of(*nodes)
        for each in build.inputs:
            build.set(each, np.full(build.nbytes(each), 0, np.uint8))
        return best(build.job(graph), rounds) / n


def product(type: str, ne0: int, ne1: int, n: int) -> Callable[[Builder], int]:
    return lambda b: b.op("mul_mat", b.tensor(type, (ne0, ne1)), b.tensor("f32", (ne0, n)))


def measured() -> Clock:
    """The clock of ggml's CPU, by micro-measurements: of memory by many weights and one column, of arithmetic by few
    weights, and of each op by a graph of it."""
    launch = seconds(lambda b: b.op("add", b.tensor("f32", (1,)), b.tensor("f32", (1,))), n=256)
    memory = 2 * 4096 * 4096 / seconds(product("f16", 4096, 4096, 1))
    rates = {t: 2 * 512 * 512 * 32 / seconds(product(t, 512, 512, 32)) for t in ("f32", "f16", "q8_0", "q4_1")}
    wide = (576, 64)

    def unary(function: str, *more: Any) -> Callable[[Builder], int]:
        return lambda b: b.op(function, b.tensor("f32", wide), *more)

    ops = {
        "RMS_NORM": unary("rms_norm", 1e-5),
        "SWIGLU": lambda b: b.op("swiglu_split", b.tensor("f32", wide), b.tensor("f32", wide)),
        "SOFT_MAX": unary("soft_max_ext", None, 1.0, 0.0),
        "CONT": lambda b: b.op("cont", b.permute(b.tensor("f32", wide), (1, 0, 2, 3))),
        "ADD": lambda b: b.op("add", b.tensor("f32", wide), b.tensor("f32", wide)),
        "MUL": lambda b: b.op("mul", b.tensor("f32", wide), b.tensor("f32", wide)),
    }
    for op, made in ops.items():
        rates[op] = 576 * 64 / (seconds(made) - launch)
    rates["elements"] = rates["CONT"]
    return Clock(memory, launch=launch, operations=rates)


class _Large(TinyModel):
    """A llama of matrices of one type."""

    def __init__(self, path: Path, type: GGMLQuantizationType) -> None:
        super().__init__(path, "llama", spm_vocabulary(), n_embd=512, n_layer=6, n_ff=1536)
        self._type = type
        self.attention_heads(n_head=8, n_head_kv=4, head_size=64)
        self.embeddings()
        for block in self.blocks():
            self.attention(block)
            self.norm(f"{block}.ffn_norm")
            self.linear(f"{block}.ffn_gate", 512, 1536)
            self.linear(f"{block}.ffn_up", 512, 1536)
            self.linear(f"{block}.ffn_down", 1536, 512)

    def linear(self, name: str, n_in: int, *n_out: int, bias: bool = False) -> None:
        self.weight(f"{name}.weight", self.random(n_in, *n_out, std=n_in**-0.5), self._type)


def predicted_and_true(model: Path, clock: Clock, prompt: str) -> list[tuple[float, float]]:
    """Seconds of a prompt and of a token: by the clock, and of llama.cpp with ggml's CPU."""
    backend = default_backend()
    backend.options = replace(backend.options, profile=Profile("cpu", "", "", {}, (clock, clock)))
    settings = Settings(flash_attention="off", threads=1, n_ctx=256)
    found = cover(model, prompt, settings=settings)
    by_clock = [graph.predicted() for graph in (found.prompt, found.token)]
    with Session(model, settings) as session:
        tokens = session.tokenize(prompt)

        def decode(part: list[int]) -> None:
            session.decode(part)
            session.logits()

        decode(tokens)

        def again() -> None:
            session.clear()
            decode(tokens)

        true = [best(again, 5), best(lambda: decode(tokens[-1:]), 9)]
    return [(guess.total, time) for guess, time in zip(by_clock, true, strict=True) if guess is not None]


@pytest.mark.slow
def test_a_clock_of_this_cpu_predicts_ggmls_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(default_backend(), "options", default_backend().options)
    models = {
        "demo, Q4_1": demo_file(),
        "F16": _Large(tmp_path / "f16.gguf", GGMLQuantizationType.F16).save(),
        "Q8_0": _Large(tmp_path / "q8.gguf", GGMLQuantizationType.Q8_0).save(),
    }
    clock = measured()
    off = []
    with capsys.disabled():
        print(f"\n{clock}")
        for name, model in models.items():
            for part, (guess, true) in zip(
                ("prompt", "token"), predicted_and_true(model, clock, "once upon a time " * 4), strict=True
            ):
                print(
                    f"{name}, {part}: predicted {guess * 1e3:.2f} ms, measured {true * 1e3:.2f} ms: {guess / true:.2f}"
                )
                off.append(guess / true)
    assert all(0.7 < ratio < 1.3 for ratio in off)
