"""A graph made ready to run: every node is bound to its call once, and runs as often as the graph comes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ggml_backend_npu.registry.calls import KernelError, Watched, said_by
from ggml_backend_npu.registry.entry import Call


@dataclass(frozen=True)
class Plan:
    """The calls that compute a graph.

    steps   what computes something, with its call: a node, nodes that run as one operator (`Joined`), or a device's
            whole graph
    counts  how many nodes of each op one run computes, alone or in a span
    fused   how many spans of each fusion are among the steps
    """

    steps: tuple[tuple[object, Call], ...]
    counts: Counter[str]
    fused: Counter[str]

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
