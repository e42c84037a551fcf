"""Logs of other backends: `graph_runner.timeline.logs`. That of ggml-vulkan has lines that it printed; those of
ggml-opencl and ggml-hexagon are written as their sources print them, since no such device is here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from kit import vulkan
from kit.commands import Cli, assert_refused, fresh

from graph_runner.base.errors import BadInputError
from graph_runner.timeline.events import LLAMA, NODE, STEP, Event, Timeline, trace_json
from graph_runner.timeline.logs import Log, Logged, nodes_in_both, read_log

VULKAN = """ggml_vulkan: Found 1 Vulkan devices:
ADD: 9 x 1 us = 9 us
----------------
Vulkan Timings:
FLASH_ATTN_EXT dst(32,4,13,1),  q(32,13,4,1),  k(32,256,2,1),  v(32,256,2,1),  m(0,0,0,0): 2 x 7.5e+06 us = 1.5e+07 us\
 (0.000225685 GFLOPS/s)
MUL_MAT f16 m=128 n=13 k=64: 4 x 3277.05 us = 13108.2 us (0.5 GFLOPS/s)
MUL_MAT_ADD MUL_MAT_VEC f16 m=64 n=1 k=128: 1 x 91.979 us = 91.979 us (0.177432 GFLOPS/s)
MUL_MAT_VEC f16 m=128 n=1 k=64: 2 x 2000 us = 4000 us (inf GFLOPS/s)
RMS_NORM_MUL RMS_NORM(64,1,1,1): 2 x 2056.81 us = 4113.61 us
GLU, CONV_2D M=Cout=8, K=Cin*KW*KH=2, N=N*OW*OH=3: 1 x 5 us = 5 us
Total time: 1.50213e+07 us.
ADD: 9 x 1 us = 9 us
----------------
Vulkan Timings:
MUL_MAT_VEC f16 m=128 n=1 k=64: 6 x 100 us = 600 us (0.25 GFLOPS/s)
Total time: 600 us.
"""
OPENCL = """op name, kernel name, exec duration (ms), global size, local size, output size
blk.0.attn_q.weight,kernel_convert_block_q4_0,0.250000,64x1x1,64x1x1,64x64x1x1
Qcur-0,kernel_mul_mat_f16_f32,0.500000,64x1x1,64x1x1,64x13x1x1
Qcur-0,kernel_rope_norm_f32,0.125000,64x1x1,64x1x1,32x2x13x1
a, b,kernel_flash,0.010000,64x1x1,64x1x1,64x13x1x1
a, b,kernel_flash,0.020000,64x1x1,64x1x1,64x13x1x1
Qcur-0,kernel_mul_mat_f16_f32,0.400000,64x1x1,64x1x1,64x1x1x1
cut off,kernel
"""
_LINE = (
    "0.00.512.004 D ggml-hex: {} profile-op {}|{}|64:64 x 64:13 -> 64:13|q4_0 x f32 -> f32|36:2304|hvx|usec {} cycles 9"
)
HEXAGON = "\n".join(
    [
        "llama_context: something else",
        _LINE.format("HTP0", "MUL_MAT", "blk.0.attn_q.weight x norm-0 -> Qcur-0", 500) + " start 1 mhz 1.0",
        _LINE.format("HTP0", "ROPE", "Qcur-0 (reshaped) x inp_pos -> Qcur-0", 125)
        + " start 1 mhz 1.0 pmu [1,2,3,4,5,6,7,8]",
        _LINE.format("HTP0", "MUL_MAT+ADD", "w x a x b -> out-0", 60) + " start 1 mhz 1.0",
        _LINE.format("HTP1", "MUL_MAT", "w x a -> Qcur-0", 1) + " start 1 mhz 1.0",
        "ggml-hex: HTP0 profile-op OPBATCH|----|n-ops 3|----|----|----|usec 700 cycles 9 start 1 mhz 1.0",
        _LINE.format("HTP0", "MUL_MAT", "blk.0.attn_q.weight x norm-0 -> Qcur-0", 400) + " start 1 mhz 1.0",
    ]
)


def log(folder: Path, text: str) -> Log:
    path = folder / "a.log"
    path.write_text(text)
    return read_log(path)


def node(step: int, place: int, op: str, name: str, ns: int, *with_it: str) -> Event:
    own = f"step {step} node {place}, {op} {name!r}"
    joined = {"nodes": [*with_it, own]} if with_it else {}
    return Event(NODE, op, "NPU", 0, ns, {"id": own, "step": step, "bytes": 8, "operations": 0} | joined)


TIMELINE = Timeline(
    {
        "model": "m.gguf", "tokens": 14, "roofline": {"bytes_per_second": 1e9, "operations_per_second": 2e9},
        "times_as_long": {"wall": 1.0, "processor": 1.0}, "machine": "a machine", "nodes_without_times": 0,
        "measured": {"NPU": "inside"}, "settings": {},
    },
    [
        Event(STEP, "step 0", LLAMA, 0, 9000, {"step": 0, "tokens": 13}),
        node(0, 0, "MUL_MAT", "Qcur-0", 1000), node(0, 1, "ROPE", "Qcur-0", 200),
        node(0, 3, "ADD", "out-0", 30, "step 0 node 2, MUL_MAT 'node_2'"), node(0, 4, "FLASH_ATTN_EXT", "a, b", 5),
        Event(STEP, "step 1", LLAMA, 9000, 9900, {"step": 1, "tokens": 1}), node(1, 0, "MUL_MAT", "Qcur-0", 700),
    ],
)  # fmt: skip


def test_sums_of_vulkan(tmp_path: Path) -> None:
    read = log(tmp_path, VULKAN)
    assert [(row.device, row.op, row.count, row.ns) for row in read.rows] == [
        ("Vulkan", "FLASH_ATTN_EXT", 2, 15_000_000_000), ("Vulkan", "MUL_MAT", 12, 17_708_200),
        ("Vulkan", "RMS_NORM_MUL", 2, 4_113_610), ("Vulkan", "MUL_MAT_ADD", 1, 91_979),
        ("Vulkan", "GLU + CONV_2D", 1, 5000),
    ]  # fmt: skip
    assert read.rows[1].operations == pytest.approx(0.5 * 13_108_200 + 0.25 * 600_000)
    assert "no node has a name" in read.says
    assert nodes_in_both(read, TIMELINE) == []


def test_kernels_of_opencl(tmp_path: Path) -> None:
    read = log(tmp_path, OPENCL)
    assert read.entries[1] == Logged("OpenCL", "kernel_mul_mat_f16_f32", "Qcur-0", 0, 1, 500_000)
    assert [entry.step for entry in read.entries] == [0, 0, 0, 0, 0, 1]
    assert [(same.ids, same.ns, same.timed) for same in nodes_in_both(read, TIMELINE)] == [
        (["step 0 node 0, MUL_MAT 'Qcur-0'", "step 0 node 1, ROPE 'Qcur-0'"], 625_000, 1200),
        (["step 1 node 0, MUL_MAT 'Qcur-0'"], 400_000, 700),
        ([], 250_000, 0),
        (["step 0 node 4, FLASH_ATTN_EXT 'a, b'"], 30_000, 5),
    ]  # fmt: skip


def test_nodes_of_hexagon(tmp_path: Path) -> None:
    read = log(tmp_path, HEXAGON)
    assert [(entry.device, entry.op, entry.name, entry.step) for entry in read.entries] == [
        ("HTP0", "MUL_MAT", "Qcur-0", 0), ("HTP0", "ROPE", "Qcur-0", 0), ("HTP0", "MUL_MAT+ADD", "out-0", 0),
        ("HTP1", "MUL_MAT", "Qcur-0", 0), ("HTP0", "MUL_MAT", "Qcur-0", 1),
    ]  # fmt: skip
    assert [(same.ids, same.ns, same.timed) for same in nodes_in_both(read, TIMELINE)] == [
        (["step 0 node 0, MUL_MAT 'Qcur-0'"], 501_000, 1000), (["step 1 node 0, MUL_MAT 'Qcur-0'"], 400_000, 700),
        (["step 0 node 1, ROPE 'Qcur-0'"], 125_000, 200), (["step 0 node 3, ADD 'out-0'"], 60_000, 30),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "Vulkan Timings:\nADD: x\n", OPENCL.splitlines()[0], "\x00\xff"])
def test_what_is_no_log_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInputError, match="has no times of ggml-vulkan, ggml-opencl or ggml-hexagon"):
        log(tmp_path, text)


def test_the_command_reads_a_log(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(HEXAGON)
    (tmp_path / "b.json").write_text(json.dumps(trace_json(TIMELINE)))
    shown = cli("timeline", tmp_path / "a.log")
    assert shown.code == 0
    assert re.search(r"(?m)^HTP0 +MUL_MAT +2 +0\.90 +82\.9%$", shown.out)
    assert "a log of ggml-hexagon: how long each node took, not when it began" in shown.out
    beside = cli("timeline", tmp_path / "a.log", tmp_path / "b.json").out
    assert re.search(r"(?m)^step 0 node 1, ROPE 'Qcur-0' +0\.12 +0\.00$", beside)
    assert "4 of 4 named nodes are in b.json" in beside
    assert_refused(cli("timeline", tmp_path / "a.log", "-o", tmp_path / "c.json"), "does not say when nodes began")
    assert_refused(cli("timeline", tmp_path / "none.log"), "no such file")


@pytest.mark.conformance
def test_what_vulkan_prints_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if vulkan.missing():
        pytest.skip(f"ggml-vulkan needs {vulkan.missing()}")
    library = vulkan.library()
    for name, value in (vulkan.environment() | {"GGML_VK_PERF_LOGGER": "1"}).items():
        monkeypatch.setenv(name, value)
    done = fresh(
        "timeline", "tiny", "-n", 1, "--device", vulkan.DEVICE, "--backend", library, "-o", tmp_path / "t.json"
    )
    assert done.code == 0, done.err
    read = log(tmp_path, done.err)
    assert read.kind == "ggml-vulkan"
    assert sum(entry.count for entry in read.entries) == sum(row.count for row in read.rows)
    assert {"FLASH_ATTN_EXT", "MUL_MAT", "ROPE"} <= {row.op for row in read.rows}
    assert done.err.count("Vulkan Timings:") == sum(line.startswith("Total time: ") for line in done.err.splitlines())
    sums = re.findall(r"(?m)^.+: \d+ x \S+ us = \S+ us", done.err)
    assert len(read.entries) == len(sums)
