"""Records as a trace, in any program, the nodes that a device of ours is handed, and their results.

With GGML_NPU_CAPTURE=trace.gguf the backend calls `record` when it is registered. Each node then runs alone, without
fusion. The trace is complete when the process ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock

from ggml_backend_npu.ggml.endings import at_end
from ggml_backend_npu.ir import Node
from ggml_backend_npu.plugin.capture import Capture
from ggml_backend_npu.plugin.handed import Handed
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.errors import TraceError
from graph_runner.judging.copies import Copied, span
from graph_runner.trace import NPU, Origin, Recorded, Selection, TraceWriter, is_trace
from quant.kernels import threads


class _Record:
    """The nodes of a process, as they are computed. A step of the trace is a graph that the device was handed."""

    def __init__(self, plugin: Plugin, wanted: Capture) -> None:
        self._select, self._n_graphs = Selection(wanted.nodes or "*"), 0
        if wanted.path.is_file() and wanted.path.stat().st_size and not is_trace(wanted.path):
            raise TraceError(
                f"GGML_NPU_CAPTURE={str(wanted.path)!r}: is a file that is no trace; it is not overwritten"
            )
        self._path, self._lock, self._kept = wanted.path, Lock(), ExitStack()
        backend = plugin.backend
        backend.options = backend.options.to_compare
        origin = Origin(
            "", "", NPU, plugin.ggml.version, backend.numerics.rounding, threads.limited(backend.team.n_threads),
            backend.options.to_compare.chosen(),
        )  # fmt: skip
        self._writer = self._kept.enter_context(TraceWriter(wanted.path, origin))

    @contextmanager
    def handed(self, _: int) -> Iterator[Handed]:
        """A graph is computed: a step. Yields what is called before each node."""
        step = self._n_graphs
        self._n_graphs += 1
        yield partial(self._node, step)

    def _node(self, step: int, index: int, node: Node, _: int) -> Callable[[], None] | None:
        if not node.dst.n_elements or not self._select(step, index, node):
            return None
        before = Copied.of(node, lambda tensor: tensor.packed is not None).node

        def computed() -> None:
            with self._lock:
                self._writer.add(Recorded(before, span(node.dst), step, index))

        return computed

    def finish(self) -> None:
        """Writes the file, and says so on stderr."""
        with self._lock:
            n_nodes, n_bytes = len(self._writer), self._writer.n_bytes
            try:
                self._kept.close()
            except TraceError as error:
                print(f"ggml-npu: {error}", file=sys.stderr)
            else:
                print(f"ggml-npu: {n_nodes} nodes, {n_bytes / 1e6:.1f} MB, in {self._path}", file=sys.stderr)


def record(plugin: Plugin, wanted: Capture) -> None:
    """Makes a plugin write the nodes that it is handed to a trace. Raises TraceError for a path that cannot be
    written."""
    kept = _Record(plugin, wanted)
    plugin.handed = kept.handed
    at_end(kept.finish)
