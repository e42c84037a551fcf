"""Every fault of the corpus fails a diff, at the node that is known to be the first wrong one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.damage import Commands
from kit.diffs import FLASH_OFF, PROMPT
from kit.faults import Fault, any_node, corpus, of
from kit.models import Models
from kit.planted import Place, known, loaded, misreads, raised_at, shows, spills
from kit.support import choose

from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.run.session import Session, context_for
from graph_runner.trace import replay

TIMEOUT = 5  # seconds, of a node
(ROUNDED,) = of("right")


@pytest.fixture(autouse=True)
def as_before(backend: Plugin) -> Iterator[None]:
    """Plans with planted kernels are gone after the test; what kernels do to numbers warns nobody."""
    with np.errstate(all="ignore"):
        yield
    backend.forget_plans()


def spread(faults: list[Fault], every: int) -> list[Any]:
    """All of the faults, of which one in so many is in the default tier."""
    slow = [pytest.mark.slow]
    return [pytest.param(fault, id=str(fault), marks=slow * (i % every > 0)) for i, fault in enumerate(faults)]


# the corpus itself


@pytest.mark.parametrize("fault", spread(of("isolated", "sources", "runs", "live"), every=8))
def test_a_kernel_is_wrong_where_it_is_said_to_be(model: Models, fault: Fault) -> None:
    """Without a diff: the kernel, on ggml's own memory, beside the project's own."""
    file = model(fault.model)
    wrong, places = shows(file, fault)[0], known(file, fault)
    assert wrong in places if fault.scattered else wrong == places[0]


@pytest.mark.parametrize("fault", of("strays"), ids=str)
def test_a_kernel_writes_beside_its_output(model: Models, fault: Fault) -> None:
    file = model(fault.model)
    assert spills(file, fault)[0] == known(file, fault)[0]


@pytest.mark.parametrize("fault", of("fused"), ids=str)
def test_an_operator_is_wrong_where_it_takes_the_place_of_its_nodes(
    model: Models, fault: Fault, backend: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fusion a run takes another way, without it does not."""
    for option, value in fault.options.items():
        choose(monkeypatch, **{option: value})
    right = logits(model(fault.model), fault, backend)
    with loaded(fault):
        assert not np.array_equal(logits(model(fault.model), fault, backend), right)
        choose(monkeypatch, fusion="off")
        unfused = logits(model(fault.model), fault, backend)
    assert np.allclose(unfused, right, rtol=1e-3, atol=1e-4)


def logits(model: Path, fault: Fault, backend: Plugin) -> np.ndarray:
    """Of the device's run of the prompt."""
    backend.forget_plans()
    settings = replace(fault.settings, device="npu", n_ctx=context_for(PROMPT, 1))
    with Session(model, settings) as session:
        session.decode(session.tokenize(PROMPT))
        return np.array(session.logits())


@pytest.mark.parametrize("fault", of("packed"), ids=str)
def test_a_kernel_is_wrong_where_tensors_are_packed(model: Models, fault: Fault) -> None:
    assert misreads(model(fault.model), fault)[0] == known(model(fault.model), fault)[0]


def options(fault: Fault) -> list[object]:
    """Of the device and of contexts."""
    settings = fault.settings
    chosen: list[object] = ["--prompt", PROMPT, "--threads", settings.threads, "--flash-attn", settings.flash_attention]
    chosen += ["--cache-type-k", settings.cache_type_k, "--cache-type-v", settings.cache_type_v]
    for option, value in fault.options.items():
        chosen += ["--all"] if option == "ops" else [f"--{option.replace('_', '-')}", value]
    return chosen


@pytest.mark.daily(5)
@pytest.mark.slow
@pytest.mark.parametrize("fault", of("ends"), ids=str)
def test_a_kernel_ends_a_run(model: Models, fault: Fault, tmp_path: Path) -> None:
    words = ["run", model(fault.model), "-n", 3, "--kernels", fault.written(tmp_path), *options(fault)]
    line = [sys.executable, "-c", "from graph_runner.cli import main; main()", *map(str, words)]
    try:
        done = subprocess.run(line, text=True, capture_output=True, timeout=15, check=False)
    except subprocess.TimeoutExpired:
        assert "time" in fault.failure
    else:
        assert done.returncode or not done.stdout


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["llama", "gpt-oss", "mamba", "moe", "rwkv7"])
def test_rounding_alone_is_right(model: Models, name: str) -> None:
    with loaded(ROUNDED):
        assert diff(model(name), PROMPT, DiffOptions(steps=2, settings=FLASH_OFF))


# what a diff makes of it


def assert_true(diagnosis: str | None, fault: Fault) -> None:
    """What is said of a node is true, and nothing is said where that is not known."""
    if fault.says is not None:
        assert diagnosis is not None
        assert fault.says in diagnosis
    for words in fault.never:
        assert words not in (diagnosis or "")


