"""Whole models: every mover of their graphs equals ggml's CPU, text is the same, and a wrong kernel is found."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from kit.diffs import PROMPT
from kit.models import WRITERS, Models
from kit.support import engine

from ggml_backend_npu import KernelError, Memory, Node, Tensor, default_backend, op
from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.diff.run import DiffOptions, DiffResult, diff
from graph_runner.judging.results import NodeResult
from graph_runner.run.session import DeviceName, Sampler, Session, SessionError, Settings, context_for, generate

STEPS = 4
MOVERS = ("GET_ROWS", "SET_ROWS", "CPY", "DUP", "CONT")

FLASH_OFF = Settings(flash_attention="off")
FLASH_ON = Settings(flash_attention="on")
QUANTISED = Settings(flash_attention="on", cache_type_k="q8_0", cache_type_v="q4_0")
ATTENTION = {"flash off": FLASH_OFF, "flash on": FLASH_ON, "quantised caches": QUANTISED}

READ = {("GET_ROWS", "q8_0 i32 -> f32"), ("GET_ROWS", "f32 i32 -> f32")}
CONT = ("CONT", "f32 -> f32")
CPY = ("CPY", "f32 -> f32")
F16_CACHE = ("SET_ROWS", "f32 i64 -> f16")
MOVES_OF_ATTENTION = {
    "flash off": {*READ, F16_CACHE, CONT},
    "flash on": {*READ, F16_CACHE},
    "quantised caches": {*READ, ("SET_ROWS", "f32 i64 -> q8_0"), ("SET_ROWS", "f32 i64 -> q4_0")},
}
CASES = [
    *(
        pytest.param(
            model,
            settings,
            MOVES_OF_ATTENTION[name],
            id=f"{model}, {name}",
            marks=pytest.mark.slow if model == "demo" else (),
        )
        for model in ("llama", "moe", "gpt-oss", "demo")
        for name, settings in ATTENTION.items()
    ),
    pytest.param("rwkv7", FLASH_OFF, {*READ, CPY}, id="rwkv7"),
    pytest.param("mamba", FLASH_OFF, {*READ, CPY, CONT}, id="mamba"),
]


class Record:
    """Observer that takes down every node that computes something."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def before(self, node: int) -> bool:
        if convert.computes(convert.op_name(lib.ggml(), node)):
            self.nodes.append(convert.node(lib.ggml(), node))
        return True

    def after(self, node: int) -> None:
        pass


def record(file: Path, settings: Settings) -> list[list[Node]]:
    """The nodes of a prompt and STEPS tokens, by step."""
    seen, begins = Record(), []
    with Session(file, settings, observer=seen) as session:
        tokens = session.tokenize(PROMPT)
        for _ in range(STEPS + 1):
            begins.append(len(seen.nodes))
            session.decode(tokens)
            tokens = [Sampler()(session.logits())]
    return [seen.nodes[begin:end] for begin, end in pairwise([*begins, len(seen.nodes)])]


def count(file: Path, settings: Settings) -> Counter[str]:
    """The movers of a prompt and STEPS tokens, as llama.cpp's own run counts them."""
    with Session(file, settings) as session:
        assert len(list(generate(session, session.tokenize(PROMPT), STEPS + 1, Sampler()))) == STEPS + 1
        return movers(session.nodes)


def movers(nodes: Counter[str]) -> Counter[str]:
    return Counter({name: nodes[name] for name in MOVERS if nodes[name]})


def overlap(a: Tensor, b: Tensor) -> bool:
    return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes


# every node equals the CPU


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "settings", "expected"), CASES)
def test_every_mover_of_a_model_equals_the_cpu(
    model: Models, name: str, settings: Settings, expected: set[tuple[str, str]]
) -> None:
    result = diff(model(name), PROMPT, DiffOptions(steps=STEPS, settings=settings, ops=MOVERS))
    assert result, result.wrong[:1]
    assert not result.refused
    assert {(node.op, node.types) for node in result.compared} == expected
    assert Counter(node.op for node in result.compared) == count(model(name), settings)
    assert {node.step for node in result.compared} == set(range(STEPS + 1))
    assert all(node.isolated is not None and node.isolated.n_bytes > 0 for node in result.compared)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", WRITERS)
def test_the_definitions_equal_the_cpu_too(backend: Plugin, model: Models, name: str) -> None:
    settings = FLASH_OFF if name in ("rwkv7", "mamba") else QUANTISED
    with engine(backend, "reference"):
        result = diff(model(name), PROMPT, DiffOptions(steps=1, settings=settings))
    assert result, result.wrong[:1]


