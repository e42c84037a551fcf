"""A graph made ready to run: every node is bound to its call once, and runs as often as the graph comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.registry.calls import KernelError, Watched, said_by
from ggml_backend_npu.registry.entry import Call
from quant.kernels.threads import Job


class Plan:
    """The calls that compute a graph.

    counts  how many nodes of each op one run computes, alone or in a span
    fused   how many spans of each fusion are among the steps
    """

    def __init__(self, steps: Iterable[tuple[object, Call]], counts: Counter[str], fused: Counter[str]) -> None:
        self._made, self.counts, self.fused = tuple(steps), counts, fused

    @cached_property
    def steps(self) -> tuple[tuple[object, Call], ...]:
        """What computes something, with its call: a node, nodes that run as one operator (`Joined`), or a device's
        whole graph."""
        return self._made

    @cached_property
    def works(self) -> NDArray[np.int64] | None:
        """The addresses of all works of its calls, in order; None if a call is Python's own."""
        jobs = [call for _, call in self.steps if isinstance(call, Job)]
        if len(jobs) < len(self.steps):
            return None
        return np.array([work.address for job in jobs for work in job.works], np.int64)

    @property
    def is_for_one(self) -> bool:
        """Whether a second thread would be of no use to any of its works."""
        return not any(isinstance(call, Job) and call.is_for_threads for _, call in self.steps)

    def run(self) -> None:
        """Makes the calls in order. Raises KernelError, which names the op and the node, where one fails."""
        for what, call in self.steps:
            run_step(what, call)


def run_step(what: object, call: Call) -> None:
    """Makes the call of one step of a plan. Raises KernelError, which names the op and the node, where it fails."""
    try:
        with Watched(what):
            call()
    except KernelError as error:
        raise KernelError(f"{what}: {error}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise KernelError(f"{what}: {said_by(error)}") from error
