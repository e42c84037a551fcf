"""What a run could not have shown: parameters and sources that a device may ignore without any node being wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kit.commands import Cli
from kit.diffs import run
from kit.models import Models

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.replica import Replica
from graph_runner.diff.blindness import Blindness
from graph_runner.diff.turns import Compared
from graph_runner.judging.compare import compare
from graph_runner.judging.copies import copy
from graph_runner.judging.mistakes import ignored
from graph_runner.judging.rules import Rules
from graph_runner.reports.scope import scope_json, scope_line

Rng = np.random.Generator


@pytest.fixture
def cpu() -> Iterator[Replica]:
    with Replica(lib.ggml(), "CPU") as replica:
        yield replica


def made(op: str, sources: tuple[Tensor, ...], **params: Any) -> Node:
    """A node with an output like its first source, and some parameters that are not 0."""
    record = OWN[op].params
    assert record is not None
    packed = replace(record.of(bytes(64)), **params).packed
    return Node(op, Tensor.of(np.zeros(sources[0].ne[::-1], np.float32)), sources, packed)


def normal(random: Rng, *shape: int) -> Tensor:
    return Tensor.of(random.standard_normal(shape).astype(np.float32))


def rope(random: Rng, positions: object) -> Node:
    sources = normal(random, 1, 5, 4, 32), Tensor.of(np.asarray(positions, np.int32))
    return made("ROPE", sources, n_dims=32, freq_base=10000.0, freq_scale=0.25, attn_factor=1.0)


def soft_max(random: Rng, mask: object, scale: float, size: float) -> Node:
    x = Tensor.of((random.standard_normal((1, 2, 5, 32)) * size).astype(np.float32))
    masked = Tensor.of(np.broadcast_to(np.asarray(mask, np.float32), (1, 1, 5, 32)).copy())
    return made("SOFT_MAX", (x, masked), scale=scale)


def norm(random: Rng, op: str, size: float) -> Node:
    x = Tensor.of((random.standard_normal((1, 2, 5, 32)) * size).astype(np.float32))
    return made(op, (x,), eps=1e-6)


def masked(random: Rng) -> object:
    return np.where(random.random(32) < 0.5, -np.inf, 0.0)


# what is ignored, a node that hides it, and one that shows it
HIDDEN: dict[str, tuple[str, Callable[[Rng], Node], Callable[[Rng], Node]]] = {
    "base": ("frequency base", lambda r: rope(r, [0] * 5), lambda r: rope(r, range(5))),
    "scale": ("frequency scale", lambda r: rope(r, [0] * 5), lambda r: rope(r, range(5))),
    "mask": ("mask", lambda r: soft_max(r, 0.0, 0.5, 1.0), lambda r: soft_max(r, masked(r), 0.5, 1.0)),
    "logits": ("scale", lambda r: soft_max(r, 0.0, 0.5, 1e-9), lambda r: soft_max(r, 0.0, 0.5, 1.0)),
    "rms": ("eps", lambda r: norm(r, "RMS_NORM", 1e3), lambda r: norm(r, "RMS_NORM", 1e-2)),
    "norm": ("eps", lambda r: norm(r, "NORM", 1e3), lambda r: norm(r, "NORM", 1e-2)),
}


def looked_at(blindness: Blindness, cpu: Replica, node: Node) -> None:
    cpu.compute(node)
    blindness.look(
        Compared("isolated", node, node, lambda: None, node.dst, node.dst, compare(node.dst, node.dst), True)
    )


@pytest.mark.parametrize("which", HIDDEN)
def test_what_the_inputs_hide_is_named_each_time(cpu: Replica, which: str) -> None:
    """A device that ignores it is right by the rules, and the parameter is among the blind; until a node shows it."""
    what, hides, shows = HIDDEN[which]
    for seed in range(10):
        random, blindness = np.random.default_rng(seed), Blindness(Rules())
        node = hides(random)
        looked_at(blindness, cpu, node)
        bad = copy(node.dst)
        cpu.compute(replace(dict(ignored(node))[what], dst=bad))
        found = compare(node.dst, bad)
        assert found or Rules().allows(node, node.dst, bad, found)
        assert (what, False) in {(each.what, each.is_shown) for each in blindness.sights}

        node = shows(random)
        looked_at(blindness, cpu, node)
        bad = copy(node.dst)
        cpu.compute(replace(dict(ignored(node))[what], dst=bad))
        found = compare(node.dst, bad)
        assert not found
        assert not Rules().allows(node, node.dst, bad, found)
        assert (what, True) in {(each.what, each.is_shown) for each in blindness.sights}


def test_a_run_names_what_it_could_not_have_shown(model: Models) -> None:
    result = run(model("llama"), steps=1)
    assert scope_json(result)["blind"] == []
    assert {"ROPE frequency base", "SOFT_MAX mask", "RMS_NORM eps"} <= {
        f"{each['op']} {each['what']}" for each in scope_json(result)["tried"] if each["is_shown"]
    }
    assert "blind" not in scope_line(result)


@pytest.mark.slow
def test_strict_coverage_does_not_judge_a_run_that_is_blind(cli: Cli) -> None:
    """A prompt of one token, at position 0."""
    words = ("diff", "tiny", "--in-process", "--all", "-n", 0)
    assert cli(*words, "-p", "").code == 0
    outcome = cli(*words, "-p", "", "--strict-coverage")
    assert outcome.code == 1
    last = outcome.out.splitlines()[-1]
    assert last.startswith(
        "not judged: a device could ignore unseen ROPE mode (0 normal, 2 neox), ROPE frequency base,"
    )
    assert cli(*words, "--strict-coverage").code == 0
