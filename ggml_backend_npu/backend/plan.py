"""A graph made ready to run: every node is bound to its call once, and runs as often as the graph comes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.backend.fusion import Joined
from ggml_backend_npu.ir import Node
from ggml_backend_npu.registry.calls import KernelError, Watched, said_by
from ggml_backend_npu.registry.entry import Call
from quant.kernels.jit import now
from quant.kernels.threads import Job


class Part(NamedTuple):
    """What one step of a plan is of a graph's nodes, and of the times that `Plan.timed` returns.

    name     of the operator that its nodes run as; "" of a node
    n_nodes  how many nodes it computes; 0: all of the graph
    n_times  how many times it has: one for each work, or one for a call of Python's
    """

    name: str
    n_nodes: int
    n_times: int

    @staticmethod
    def of(what: object, call: Call) -> Part:
        """The part of a step."""
        n_times = len(call.works) if isinstance(call, Job) else 1
        if isinstance(what, Joined):
            return Part(what.name, len(what.span.nodes), n_times)
        return Part("", 1 if isinstance(what, Node) else 0, n_times)


@dataclass(eq=False)
class Plan:
    """The calls that compute a graph.

    made    its steps, as they were bound
    counts  how many nodes of each op one run computes, alone or in a span
    fused   how many spans of each fusion are among the steps
    """

    made: tuple[tuple[object, Call], ...]
    counts: Counter[str]
    fused: Counter[str]

    @cached_property
    def steps(self) -> tuple[tuple[object, Call], ...]:
        """What computes something, with its call: a node, nodes that run as one operator (`Joined`), or a device's
        whole graph."""
        return self.made

    @cached_property
    def works(self) -> NDArray[np.int64] | None:
        """The addresses of all works of its calls, in order; None if a call is Python's own."""
        jobs = [call for _, call in self.steps if isinstance(call, Job)]
        if len(jobs) < len(self.steps):
            return None
        return np.array([work.address for job in jobs for work in job.works], np.int64)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What each of its steps computes, in order, without the nodes themselves."""
        return tuple(Part.of(what, call) for what, call in self.steps)

    @property
    def is_for_one(self) -> bool:
        """Whether a second thread would be of no use to any of its works."""
        return not any(isinstance(call, Job) and call.is_for_threads for _, call in self.steps)

    def run(self) -> None:
        """Makes the calls in order. Raises KernelError, which names the op and the node, where one fails."""
        for what, call in self.steps:
            run_step(what, call)

    def timed(self) -> NDArray[np.int64]:
        """Runs it as `run` does. Returns the time before, and after each work or call of Python's, in ns."""
        times = [now()]
        for what, call in self.steps:
            run_step(what, call)
            times += [now()] * Part.of(what, call).n_times
        return np.array(times, np.int64)


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
