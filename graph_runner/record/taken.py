"""Records, in any program, the graphs that a device of ours computes.

With GGML_NPU_CAPTURE=run.gguf and GGML_NPU_CAPTURE_AS=record the backend calls `record` when it is registered. Each
node then runs alone, without fusion. The file is written when the process ends. What cannot be written is said in one
line on stderr, and the program goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Node
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.endings import at_end
from ggml_backend_npu.plugin.capture import Capture
from ggml_backend_npu.plugin.handed import Handed
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.errors import BadInputError
from graph_runner.base.files import check_outputs
from graph_runner.record.files import is_run, write_run
from graph_runner.record.machine import machine
from graph_runner.record.recorder import Recorder
from graph_runner.record.run import About, Run, Step
from graph_runner.trace import Selection


class _Record:
    """The graphs of a process, as they are computed. A step of the run is a graph that the device was handed."""

    def __init__(self, plugin: Plugin, wanted: Capture) -> None:
        self._plugin, self._path, self._lock = plugin, wanted.path, Lock()
        self._run = Run(About({}, {}, {}, {}, "", is_watched=True))
        self._selection = Selection(wanted.nodes) if wanted.nodes is not None else None
        selects = self._selects if self._selection is not None else None
        memory = plugin if plugin.memory is not None else None
        self._recorder = Recorder(plugin.ggml, memory, selects, self._keep)

    def _selects(self, place: int, op: str, name: str) -> bool:
        assert self._selection is not None
        return self._selection.has(len(self._run.steps), place, op, name)

    def _keep(self, place: int, data: NDArray[np.uint8]) -> None:
        self._run.data[len(self._run.steps), place] = data

    @contextmanager
    def handed(self, graph: int) -> Iterator[Handed]:
        """A graph is computed. Yields what is called before each node. One that fails is no step."""
        with self._lock:
            ggml, recorder = self._plugin.ggml, self._recorder
            recorder.forget()
            for address in convert.in_graph(graph):
                if not convert.computes(convert.op_name(ggml, address)) or convert.is_to_be_computed(ggml, address):
                    recorder.note(address)
            yield self._node
            self._run.steps.append(Step([], [], *recorder.step()))

    def _node(self, _: int, __: Node, address: int) -> Callable[[], None]:
        return lambda: self._recorder.after(address)

    def finish(self) -> None:
        """Writes the file, and says so on stderr."""
        with self._lock:
            run, ggml, backend = self._run, self._plugin.ggml, self._plugin.backend
            settings = {"device": backend.name, **backend.options.chosen()}
            try:
                run.about, run.forms = About({}, {}, settings, machine(ggml), "", is_watched=True), self._recorder.forms
                write_run(self._path, run)
            except (BadInputError, OSError) as error:
                _say(f"{error}; nothing is recorded")
            else:
                _say(f"{len(run.steps):,} graphs, {run.n_rows:,} results of nodes, in {self._path}")


def record(plugin: Plugin, wanted: Capture) -> None:
    """Makes a plugin record the graphs that it is handed. A path that cannot be written is said on stderr."""
    try:
        _check(wanted.path)
    except BadInputError as error:
        _say(f"{error}; nothing is recorded")
        return
    kept = _Record(plugin, wanted)
    plugin.handed = kept.handed
    at_end(kept.finish)


def _check(path: Path) -> None:
    """Raises BadInputError for a path that cannot be written, and for one that has something else than a record."""
    check_outputs({"GGML_NPU_CAPTURE": str(path)})
    if path.is_file() and path.stat().st_size and not is_run(path):
        raise BadInputError(f"GGML_NPU_CAPTURE {str(path)!r}: is a file that is no record")


def _say(text: str) -> None:
    print(f"ggml-npu: {text}", file=sys.stderr)
