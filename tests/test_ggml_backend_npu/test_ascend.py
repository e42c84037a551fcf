"""The Ascend profiles against the driver they describe: ggml-cann's supports_op, compiled, over random nodes."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import llama_cpp
import pytest
from kit.bare import tensor

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ggml import lib, structs
from ggml_backend_npu.profiles.generations import PROFILES
from graph_runner.tools.suites import _fetch as fetch_sources
from quant import codec

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "i32", "i64", "q4_K")
VIEWS = {"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}
# ops whose answer depends on more than the op, and come more often
CONDITIONAL = (
    "GET_ROWS", "SET_ROWS", "CPY", "CONT", "DUP", "MUL_MAT", "MUL_MAT_ID", "ROPE", "UPSCALE", "POOL_2D", "SUM", "PAD",
    "SCALE", "SOFT_MAX", "FLASH_ATTN_EXT", "OUT_PROD", "CUMSUM",
)  # fmt: skip
LEAST_SOURCES = {"FLASH_ATTN_EXT": 3, "MUL_MAT": 2, "MUL_MAT_ID": 2}

Ask = Callable[[Node], bool]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama.cpp's sources."""
    folder = tmp_path_factory.mktemp("llama.cpp") / "source"
    fetch_sources(folder)
    return folder


def driver(source: Path, folder: Path, defined: str) -> Ask:
    """ggml_backend_cann_supports_op of a build with a symbol defined."""
    text = (source / "ggml/src/ggml-cann/ggml-cann.cpp").read_text()
    begin = text.index("static bool ggml_backend_cann_supports_op")
    function = text[begin : text.index("\n}\n", begin) + 3]
    (folder / "driver.cpp").write_text(
        '#include <cstring>\n#include "ggml.h"\n#include "ggml-backend.h"\n#include "ggml-impl.h"\n'
        f"{function}"
        'extern "C" bool ask(const ggml_tensor * op) { return ggml_backend_cann_supports_op(nullptr, op); }\n'
    )
    libraries, built = Path(llama_cpp.__file__).parent / "lib", folder / f"{defined}.so"
    paths = [f"-I{source}/ggml/include", f"-I{source}/ggml/src", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command = [os.environ.get("CXX", "c++"), "-w", "-shared", "-fPIC", f"-D{defined}", *paths]
    subprocess.run([*command, folder / "driver.cpp", "-lggml-base", "-o", built], check=True)
    ask = ctypes.CDLL(str(built)).ask
    ask.restype, ask.argtypes = ctypes.c_bool, [ctypes.c_void_p]
    return lambda node: bool(ask(in_c(node)))


def in_c(node: Node) -> ctypes.Array[ctypes.c_char]:
    """The node as a ggml_tensor, which keeps its sources."""
    ggml = lib.ggml()
    numbers = {name: number for number, name in ggml.ops.items()}
    op, params = numbers.get(node.op), node.params
    for family, functions in ggml.functions.items():
        for number, name in functions.items():
            if name == node.op:
                op, params = numbers[family], struct.pack("i", number) + params[4:]

    def ggml_tensor(t: Tensor, op: int, params: bytes, sources: list[int]) -> ctypes.Array[ctypes.c_char]:
        own = [*sources, *[0] * (structs.N_SRC - len(sources))]
        packed = structs.TENSOR.pack(ggml.type_numbers[t.type], 0, *t.ne, *t.nb, op, params, 16, *own, 0, 0, 0, b"", 0)
        return ctypes.create_string_buffer(packed)

    sources = [ggml_tensor(t, 0, b"", []) if t is not None else None for t in node.src]
    result = ggml_tensor(node.dst, op or 0, params, [ctypes.addressof(s) if s is not None else 0 for s in sources])
    result.__dict__["sources"] = sources
    return result


def random_node(random: Random, ops: list[str]) -> Node:
    def any_tensor() -> Tensor:
        type = random.choice(TYPES)
        block = codec(type).block_size
        row = block * random.choice([1, 2, 28] if block > 1 else [1, 64, 896, 1024])
        return tensor(type, (row, *(random.randint(1, 3) for _ in range(3))), random.choice([0, 0, 0, 1, 2, 3]))

    op = random.choice(ops) if random.random() < 0.4 else random.choice(CONDITIONAL)
    sources: list[Tensor | None] = [any_tensor() for _ in range(random.randint(LEAST_SOURCES.get(op, 1), 5))]
    if op == "FLASH_ATTN_EXT" and random.random() < 0.7:
        sources[1:3] = tensor("f16"), tensor("f16", (random.choice([32, 64]), 4, 1, 1))
        sources = sources[: random.choice([4, 5])]
    if op == "SOFT_MAX" and random.random() < 0.5:
        sources[2:] = []
    first = sources[0]
    assert first is not None
    words = [random.choice([0, 0, 0, 1, 2, 3]) for _ in range(16)] if random.random() < 0.5 else [0] * 16
    if op == "ROPE" and random.random() < 0.6:
        words[1] = first.ne[0]
    dst = first if random.random() < 0.4 else any_tensor()
    return Node(op, dst, tuple(sources), struct.pack("16i", *words))


@pytest.mark.conformance
@pytest.mark.parametrize(("name", "defined"), [("ascend-910b", "ASCEND_910B"), ("ascend-310p", "ASCEND_310P")])
def test_a_profile_answers_as_the_driver_does(source: Path, tmp_path: Path, name: str, defined: str) -> None:
    ask, random, ops = driver(source, tmp_path, defined), Random(1), sorted(lib.ggml().op_names - VIEWS)
    answers: Counter[tuple[str, bool]] = Counter()
    for _ in range(50_000):
        node = random_node(random, ops)
        taken = ask(node)
        assert taken == (PROFILES[name].refusal(node) is None), f"{node}: the driver says {taken}"
        answers[node.op, taken] += 1
    for op in CONDITIONAL:
        assert answers[op, False] or op == "DUP"
        assert answers[op, True] or op not in (PROFILES[name].ops or ())
