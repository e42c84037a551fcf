"""python -m graph_runner.bench.soak: runs the backend for a long time, with every op on the NPU and exact products.

It decodes many tokens with context shifts, opens and closes many contexts, and decodes in two threads at once. It
checks that the process does not grow in memory, open files or threads, and that the text is the CPU's.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import ggml_backend_npu
from graph_runner.base.models import model_file
from graph_runner.run.session import DeviceName, Sampler, Session, Settings

PROMPT = "Once upon a time"
_SAMPLES = 200


@dataclass
class Held:
    """Samples of what a process holds during a soak: pages of resident memory, open files, threads."""

    pages: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def look(self) -> None:
        """Takes a sample now."""
        self.pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
        self.files.append(len(os.listdir("/proc/self/fd")))
        self.threads.append(len(os.listdir("/proc/self/task")))

    @property
    def growth(self) -> float:
        """The relative growth of resident memory after the first tenth of the samples."""
        settled = self.pages[len(self.pages) // 10 :]
        return max(settled) / settled[0] - 1

    @property
    def is_constant(self) -> bool:
        """Whether files and threads stay the same after the first tenth of the samples, and memory grows by less than
        1%."""
        others = (counts[len(counts) // 10 :] for counts in (self.files, self.threads))
        return self.growth < 0.01 and all(len({*counts}) == 1 for counts in others)

    def __str__(self) -> str:
        mib = self.pages[-1] * os.sysconf("SC_PAGESIZE") / (1 << 20)
        return f"{mib:.0f} MiB, {self.growth:+.2%}; {self.files[-1]} files, {self.threads[-1]} threads"


def tokens(session: Session, steps: int, look: Callable[[], object] = lambda: None) -> Iterator[int]:
    """Yields greedy tokens after the prompt. If the context is full, half of the tokens after the prompt are dropped,
    the older ones."""
    prompt, sampler, n_ctx = session.tokenize(PROMPT), Sampler(), session.settings.n_ctx
    session.decode(prompt)
    used, dropped = len(prompt), (n_ctx - len(prompt)) // 2
    for step in range(steps):
        token = sampler(session.logits())
        yield token
        if used == n_ctx:
            session.forget(len(prompt), len(prompt) + dropped)
            used -= dropped
        session.decode([token])
        used += 1
        if step % max(1, steps // _SAMPLES) == 0:
            look()


def _settings(device: DeviceName) -> Settings:
    return Settings(device, n_ctx=256, flash_attention="on", threads=1)


def decode(model: Path, steps: int) -> tuple[Held, bool]:
    """Decodes many steps on the NPU. Returns what the process held, and whether the tokens are the CPU's."""
    held, found = Held(), np.zeros(steps, np.int32)  # of its own size from the begin
    with Session(model, _settings("npu")) as session:
        for step, token in enumerate(tokens(session, steps, held.look)):
            found[step] = token
    with Session(model, _settings("cpu")) as session:
        return held, all(a == b for a, b in zip(found, tokens(session, steps), strict=True))


def contexts(model: Path, count: int) -> tuple[Held, bool]:
    """Opens and closes many contexts. Returns what the process held, and whether all have the same first token."""
    held, found = Held(), set[int]()
    for _ in range(count):
        with Session(model, _settings("npu")) as session:
            found.update(tokens(session, 1))
        held.look()
    return held, len(found) == 1


def in_threads(model: Path, steps: int) -> tuple[Held, bool]:
    """Decodes in two contexts at once. Returns what the process held, and whether both have the CPU's tokens."""
    held, found, done = Held(), dict[int, list[int]](), threading.Barrier(2)  # that neither is gone before the other
    with Session(model, _settings("npu")) as one, Session(model, _settings("npu")) as two:

        def run(number: int, session: Session) -> None:
            try:
                found[number] = [*tokens(session, steps, held.look if number == 0 else lambda: None)]
            finally:
                done.wait()

        both = [threading.Thread(target=run, args=each) for each in enumerate((one, two))]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
    with Session(model, _settings("cpu")) as session:
        expected = [*tokens(session, steps)]
    return held, found == {0: expected, 1: expected}


def main(share: float = 1.0) -> int:
    """Runs all parts, with `share` of their steps. Returns the number of parts that failed."""
    backend = ggml_backend_npu.register().backend
    backend.options = backend.options.updated({"ops": "all", "matmul": "exact"})
    wrong = 0
    with model_file("tiny") as tiny, model_file("demo") as demo:
        parts: dict[str, Callable[[], tuple[Held, bool]]] = {
            "tiny, 100,000 steps": lambda: decode(tiny, int(100_000 * share)),
            "demo, 2,000 steps": lambda: decode(demo, int(2_000 * share)),
            "1,000 contexts": lambda: contexts(tiny, int(1_000 * share)),
            "two threads, 10,000 steps each": lambda: in_threads(tiny, int(10_000 * share)),
        }
        for name, part in parts.items():
            begin = time.perf_counter()
            held, same = part()
            wrong += not (held.is_constant and same)
            text = "the CPU's text" if same else "ANOTHER TEXT"
            print(f"{name}: {held}; {text}; {time.perf_counter() - begin:.0f} s", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0))
