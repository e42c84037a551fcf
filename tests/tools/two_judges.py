"""Two judges of the same results: the project's own rules, and the second judge, which was made apart from them.

    python tests/tools/two_judges.py --seed 1 --nodes 15000                    nodes 0 to 14,999, the ops by turns
    python tests/tools/two_judges.py --seed 1 --first 700 --nodes 1 --ops ADD  judges the results of one node again

Of each random node, as of fuzz.py, both judge ggml's CPU's result, that of the backend's kernel, and results with a
fault of random kind and of random size from far below to far above rounding. Prints each disagreement with the command
that judges it again, and how often both agree. Exits with 1 if there is a disagreement.

A fault may lie between the two judges' bounds, which are both estimates: the project's is a mean over a row, the
second's a bound of each element. So one that says "wrong" disagrees with one that says "right" only if the error is
more than BAND times its bound, in the scale of the row; closer ones are counted as near. BAND is 30. If the rules say
"right", it is as many bounds as they openly allow, if that is more: an element of a long row counts with an eighth of
its error, and the limit of the op, 1e-6 to 1e-5 of a value, is a hundred roundings of float32. The project demands
ggml's bytes of ops whose order of operations ggml defines; the second judge allows a rounding more or less there:
counted as stricter. But of ggml's own result and of the kernel's any "wrong" counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # what tests share lies beside this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from numpy.typing import NDArray
from second_judge import Given, Verdict
from second_judge import Judge as Second
from second_judge import Node as Bare
from tools.fuzz import Judge as Computing
from tools.fuzz import Numbered, series

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ops import OWN
from graph_runner.judging.compare import compare
from graph_runner.judging.copies import Copied, span
from graph_runner.judging.rules import type_of

BAND = 30.0
CPU, KERNEL = "ggml's CPU", "the kernel"
FAULTS = 14  # of each node
CHUNK = 236  # nodes of a process

Rng = np.random.Generator
Fault = Callable[[Rng, Tensor, float], None]


# faults: each changes a result in place, by about `size` of its values


def _floats(dst: Tensor) -> NDArray[np.floating]:
    """The elements of floats; of other types and blocks there are none."""
    view = dst.view()
    return view if dst.type in ("f32", "f16", "bf16") else np.zeros((0,) * 4, np.float32)


def _place(rng: Rng, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(rng.integers(n)) for n in shape)


def scaled(rng: Rng, dst: Tensor, size: float) -> None:
    view = _floats(dst)
    if view.size:
        at = _place(rng, view.shape)
        view[at] = float(view[at]) * (1 + size)


def all_scaled(rng: Rng, dst: Tensor, size: float) -> None:
    view = _floats(dst)
    view[...] = (view.astype(np.float64) * (1 + size)).astype(view.dtype)


def moved(rng: Rng, dst: Tensor, size: float) -> None:
    """One element off by a part of the result's root mean square."""
    view = _floats(dst)
    if view.size:
        at = _place(rng, view.shape)
        view[at] = float(view[at]) + size * _rms(view)


def _rms(view: NDArray[np.floating]) -> float:
    x = view.astype(np.float64)
    x = x[np.isfinite(x)]
    return float(np.sqrt(np.mean(x * x))) if x.size else 1.0


def noisy(rng: Rng, dst: Tensor, size: float) -> None:
    view = _floats(dst)
    x = view.astype(np.float64)
    view[...] = (x + size * _rms(view) * rng.standard_normal(view.shape)).astype(view.dtype)


def flipped(rng: Rng, dst: Tensor, size: float) -> None:
    """A bit of an element or block."""
    raw = _bytes(dst)
    if raw.size:
        raw[_place(rng, raw.shape)] ^= 1 << int(rng.integers(8))


def _bytes(dst: Tensor) -> NDArray[np.uint8]:
    """The bytes of each element or block: shape (ne3, ne2, ne1, blocks, bytes), over dst's memory."""
    shape = (*dst.ne[:0:-1], dst.n_blocks, dst.codec.block_bytes)
    memory = dst.memory.bytes()[dst.offset :]
    return np.lib.stride_tricks.as_strided(memory, shape, (*dst.nb[::-1], 1))


def rows_swapped(rng: Rng, dst: Tensor, size: float) -> None:
    raw = _bytes(dst)
    if raw.size:
        a, b = (_place(rng, raw.shape[:3]) for _ in range(2))
        raw[a], raw[b] = raw[b].copy(), raw[a].copy()


def stale(rng: Rng, dst: Tensor, size: float) -> None:
    """A row that was not written: as another one, or zero."""
    raw = _bytes(dst)
    if raw.size:
        raw[_place(rng, raw.shape[:3])] = raw[_place(rng, raw.shape[:3])].copy() if rng.random() < 0.5 else 0


