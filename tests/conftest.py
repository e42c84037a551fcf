"""What every test needs: a ggml that aborts without a debugger, the registered backend, reproducible examples."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys

os.environ["GGML_NO_BACKTRACE"] = "1"  # read by ggml when it is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two workers share two cores: a thread that waits keeps none
os.environ["PYTHONSAFEPATH"] = "1"  # processes of the tests import what is installed, not what lies in their folder

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, settings
from kit.days import TODAY, turn_of

if TYPE_CHECKING:
    from kit.commands import Cli
    from kit.models import Models

    from ggml_backend_npu.plugin.plugin import Plugin

_few = settings(
    deadline=None,
    derandomize=False,
    max_examples=10,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("few", _few)
settings.register_profile("few, the same each time", _few, derandomize=True)
settings.register_profile("many", _few, max_examples=100, derandomize="CI" in os.environ)
settings.load_profile("few, the same each time" if "CI" in os.environ else "few")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so its children
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def backend() -> Plugin:
    """The backend, registered with the ggml inside llama-cpp-python."""
    import ggml_backend_npu

    return ggml_backend_npu.register()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Finds the file of a model by name; a tiny one is written when first asked for."""
    from kit.encoders import ENCODERS
    from kit.models import OTHERS, VARIED, WRITERS

    from graph_runner.base.models import demo_file

    folder = tmp_path_factory.mktemp("models")

    def find(name: str) -> Path:
        path = demo_file() if name == "demo" else folder / f"{name}.gguf"
        return path if path.exists() else (WRITERS | OTHERS | VARIED | ENCODERS)[name](path)

    return find


@pytest.fixture
def turn(request: pytest.FixtureRequest) -> int:
    """A number that goes up by one each time that the test has its day (`daily`)."""
    marker = request.node.get_closest_marker("daily")
    return turn_of(marker.args[0] if marker else 1)


