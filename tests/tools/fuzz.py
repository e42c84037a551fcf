"""Random nodes of every op, computed by the backend's kernels and by ggml's CPU: the same bytes if they are promised,
else what the op's rule allows; and nothing is written but dst.

    python tests/tools/fuzz.py --seed 1 --nodes 100000             nodes 0 to 99,999 of this seed, the ops by turns
    python tests/tools/fuzz.py --seed 1 --first 50000 --nodes 100  goes on from there
    python tests/tools/fuzz.py --ops MUL_MAT,SOFT_MAX              these ops alone
    python tests/tools/fuzz.py --special                           NaN, infinities, denormals, any blocks among sources

Prints how many nodes of each op were computed, and each that is wrong with the command that computes it alone. Chunks
run in processes of their own: a node that ends one is wrong, and the next ones go on. Exits with 1 if a node is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Self

if __name__ == "__main__":  # what tests share lies beside this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from kit.drawn import drawn

from ggml_backend_npu import Node
from ggml_backend_npu.ggml import codecs, lib
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.replica import Replica
from graph_runner.judging import promises
from graph_runner.judging.compare import compare
from graph_runner.judging.copies import Copied
from graph_runner.judging.rules import Rules
from graph_runner.judging.spoilt import defined
from quant.kernels.threads import allowing

CHUNK = 5_000  # nodes of a process


class Numbered(NamedTuple):
    """A node's place in the series of a seed."""

    seed: int
    place: int
    op: str
    special: bool

    def node(self) -> Node:
        words = (self.seed, self.place, *self.op.encode(), self.special)
        return drawn(np.random.default_rng(words), self.op, special=self.special)

    def __str__(self) -> str:
        flag = " --special" if self.special else ""
        return f"python tests/tools/fuzz.py --seed {self.seed} --first {self.place} --nodes 1 --ops {self.op}{flag}"


def series(seed: int, first: int, nodes: int, ops: Sequence[str], special: bool) -> Iterator[Numbered]:
    """Nodes `first` to `first + nodes`, the ops by turns."""
    for index in range(first, first + nodes):
        yield Numbered(seed, index, ops[index % len(ops)], special)


class Judge:
    """Judges the kernels' results by those of ggml's CPU. A context manager."""

    def __init__(self) -> None:
        self._stack, self._rules = ExitStack(), Rules()
        self._cpu = self._stack.enter_context(Replica(lib.ggml(), "CPU", threads=1))
        self._numerics = replace(codecs.bound(), matmul="exact")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def takes(self, node: Node) -> bool:
        """Whether ggml's CPU takes the node. At bf16 columns of float32 experts it aborts, though it says that it takes
        them."""
        aborts = node.op == "MUL_MAT_ID" and [x and x.type for x in node.src[:2]] == ["f32", "bf16"]
        return not aborts and self._cpu.refusal(node) is None

    def computed(self, node: Node) -> tuple[Copied, Copied]:
        """The node over copies, computed by ggml's CPU and by its kernel."""
        expected, actual = (Copied.of(node, blanks=True) for _ in range(2))
        self._cpu.compute(expected.node)
        with allowing(1):  # attention adds up its cells in as many parts as there are threads
            OWN[node.op].bind(actual.node, self._numerics)()
        return expected, actual

    def wrong(self, node: Node) -> str | None:
        """What is wrong with the result of the node's kernel; None if nothing is."""
        expected, actual = self.computed(node)
        if (changed := actual.changed()) != expected.changed():  # an optimiser's are its results too
            return f"changes sources {changed}, not {expected.changed()}"
        found = compare(expected.node.dst, actual.node.dst, actual.outside())
        if found.outside:
            return "writes outside of dst"
        if found:
            return None
        if promises.promised(node):
            result = defined(node, expected.node.dst, actual.node.dst)
            if compare(expected.node.dst, result):
                return None
            return f"{found.n_different} of {found.n_bytes} bytes differ and are promised, NMSE {found.nmse:.3g}"
        if self._rules.allows(node, expected.node.dst, actual.node.dst, found):
            return None
        return f"NMSE {found.nmse:.3g}, max {found.max_abs:.3g}, NaN {found.nan}, inf {found.inf} at {found.where}"


def described(node: Node) -> str:
    """Types, sizes, strides and parameters."""
    tensors = (f"{x.type} {list(x.ne)} nb {list(x.nb)}" for x in (node.dst, *node.src) if x is not None)
    kind = OWN[node.op].params
    return "; ".join([*tensors, "" if kind is None else str(kind.of(node.params))])


Outcome = tuple[str, str | None]  # "refused" or "computed", and what is wrong


def judged(each: Numbered, judge: Judge) -> Outcome:
    """Computes one node."""
    try:
        node = each.node()
        if not judge.takes(node):
            return "refused", None
        wrong = judge.wrong(node)
    except Exception as error:
        return "computed", f"{type(error).__name__}: {error}"
    return "computed", wrong and f"{wrong}\n    {described(node)}"


def _chunk(numbers: Sequence[Numbered], to: Connection) -> None:
    with Judge() as judge:
        for each in numbers:
            to.send(judged(each, judge))


def outcomes(numbers: Sequence[Numbered]) -> Iterator[tuple[Numbered, Outcome]]:
    """What became of each node, computed in another process, and in the next one after a node that ended it."""
    spawn = multiprocessing.get_context("spawn")
    while numbers:
        here, there = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_chunk, args=(numbers[:CHUNK], there), daemon=True)
        process.start()
        there.close()
        n = 0
        for each in numbers[:CHUNK]:
            try:
                yield each, here.recv()
            except EOFError:
                process.join()
                yield each, ("computed", f"the process ended with {process.exitcode}")
                n += 1
                break
            n += 1
        process.join()
        numbers = numbers[n:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first node")
    parser.add_argument("--nodes", type=int, default=1000, metavar="N", help="how many")
    parser.add_argument("--ops", default=",".join(sorted(OWN)), metavar="A,B", help="ops; default: all")
    parser.add_argument("--special", action="store_true", help="NaN, infinities, denormals, any blocks")
    options = parser.parse_args()
    ops = options.ops.split(",")
    unknown = [op for op in ops if op not in OWN]
    if unknown:
        parser.error(f"--ops {unknown[0]}: no such op")
    os.environ["GGML_NO_BACKTRACE"] = "1"
    counts, refused, wrong = Counter[str](), Counter[str](), 0
    for each, (kind, why) in outcomes([*series(options.seed, options.first, options.nodes, ops, options.special)]):
        (counts if kind == "computed" else refused)[each.op] += 1
        if why is not None:
            wrong += 1
            print(f"{each.op}: {why}\n    {each}", flush=True)
    print(" ".join(f"{op}:{counts[op]}" for op in ops))
    left = " ".join(f"{op}:{n}" for op, n in sorted(refused.items()))
    print(f"{counts.total():,} nodes, {wrong} wrong; {refused.total()} refused by ggml's CPU {left}".rstrip())
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