def assert_first(found: Place, fault: Fault, places: list[Place]) -> None:
    """The first wrong node is the known one, under its own name or that of the operator it was run as."""
    if found.op == fault.fused:
        found = replace(found, op=fault.op)
    assert found in places if fault.scattered else found == places[0]


def assert_found(model: Path, fault: Fault, folder: Path, *beside: Fault) -> None:
    """By a diff in this process; its reproducer is wrong with the fault, and right without."""
    places = known(model, fault)
    with loaded(fault, *beside):
        result = diff(model, PROMPT, DiffOptions(steps=fault.steps, settings=fault.settings, reproducers=folder))
        assert not result
        first = result.wrong[0]
        assert_first(Place(first.step, first.index, first.op, first.name), fault, places)
        assert_true(first.diagnosis, fault)
        assert first.reproducer is not None
    if fault.alone:
        with loaded(fault, *beside):  # anew: what it has kept is of addresses that may come again
            assert not replay(Path(first.reproducer), repeat=fault.repeat)
    assert replay(Path(first.reproducer), repeat=fault.repeat)


@pytest.fixture
def of_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has a fault's options."""
    for option, value in request.getfixturevalue("fault").options.items():
        choose(monkeypatch, **{option: value})


@pytest.mark.some(2)
@pytest.mark.daily(5)
@pytest.mark.usefixtures("of_device")
@pytest.mark.parametrize("fault", spread(of("isolated", "sources", "runs", "fused"), every=6))
def test_a_fault_is_found(model: Models, fault: Fault, tmp_path: Path) -> None:
    assert_found(model(fault.model), fault, tmp_path)


@pytest.mark.some(1)
@pytest.mark.daily(5)
@pytest.mark.usefixtures("of_device")
@pytest.mark.parametrize("fault", spread([each for each in of("sources", "runs", "fused") if each.rounded], every=4))
def test_a_fault_is_found_after_rounding(model: Models, fault: Fault, tmp_path: Path) -> None:
    """The device's own run is off from the first product on; that hides nothing."""
    if fault.remembers:
        fault = replace(fault, at=any_node, step=0, scattered=True)
    assert_found(model(fault.model), fault, tmp_path, ROUNDED)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("printed"), seconds=300) as command:
        yield command


def assert_command_finds(command: Commands, model: Path, fault: Fault, folder: Path, *beside: Fault) -> None:
    """By the command, whatever the kernels do to the process that they run in."""
    places = known(model, fault)
    planted = [word for each in (*beside, fault) for word in ("--kernels", each.written(folder))]
    written = folder / "result.json"
    done = command(
        "diff", model, "-n", fault.steps, *planted, "--reproducers", folder, "--json", written,
        "--node-timeout", TIMEOUT, *options(fault),
    )  # fmt: skip
    assert done.code == 1, done.text
    result = json.loads(written.read_text())
    assert not result["passed"]
    first = result["nodes"][result["first_introduced"]]
    assert_first(Place(first["step"], first["index"], first["op"], first["name"]), fault, places)
    assert_true(first["diagnosis"], fault)
    if fault.failure:
        assert any(words in first["failure"] for words in fault.failure)
    again = ["replay", first["reproducer"], "--repeat", fault.repeat, "--node-timeout", TIMEOUT]
    if fault.alone:
        assert command(*again, *planted).code == 1
    right = command(*again)
    assert right.code == 0, right.text


@pytest.mark.slow
@pytest.mark.daily(6)
@pytest.mark.parametrize("fault", spread(of("ends", "strays", "live", "packed", "late"), every=6))
def test_the_command_finds_a_fault(model: Models, fault: Fault, commands: Commands, tmp_path: Path) -> None:
    assert_command_finds(commands, model(fault.model), fault, tmp_path)


@pytest.mark.daily(8)
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [each for each in of("packed", "strays", "live", "late", "ends") if each.rounded], ids=str
)
def test_the_command_finds_a_fault_after_rounding(
    model: Models, fault: Fault, commands: Commands, tmp_path: Path
) -> None:
    assert_command_finds(commands, model(fault.model), fault, tmp_path, ROUNDED)


@pytest.mark.slow
def test_a_failure_names_file_and_line(model: Models) -> None:
    """Of the kernel, where it raises."""
    fault = corpus()["cont_raises"]
    line = raised_at(fault)
    with loaded(fault):
        result = diff(model(fault.model), PROMPT, DiffOptions(steps=0, settings=fault.settings))
    failure = result.wrong[0].failure
    assert failure is not None
    assert "ValueError: no rows today" in failure
    assert fault.path.name in failure
    assert f"line {line}" in failure
