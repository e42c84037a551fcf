"""Captures nodes of a run on ggml's CPU in a trace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from ggml_backend_npu import Node, default_backend
from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.ggml.node_reader import Reader
from graph_runner.base.errors import TraceError
from graph_runner.base.files import parts_of
from graph_runner.base.settings import Settings
from graph_runner.judging.copies import Copied, span
from graph_runner.judging.spans import Collected
from graph_runner.trace.format import Bytes, Origin, Recorded
from graph_runner.trace.writing import TraceWriter, check_output
from quant.kernels.processor import processors


class Selection:
    """Selects nodes of a run by comma-separated items; a node is selected if it matches one of them.

    GET_ROWS   nodes of an op
    ffn_out-*  nodes of that name; * and ? stand for any text and any character
    17, 17-40  nodes at these places in their step, as a diff counts them
    2:...      the same, in step 2 alone: 2:GET_ROWS, 2:17-40, 0:*

    Raises TraceError for an empty item.
    """

    def __init__(self, text: str) -> None:
        self.items = [item.strip() for item in text.split(",")]
        if not all(self.items) or any(re.fullmatch(r"\d+:", item) for item in self.items):
            raise TraceError(f"nodes {text!r}: an item is empty")
        self._found: set[str] = set()

    def __call__(self, step: int, index: int, node: Node) -> bool:
        return self.has(step, index, node.op, node.name)

    def has(self, step: int, index: int, op: str, name: str) -> bool:
        """Whether it selects a node of this op and name."""
        found = {item for item in self.items if _matches(item, step, index, op, name)}
        self._found |= found
        return bool(found)

    @property
    def without_node(self) -> list[str]:
        """Items that no node has matched."""
        return [item for item in self.items if item not in self._found]


def _matches(item: str, step: int, index: int, op: str, name: str) -> bool:
    if in_step := re.match(r"([0-9]{1,18}):", item):
        if int(in_step[1]) != step:
            return False
        item = item[in_step.end() :]
    return is_item_of(item, index, op, name)


def is_item_of(item: str, index: int, op: str, name: str) -> bool:
    """Whether an item of a selection, without a step, selects a node by its place in its step, its op or its name."""
    if places := re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", item):
        return int(places[1]) <= index <= int(places[2] or places[1])
    return item.upper() == op or fnmatchcase(name, item)


def taken_by_the_npu(step: int, index: int, node: Node) -> bool:
    """The default selection of a capture: nodes that the NPU's kernels and its profile take, with --all or without."""
    return default_backend().refusal(node) is None


@dataclass
class Captured:
    """What a capture wrote: where the nodes come from, the number of nodes by op, and the bytes of tensors."""

    origin: Origin
    ops: Counter[str] = field(default_factory=Counter)
    n_bytes: int = 0


class _Capture:
    """The observer of a capture: records the selected nodes before they run, and their results."""

    def __init__(self, ggml: lib.Ggml, select: Callable[[int, int, Node], bool], take: Callable[[Recorded], None]):
        self._ggml, self._select, self._take = ggml, select, take
        self.step, self._index = 0, -1
        self._node: Node | None = None

    def next_step(self) -> None:
        self.step, self._index = self.step + 1, -1

    def before(self, address: int) -> bool:
        self._node = None
        if not convert.computes(convert.op_name(self._ggml, address)):
            return False
        self._index += 1
        node = convert.node(self._ggml, address)
        if node.dst.n_elements and self._select(self.step, self._index, node):
            self._result, self._node = node.dst, Copied.of(node).node
        return True  # one that runs together with nodes behind it would not be there when they are asked for

    def after(self, _: int) -> None:
        if self._node is not None:
            self._take(Recorded(self._node, span(self._result), self.step, self._index))

    def finish(self) -> None:
        """Called after the last node."""


class _CaptureTogether(_Capture):
    """Records the selected nodes as those of one operator."""

    def __init__(self, ggml: lib.Ggml, select: Callable[[int, int, Node], bool], take: Callable[[Recorded], None]):
        super().__init__(ggml, select, take)
        self._reader, self._collected, self._last = Reader(ggml), Collected(), 0
        self._expected: Bytes = np.empty(0, np.uint8)
        self._place = (0, 0)

    def before(self, address: int) -> bool:
        index = self._index
        runs = super().before(address)
        if self._index != index and self._node is not None:
            self._collected.add(self._reader(address), self._index)
            self._last = address
        return runs

    def after(self, address: int) -> None:
        if self._node is not None and address == self._last:
            self._expected, self._place = span(self._result), (self.step, self._index)

    def finish(self) -> None:
        *lead, last = self._collected.graph().nodes
        self._take(Recorded(last, self._expected, *self._place, tuple(lead)))


@dataclass(frozen=True)
class CaptureOptions:
    """What is captured of a run.

    steps     greedy tokens to decode after the prompt
    settings  of the context, with flash attention off if omitted; device and n_ctx are set here
    select    called with a node's step, its place in the step, and the node; nodes without elements are left out
    device_options  of a backend, for a replay; those of the default backend if omitted
    together  whether the selected nodes form one operator
    progress  called with 0..1 while the model loads
    seen      called with each node that is written
    """

    steps: int = 4
    settings: Settings | None = None
    select: Callable[[int, int, Node], bool] = taken_by_the_npu
    device_options: Mapping[str, str] | None = None
    together: bool = False
    progress: Callable[[float], None] | None = None
    seen: Callable[[Recorded], None] = lambda recorded: None


_DEFAULT = CaptureOptions()


def capture(model: Path, prompt: str, path: Path, asked: CaptureOptions = _DEFAULT) -> Captured:
    """Runs a prompt and greedy tokens on llama.cpp's CPU, and writes the selected nodes to a trace.

    Raises SessionError for a model or settings that llama.cpp refuses; TraceError for a file that cannot be written, or
    if no node was selected.
    """
    from graph_runner.run.session import Session

    check_output(path)
    if any(path.exists() and part.exists() and path.samefile(part) for part in parts_of(model)):
        raise TraceError(f"trace {str(path)!r}: is the model")
    ggml = lib.ggml()
    backend = default_backend()
    settings = asked.settings or Settings(flash_attention="off")
    settings = replace(settings.holding(prompt, asked.steps), device="cpu")
    ops = Counter[str]()

    def take(recorded: Recorded) -> None:
        writer.add(recorded)
        ops[recorded.node.op] += 1
        asked.seen(recorded)

    observer = (_CaptureTogether if asked.together else _Capture)(ggml, asked.select, take)
    with Session(model, settings, observer=observer, progress=asked.progress) as session:
        threads = settings.threads or processors()
        chosen = dict(asked.device_options or backend.options.to_compare.chosen())
        origin = Origin(session.description, prompt, "CPU", ggml.version, backend.numerics.rounding, threads, chosen)
        with TraceWriter(path, origin) as writer:
            session.decode(*session.prompts(prompt))
            for _ in range(session.n_steps(asked.steps) - 1):
                tokens = session.next_tokens()
                observer.next_step()
                session.decode(*tokens)
            observer.finish()
            missing = asked.select.without_node if isinstance(asked.select, Selection) else []
            if missing:
                raise TraceError(f"nodes {missing[0]!r}: no node of this run is that")
    return Captured(origin, ops, writer.n_bytes)