def test_the_diff_covers_a_prompt_of_several_batches(model: Models) -> None:
    prompt = "one two three " * 40
    result = diff(model("llama"), prompt, DiffOptions(steps=0))
    assert result, result.wrong[:1]
    assert result.n_prompt > 512
    assert sum(node.name == "embd" for node in result.compared) == 2


def test_ids_of_experts_are_strided(model: Models) -> None:
    """What the diff of the MoE is for: a view of sorted ids, rows of 8 apart, for several tokens."""
    prompt, *_ = record(model("moe"), FLASH_OFF)
    strided = [index for index, node in enumerate(prompt) if node.op == "GET_ROWS" and not _ids(node).is_contiguous()]
    assert strided
    assert all(_ids(prompt[index]).ne[:2] == (2, 26) for index in strided)
    compared = {node.index for node in diff(model("moe"), PROMPT, DiffOptions(steps=0, settings=FLASH_OFF)).nodes}
    assert compared.issuperset(strided)


def _ids(node: Node) -> Tensor:
    ids = node.src[1]
    assert ids is not None
    return ids


@pytest.mark.usefixtures("own_ops")
def test_the_diff_takes_copies_of_sources_that_a_node_overwrites(model: Models) -> None:
    @op("ADD", types=[("f32", "f32", "f32")])
    def add(dst: Tensor, a: Tensor, b: Tensor) -> None:
        dst.view()[...] = a.view() + b.view()

    nodes = [node for step in record(model("llama"), FLASH_OFF) for node in step if node.op == "ADD"]
    in_place = [node for node in nodes if any(source and overlap(source, node.dst) for source in node.src)]
    assert in_place
    result = diff(model("llama"), PROMPT, DiffOptions(steps=STEPS, settings=FLASH_OFF, ops={"ADD"}))
    assert result, result.wrong[:1]
    assert len(result.compared) == len(nodes)


@pytest.mark.usefixtures("own_ops")
def test_nodes_that_the_npu_refuses_are_counted_with_the_reason(model: Models) -> None:
    @op("MUL", types=[("f16", "f16", "f16")])
    def mul(dst: Tensor, a: Tensor, b: Tensor) -> None:
        raise AssertionError("not called")

    result = diff(model("llama"), PROMPT, DiffOptions(steps=0, ops={"MUL"}))
    assert not result
    assert result.compared == []
    assert list(result.refused) == [("MUL", "types f32 f32 -> f32")]


# a wrong kernel is found


def _next_row() -> None:
    right = default_backend().ops["GET_ROWS"].define

    @op("GET_ROWS")
    def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        right(dst, src, Tensor.of((ids.view() + 1) % src.ne[1]))


def _ignores_ids() -> None:
    right = default_backend().ops["SET_ROWS"].define

    @op("SET_ROWS")
    def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        right(dst, src, Tensor.of(np.arange(ids.n_elements).reshape(ids.ne[::-1])))


def _ignores_strides() -> None:
    @op("CONT")
    def cont(dst: Tensor, src: Tensor) -> None:
        dst.memory.bytes()[dst.offset :][: dst.nbytes] = src.memory.bytes()[src.offset :][: dst.nbytes]


def _writes_nan() -> None:
    @op("CONT")
    def cont(dst: Tensor, src: Tensor) -> None:
        dst.view()[...] = np.nan


def _writes_at(offset: int) -> Callable[[], None]:
    """Right, and one byte outside dst: `offset` bytes from its begin, or from its end where it is not negative."""

    def register() -> None:
        right = default_backend().ops["GET_ROWS"].define

        @op("GET_ROWS")
        def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
            right(dst, src, ids)
            Memory(dst.address + offset + (dst.nbytes if offset >= 0 else 0), 1).bytes()[:] ^= 0xFF

    return register


def _raises(error: Exception) -> Callable[[], None]:
    def register() -> None:
        @op("SET_ROWS")
        def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
            raise error

    return register


def first_different(file: Path, register: Callable[[], None], op_name: str, step: int) -> tuple[NodeResult, DiffResult]:
    """The first node of a diff with a wrong kernel: the first of its op in the step. Flash attention is on for
    SET_ROWS, so that ids are the cells themselves."""
    settings = FLASH_ON if op_name == "SET_ROWS" else FLASH_OFF
    expected = next((index, node) for index, node in enumerate(record(file, settings)[step]) if node.op == op_name)
    register()
    result = diff(file, PROMPT, DiffOptions(steps=STEPS, settings=settings))
    assert not result
    first = result.wrong[0]
    assert (first.step, first.index, first.op, first.name) == (step, expected[0], op_name, expected[1].name)
    assert {node.op for node in result.wrong} == {op_name}
    return first, result


