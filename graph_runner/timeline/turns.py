"""Each step of a run without clocks and with them, in turns: what else the machine does hinders both alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from quant.kernels.jit import now

_WITHOUT, _WITH = range(2)


class Turns:
    """How long each step took, without clocks and with them. The run without is first in even steps, second in odd
    ones: which of two is second finds weights in the processor's caches."""

    def __init__(self) -> None:
        self._wall: list[tuple[int, int]] = []  # of each step, in ns: without clocks, with them
        self._processor: list[tuple[int, int]] = []

    def take(self, without: Callable[[], object], with_clocks: Callable[[], object]) -> tuple[int, int]:
        """Runs the next step both ways. Returns when that with clocks began and ended, in ns."""
        order = (_WITHOUT, _WITH) if len(self._wall) % 2 == 0 else (_WITH, _WITHOUT)
        begins, ends, spent = [0, 0], [0, 0], [0, 0]
        for which in order:
            processor, begins[which] = time.process_time_ns(), now()
            (without, with_clocks)[which]()
            ends[which] = now()
            spent[which] = time.process_time_ns() - processor
        self._wall.append((ends[_WITHOUT] - begins[_WITHOUT], ends[_WITH] - begins[_WITH]))
        self._processor.append((spent[_WITHOUT], spent[_WITH]))
        return begins[_WITH], ends[_WITH]

    @property
    def json(self) -> dict[str, Any]:
        """As it is in the file: both sums, and how many times as long the steps with clocks took."""
        walls, processors = ([*zip(*each, strict=True)] for each in (self._wall, self._processor))
        names = "without_clocks", "with_clocks"
        sums = {
            name: {"wall_ns": sum(wall), "processor_ns": sum(processor)}
            for name, wall, processor in zip(names, walls, processors, strict=True)
        }
        ratios = {"wall": times_as_long(self._wall), "processor": times_as_long(self._processor)}
        return {**sums, "times_as_long": ratios}


def times_as_long(pairs: list[tuple[int, int]]) -> float:
    """Returns how many times as long the second of each pair is: the median of those in which it ran second, and of
    those in which it ran first, and the geometric mean of the two."""
    medians = [statistics.median(b / max(1, a) for a, b in each) for each in (pairs[::2], pairs[1::2]) if each]
    return math.exp(statistics.fmean(math.log(max(each, 1e-9)) for each in medians))
