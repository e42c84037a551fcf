"""A kind of side that this project does not have: a class, and its place in KINDS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kit.commands import Cli
from kit.diffs import run

from ggml_backend_npu import Node
from ggml_backend_npu.ggml import lib
from graph_runner.base.errors import BadInputError
from graph_runner.base.settings import Settings
from graph_runner.bisect.replacing import suspects
from graph_runner.diff import sides
from graph_runner.diff.kinds import Cpu
from graph_runner.diff.side import CPU, Wanted
from graph_runner.elsewhere.session import AnySession
from graph_runner.run.session import Observer


class Noisy(Cpu):
    """noise:SIZE, ggml's CPU with each product of matrices multiplied by 1 + SIZE of normal noise."""

    @classmethod
    def of(cls, wanted: Wanted) -> Noisy | None:
        if not wanted.name.startswith("noise:"):
            return None
        side = cls(wanted.ggml, wanted.replica(CPU), wanted.variant, is_rival=True)
        side.name, side.size = wanted.name, float(wanted.name.removeprefix("noise:"))
        side.drawn = np.random.default_rng(0)
        return side

    size: float
    drawn: np.random.Generator

    @property
    def is_cpu(self) -> bool:
        return False

    def spoil(self, node: Node) -> None:
        if node.op == "MUL_MAT":
            found = node.dst.view()
            found *= 1 + self.size * self.drawn.standard_normal(found.shape)

    def compute(self, node: Node) -> None:
        super().compute(node)
        self.spoil(node)

    def session(
        self,
        model: Path,
        settings: Settings,
        observer: Observer | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> AnySession:
        return super().session(model, settings, Spoils(self, observer), progress)


class Spoils:
    """Spoils each node of a side's run before another observer sees it."""

    def __init__(self, side: Noisy, then: Observer | None) -> None:
        self._side, self._then, self._is_wanted = side, then, False
        self._read = side.reader(lib.ggml())

    def before(self, node: int) -> bool:
        self._is_wanted = self._then is not None and self._then.before(node)
        return True

    def after(self, node: int) -> None:
        if self._side.computes(node):
            self._side.spoil(self._read(node).node)
        if self._is_wanted and self._then is not None:
            self._then.after(node)


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "KINDS", (Noisy, *sides.KINDS))


@pytest.mark.usefixtures("noisy")
@pytest.mark.parametrize(("size", "is_wrong"), [("1e-9", False), ("1e-2", True)])
def test_a_new_kind_is_judged_as_the_others(tiny: Path, size: str, is_wrong: bool) -> None:
    result = run(tiny, steps=1, device=f"noise:{size}")
    assert bool(result) is not is_wrong
    assert {node.op for node in result.wrong} == ({"MUL_MAT"} if is_wrong else set())
    assert (result.device, result.n_computed) == (f"noise:{size}", len(result.nodes))
    assert suspects(result) == []  # no scheduler gives its nodes to it


@pytest.mark.usefixtures("noisy")
def test_the_command_knows_a_new_kind(cli: Cli, tiny: Path) -> None:
    done = cli("diff", tiny, "-n", 0, "--device", "noise:1e-2", "--in-process")
    assert done.code == 1, done.err
    assert "own run of noise:1e-2: " in done.out
    assert "first wrong node:\nstep 0 node 3: MUL_MAT 'Qcur-0'" in done.out


def test_without_it_there_is_none(tiny: Path) -> None:
    with pytest.raises(BadInputError, match="device 'noise:1e-2': there is none of this name; there are: CPU NPU"):
        run(tiny, device="noise:1e-2")