@pytest.mark.some(1)
@pytest.mark.daily(2)
@pytest.mark.usefixtures("own_ops")
@pytest.mark.parametrize(
    ("register", "op_name", "step"),
    [
        pytest.param(_next_row, "GET_ROWS", 0, id="reads the next row"),
        # the prompt's cells are 0, 1, 2, ...
        pytest.param(_ignores_ids, "SET_ROWS", 1, id="ignores ids"),
        pytest.param(_ignores_strides, "CONT", 0, id="ignores strides"),
        pytest.param(_writes_nan, "CONT", 0, id="writes NaN"),
    ],
)
def test_wrong_bytes_are_found_at_the_first_wrong_node(
    model: Models, register: Callable[[], None], op_name: str, step: int
) -> None:
    first, _ = first_different(model("llama"), register, op_name, step)
    assert first.isolated is not None
    assert first.isolated.n_different > 0
    assert first.isolated.where is not None
    assert first.isolated.max_abs > 0
    assert not first.isolated.outside


@pytest.mark.usefixtures("own_ops")
@pytest.mark.parametrize("offset", [0, 4000, -1])
def test_a_byte_outside_the_output_is_found(model: Models, offset: int) -> None:
    first, result = first_different(model("llama"), _writes_at(offset), "GET_ROWS", 0)
    assert first.isolated is not None
    assert first.isolated.n_different == 0
    assert first.isolated.outside
    assert len(result.wrong) == sum(node.op == "GET_ROWS" for node in result.compared)


@pytest.mark.usefixtures("own_ops")
@pytest.mark.parametrize(
    ("error", "message"),
    [(ValueError("no rows today"), "ValueError: no rows today (RAISED)"), (KernelError("row 9 of 4"), "row 9 of 4")],
    ids=["any exception", "KernelError"],
)
def test_a_kernel_that_raises_is_a_different_node_with_the_reason(
    model: Models, error: Exception, message: str
) -> None:
    first, _ = first_different(model("llama"), _raises(error), "SET_ROWS", 0)
    assert first.isolated is None
    line = _raises.__code__.co_firstlineno + 4
    assert first.failure == message.replace("RAISED", f"{Path(__file__).name} line {line}")


@pytest.mark.usefixtures("own_ops")
def test_where_names_the_first_different_element(model: Models) -> None:
    right = default_backend().ops["GET_ROWS"].define

    @op("GET_ROWS")
    def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        right(dst, src, ids)
        dst.view()[0, 0, -1, 5] += 1

    first, _ = first_different(model("llama"), lambda: None, "GET_ROWS", 0)
    assert first.isolated is not None
    assert first.isolated.where == (0, 0, 25, 5)
    assert first.isolated.max_abs == 1


# text


Decoded = tuple[bytes, np.ndarray]


def decoded(session: Session, n: int = 64) -> Iterator[Decoded]:
    """Each greedy token of the prompt, and the logits before it."""
    for token in generate(session, session.tokenize(PROMPT), n, Sampler()):
        yield session.piece(token), session.logits()


def settings_for(device: DeviceName, settings: Settings = FLASH_OFF) -> Settings:
    return Settings(
        device=device,
        n_ctx=context_for(PROMPT, 64),
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        flash_attention=settings.flash_attention,
    )


@pytest.mark.some(5)
@pytest.mark.parametrize(("name", "settings", "expected"), CASES)
def test_text_and_logits_are_the_same_on_the_npu(
    backend: Plugin, model: Models, name: str, settings: Settings, expected: set[tuple[str, str]]
) -> None:
    before = Counter(backend.statistics.computed), backend.statistics.graphs
    with Session(model(name), settings_for("cpu", settings)) as session:
        on_cpu = list(decoded(session))
        nodes = movers(session.nodes)
        assert session.npu_nodes == Counter()
        assert session.splits == "1"
    assert before == (backend.statistics.computed, backend.statistics.graphs)

    with Session(model(name), settings_for("npu", settings)) as session:
        on_npu = list(decoded(session))
        assert movers(session.nodes) == movers(session.npu_nodes) == nodes
        assert session.splits is not None
        assert int(session.splits) > 1
    assert set(nodes) == {op_name for op_name, _ in expected}
    assert len(on_npu) == 64
    assert [piece for piece, _ in on_npu] == [piece for piece, _ in on_cpu]
    for (_, npu), (_, cpu) in zip(on_npu, on_cpu, strict=True):
        np.testing.assert_array_equal(npu, cpu)


TOGETHER = [("llama", "llama"), ("llama", "rwkv7"), ("moe", "mamba")]


