"""Many diffs of small models, each with canaries of another seed: the judge must see every one.

    python tests/tools/canaries.py FOLDER              1,000 diffs; the models are made in FOLDER
    python tests/tools/canaries.py FOLDER --diffs 100

Exits with 1 if a planted fault is called right, none was planted, or a right device is called wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # what tests share lies beside this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from kit.diffs import FLASH_OFF, FLASH_ON, PROMPT, QUANTISED
from kit.models import OTHERS, VARIED, WRITERS

from ggml_backend_npu import default_backend
from graph_runner.base.errors import BlindError
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.judging.rules import Rules

MODELS = (WRITERS | OTHERS | VARIED).items()
WAYS = [*product((FLASH_OFF, FLASH_ON, QUANTISED), ("default", "all"), (None, "gpu"))]

NARROW = ("mpt",)  # heads that are no whole blocks, so that their caches cannot be quantised


class Row(NamedTuple):
    """A diff: the model, the seed, what was planted and seen by way and kind, how many were hidden, and what is wrong;
    "" if nothing."""

    model: str
    seed: int
    seen: Counter[tuple[str, str]]
    hidden: int
    wrong: str


def of_seeds(name: str, file: Path, seeds: range) -> list[Row]:
    """Diffs of one model, each in the next of WAYS."""
    rows, backend = [], default_backend()
    for seed in seeds:
        settings, ops, rules = WAYS[seed % len(WAYS)]
        settings = FLASH_ON if name in NARROW else settings
        before, backend.options = backend.options, backend.options.updated({"ops": ops})
        try:
            result = diff(file, PROMPT, DiffOptions(steps=1, settings=settings, canary=seed, rules=Rules(rules)))
        except BlindError as error:
            rows.append(Row(name, seed, Counter(), 0, str(error)))
            continue
        finally:
            backend.options = before
        assert result.canaries is not None
        seen = Counter((planted.way, planted.kind) for planted in result.canaries.seen)
        wrong = "" if seen else "none was planted"
        wrong = wrong if result or result.ends_apart else f"a right device is called wrong: {result.wrong[:1]}"
        rows.append(Row(name, seed, seen, result.canaries.hidden, wrong))
    return rows


def found(folder: Path, n_diffs: int, at_once: int = 2, first: int = 0) -> Iterator[Row]:
    """The diffs, spread over the models, with seeds from the first on."""
    files = [(name, write(folder / f"{name}.gguf")) for name, write in MODELS]
    n = -(-n_diffs // len(files))
    jobs = [(name, file, range(first + place * n, first + place * n + n)) for place, (name, file) in enumerate(files)]
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        for rows in pool.map(of_seeds, *zip(*jobs, strict=True)):
            yield from rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--diffs", type=int, default=1000, help="how many, over all models")
    parser.add_argument("--processes", type=int, default=2, help="at once")
    options = parser.parse_args()
    rows = []
    for row in found(options.folder, options.diffs, options.processes):
        rows.append(row)
        if row.wrong:
            print(f"{row.model} --canary {row.seed}: {row.wrong}", file=sys.stderr, flush=True)
    seen = sum((row.seen for row in rows), Counter[tuple[str, str]]())
    for (way, kind), count in sorted(seen.items()):
        print(f"{count:8,}  {kind}, {way}")
    wrong = sum(bool(row.wrong) for row in rows)
    hidden = sum(row.hidden for row in rows)
    print(f"{len(rows):,} diffs, {seen.total():,} planted faults seen, {hidden:,} hidden by rounding; {wrong:,} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
