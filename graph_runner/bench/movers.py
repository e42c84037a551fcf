"""The data movers on the NPU and on ggml's CPU: the same node, the same bytes, through ggml_backend_graph_compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import quant
from ggml_backend_npu.plugin.build import Builder
from graph_runner.bench import nodes
from graph_runner.bench.measure import ELEMENTS, Measurement, against, in_turns


@dataclass(frozen=True)
class Case:
    """One node to measure.

    what   op, types and layout
    op     the heading that it is shown under
    types  the type it reads and the type it writes
    build  makes the node, given a builder, the elements of a row and the number of rows
    width  elements of a row
    """

    what: str
    op: str
    types: tuple[str, str]
    build: Callable[[Builder, int, int], int]
    width: int = 4096

    def nbytes(self, elements: int) -> int:
        """Returns the bytes of the wider side (input or output) for this number of elements."""
        kinds = map(quant.codec, self.types)
        return max(elements // kind.block_size * kind.block_bytes for kind in kinds)


def _cases() -> Iterator[Case]:
    for type in ("f32", "f16", "bf16", "q8_0", "q4_0"):
        yield Case(f"GET_ROWS {type} -> f32", "GET_ROWS", (type, "f32"), partial(nodes.get_rows, type))
    for type in ("f32", "f16", "q8_0", "q4_0"):
        yield Case(f"SET_ROWS f32 -> {type}", "SET_ROWS", ("f32", type), partial(nodes.set_rows, type))
    copies = [("f32", "f16"), ("f16", "f32"), ("f32", "bf16"), ("f32", "q8_0"), ("f32", "q4_0"), ("f16", "q8_0")]
    copies += [("q8_0", "f32"), ("q4_0", "f32"), ("f32", "f32"), ("f16", "f16"), ("q8_0", "q8_0")]
    for src, dst in copies:
        yield Case(f"CPY {src} -> {dst}", "CPY", (src, dst), partial(nodes.cpy, src, dst))
    layouts: list[tuple[str, Callable[[str, Builder, int, int], int], int]] = [
        ("transposed", nodes.cont_transposed, 4096),
        ("heads <-> tokens", nodes.cont_heads, 32 * nodes.HEAD),
        ("strided rows", nodes.cont_strided, 4096),
    ]
    for layout, build, width in layouts:
        for type in ("f32", "f16"):
            yield Case(f"CONT {type} {layout}", "CONT", (type, type), partial(build, type), width)
    for type in ("f32", "f16"):
        yield Case(f"DUP {type}", "DUP", (type, type), partial(nodes.dup, type))


CASES = list(_cases())


def bench_movers(*, rounds: int, threads: int, elements: int = ELEMENTS, only: str = "") -> Iterator[Measurement]:
    """Measures each case with `elements` elements on both devices, in ms.

    only  measure only cases whose name contains this text

    Raises RuntimeError if a node fails or the bytes of the two devices differ.
    """
    for case in CASES:
        if only not in case.what:
            continue
        shape = case.width, elements // case.width
        with nodes.on_both_devices(case.what, case.build, *shape, threads=threads) as runs:
            nodes.check_equal(case.what, runs)
            times = in_turns(runs, rounds, quiet=0)  # both devices compute with the same threads
        yield against(times, case.what, "ms", nbytes=case.nbytes(elements), group=case.op)
