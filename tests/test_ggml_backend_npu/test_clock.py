"""The clock of a profile: what it predicts."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.models import Models
from kit.support import choose

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.profiles import load
from ggml_backend_npu.profiles.clock import Clock
from ggml_backend_npu.profiles.rules import FULL, ProfileError
from graph_runner.run.session import Settings
from graph_runner.tools.coverage import cover
from graph_runner.tools.prediction import Timer

PROMPT = "once upon"
CHIP = Clock(memory=1e9, bus=1e8, launch=1e-6, operations={"f32": 1e9, "elements": 1e12, "f16": 1e10})
CPU = Clock(memory=1e8, operations={"f32": 1e8})


def of(*shape: int, type: Any = np.float32) -> Tensor:
    return Tensor.of(np.zeros(shape, type))


# what a node takes


@pytest.mark.parametrize(
    ("node", "seconds"),
    [
        (Node("ADD", of(2, 64), (of(2, 64), of(1, 64))), 1e-6 + (128 + 128 + 64) * 4 / 1e9),
        (Node("MUL_MAT", of(1, 8), (of(8, 64, type=np.float16), of(1, 64))), 1e-6 + (8 * 64 * 2 + 72 * 4) / 1e9),
        (Node("MUL_MAT", of(99, 8), (of(8, 64), of(99, 64))), 1e-6 + 2 * 8 * 64 * 99 / 1e9),
        (Node("GET_ROWS", of(2, 64), (of(99, 64), of(1, 2, type=np.int32))), 1e-6 + (256 * 4 + 8) / 1e9),
    ],
    ids=["bytes", "weights", "operations", "rows"],
)
def test_a_node_takes_what_takes_longer(node: Node, seconds: float) -> None:
    assert CHIP.seconds(node) == pytest.approx(seconds)


def test_an_op_has_a_rate_of_its_own() -> None:
    node = Node("SILU", of(64), (of(64),))
    assert replace(CHIP, operations={"SILU": 1e6, "elements": 1.0}).seconds(node) == pytest.approx(65e-6)


# what a graph takes


def test_what_one_reads_of_the_other_is_copied() -> None:
    timer = Timer(CHIP, CPU)
    x, y, z = of(1000), of(1000), of(1000)
    for dst, src in ((y, x), (z, y), (x, y)):
        timer.add(Node("SQR", dst, (src,)), computes=True)
    ops = ["SQR"] * 3
    here = timer.predict(ops, [True, True, True])
    assert here.transfer == 0
    assert here.total == pytest.approx(3 * (1e-6 + 8000 / 1e9))
    mixed = timer.predict(ops, [True, False, False])
    assert mixed.transfer == pytest.approx(4000 / 1e8)
    assert mixed.fallback["SQR"] == pytest.approx(2 * 8000 / 1e8)


def test_a_coverage_says_what_saves_time(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Clock(memory=1e15, bus=1e15)
    choose(monkeypatch, profile=replace(FULL, clock=(fast, CPU)))
    found = cover(model("llama"), PROMPT, settings=Settings(flash_attention="off"))
    now = found.token.predicted()
    assert now is not None
    assert now.fallback.total() > 0.9 * now.total
    best = found.write_next
    assert best is not None
    assert "MUL_MAT" in best.ops
    assert found.single[0].ops == ("MUL_MAT",)
    then = found.token.predicted(best.ops)
    assert then is not None
    assert best.saves[1] == pytest.approx(now.total - then.total)


def test_a_coverage_without_a_clock_predicts_nothing(
    model: Models, monkeypatch: pytest.MonkeyPatch, backend: object
) -> None:
    found = cover(model("llama"), PROMPT)
    assert found.token.predicted() is None
    assert not any(gain.saves != (0.0, 0.0) for gain in found.single)


# its profile

CLOCK = """
[clock]
memory = 1e11
bus = 1e10
launch = 5e-6
operations = { q8_0 = 4e12, f32 = 1e12, SOFT_MAX = 1e10, elements = 1e11 }
[host]
memory = 1e10
operations.f32 = 5e10
"""


@pytest.mark.slow
def test_a_profile_has_a_clock(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(CLOCK)
    profile = load(str(path))
    assert profile.ops is None
    assert profile.clock == (
        Clock(1e11, 1e10, 5e-6, {"q8_0": 4e12, "f32": 1e12, "SOFT_MAX": 1e10, "elements": 1e11}),
        Clock(1e10, operations={"f32": 5e10}),
    )
    path.write_text('ops = ["ADD"]' + CLOCK)
    assert set(load(str(path)).ops or ()) == {"ADD"}
    command = [sys.executable, "-m", "graph_runner", "coverage", "tiny", "--profile", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^token by the clock: [\d.,]+ tokens/s, [\d.]+ ms: .*on the CPU", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("line", "wrong", "said"),
    [
        ("memory = 1e11", "memory = 0", "line 3: memory=0: must be a number above zero"),
        ("memory = 1e11\n", "", "line 2: clock: needs memory, in bytes a second"),
        ("bus =", "buss =", "line 4: unknown key 'buss'; known: memory bus launch operations"),
        ("SOFT_MAX", "SOFTMAX", "line 6: unknown type or op 'SOFTMAX'; did you mean SOFT_MAX"),
        ("[host]", "[op.ADD]\n[host2]", "line 8: unknown key 'host2'; known: "),
        ("[host]\nmemory = 1e10\noperations.f32 = 5e10\n", "", "line 2: clock: needs [host] beside it"),
    ],
)
def test_what_is_wrong_in_a_clock_is_told(line: str, wrong: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    assert line in CLOCK
    path.write_text(CLOCK.replace(line, wrong, 1))
    with pytest.raises(ProfileError) as raised:
        load(str(path))
    assert str(raised.value).startswith(said)
