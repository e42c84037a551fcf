"""A graph made ready to run: every node bound to its call, once, and run as often as the graph comes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ggml_backend_npu.registry import Call, KernelError, said_by


@dataclass(frozen=True)
class Plan:
    """steps  what computes something, nodes and fused spans of nodes, or a device's whole graph, each with its call
    counts  how many nodes of which op one run computes, alone or in a span
    fused   how many spans of which fusion are among the steps
    """

    steps: tuple[tuple[object, Call], ...]
    counts: Counter[str]
    fused: Counter[str]

    def run(self) -> None:
        """Computes the nodes in order. Raises KernelError, naming op and node, where one fails."""
        for what, call in self.steps:
            try:
                call()
            except KernelError as error:
                raise KernelError(f"{what}: {error}") from None
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise KernelError(f"{what}: {said_by(error)}") from error
