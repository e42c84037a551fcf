"""Does a device give the same each time? Whole runs of the same tokens, of which nobody looks at a node, compared with
each other; and if two are apart, the first node at which they are."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ggml_backend_npu import AnyBackend
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.plugin.foreign import ForeignMemory
from graph_runner.base.errors import SessionError
from graph_runner.bisect.flakiness import Parting, Repeat, Way
from graph_runner.bisect.result import Unit
from graph_runner.bisect.running import few_enough
from graph_runner.bisect.whole import Batches, Whole, WholeOptions
from graph_runner.diff.walks import Place, Walk
from graph_runner.judging.copies import digest_of
from graph_runner.judging.results import types_of
from graph_runner.run.session import Observer, Session
from quant.kernels.processor import processors

_PAUSE = 2e-3  # seconds, at most, before and after a split
_BLOCK = 1 << 23  # bytes, at most, of a block that moves addresses
_BLOCKS = 16
_MOST_REPEATS = 400  # of a run in which a node is looked at


class _Seen(Walk):
    """An observer that digests the results of some nodes, and lets the others run together.

    wanted  by place; None: none, but all are listed
    """

    def __init__(self, whole: Whole, wanted: Place | None) -> None:
        super().__init__(whole.ggml)
        self._wanted, self._npu, self._memory = wanted, whole.npu, ForeignMemory(whole.ggml)
        self.found: int | None = None
        self.units: dict[Place, Unit] = {}

    def looks_at(self, place: Place, address: int) -> bool:
        if self._wanted is None:
            node = convert.node(self.ggml, address)
            self.units[place] = Unit(node.name, node.op, types_of(node), node.dst.ne)
        return place == self._wanted

    def saw(self, place: Place, address: int) -> None:
        memory = self._npu or self._memory
        dst = convert.tensor(self.ggml, address, packed=memory.packed)
        self.found = digest_of(dst.address, dst.nbytes, memory.bytes_at)


class Repeats:
    """Whole runs of the same tokens on a device.

    batches  the tokens, step by step; those of the first run, if they are not given
    """

    def __init__(
        self, model: Path, prompt: str, options: WholeOptions, backend: AnyBackend, batches: Batches | None = None
    ) -> None:
        self._whole = Whole(model, prompt, options, backend)
        self.name = self._whole.name
        self._batches = batches or ()

    @property
    def batches(self) -> Batches:
        """The tokens, step by step."""
        self._batches = self._batches or self._whole.greedy(self._whole.settings)[0]
        return self._batches

    def run(self, way: Way, process: int) -> Repeat:
        """Runs the tokens in some way. Returns the digests of what each step gives, logits or embeddings, and of the
        states at the end."""
        begin, batches = time.perf_counter(), self.batches
        try:
            with self._provoked(way), self._opened(way) as session:
                if way.dirty:
                    self._leave_other_content(session)
                digests = []
                for tokens in batches:
                    session.decode(*tokens)
                    digests.append(_digest(session.outputs().tobytes()))
                digests.append(_digest(session.save()))
        except SessionError as error:
            return Repeat(way, process, (), time.perf_counter() - begin, str(error))
        return Repeat(way, process, tuple(digests), time.perf_counter() - begin)

    def _opened(self, way: Way, observer: Observer | None = None) -> Session:
        settings = self._whole.settings
        return self._whole.opened(replace(settings, threads=way.threads or settings.threads), observer)

    def _leave_other_content(self, session: Session) -> None:
        """Decodes the tokens in another order, and drops them: what they left lies where the results will."""
        for tokens in self.batches:
            session.decode(*[each[::-1] for each in tokens])
        session.clear()

    @contextmanager
    def _provoked(self, way: Way) -> Iterator[None]:
        npu, held = self._whole.npu, []
        if way.moved:
            held = [bytearray(random.randrange(1 << 12, _BLOCK)) for _ in range(_BLOCKS)]
        with _busy() if way.busy else _idle():
            if npu is None or not way.pauses:
                yield
            else:
                before, npu.run = npu.run, _paused
                npu.forget_plans()  # one that is known runs without pauses
                try:
                    yield
                finally:
                    npu.run = before
                    npu.forget_plans()
        del held

    def parting(self, way: Way, last_step: int, rate: float) -> Parting:
        """Returns the first node whose result is not the same each time when nobody looks at another one.

        way   of the runs
        last_step  in which it is, or before
        rate  of runs that were apart
        """
        listed = self._observed(way, None)
        places = [place for place in sorted(listed.units) if place[0] <= last_step]
        of_a_node = min(rate, 0.5) / 2  # runs may be apart by several nodes, and each in another way
        times, n_runs = few_enough(of_a_node, _MOST_REPEATS), 1

        def parts(place: Place) -> bool:
            nonlocal n_runs
            found = set[int | None]()
            for _ in range(times + 1):
                n_runs += 1
                found.add(self._observed(way, place).found)
                if len(found) > 1:
                    return True
            return False

        if not places or not parts(places[-1]):
            return Parting(None, None, n_runs)
        low, high = 0, len(places) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if parts(places[middle]) else (middle + 1, high)
        return Parting(places[low], listed.units[places[low]], n_runs)

    def _observed(self, way: Way, wanted: Place | None) -> _Seen:
        seen = _Seen(self._whole, wanted)
        with self._provoked(way), self._opened(way, seen) as session:
            if way.dirty:
                self._leave_other_content(session)
                seen.begins_again()
            for step, tokens in enumerate(self.batches):
                if step:
                    seen.next_step()
                session.decode(*tokens)
                if wanted is not None and step == wanted[0]:
                    break
        return seen


def _paused(plan: Plan, graph: int) -> None:
    time.sleep(random.random() * _PAUSE)
    plan.run()
    time.sleep(random.random() * _PAUSE)


@contextmanager
def _idle() -> Iterator[None]:
    yield


@contextmanager
def _busy() -> Iterator[None]:
    """Within it, each processor has other work now and then."""
    done, block = threading.Event(), bytes(1 << 18)

    def work() -> None:
        while not done.is_set():
            hashlib.sha256(block)  # without the lock of Python
            time.sleep(random.random() * _PAUSE)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(processors())]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        done.set()
        for each in threads:
            each.join()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
