"""Whether the tensors that `ggml-npu quantdiff` names first are worth more than others: puts back the first five, and
random fives, and compares by how much the KL divergence falls.

    python tests/tools/quantdiff_draws.py RESULT.json TEXT [--draws 200] [--chunks 1] [--threads 0]

RESULT.json is the --json of a run of quantdiff with all tensors. A text is cut to the first chunks, of the size that
the result has.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from graph_runner.base.settings import Settings
from graph_runner.quantdiff.files import ModelFile
from graph_runner.quantdiff.running import Mixed, Text
from graph_runner.quantdiff.scores import mean

N = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    data = json.loads(given.result.read_text())
    big, small = (ModelFile(Path(data[side]["model"])) for side in ("big", "small"))
    settings = Settings(n_ctx=data["chunk"], threads=given.threads)
    text = Text.of(big, given.text.read_text(), settings, given.chunks)
    mixed = Mixed(small, text)
    before = mixed.scores([]).kls
    print(f"{text.n_scored} tokens scored, KL divergence {before.mean():.6f}", flush=True)

    def fall(names: list[str]) -> tuple[float, float]:
        """By how much it falls, in nats, and for each MiB."""
        back = [big.tensors[name] for name in names]
        mib = sum(each.data.nbytes - small.tensors[each.name].data.nbytes for each in back) / 2**20
        gain = mean(before - mixed.scores(back).kls)
        print(f"{gain.value:.6f} +- {gain.error:.6f}  {mib:6.2f} MiB  {' '.join(names)}", flush=True)
        return gain.value, gain.value / mib

    measured = [each for each in data["tensors"] if each["cost"] is not None]
    drawn = np.random.default_rng(0)
    names = [each["name"] for each in measured]
    falls = np.array([fall([*map(str, drawn.choice(names, N, replace=False))]) for _ in range(given.draws)])
    orders = {
        "KL for each byte": lambda each: each["cost"]["per_mib"],
        "what they are expected to cost": lambda each: each["name"] in data["most"],
    }
    for what, key in orders.items():
        first = sorted(measured, key=key, reverse=True)[:N]
        total, per_mib = fall([each["name"] for each in first])
        more = [int((falls[:, i] >= value).sum()) for i, value in enumerate((total, per_mib))]
        print(f"the first {N} by {what}: {more[0]} of {given.draws} draws fall by more, {more[1]} for each byte")


if __name__ == "__main__":
    main()
