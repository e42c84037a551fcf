"""How well a clock predicts the time of ggml's own CPU.

    python tests/tools/clock.py

Measures the clock of this machine's CPU, one thread, by single nodes; predicts a prompt and a token of the demo model
and of llamas of F16 and of Q8_0; and prints each beside the time of llama.cpp.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from ggml_backend_npu import default_backend
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.plugin.build import Builder
from ggml_backend_npu.profiles.clock import Clock
from ggml_backend_npu.profiles.rules import Profile
from graph_runner.base.models import demo_file
from graph_runner.base.tiny import TinyModel, spm_vocabulary
from graph_runner.run.session import Session, Settings
from graph_runner.tools.coverage import cover


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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "demo, Q4_1": demo_file(),
            "F16": _Large(Path(folder) / "f16.gguf", GGMLQuantizationType.F16).save(),
            "Q8_0": _Large(Path(folder) / "q8.gguf", GGMLQuantizationType.Q8_0).save(),
        }
        clock = measured()
        print(clock)
        for name, model in models.items():
            both = predicted_and_true(model, clock, "once upon a time " * 4)
            for part, (guess, true) in zip(("prompt", "token"), both, strict=True):
                print(
                    f"{name}, {part}: predicted {guess * 1e3:.2f} ms, measured {true * 1e3:.2f} ms: {guess / true:.2f}"
                )


if __name__ == "__main__":
    main()
