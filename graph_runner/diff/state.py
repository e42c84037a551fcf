"""What two runs keep from step to step, caches and recurrent states, compared cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Tensor
from ggml_backend_npu.ggml.convert import same_bytes


@dataclass(frozen=True)
class StateResult:
    """Cells of a cache or state that now differ from the reference's, and did not before.

    tensor   its name
    step     when they were written
    node     "SET_ROWS 'cache_k_l0 (view)'": the node that wrote them; None if no node that writes there did
    cells    their numbers: rows of the tensor, or positions of a cache whose values are transposed
    n_cells  number of cells of the tensor
    """

    tensor: str
    step: int
    node: str | None
    cells: tuple[int, ...]
    n_cells: int


@dataclass
class _State:
    """A tensor in both runs.

    transposed  whether the values of a cell are spread over rows, one in each
    wrong       for each cell, whether it is known to differ
    """

    reference: Tensor
    device: Tensor
    transposed: bool
    wrong: NDArray[np.bool_]


@dataclass
class States:
    """All tensors of two runs that nodes write to but no node computes.

    found  called with each result
    """

    found: Callable[[StateResult], None]
    _states: dict[int, _State] = field(default_factory=dict)
    _off: dict[str, NDArray[np.bool_]] = field(default_factory=dict)  # bytes that were not cleared

    def begins(self, device: Tensor, step: int) -> None:
        """Called with a tensor that was cleared, and is to be 0, before a node reads or writes it: cells that are not
        are no node's."""
        off: NDArray[np.bool_] = np.not_equal(device.unpacked().view().reshape(-1).view(np.uint8), 0)
        self._off[device.name] = off
        wrong = _cells(off, device, transposed=False)
        self.found(StateResult(device.name, step, None, tuple(map(int, np.flatnonzero(wrong))), wrong.size))

    def written(self, root: int, reference: Tensor, device: Tensor, step: int, node: str, *, by_element: bool) -> None:
        """Called after a node has written to the tensor, which is identified by the reference's address.

        by_element  whether it scattered single elements: then the tensor holds transposed values
        """
        off = self._off.get(device.name)
        known = np.zeros(reference.ne[1], np.bool_) if off is None else _cells(off, reference, transposed=by_element)
        state = self._states.setdefault(root, _State(reference, device, by_element, known))
        self._look(state, step, node)

    def is_off(self, root: int) -> bool:
        """Whether a tensor is known to differ."""
        return root in self._states and bool(self._states[root].wrong.any())

    def is_read(self, root: int, step: int) -> bool:
        """Called when a node reads a tensor. Returns whether it differs. Cells that differ only now were written by a
        node that does not write there."""
        if root in self._states:
            self._look(self._states[root], step, None)
        return self.is_off(root)

    def finish(self, step: int) -> None:
        """Called after a step: cells that differ only now were written by a node that does not write there."""
        for state in self._states.values():
            self._look(state, step, None)

    def _look(self, state: _State, step: int, node: str | None) -> None:
        size = state.reference.nbytes
        plain = state.device.apart is None and not state.wrong.any()
        if plain and same_bytes(state.reference.address, state.device.address, size):
            return
        wrong = self._differing(state)
        new = np.flatnonzero(wrong & ~state.wrong)
        state.wrong = wrong
        if new.size:
            cells = tuple(int(cell) for cell in new)
            self.found(StateResult(state.reference.name, step, node, cells, wrong.size))

    def _differing(self, state: _State) -> NDArray[np.bool_]:
        a, b = (tensor.unpacked().view() for tensor in (state.reference, state.device))
        differs = a.reshape(-1).view(np.uint8) != b.reshape(-1).view(np.uint8)
        return _cells(differs, state.reference, transposed=state.transposed)


def _cells(differs: NDArray[np.bool_], tensor: Tensor, *, transposed: bool) -> NDArray[np.bool_]:
    """Returns which cells of a tensor have a byte that differs, from which bytes differ."""
    size = tensor.codec.block_bytes if transposed else tensor.nb[1]
    found: NDArray[np.bool_] = np.logical_or.reduce(differs.reshape(-1, tensor.ne[1], size), axis=(0, 2))
    return found