def turned(rng: Rng, dst: Tensor, size: float) -> None:
    """A row one element further."""
    raw = _bytes(dst)
    if raw.size:
        at = _place(rng, raw.shape[:3])
        raw[at] = np.roll(raw[at], 1, 0)


def no_number(rng: Rng, dst: Tensor, size: float) -> None:
    view = _floats(dst)
    if view.size:
        view[_place(rng, view.shape)] = rng.choice([np.nan, np.inf, -np.inf])


def gross(rng: Rng, dst: Tensor, size: float) -> None:
    """Every element off by ten times its size and more, or every bit turned over: nobody may miss it."""
    view, raw = _floats(dst), _bytes(dst)
    if not view.size:
        raw ^= 0xFF
        return
    far = np.where(np.isfinite(view), view, 0).astype(np.float64)
    view[...] = (far + 10 * np.abs(far) + 10 * _rms(view) + 1).astype(view.dtype)


_IN_RESULTS: tuple[Fault, ...] = (
    *(scaled, scaled, all_scaled, moved, moved, noisy, flipped, flipped, rows_swapped, stale, turned, no_number),
)


def wrong_source(rng: Rng, node: Node, size: float) -> Node | None:
    """The node over a source of which a number is a little off, or whose last block is zero, a lost part of a sum."""
    places = [i for i, x in enumerate(node.src) if x is not None and x.type in ("f32", "f16") and x.n_elements]
    if not places:
        return None
    source = node.src[places[int(rng.integers(len(places)))]]
    assert source is not None
    view = replace(source, memory=replace(source.memory, writable=True)).view()
    if rng.random() < 0.5:
        at = _place(rng, view.shape)
        view[at] = float(view[at]) * (1 + size)
    else:
        view[..., -min(32, view.shape[-1] // 2 + 1) :] = 0
    return node


# judging


class Candidate(NamedTuple):
    """A result: whose it is or what its fault is, and dst over its bytes."""

    name: str
    dst: Tensor


@dataclass
class Agreement:
    """What both say of one result.

    kind   agree, near, stricter, none (the second has no opinion), or disagree
    right  whether it is right: what the rules say, and what the second judge says
    """

    kind: str
    text: str = ""
    right: tuple[bool, bool | None] = (True, None)


def given(tensor: Tensor) -> Given:
    return Given(tensor.type, tuple(tensor.ne), tuple(tensor.nb), span(tensor).tobytes())


class Both(Computing):
    """The two judges. A context manager."""

    def results(self, node: Node, rng: Rng, faults: Sequence[Fault]) -> Iterator[Candidate]:
        """ggml's CPU's, the kernel's, and faulty ones: a quarter of them computed from a wrong source instead."""
        expected, actual = self.computed(node)
        self._before = expected.before
        yield Candidate(CPU, expected.node.dst)
        yield Candidate(KERNEL, actual.node.dst)
        for fault in faults:
            size = float(10 ** rng.uniform(-8, 1) * rng.choice([-1, 1]))
            if (
                fault is not gross
                and rng.random() < 0.25
                and (faulty := self._from_source(rng, node, size)) is not None
            ):
                yield Candidate(f"wrong_source {size:.3g}", faulty)
                continue
            copy = over_copy(expected.node.dst)
            with np.errstate(all="ignore"):
                fault(rng, copy, size)
            yield Candidate(f"{fault.__name__} {size:.3g}", copy)

    def _from_source(self, rng: Rng, node: Node, size: float) -> Tensor | None:
        copied = Copied.of(node, blanks=True)
        with np.errstate(all="ignore"):
            faulty = wrong_source(rng, copied.node, size)
        if faulty is None or not self.takes(faulty):
            return None
        self._cpu.compute(faulty)
        return copied.node.dst

    def agreements(
        self, node: Node, rng: Rng, faults: Sequence[Fault] | None = None
    ) -> Iterator[tuple[str, Agreement]]:
        """What both say of each result of a node; nothing if ggml's CPU does not take it.

        faults  of the faulty results; left out: some at random
        """
        if not self.takes(node):
            return
        if faults is None:
            faults = [_IN_RESULTS[i] for i in rng.integers(len(_IN_RESULTS), size=FAULTS)]
        second, expected = None, None
        for name, dst in self.results(node, rng, faults):
            if second is None or expected is None:
                bare = Bare(
                    node.op, node.params, given(self._before), tuple(None if x is None else given(x) for x in node.src)
                )
                expected, second = dst, Second(bare, span(dst).tobytes())
            yield name, self._agreement(node, name, expected, dst, second.verdict(span(dst).tobytes()))

    def _agreement(self, node: Node, name: str, expected: Tensor, dst: Tensor, second: Verdict) -> Agreement:
        found = compare(expected, dst)
        first = bool(found) or self._rules.allows(node, expected, dst, found)
        kind = self._kind(name, first, second, node, expected, dst)
        if kind == "agree":
            says = ""
        elif kind == "none":
            says = second.why
        else:
            seconds = f"{second.right}, {second.error:.3g} ({second.row:.3g}) {second.why}"
            says = f"{name}: {self._says(node, expected, dst, first)}; second: {seconds}"
        return Agreement(kind, says, (first, second.right))

    def _kind(self, name: str, first: bool, second: Verdict, node: Node, expected: Tensor, dst: Tensor) -> str:
        if second.right is None:
            return "none"
        if name in (CPU, KERNEL):
            return "agree" if first and second.right else "disagree"
        if first == second.right:
            return "agree"
        if first:
            return "disagree" if second.row > self._band(node) else "near"
        margin = self._margin(node, expected, dst)
        return "stricter" if margin is None else "disagree" if margin > BAND else "near"

    def _band(self, node: Node) -> float:
        """How many roundings of float32 the rules allow an element of a long row to be off."""
        return max(BAND, 8 * float(np.sqrt(self._rules.bound(node.op, type_of(node)))) / 2.0**-24)

    def _margin(self, node: Node, expected: Tensor, dst: Tensor) -> float | None:
        """How many times its limit an error is, for the project's rules; None if they demand bytes."""
        judged = self._rules.judged(node, expected, dst)
        return None if judged is None else float(np.sqrt(judged.error / judged.limit))

    def _says(self, node: Node, expected: Tensor, dst: Tensor, right: bool) -> str:
        margin = self._margin(node, expected, dst)
        return f"rules: {right}, " + ("by bytes" if margin is None else f"{margin:.3g}")


def over_copy(tensor: Tensor) -> Tensor:
    return tensor.over(Memory.of(span(tensor)))


def judged(each: Numbered, both: Both) -> list[tuple[str, Agreement]]:
    """What both say of the results of a node; what an exception says is a disagreement."""
    try:
        rng = np.random.default_rng((each.seed, each.place, 2))
        return list(both.agreements(each.node(), rng))
    except Exception as error:
        return [("", Agreement("disagree", f"{type(error).__name__}: {error}"))]


def _chunk(numbers: list[Numbered]) -> list[tuple[Numbered, list[tuple[str, Agreement]]]]:
    with Both() as both:
        return [(each, judged(each, both)) for each in numbers]


def verdicts(numbers: list[Numbered], processes: int) -> Iterator[tuple[Numbered, list[tuple[str, Agreement]]]]:
    chunks = [numbers[i : i + CHUNK] for i in range(0, len(numbers), CHUNK)]
    with get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        for found in pool.imap(_chunk, chunks, chunksize=1):
            yield from found


def command(each: Numbered) -> str:
    return f"python tests/tools/two_judges.py --seed {each.seed} --first {each.place} --nodes 1 --ops {each.op}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first node")
    parser.add_argument("--nodes", type=int, default=1000, metavar="N", help="how many")
    parser.add_argument("--ops", default=",".join(sorted(OWN)), metavar="A,B", help="ops; default: all")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="how many; default: 1")
    parser.add_argument("--verbose", action="store_true", help="prints what is near and stricter, too")
    options = parser.parse_args()
    os.environ["GGML_NO_BACKTRACE"] = "1"
    ops, began = options.ops.split(","), time.monotonic()
    if unknown := [op for op in ops if op not in OWN]:
        parser.error(f"--ops {unknown[0]}: no such op")
    counts, silent = Counter[str](), Counter[str]()
    numbers = [*series(options.seed, options.first, options.nodes, ops, special=False)]
    for each, found in verdicts(numbers, options.processes):
        for _, agreement in found:
            counts[agreement.kind] += 1
            silent[each.op] += agreement.kind == "none"
            if agreement.kind == "disagree" or (options.verbose and agreement.text):
                print(f"{each.op} {agreement.kind}: {agreement.text}\n    {command(each)}", flush=True)
    n, seconds = counts.total(), time.monotonic() - began
    print(
        f"{n:,} verdicts: {counts['agree']:,} agree, {counts['near']:,} near (within {BAND:g} bounds), "
        f"{counts['stricter']:,} where the rules demand bytes and the second judge allows a rounding, "
        f"{counts['none']:,} of which it has no opinion, {counts['disagree']:,} disagreements; "
        f"{1000 * seconds / max(n, 1):.1f} s a thousand"
    )
    print("no opinion: " + " ".join(f"{op}:{k}" for op, k in sorted(silent.items()) if k))
    return int(counts["disagree"] > 0)


if __name__ == "__main__":
    sys.exit(main())
