"""Who sees the nodes of a run: an observer, each of them, or a count."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.guard import stopped_by_interrupts
from ggml_backend_npu.ggml.lib import Ggml
from quant.kernels.jit import array_at, callback
from quant.kernels.late import types

_FUNCTIONS_PER_OP = 64


class Observer(Protocol):
    """Sees every node of a run in order, by the address of its ggml_tensor."""

    def before(self, node: int) -> bool:
        """Called before the node runs: its sources are complete, its dst is not written yet. Returns whether to run it
        now and call `after`. Otherwise it runs together with the following nodes, up to one that returns True; these
        see sources that are not computed yet."""

    def after(self, node: int) -> None:
        """Called after the node has run."""


@runtime_checkable
class Sieve(Protocol):
    """An observer with a cb_eval of its own in machine code, which hands to Python what Python has to see.

    callback  its address
    """

    callback: int

    def over(self, callback: int) -> int:
        """Returns its user data, given the address of the cb_eval that tells the observer."""


class Observed:
    """A cb_eval that tells an observer, and ends the run if that raises.

    sieve  what stands before it; None: nothing
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.sieve = observer if isinstance(observer, Sieve) else None
        self._error: BaseException | None = None
        self.callback = structs.EvalCallback(self._observe)

    @stopped_by_interrupts
    def _observe(self, node: int, ask: bool, _: Any) -> bool:
        try:
            if ask:
                return self._observer.before(node)
            self._observer.after(node)
        except BaseException as error:
            self._error = error
            return False
        return True

    def refuse_what_was_raised(self) -> None:
        """Raises what the observer has raised."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error


@callback(types.boolean(types.intp, types.boolean, types.intp))
def _count_node(node: int, ask: bool, counts: int) -> bool:
    """cb_eval that observes no node but counts those that compute something: counts[op, function]."""
    if ask and array_at(node + structs.FLAGS_AT, types.int32, 1)[0] & structs.FLAG_COMPUTE:
        ne = array_at(node + 16, types.int64, 4)
        if ne[0] * ne[1] * ne[2] * ne[3] > 0:
            op = array_at(node + structs.OP_AT, types.int32, 2)
            function = op[1] if 0 <= op[1] < _FUNCTIONS_PER_OP else 0
            array_at(counts, types.int64, (op[0] + 1) * _FUNCTIONS_PER_OP)[op[0] * _FUNCTIONS_PER_OP + function] += 1
    return False


class Counts:
    """How many nodes have computed something, by op.

    address  of the counts: the user data of the cb_eval
    """

    def __init__(self, ggml: Ggml) -> None:
        self._ggml, self._counts = ggml, np.zeros((len(ggml.ops) + 1, _FUNCTIONS_PER_OP), np.int64)
        self.address = int(self._counts.ctypes.data)

    @property
    def callback(self) -> int:
        """The address of a cb_eval that counts."""
        return int(_count_node.address)

    def by_op(self) -> Counter[str]:
        """Returns the counts so far, by the name of the op."""
        found: Counter[str] = Counter()
        for op, function in zip(*np.nonzero(self._counts), strict=True):
            name = self._ggml.op_name(int(op), int(function))
            if convert.computes(name):
                found[name] += int(self._counts[op, function])
        return found
