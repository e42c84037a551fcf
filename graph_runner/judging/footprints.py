"""What the device is about to compute: told before, so that a process that ends or hangs has said where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ggml_backend_npu import Node

AboutTo = Callable[[str, int, int, Node | None], None]


class Footprints:
    """Tells what the device is about to compute, and when it no longer does.

    told  called with how ("isolated", "own", "fused N" for N nodes as one operator), step, place and node, and with
          how "" after it
    """

    def __init__(self, told: AboutTo) -> None:
        self._told = told

    def begin(self, how: str, step: int, place: int, node: Node) -> None:
        """Called before the device computes a node."""
        self._told(how, step, place, node)

    def end(self) -> None:
        """Called after it."""
        self._told("", 0, 0, None)

    @contextmanager
    def about_to(self, how: str, step: int, place: int, node: Node) -> Iterator[None]:
        """Within it, the device computes a node. What ends the process there leaves the footprint."""
        self.begin(how, step, place, node)
        try:
            yield
        except Exception:
            self.end()
            raise
        self.end()
