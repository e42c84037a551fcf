"""Runs the tokens of a diff again: does the device give the same results each time, and also if no node is observed?
How far does rounding alone move the CPU's result?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from ggml_backend_npu import Backend, Node
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.lib import Ggml
from graph_runner.diff.contents import digest_of
from graph_runner.diff.logits import Ending, Logits, nmse
from graph_runner.judging.results import OWN_RUN, NodeResult, Verdict, types_of
from graph_runner.judging.spans import Chain
from graph_runner.run.session import Observer, Session, SessionError, Settings
from quant import codec, type_names

Opened = Callable[[Settings, Observer | None], Session]
Place = tuple[int, int]  # a node's step, and its place in that
_FAR = 100.0  # times what is natural, which the end of a run may be off by
_FEW_ULP = 1e-6  # of float32, in parts of an element
_DRAWS = 4  # of errors, at most, to find out what is natural
_NOTHING = 1e-9  # an nmse that is small whatever is natural


class _Walk:
    """An observer that counts nodes in the same way as a diff.

    step  the current step; incremented before each step but the first
    read  returns the bytes of a span of the run's memory
    """

    read: Callable[[int, int], Any] = staticmethod(convert.bytes_at)

    def __init__(self, ggml: Ggml) -> None:
        self.ggml, self.step, self._place = ggml, 0, -1

    def next_step(self) -> None:
        self.step, self._place = self.step + 1, -1

    def before(self, address: int) -> bool:
        """Returns whether to observe the node after it has run."""
        if not convert.computes(convert.op_name(self.ggml, address)):
            return False
        self._place += 1
        return self.looks_at((self.step, self._place), address)

    def after(self, address: int) -> None:
        self.saw((self.step, self._place), address)

    def _digest(self, address: int) -> int:
        dst = convert.tensor(self.ggml, address)
        return digest_of(dst.address, dst.nbytes, self.read)

    def looks_at(self, place: Place, address: int) -> bool:
        """Returns whether to observe the node after it has run."""
        return True

    def saw(self, place: Place, address: int) -> None:
        """Called after an observed node has run."""


class _Same(_Walk):
    """Compares nodes with their results in an earlier run.

    differs  the first node that is not the same: its place, and the node
    """

    def __init__(self, ggml: Ggml, backend: Backend, before: Mapping[Place, int], fuses: bool) -> None:
        super().__init__(ggml)
        self._before, self._chain = before, Chain(backend, backend.fusions if fuses else ())
        self.differs: tuple[Place, Node] | None = None

    def looks_at(self, place: Place, address: int) -> bool:
        node = convert.node(self.ggml, address)
        return self._chain.is_at_end(node.op, lambda: node)

    def saw(self, place: Place, address: int) -> None:
        if self.differs is None and self._before.get(place, -1) not in (-1, self._digest(address)):
            self.differs = place, convert.node(self.ggml, address)


class _One(_Walk):
    """Observes one node alone; the nodes before it run as they do without an observer."""

    def __init__(self, ggml: Ggml, place: Place) -> None:
        super().__init__(ggml)
        self._wanted = place
        self.digest, self.node = -1, None

    def looks_at(self, place: Place, address: int) -> bool:
        return place == self._wanted

    def saw(self, place: Place, address: int) -> None:
        self.digest, self.node = self._digest(address), convert.node(self.ggml, address)

    digest: int
    node: Node | None


class _Noise(_Walk):
    """Adds rounding errors to nodes: for each node of the given size, relative to the node's values."""

    def __init__(self, ggml: Ggml, errors: Mapping[Place, float], seed: int) -> None:
        super().__init__(ggml)
        self._errors, self._random = errors, np.random.default_rng(seed)

    def saw(self, place: Place, address: int) -> None:
        error = self._errors.get(place, 0.0)
        dst = convert.tensor(self.ggml, address, writable=True)
        if error > 0 and dst.type in ("f32", "f16") and dst.nbytes:
            values = dst.view()
            size = float(np.sqrt(np.square(values, dtype=np.float64).mean()))
            noise = self._random.standard_normal(values.shape) * error * size
            with np.errstate(invalid="ignore"):
                values[...] += noise.astype(values.dtype)


