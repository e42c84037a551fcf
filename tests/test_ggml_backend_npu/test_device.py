"""A device with memory that the host cannot read: what runs on it, in what order, and what becomes of its faults."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.models import Models
from llama_cpp import llama_cpp

from ggml_backend_npu import Device, DeviceBackend, DeviceError, Graph, KernelError, Memory, Node, Program, Tensor
from ggml_backend_npu.device.memory import OpaqueMemory
from ggml_backend_npu.device.sim import FAULTS, Simulator
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ir.buffer import Buffer
from ggml_backend_npu.plugin.build import Builder
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.diff.run import DiffOptions, run_in_step
from graph_runner.run.session import Sampler, Session, SessionError, Settings, generate

PROMPT = "The capital of France is"
ON_DEVICE = Settings(device="npu", gpu_layers=999)


@contextmanager
def plugged(device: Device) -> Iterator[Plugin]:
    """A device that a session may be given, which nobody else sees."""
    plugin = Plugin(lib.ggml(), DeviceBackend(device))
    plugin.failures.printed = False
    yield plugin


def text(model: Path, npu: Plugin | None, n: int = 12, settings: Settings = ON_DEVICE) -> list[int]:
    with Session(model, settings if npu is not None else Settings(), npu=npu) as session:
        return list(generate(session, session.tokenize(PROMPT), n, Sampler()))


class OfNumpy(Device):
    """Memory that is an array, and SQR, compiled once for each topology."""

    name, ops, constants, memory = "XNPU7", ("SQR", "SCALE"), False, 1 << 20

    def __init__(self) -> None:
        self.compiled: list[Graph] = []
        self.calls: list[list[tuple[Any, int]]] = []

    def alloc(self, size: int) -> Any:
        return np.zeros(size, np.uint8)

    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        handle[offset : offset + data.size] = data

    def copy_out(self, handle: Any, offset: int, out: Any) -> None:
        out[:] = handle[offset : offset + out.size]

    def compile(self, graph: Graph) -> Program:
        self.compiled.append(graph)
        (node,) = graph.nodes
        assert node.src[0] is not None
        source, target = graph.root_of(node.src[0]), graph.root_of(node.dst)
        size = node.dst.nbytes

        def run(places: list[tuple[Any, int]]) -> None:
            self.calls.append(places)
            (a, begin), (b, at) = places[source], places[target]
            b[at : at + size].view(np.float32)[:] = a[begin : begin + size].view(np.float32) ** 2

        return run


def squared(values: Any) -> Node:
    return Node("SQR", Tensor.of(np.zeros_like(values)), (Tensor.of(values),))


# memory


def test_any_bytes_are_set_got_copied_and_filled() -> None:
    memory = OpaqueMemory(OfNumpy())
    first, second = memory.allocate(4096), memory.allocate(100)
    assert first is not None
    assert second is not None
    assert memory.free == (1 << 20) - 4196
    assert memory.packed(first.address + 4095) is first
    assert memory.packed(first.address + 4096) is not first
    data = np.arange(100, dtype=np.uint8)
    memory.write(first.address + 3, data)
    assert np.array_equal(memory.read(first.address + 3, 100), data)
    memory.copy(first.address + 3, second.address, 100)
    memory.set(second.address + 1, 98, 7)
    assert memory.read(second.address, 100).tolist() == [0, *[7] * 98, 99]
    memory.fill(second, 1)
    assert memory.read(second.address, 100).tolist() == [1] * 100
    with pytest.raises(KernelError, match=r"XNPU7: 101 bytes at .* are in no buffer"):
        memory.read(second.address, 101)
    memory.release(first)
    assert memory.packed(first.address) is None
    assert memory.allocate(2 << 20) is None


@pytest.mark.slow
def test_who_reads_an_address_of_it_ends_with_a_signal() -> None:
    code = (
        "from ggml_backend_npu.device.memory import OpaqueMemory; from ggml_backend_npu.device.sim import Simulator;"
        "import ctypes; d = Simulator(); d.open(); b = OpaqueMemory(d).allocate(4096); ctypes.string_at(b.address, 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -11


def test_a_tensor_in_it_has_no_view_and_gives_its_bytes_by_a_copy() -> None:
    memory = OpaqueMemory(OfNumpy())
    buffer = memory.allocate(64)
    assert isinstance(buffer, Buffer)
    memory.write(buffer.address, np.arange(16, dtype=np.float32).view(np.uint8))
    like = Tensor.of(np.zeros(4, np.float32), name="x")
    tensor = replace(like, memory=Memory(buffer.address + 16, 32), offset=8, buffer=buffer)
    with pytest.raises(ValueError, match="tensor 'x' lies in a device's memory"):
        tensor.view()
    assert tensor.start == 24
    assert tensor.unpacked().view().ravel().tolist() == [6, 7, 8, 9]
    assert tensor.within(buffer.handle).view().ravel().tolist() == [6, 7, 8, 9]


def test_a_devices_class_imports_no_kernel_and_starts_at_once() -> None:
    code = (
        "import sys, time; before = time.process_time(); from ggml_backend_npu import Device;"
        "print(time.process_time() - before, 'numba' in sys.modules, any('kernel' in name for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, *imported = done.stdout.split()
    assert imported == ["False", "False"]
    assert float(seconds) < 0.3


# programs


def test_graphs_that_differ_in_places_alone_are_compiled_once() -> None:
    device = OfNumpy()
    backend = DeviceBackend(device)
    for n in (4, 4, 8, 4):
        node = squared(np.arange(n, dtype=np.float32))
        backend.compute(node)
        assert node.dst.view().ravel().tolist() == [i * i for i in range(n)]
    assert [graph.nodes[0].dst.ne[0] for graph in device.compiled] == [4, 8]
    assert len(device.calls) == 4


def test_a_topology_is_also_how_tensors_lie_to_each_other() -> None:
    x = Tensor.of(np.arange(8, dtype=np.float32))
    moved = replace(x, memory=replace(x.memory, address=x.address + 64), offset=0)
    apart = replace(x, memory=replace(x.memory, address=x.address + 4), offset=0)
    into = [Graph((Node("SQR", dst, (x,)),)).topology() for dst in (moved, moved, apart, x)]
    assert into[0] == into[1]
    assert len(set(into)) == 3


def test_a_node_may_write_to_host_memory() -> None:
    device = OfNumpy()
    backend = DeviceBackend(device)
    memory = backend.memory()
    buffer = memory.allocate(16)
    assert buffer is not None
    node = squared(np.zeros(4, np.float32))
    memory.write(buffer.address, np.arange(4, dtype=np.float32).view(np.uint8))
    assert node.src[0] is not None
    there = replace(node.src[0], memory=Memory(buffer.address, 16), buffer=buffer)
    backend.plan(Graph((replace(node, src=(there,)),))).run()
    assert node.dst.view().ravel().tolist() == [0, 1, 4, 9]
    backend.plan(Graph((Node("SQR", there, (node.dst,)),))).run()
    assert memory.read(buffer.address, 16).view(np.float32).tolist() == [0, 1, 16, 81]
    assert len(device.compiled) == 1


def test_a_device_may_say_what_it_is_when_it_is_open() -> None:
    class Found(OfNumpy):
        def open(self) -> None:
            self.description = "a chip in slot 0"

    with plugged(Found()) as npu:
        assert npu.backend.description == "a chip in slot 0"


def test_what_a_device_raises_names_it_and_the_call() -> None:
    class Bad(OfNumpy):
        def compile(self, graph: Graph) -> Program:
            raise RuntimeError("no such instruction")

    with pytest.raises(KernelError, match=r"XNPU7: compile of 1 nodes: RuntimeError: no such instruction"):
        DeviceBackend(Bad()).compute(squared(np.ones(4, np.float32)))


def test_a_program_that_is_no_function_is_told() -> None:
    class Bad(OfNumpy):
        def compile(self, graph: Graph) -> Program:
            return []  # type: ignore[return-value]

    with pytest.raises(KernelError, match=r"XNPU7: compile returned list, not a function"):
        DeviceBackend(Bad()).compute(squared(np.ones(4, np.float32)))


def test_who_writes_to_a_source_is_found_out() -> None:
    class Bad(OfNumpy):
        def compile(self, graph: Graph) -> Program:
            def run(places: list[tuple[Any, int]]) -> None:
                for handle, _ in places:
                    handle[:] = 1

            return run

    with pytest.raises(KernelError, match="writes to a source"):
        DeviceBackend(Bad()).compute(squared(np.ones(4, np.float32)))


# models


@pytest.mark.parametrize("name", ["llama", "moe", "rwkv7", "gpt-oss"])
def test_the_text_is_the_cpus(name: str, model: Models) -> None:
    with plugged(Simulator(delay=2e-3)) as npu:
        assert text(model(name), npu) == text(model(name), None)


class Partial(Simulator):
    """A device that lacks some ops."""

    def __init__(self, *lacking: str) -> None:
        super().__init__()
        self.lacking = lacking

    def refusal(self, node: Node) -> str | None:
        return "lacking" if node.op in self.lacking else super().refusal(node)


@pytest.mark.parametrize("lacking", [(), ("FILL",)], ids=["whole", "without FILL"])
def test_what_writes_to_a_result_goes_where_that_is_computed(lacking: tuple[str, ...]) -> None:
    """Else ggml would copy the result to the next node before it was written to."""
    with plugged(Partial(*lacking)) as npu, Builder(npu.ggml, "CPU") as build:
        filled = build.op("fill", build.tensor("f32", (4, 8)), 0.0)
        into_a_result, into_a_leaf = (
            build.op("set_rows", target, build.tensor("f32", (4, 2)), build.tensor("i64", (2,)))
            for target in (filled, build.tensor("f32", (4, 8)))
        )
        assert npu.supports_op(0, into_a_leaf)
        assert npu.supports_op(0, into_a_result) == (lacking == ())
        if lacking:
            assert "FILL" in npu.refusals["SET_ROWS"]


def test_all_nodes_run_on_it_in_one_piece(model: Models) -> None:
    with plugged(Simulator()) as npu, Session(model("llama"), ON_DEVICE, npu=npu) as session:
        list(generate(session, session.tokenize(PROMPT), 4, Sampler()))
        assert session.splits == "1"
        assert not session.left_to_the_cpu


@pytest.mark.slow
def test_each_node_is_compared_by_copies(model: Models) -> None:
    device = Simulator(delay=1e-4)
    result = run_in_step(model("llama"), PROMPT, DiffOptions(steps=2, backend=DeviceBackend(device), strict=True))
    assert result
    assert {node.verdict.name for node in result.nodes} == {"EXACT"}
    assert device.n_buffers == 0


def test_two_contexts_share_a_queue(model: Models) -> None:
    expected = text(model("llama"), None, 24)
    with plugged(Simulator(delay=1e-3)) as npu:
        sessions = [Session(model("llama"), ON_DEVICE, npu=npu) for _ in range(2)]
        runs = [generate(s, s.tokenize(PROMPT), 24, Sampler()) for s in sessions]
        assert [list(pair) for pair in zip(*runs, strict=True)] == [[token, token] for token in expected]
        for session in sessions:
            session.__exit__(None, None, None)


class Forgets(Simulator):
    """What a device is whose synchronize was forgotten."""

    forgets = True

    def synchronize(self) -> None:
        if not self.forgets:
            super().synchronize()


def test_a_synchronise_that_is_left_out_is_seen(model: Models) -> None:
    device = Forgets(delay=3e-2)
    with plugged(device) as npu, Session(model("llama"), ON_DEVICE, npu=npu) as session:
        found: list[int] = []
        with suppress(SessionError):  # of logits that are all 0, since nothing was read yet
            found.extend(generate(session, session.tokenize(PROMPT), 12, Sampler()))
        device.forgets = False
        with suppress(DeviceError):  # of a kernel that read what was not there yet
            device.synchronize()  # or its copies come when their memory is gone
    assert found != text(model("llama"), None)


# several devices

_TWO = """
import ctypes, sys
import numpy as np
from llama_cpp import llama_cpp as l
from ggml_backend_npu import register
from ggml_backend_npu.device.sim import Simulator
npus = [register(Simulator(f"XNPU{i}", delay=1e-4)) for i in range(2)]
ggml = npus[0].ggml
quiet = l.llama_log_callback(lambda *_: None)
l.llama_log_set(quiet, None)

