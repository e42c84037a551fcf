"""Faults of the corpus in whole models: which nodes they get wrong, as known and as seen, without a diff."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from kit.diffs import PROMPT
from kit.faults import Fault, load
from kit.nodes import bind
from kit.support import choose

from ggml_backend_npu import Memory, Node, Tensor, default_backend
from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.ir.packed import PACKED_TYPES, Packed
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import recording
from graph_runner.run.session import Sampler, Session, context_for


@contextmanager
def loaded(*faults: Fault) -> Iterator[None]:
    """The kernels of faults stand in the place of the project's own, and so do the fusions that they change."""
    backend = default_backend()
    fusions = backend.fusions
    try:
        with recording() as ops:
            for each in faults:
                load(each.path.stem, str(each))
        with backend.ops.having(*ops):
            yield
    finally:
        backend.fusions = fusions


@dataclass(frozen=True)
class Place:
    """A node of a run."""

    step: int
    index: int
    op: str
    name: str


class _Walk:
    """Observer of ggml's CPU that is shown each node before the CPU computes it."""

    def __init__(self, shown: Callable[[Place, Node], None]) -> None:
        self._shown, self._step, self._index = shown, 0, -1

    def before(self, address: int) -> bool:
        ggml = lib.ggml()
        if not convert.computes(convert.op_name(ggml, address)):
            return False
        self._index += 1
        node = convert.node(ggml, address)
        if node.dst.n_elements:
            self._shown(Place(self._step, self._index, node.op, node.name), node)
        return True

    def after(self, address: int) -> None:
        pass

    def next_step(self) -> None:
        self._step, self._index = self._step + 1, -1


def walk(file: Path, fault: Fault, shown: Callable[[Place, Node], None], prompt: str = PROMPT) -> None:
    """Shows each node of a run of ggml's CPU: of the prompt, and of the steps after it."""
    observer = _Walk(shown)
    settings = replace(fault.settings, n_ctx=context_for(prompt, fault.steps))
    with Session(file, settings, observer=observer) as session:
        session.decode(session.tokenize(prompt))
        for _ in range(fault.steps):
            token = Sampler()(session.logits())
            observer.next_step()
            session.decode([token])


def known(file: Path, fault: Fault) -> list[Place]:
    """The nodes that can come out wrong, by what is known of the fault: the first of them does, or any if scattered."""
    found: list[Place] = []

    def look(place: Place, node: Node) -> None:
        if node.op == fault.op and place.step >= fault.step and fault.at(node):
            found.append(place)

    walk(file, fault, look)
    return found


def shows(file: Path, fault: Fault) -> list[Place]:
    """The nodes that the kernels really get wrong: computed where ggml's CPU is about to compute them, from the same
    sources, and once more by the project's own kernel. Wrong is also what changes a source, or an earlier result."""
    found: list[Place] = []
    earlier: dict[int, Memory] = {}

    def look(place: Place, node: Node) -> None:
        if fault.kind == "live":
            earlier[node.dst.address] = Memory(node.dst.address, node.dst.nbytes)
        if default_backend().ops.get(node.op) is OWN.get(node.op) or default_backend().refusal(node) is not None:
            return
        tensors = [tensor for tensor in (node.dst, *node.src) if tensor is not None]
        memory = [span.bytes() for span in (*[Memory(t.address, t.nbytes) for t in tensors], *earlier.values())]
        before = [span.copy() for span in memory]

        def computed_by(run: Callable[[], None]) -> list[np.ndarray]:
            run()
            results = [span.copy() for span in memory]
            for span, old in zip(memory, before, strict=True):
                if not np.array_equal(span, old):
                    span[:] = old
            return results

        planted, right = (
            computed_by(bind(node)),
            computed_by(OWN[node.op].bind(node, default_backend().numerics)),
        )
        if not all(np.array_equal(a, b) for a, b in zip(planted, right, strict=True)):
            found.append(place)

    with loaded(fault), pytest.MonkeyPatch.context() as patch:
        choose(patch, matmul="exact")
        walk(file, fault, look)
    return found


ROOM = 2 << 20  # bytes on each side of an output


def spills(file: Path, fault: Fault) -> list[Place]:
    """The nodes of which the kernels write beside the output, which lies in a room of its own; the output is right."""
    found: list[Place] = []

    def look(place: Place, node: Node) -> None:
        if default_backend().ops.get(node.op) is OWN.get(node.op) or default_backend().refusal(node) is not None:
            return
        planted, right = (np.zeros(node.dst.nbytes + 2 * ROOM, np.uint8) for _ in range(2))
        for ops, room in ((default_backend().ops, planted), (OWN, right)):
            apart = replace(node, dst=replace(node.dst, memory=Memory.of(room), offset=ROOM))
            ops[node.op].bind(apart, default_backend().numerics)()
        same = planted == right
        if same[ROOM:-ROOM].all() and not same.all():
            found.append(place)

    with loaded(fault):
        walk(file, fault, look)
    return found


def packed(tensor: Tensor) -> Tensor:
    """A tensor over a copy of its memory, packed where the device packs its type."""
    storage = tensor.memory.bytes().copy()
    memory = Memory.of(storage)
    layout = Packed.of(tensor.type, memory.address, storage) if tensor.type in PACKED_TYPES else None
    return replace(tensor, memory=memory, packed=layout)


def misreads(file: Path, fault: Fault) -> list[Place]:
    """The nodes that the kernels get wrong where tensors are packed, and right where they are not."""
    found: list[Place] = []

    def look(place: Place, node: Node) -> None:
        if default_backend().ops.get(node.op) is OWN.get(node.op):
            return
        results: list[np.ndarray] = []
        for copy in (packed, lambda tensor: replace(packed(tensor).unpacked())):
            for ops in (default_backend().ops, OWN):
                dst = copy(node.dst)
                sources = tuple(copy(source) if source is not None else None for source in node.src)
                ops[node.op].bind(replace(node, dst=dst, src=sources), default_backend().numerics)()
                results.append(Memory(dst.address, dst.nbytes).bytes().copy())
        wrong, right = results[:2], results[2:]
        if not np.array_equal(wrong[0], wrong[1]) and np.array_equal(right[0], right[1]):
            found.append(place)

    with loaded(fault):
        walk(file, fault, look)
    return found


def raised_at(fault: Fault) -> int:
    """The line of its file in which the kernel raises."""
    lines, first = inspect.getsourcelines(fault.kernel)
    return first + next(i for i, line in enumerate(lines) if line.strip().startswith("raise "))