class Again:
    """Runs the same model on the same tokens again.

    opened   opens a new session
    backend  the backend of the device
    """

    def __init__(
        self, ggml: Ggml, opened: Opened, backend: Backend, settings: Settings, batches: Sequence[list[int]]
    ) -> None:
        self._ggml, self._opened, self._backend = ggml, opened, backend
        self._settings, self._batches = settings, batches

    def _run(self, settings: Settings, observer: _Walk | None = None) -> list[Logits]:
        found = []
        with self._opened(settings, observer) as session:
            if observer is not None and session.npu is not None:
                observer.read = session.npu.bytes_at
            for step, tokens in enumerate(self._batches):
                if step and observer is not None:
                    observer.next_step()
                session.decode(tokens)
                found.append(session.logits())
        return found

    def repeated(self, fingerprints: Mapping[Place, int], times: int, *, fuses: bool) -> NodeResult | None:
        """Returns the first node whose result on the device changes between runs; None if all runs are the same.

        fingerprints  digests of the nodes' results in the first run
        times  the number of runs, the first one included
        """
        for run in range(2, times + 1):
            same = _Same(self._ggml, self._backend, fingerprints, fuses)
            self._run(replace(self._settings, device="npu"), same)
            if same.differs is not None:
                place, node = same.differs
                return _unlike(place, node, f"is not the same each time: run {run} of {times} gives other bytes")
        return None

    def unwatched(
        self, device: Sequence[Logits], reference: Sequence[Logits], fingerprints: Mapping[Place, int]
    ) -> NodeResult | None:
        """Returns the first node whose result changes if the device's run is not observed node by node. Returns None if
        the run ends the same, or if ggml's CPU shows such a difference too.

        device, reference  the logits of both runs while they were observed
        fingerprints       digests of the nodes' results in that run
        """
        on_device = replace(self._settings, device="npu")
        if _alike(self._run(on_device), device) or not _alike(self._run(replace(on_device, device="cpu")), reference):
            return None
        low, high = 0, len(places := sorted(fingerprints)) - 1
        while low < high:
            middle = (low + high) // 2
            if self._gives(on_device, places[middle], fingerprints) is None:
                low = middle + 1
            else:
                high = middle
        found = self._gives(on_device, places[low], fingerprints) if places else None
        if found is None:
            return None
        return _unlike(places[low], found, "gives other bytes when nodes run together, not one by one")

    def _gives(self, settings: Settings, place: Place, fingerprints: Mapping[Place, int]) -> Node | None:
        """Returns the node if its result changes when only this node is observed, else None."""
        one = _One(self._ggml, place)
        with suppress(SessionError):
            self._run(settings, one)
        return one.node if one.digest != fingerprints[place] else None

    def natural(self, ending: Ending, reference: Sequence[Logits], nodes: Collection[NodeResult]) -> Ending:
        """Returns the ending with `natural` and `limit` set: how far rounding alone moves the reference from itself.
        The reference is run with errors as large as those of the device's nodes, and with flash attention switched. If
        values are quantised, errors are at least a few units in the last place, since it is chance which of two quants
        a value at the edge gets. So errors are drawn again, a few times, while the ending is too far off."""
        errors: dict[Place, float] = {}
        least = _FEW_ULP if any(map(_quantises, nodes)) else 0.0
        for node in nodes:
            found = [each.error for each in (node.isolated, node.mirrored) if each is not None and not each]
            if found and np.isfinite(max(found)):
                errors[node.step, node.index] = max(float(np.sqrt(max(found))), least)
        on_cpu = replace(self._settings, device="cpu")
        switched = replace(on_cpu, flash_attention="off" if on_cpu.flash_attention == "on" else "on")
        runs: list[tuple[Settings, _Walk | None]] = [(switched, None)]
        runs += [(on_cpu, _Noise(self._ggml, errors, seed)) for seed in range(_DRAWS)]
        natural = 0.0
        for settings, observer in runs:
            with suppress(SessionError):
                natural = max(natural, _apart(reference, self._run(settings, observer)))
            judged = replace(ending, natural=natural, limit=max(_FAR * natural, _NOTHING))
            if observer is not None and judged:
                break
        return judged


def _quantises(node: NodeResult) -> bool:
    """Whether a node reads or writes quantised blocks."""
    return node.op != "GET_ROWS" and any(codec(type).is_quantized for type in {*node.types.split()} & {*type_names()})


def _alike(a: Sequence[Logits], b: Sequence[Logits]) -> bool:
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def _apart(a: Sequence[Logits], b: Sequence[Logits]) -> float:
    return max((nmse(x, y) for x, y in zip(a, b, strict=True)), default=0.0)


def _unlike(place: Place, node: Node, failure: str) -> NodeResult:
    step, index = place
    return NodeResult(
        step, index, node.op, node.name, types_of(node), node.dst.ne, Verdict.FAILED, "NPU",
        failure=failure, wrong_in=OWN_RUN,
    )  # fmt: skip