def text(names):
    params = l.llama_model_default_params()
    params.use_extra_bufts = False
    devices = (ctypes.c_void_p * 3)(*[ggml.ggml_backend_dev_by_name(name) for name in names], None)
    params.devices = ctypes.addressof(devices)
    params.n_gpu_layers, params.split_mode = 999 if names else 0, 1
    model = l.llama_model_load_from_file(sys.argv[1].encode(), params)
    settings = l.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 256
    context = l.llama_init_from_model(model, settings)
    tokens, found = [1, 300, 301, 302], []
    for _ in range(16):
        batch = l.llama_batch_get_one((l.llama_token * len(tokens))(*tokens), len(tokens))
        assert l.llama_decode(context, batch) == 0
        n = l.llama_vocab_n_tokens(l.llama_model_get_vocab(model))
        tokens = [int(np.ctypeslib.as_array(l.llama_get_logits_ith(context, -1), (n,)).argmax())]
        found += tokens
    l.llama_free(context)
    l.llama_model_free(model)
    return found

one, both = text([b"XNPU0"]), text([b"XNPU0", b"XNPU1"])
assert one == both == text([]), (one, both)
first, second = (npu.statistics.computed for npu in npus)
assert first["MUL_MAT"] > second["MUL_MAT"] >= 16, (first, second)
"""


@pytest.mark.slow
def test_the_layers_of_a_model_on_two_devices(model: Models) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TWO, str(model("llama"))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# faults


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"event", "copy"}))
def test_each_fault_is_told_in_a_line(fault: str, model: Models) -> None:
    device = Simulator(faults={fault: 1.0})
    with pytest.raises((SessionError, DeviceError, KernelError)) as raised, plugged(device) as npu:
        text(model("llama"), npu)
    assert_told(fault, str(raised.value))
    assert device.n_buffers == 0


def test_a_fault_in_the_queue_fails_the_decode_that_it_is_in(model: Models) -> None:
    device = Simulator()
    with plugged(device) as npu, Session(model("llama"), ON_DEVICE, npu=npu) as session:
        session.decode(session.tokenize(PROMPT))
        device.faults = {"run": 1.0}
        with pytest.raises(SessionError, match=r"^XNPU0: .*: a fault in run of [0-9]+ nodes, on purpose$"):
            session.decode([300])


def test_what_a_queue_could_not_read_is_no_number(model: Models) -> None:
    """llama_decode returns before the device has computed; a program that looks at no more than logits sees NaN, and
    not the logits of before."""
    device = Simulator()
    with plugged(device) as npu, Session(model("llama"), ON_DEVICE, npu=npu) as session:
        session.decode(session.tokenize(PROMPT))
        n = session.logits().size
        device.faults = {"run": 1.0}
        batch = llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 1)(300), 1)
        assert llama_cpp.llama_decode(session._context, batch) == 0
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(session._context, -1), (n,))
        assert np.isnan(logits).all()
        assert llama_cpp.llama_decode(session._context, batch) != 0  # the next call tells it
        device.faults = {}


SIZED = {
    "alloc": "(size|of) [0-9]+",
    "refusal": "of [A-Z_]+ node '",
    "compile": "of [0-9]+ nodes",
    "run": "of [0-9]+ nodes",
}


def assert_told(fault: str, line: str) -> None:
    """In one line: the device, the call that failed, and of how many bytes or nodes it was."""
    assert "\n" not in line
    if fault == "gone":
        assert re.search(r"XNPU0: .*: the device is gone", line), line
    elif fault not in ("open", "event"):
        assert re.search(rf"XNPU0.*{SIZED.get(fault, 'of [0-9]+ bytes')}", line), line
        assert fault in line or "allocate" in line, line


def soak(model: Path, n: int, first: int = 1) -> None:
    """Runs a model until n faults have come, each with its own seed, from the first on: a right text, or one line, and
    nothing left."""
    expected = text(model, None, 6)
    n_lines, seed = 0, first - 1
    while n_lines < n:
        seed += 1
        fault = FAULTS[seed % len(FAULTS)]
        likely = {"run": 0.2, "gone": 0.2, "refusal": 0.02, "compile": 0.5, "alloc": 0.3}.get(fault, 0.05)
        device = Simulator(faults={fault: likely}, seed=seed, delay=1e-5)
        try:
            with plugged(device) as npu:
                assert text(model, npu, 6) == expected, (fault, seed)
        except (SessionError, DeviceError) as error:
            assert_told(fault, str(error))
            n_lines += 1
        assert device.n_buffers == 0, (fault, seed)
        assert seed < first + 20 * n + 100


@pytest.mark.slow
def test_faults_at_random_leave_a_line_or_the_right_text(model: Models) -> None:
    soak(model("llama"), 25)


@pytest.mark.daily(8)
@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 10_001, 20_001, 30_001])
def test_two_hundred_and_fifty_faults(model: Models, first: int) -> None:
    soak(model("llama"), 250, first)


@pytest.mark.slow
@pytest.mark.daily(7)
def test_ten_thousand_steps_of_two_contexts_with_delays(model: Models) -> None:
    settings = replace(ON_DEVICE, n_ctx=512)
    expected = text(model("llama"), None, 250, replace(settings, device="cpu"))
    with plugged(Simulator(delay=2e-3)) as npu:
        sessions = [Session(model("llama"), settings, npu=npu) for _ in range(2)]
        for _ in range(20):
            runs = [generate(s, s.tokenize(PROMPT), 250, Sampler()) for s in sessions]
            for at, pair in enumerate(zip(*runs, strict=True)):
                assert pair == (expected[at], expected[at])
            for session in sessions:
                session.clear()
        for session in sessions:
            session.__exit__(None, None, None)
