"""Faults of parameters that the inputs of a run cannot show: each is named among the blind, and synthetic nodes show
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.commands import Cli, kernel_file

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.replica import Replica
from graph_runner.base.variants import Variant
from graph_runner.diff.alone import Alone
from graph_runner.diff.blindness import Blindness
from graph_runner.diff.erring import Erring
from graph_runner.diff.explaining import Explainer
from graph_runner.diff.kinds import Cpu
from graph_runner.diff.synthetic import Synthetic
from graph_runner.judging.copies import Copied
from graph_runner.judging.footprints import Footprints
from graph_runner.judging.mistakes import ignored
from graph_runner.judging.results import NodeResult
from graph_runner.judging.rules import Rules

WITHOUT_BASE = """
from dataclasses import replace
from ggml_backend_npu import op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.rope import Rope

@op("ROPE", params=Rope)
def rope(dst, x, positions, factors, params):
    OWN["ROPE"].define(dst, x, positions, factors, params=replace(params, freq_base=500000.0))
"""

Hide = Callable[[Node], None]


def filled(index: int, number: float) -> Hide:
    """All of a source is one number."""

    def hide(node: Node) -> None:
        source = node.src[index]
        assert source is not None
        source.view()[...] = number

    return hide


def times(index: int, factor: float) -> Hide:
    """A source is a multiple of itself."""

    def hide(node: Node) -> None:
        source = node.src[index]
        assert source is not None
        source.view()[...] *= np.float32(factor)

    return hide


def plain(random: np.random.Generator, op: str) -> Node:
    """A node of one source."""
    shape = 1, 2, 5, 32
    source = Tensor.of(random.standard_normal(shape).astype(np.float32))
    return Node(op, Tensor.of(np.zeros(shape, np.float32)), (source,), bytes(64))


@dataclass(frozen=True)
class Hidden:
    """A parameter of an op that inputs hide.

    hide    makes the inputs hide it
    params  that a node of the op is to have
    types   of its sources, if not all f32
    make    which of the op's small nodes
    """

    op: str
    what: str
    hide: Hide
    params: dict[str, Any] = field(default_factory=dict)
    types: tuple[str, ...] = ()
    make: int = 0

    def node(self, seed: int) -> Node:
        own = OWN[self.op]
        random = np.random.default_rng(seed)
        made = (
            own.makes[self.make](random, ("f32", *self.types, *("f32",) * 8)) if own.makes else plain(random, self.op)
        )
        if self.params:
            assert own.params is not None
            made = replace(made, params=replace(own.params.of(made.params), **self.params).packed)
        made = Copied.of(made).node
        self.hide(made)
        return made

    def __str__(self) -> str:
        return "-".join([self.op, self.what.split(" (")[0], *self.types[1:2]]).replace(" ", "_")


def of_rotations(op: str) -> list[Hidden]:
    """What positions of 0 hide, and rows of zeros."""
    at_0, scaled = filled(1, 0), {"freq_scale": 0.25}
    return [
        Hidden(op, "frequency base", at_0),
        Hidden(op, "frequency scale", at_0, scaled),
        Hidden(op, "mode (0 normal, 2 neox)", at_0),
        Hidden(op, "extrapolation factor", filled(0, 0.0), scaled, make=5),
        Hidden(op, "factors", at_0),
        Hidden(op, "attention factor", filled(0, 0.0), {"attn_factor": 1.5}),
    ]


def of_attention(*types: str) -> list[Hidden]:
    op = "FLASH_ATTN_EXT"
    return [
        Hidden(op, "scale", filled(0, 0.0), types=types),
        Hidden(op, "soft cap of the logits", times(0, 1e-6), types=types),
        Hidden(op, "ALiBi bias", filled(3, 0.0), types=types),
        Hidden(op, "mask", filled(3, 0.0), types=types),
        Hidden(op, "sinks", filled(4, -1e9), types=types),
    ]


def within(node: Node) -> None:
    """Numbers from -1 to 1."""
    source = node.src[0]
    assert source is not None
    source.view()[...] = np.tanh(source.view())


OF_SOFT_MAX = {"scale": 0.5, "max_bias": 8.0}
TWICE = [
    *of_rotations("ROPE"),
    *of_rotations("ROPE_BACK"),
    Hidden("SOFT_MAX", "scale", times(0, 1e-9), OF_SOFT_MAX),
    Hidden("SOFT_MAX", "mask", filled(1, 0.0), OF_SOFT_MAX),
    Hidden("SOFT_MAX", "ALiBi bias", filled(1, 0.0), OF_SOFT_MAX),
    Hidden("SOFT_MAX", "sinks", filled(2, -1e9), OF_SOFT_MAX),
    *(Hidden(op, "eps", times(0, 1e4)) for op in ("NORM", "RMS_NORM", "L2_NORM", "GROUP_NORM")),
    Hidden("SCALE", "scale", filled(0, 0.0), {"scale": 3.0, "bias": 0.5}),
    Hidden("SCALE", "bias", times(0, 1e9), {"scale": 3.0, "bias": 0.5}),
    Hidden("CLAMP", "minimum", within, {"min": -2.0, "max": 2.0}),
]
ONCE = [*of_attention("f32", "f16", "f16"), *of_attention("f32", "f32", "f32"), *of_attention("f32", "q8_0", "q8_0")]
FAULTS = [*((hidden, seed) for hidden in TWICE for seed in (1, 2)), *((hidden, 1) for hidden in ONCE)][:60]


class Ignoring(Cpu):
    """A device that ignores a parameter or a source of an op."""

    def __init__(self, cpu: Replica, of: Hidden) -> None:
        super().__init__(lib.ggml(), cpu, Variant())
        self._of = of

    def compute(self, node: Node) -> None:
        without = dict(ignored(node)).get(self._of.what, node) if node.op == self._of.op else node
        super().compute(without)


class Nobody:
    """Keeps no node."""

    def node(self, *_: object) -> None:
        return None

    def span(self, *_: object) -> None:
        return None


@pytest.fixture(scope="module")
def cpu() -> Iterator[Replica]:
    with Replica(lib.ggml(), "CPU", threads=1) as replica:
        yield replica


def seen(cpu: Replica, device: Cpu, node: Node) -> tuple[Blindness, list[NodeResult]]:
    """Has a device compute a node of a run, which must be right, and then the synthetic ones."""
    rules, erring = Rules(), Erring(None)
    alone = Alone(device, None, rules, Footprints(lambda *_: None), erring)
    expected = Copied.of(node).node
    cpu.compute(expected)
    right = alone.synthetic(node, expected.dst, 0, 0)
    assert right, f"the inputs show it: {right}"
    blindness = Blindness(rules)
    blindness.look(right)
    reference = Cpu(lib.ggml(), cpu, Variant())
    nodes = Synthetic(reference, alone, Explainer(rules, Nobody()), blindness)
    return blindness, [*nodes.judged(1)]


def of_one(cpu: Replica, hidden: Hidden, seed: int) -> tuple[bool, bool, bool]:
    """Whether a fault that inputs hide is named among the blind; whether a synthetic node shows it; and whether each
    synthetic node is right without it."""
    node = hidden.node(seed)
    blindness, found = seen(cpu, Ignoring(cpu, hidden), node)
    named = next(each for each in blindness.sights if each.what == hidden.what)
    _, without = seen(cpu, Cpu(lib.ggml(), cpu, Variant()), node)
    shows = any(not each and hidden.what in each.name for each in found)
    return named.n_tried > 0 and not named.is_shown, shows, bool(without) and all(without)


@pytest.mark.daily(2)
@pytest.mark.slow
def test_sixty_faults_that_the_inputs_hide(cpu: Replica) -> None:
    found = {(str(hidden), seed): of_one(cpu, hidden, seed) for hidden, seed in FAULTS}
    assert len(found) == 60
    assert [name for name, (is_named, _, _) in found.items() if not is_named] == []
    assert [name for name, (_, _, is_right) in found.items() if not is_right] == []
    assert sum(is_shown for _, is_shown, _ in found.values()) >= 55


@pytest.mark.slow
def test_the_command_sees_what_its_run_does_not(cli: Cli, tmp_path: Path) -> None:
    """A prompt of one token, at position 0."""
    kernels = kernel_file(tmp_path, WITHOUT_BASE)
    words = ("diff", "tiny", "--in-process", "--all", "-n", 0, "-p", "", "--reproducers", tmp_path)
    faulty = (*words, "--kernels", kernels)
    blind = cli(*faulty)
    assert blind.code == 0
    assert "blind to ROPE mode (0 normal, 2 neox), ROPE frequency base" in blind.out
    assert "(a longer prompt, or --see, shows them)" in blind.out
    outcome = cli(*faulty, "--see")
    assert outcome.code == 1
    assert "ROPE 'synthetic, shows mode (0 normal, 2 neox) and frequency base" in outcome.out
    assert "ROPE takes 500000 for the frequency base" in outcome.out
    assert cli("replay", tmp_path / "1-0-ROPE.gguf", "--kernels", kernels).code == 1
    assert cli("replay", tmp_path / "1-0-ROPE.gguf").code == 0


@pytest.mark.some(1)
@pytest.mark.daily(2)
@pytest.mark.parametrize("options", [(), ("--memory", "device"), ("--reference", "npu")], ids=str)
def test_synthetic_nodes_of_a_right_device_are_right(cli: Cli, options: tuple[str, ...]) -> None:
    outcome = cli("diff", "tiny", "--in-process", "--all", "-n", 0, "-p", "", "--see", "--strict-coverage", *options)
    assert outcome.code == 0, outcome.out
    assert "seen by synthetic nodes: ROPE mode (0 normal, 2 neox), ROPE frequency base" in outcome.out
    assert "blind to" not in outcome.out
