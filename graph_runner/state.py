"""What two runs keep from step to step, caches and recurrent states, compared cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Tensor
from ggml_backend_npu.abi.convert import same_bytes


@dataclass(frozen=True)
class StateResult:
    """Cells of a cache or state that are not the reference's, and were before.

    tensor   its name
    step     when they were written
    node     "SET_ROWS 'cache_k_l0 (view)'": which node wrote them; None where none did that writes there
    cells    their numbers: rows of the tensor, or positions of a cache whose values lie transposed
    n_cells  how many there are in the tensor
    """

    tensor: str
    step: int
    node: str | None
    cells: tuple[int, ...]
    n_cells: int


@dataclass
class _State:
    """A tensor in both runs.

    transposed  a value of a cell is an element of a row of all cells
    wrong       by cell, whether it is known to differ
    """

    reference: Tensor
    device: Tensor
    transposed: bool
    wrong: NDArray[np.bool_]


@dataclass
class States:
    """All tensors that nodes have written to and no node computes, of two runs.

    found  called with each result
    """

    found: Callable[[StateResult], None]
    _states: dict[int, _State] = field(default_factory=dict)

    def written(self, root: int, reference: Tensor, device: Tensor, step: int, node: str, *, by_element: bool) -> None:
        """A node has written to the tensor, known by the address of the reference's.

        by_element  it scattered single elements: the tensor holds values transposed
        """
        n_cells = reference.ne[1]
        state = self._states.setdefault(root, _State(reference, device, by_element, np.zeros(n_cells, np.bool_)))
        self._look(state, step, node)

    def is_off(self, root: int) -> bool:
        """Whether a tensor is known to differ."""
        return root in self._states and bool(self._states[root].wrong.any())

    def is_read(self, root: int, step: int) -> bool:
        """A node reads a tensor: whether it differs. What does so first now was written by one that does not write
        there."""
        if root in self._states:
            self._look(self._states[root], step, None)
        return self.is_off(root)

    def finish(self, step: int) -> None:
        """After a step: what differs now was written by a node that does not write there."""
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
        n_cells = state.reference.ne[1]
        size = state.reference.codec.block_bytes if state.transposed else state.reference.nb[1]
        found: NDArray[np.bool_] = differs.reshape(-1, n_cells, size).any(axis=(0, 2))
        return found