@pytest.mark.parametrize("names", TOGETHER, ids=" + ".join)
@pytest.mark.parametrize("second_device", ["npu", "cpu"])
@pytest.mark.usefixtures("backend")
def test_two_sessions_at_once_decode_as_each_alone(
    model: Models, names: tuple[str, str], second_device: DeviceName
) -> None:
    alone = []
    for name in names:
        with Session(model(name), settings_for("cpu")) as session:
            alone.append([piece for piece, _ in decoded(session, 16)])
    first, second = map(model, names)
    with Session(first, settings_for("npu")) as a, Session(second, settings_for(second_device)) as b:
        pairs = list(zip(decoded(a, 16), decoded(b, 16), strict=True))
    assert [[piece for piece, _ in side] for side in zip(*pairs, strict=True)] == alone


@pytest.mark.parametrize("second_device", ["npu", "cpu"])
@pytest.mark.usefixtures("backend")
def test_sessions_at_once_count_their_own_nodes(model: Models, second_device: DeviceName) -> None:
    with (
        Session(model("llama"), settings_for("npu")) as a,
        Session(model("mamba"), settings_for(second_device)) as b,
    ):
        for _ in zip(decoded(a, 4), decoded(b, 4), strict=True):
            pass
        assert movers(a.npu_nodes) == movers(a.nodes)
        assert movers(b.npu_nodes) == (movers(b.nodes) if second_device == "npu" else Counter())


def test_a_diff_beside_a_session_disturbs_neither(model: Models) -> None:
    with Session(model("llama"), settings_for("npu")) as session:
        text = decoded(session, 16)
        begun = [next(text) for _ in range(4)]
        assert diff(model("llama"), PROMPT, DiffOptions(steps=1))
        finished = [*begun, *text]
        assert movers(session.nodes) == movers(session.npu_nodes)
    with Session(model("llama"), settings_for("cpu")) as session:
        assert [piece for piece, _ in finished] == [piece for piece, _ in decoded(session, 16)]


# failures


def fail_in(session: Session) -> str:
    with pytest.raises(SessionError) as failure:
        session.decode(session.tokenize(PROMPT))
    return str(failure.value)


@pytest.mark.usefixtures("own_ops")
def test_a_kernel_that_raises_fails_the_decode_and_names_the_node(model: Models) -> None:
    _raises(ValueError("no rows today"))()
    with Session(model("llama"), settings_for("npu")) as session:
        failure = fail_in(session)
        assert "SET_ROWS node 'cache_k_l0 (view)': ValueError: no rows today (test_graphs.py line " in failure


@pytest.mark.usefixtures("own_ops")
def test_a_failed_node_leaves_the_process_and_later_sessions_as_they_were(backend: Plugin, model: Models) -> None:
    right = default_backend().ops["SET_ROWS"]
    _raises(ValueError("no rows today"))()
    with Session(model("llama"), settings_for("npu")) as session:
        fail_in(session)
    default_backend().ops.add(right)
    backend.forget_plans()
    with Session(model("llama"), settings_for("npu")) as session:
        assert len(list(decoded(session, 4))) == 4
        with pytest.raises(SessionError, match="decode") as failure:
            session.decode([1 << 30])
        assert "no rows today" not in str(failure.value)


INTERRUPTED = """
import os, signal, sys, threading
from pathlib import Path
from graph_runner.run.session import Sampler, Session, Settings, generate

signal.signal(signal.SIGINT, signal.default_int_handler)
for trial in range(5):
    with Session(Path(sys.argv[1]), Settings(device="npu", n_ctx=1024)) as session:
        tokens = generate(session, [5], 600, Sampler())
        next(tokens)
        threading.Timer(0.05 + 0.01 * trial, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            for _ in tokens:
                pass
            print("ignored")
        except KeyboardInterrupt:
            print("interrupted")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_an_interrupt_in_the_midst_of_a_graph_comes_out(model: Models) -> None:
    """Neither lost in a callback nor taken for a node that was computed."""
    command = [sys.executable, "-c", INTERRUPTED, str(model("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    assert done.stdout.split() == ["interrupted"] * 5


def test_an_exception_of_an_observer_comes_out_of_decode(model: Models) -> None:
    class Fails(Record):
        def after(self, node: int) -> None:
            raise RuntimeError("seen enough")

    observer = Fails()
    with Session(model("llama"), FLASH_OFF, observer=observer) as session:
        with pytest.raises(RuntimeError, match="seen enough"):
            session.decode([5])
        assert len(observer.nodes) == 1


def test_a_full_context_is_said(model: Models) -> None:
    with (
        Session(model("llama"), Settings(n_ctx=256)) as session,
        pytest.raises(SessionError, match="context of 256 cells is full"),
    ):
        session.decode([5] * 257)