@pytest.fixture
def every_op(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device takes every op, and what a kernel does to numbers warns nobody."""
    import numpy as np
    from kit.support import choose

    choose(monkeypatch, ops="all")
    with np.errstate(all="raise", under="ignore"):
        yield


@pytest.fixture
def all_fused(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device takes every op and runs known patterns of nodes as one operator; no plan of another test is left."""
    from kit.support import choose

    choose(monkeypatch, ops="all", fusion="on")
    backend.forget_plans()
    yield
    backend.forget_plans()


@pytest.fixture
def cli(backend: Plugin, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """The command with some arguments, in this process; its kernels and options are gone after the test."""
    from kit.commands import Outcome

    from ggml_backend_npu import default_backend
    from ggml_backend_npu.plugin import embedding
    from graph_runner.cli import main

    options = default_backend().options
    monkeypatch.setattr(default_backend().ops, "_ops", dict(default_backend().ops._ops))
    monkeypatch.setattr(embedding, "check_package", lambda: None)  # this checkout may be one on PYTHONPATH
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("GGML_NPU_DEVICE_FILE", "")  # --device-file sets it; afterwards it is what it was
    monkeypatch.delenv("GGML_NPU_DEVICE_FILE")
    backend.forget_plans()

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["ggml-npu", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        assert isinstance(code, int)
        return Outcome(code, *capfd.readouterr())

    yield call
    default_backend().options = options
    backend.forget_plans()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small random llama, as a file."""
    from graph_runner.base.tiny import write_tiny_llama

    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_text(tiny: Path) -> str:
    """64 greedy tokens of the tiny model on the CPU."""
    from graph_runner.cli.options import PROMPT
    from graph_runner.run.session import Sampler, Session, Settings, context_for, generate

    with Session(tiny, Settings(n_ctx=context_for(PROMPT, 64))) as session:
        tokens = session.tokenize(PROMPT)
        return b"".join(map(session.piece, generate(session, tokens, 64, Sampler()))).decode()


@pytest.fixture
def in_python(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The graphs that Python was asked to compute."""
    from ggml_backend_npu.ggml.graph_read import GraphRead, GraphReader

    backend.forget_plans()
    graphs: list[int] = []
    read = GraphReader.__call__

    def record(reader: GraphReader, graph: int) -> GraphRead:
        graphs.append(graph)
        return read(reader, graph)

    monkeypatch.setattr(GraphReader, "__call__", record)
    return graphs


@pytest.fixture(params=["openmp", "pool"])
def team(request: pytest.FixtureRequest, backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Threads of ggml's OpenMP runtime, or of the pool that stands in where there is none."""
    from quant.kernels import threads

    kind: str = request.param
    if kind == "openmp" and not backend.ggml.openmp:
        pytest.skip("this ggml has no OpenMP")
    team = threads.Team(backend.ggml.openmp if kind == "openmp" else 0)
    monkeypatch.setattr(backend.backend, "team", team)
    with team.working():
        yield kind


def pytest_configure(config: pytest.Config) -> None:
    """An exception that would leave a callback, and reach C, fails the test."""
    config.addinivalue_line("filterwarnings", "error::pytest.PytestUnraisableExceptionWarning")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-day", action="store_true", help="all cases of tests marked daily(n), not an nth of them")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `some(n)`, n cases run by default, evenly spaced; the others are slow. Of the slow cases of a
    test marked `daily(n)` one in n runs, others each day: a single one each n-th day."""
    for n, cases in _marked("some", [item for item in items if not item.get_closest_marker("slow")]):
        chosen = {i * len(cases) // n for i in range(n)}
        for i in {*range(len(cases))} - chosen:
            cases[i].add_marker("slow")
    if config.getoption("--every-day"):
        return
    left: set[pytest.Item] = set()
    for n, cases in _marked("daily", [item for item in items if _is_long(item)]):
        first = crc32(cases[0].nodeid.split("[")[0].encode())  # single cases of several tests are not on the same day
        left.update(each for i, each in enumerate(cases) if (first + i) % n != TODAY % n)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def _marked(name: str, items: list[pytest.Item]) -> Iterator[tuple[int, list[pytest.Item]]]:
    """For each test with a marker: its argument, and the test's cases among items."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(name):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for each in cases.values():
        marker = each[0].get_closest_marker(name)
        assert marker is not None
        yield marker.args[0], each


def _is_long(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(tier) for tier in ("slow", "conformance"))


@cache
def is_older() -> bool:
    """Whether the ggml of this process is older than the newest that is known."""
    from ggml_backend_npu.ggml import layouts, lib

    return lib.numbers(lib.ggml().version) < lib.numbers(layouts.NEWEST.versions[0])


@cache
def lacking() -> set[str]:
    """Names of our ops and types that an older ggml does not have, or has with another meaning."""
    import quant
    from ggml_backend_npu.ggml import lib
    from ggml_backend_npu.ops import OWN

    if not is_older():
        return set()
    ggml = lib.ggml()
    return ({*OWN} - ggml.op_names) | ({*quant.type_names()} - ggml.type_numbers.keys()) | ggml.uncounted


@pytest.hookimpl(trylast=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Skips a case that is named after an op or a type that an older ggml does not have."""
    words = {*re.findall(r"\w+", item.name.partition("[")[2])}
    if words & lacking():
        item.add_marker(pytest.mark.skip(reason="this version of ggml has no such op or type"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skips a test of what an older ggml does not have: a function, or a node that its CPU does not compute."""
    from ggml_backend_npu import KernelError
    from ggml_backend_npu.ggml import lib

    try:
        yield
    except (AttributeError, KernelError) as error:
        if is_older() and re.search(rf"ggml: no function|ggml {lib.ggml().version} ", str(error)):
            pytest.skip(str(error))
        raise


def pytest_collection_finish() -> None:
    """The collected tests live as long as the process: no collection of garbage goes through them again."""
    gc.collect()
    gc.freeze()
