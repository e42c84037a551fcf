"""A corpus of faults: each a file of kernels in tests/faults, with what is known of it without a diff."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from kit.diffs import FLASH_OFF, FLASH_ON, PROMPT, QUANTISED
from kit.models import OTHERS, WRITERS, requantized
from kit.support import choose

from ggml_backend_npu import Memory, Node, Tensor, default_backend
from ggml_backend_npu.backend.kernel_files import load_kernels
from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.ir.packed import PACKED_TYPES, Packed
from ggml_backend_npu.ops import OWN
from graph_runner.base.tiny import TinyModel, spm_vocabulary, write_tiny_llama
from graph_runner.run.session import Sampler, Session, Settings, context_for

FOLDER = Path(__file__).parents[1] / "faults"
ROUNDED = FOLDER / "right_mul_mat_in_doubles.py"  # right, but for rounding

ALL = {"ops": "all"}
PACKING = {"ops": "all", "memory": "device", "device_type": "gpu"}


def any_node(node: Node) -> bool:
    return True


def named(*names: str) -> Callable[[Node], bool]:
    return lambda node: node.name in names


def in_place(place: int = 0) -> Callable[[Node], bool]:
    return lambda node: node.dst.overlaps(src(node, place))


def of_one_token(node: Node) -> bool:
    return node.dst.ne[1] == 1


def src(node: Node, place: int = 0) -> Tensor:
    found = node.src[place]
    assert found is not None
    return found


@dataclass(frozen=True)
class Fault:
    """A file of kernels with one fault.

    file      its name, in tests/faults
    op        of the first node that comes out wrong
    at        whether a node of that op can be the first one
    step      in which it is, at the earliest
    says      part of the diagnosis; None: any that is true, or none
    never     what is not true of it
    repeat    how often a replay has to run the node until it shows
    scattered  whether it shows at any of these nodes, since that depends on how often the kernel is called
    fused     name of the operator whose call is at fault; the node is the last one of its pattern
    rounded   whether it is to be found after rounding too, with ROUNDED beside it
    remembers  whether a call gives what one before it was to give: after rounding, that of the isolated run may be it
    alone     whether a replay of that one node can show it
    failure   words for how the process ends, of which one is in the failure
    """

    file: str
    op: str
    at: Callable[[Node], bool] = any_node
    step: int = 0
    model: str = "llama"
    settings: Settings = FLASH_OFF
    options: dict[str, str] = field(default_factory=dict)
    steps: int = 1
    says: str | None = None
    never: tuple[str, ...] = ()
    repeat: int = 1
    scattered: bool = False
    fused: str = ""
    rounded: bool = True
    remembers: bool = False
    alone: bool = True
    failure: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.file}.py"

    def __str__(self) -> str:
        return self.file


# each of these shows when the node is computed by itself, from right sources
ISOLATED = [
    Fault("get_rows_without_nb2", "GET_ROWS", lambda node: src(node).ne[2] > 1, model="moe",
          says="takes index 0 of dimension 2 of src0"),
    Fault("get_rows_next_row", "GET_ROWS", never=("permutes", "writes nothing")),
    Fault("get_rows_of_ids_in_a_row", "GET_ROWS", lambda node: not src(node, 1).is_contiguous(), model="moe"),
    Fault("get_rows_unsigned", "GET_ROWS", never=("swaps", "rounds")),
    Fault("get_rows_writes_nothing", "GET_ROWS", never=("zeros", "permutes")),
    Fault("get_rows_writes_zeros", "GET_ROWS", never=("writes nothing",)),
    Fault("set_rows_next_cell", "SET_ROWS", settings=FLASH_ON, says="writes row id + 1 in place of row id"),
    Fault("set_rows_writes_zeros", "SET_ROWS", settings=FLASH_ON, never=("writes nothing",)),
    Fault("set_rows_whole_words", "SET_ROWS", settings=FLASH_ON, never=("writes nothing", "permutes")),
    Fault("set_rows_clears_another_row", "SET_ROWS", settings=FLASH_ON, never=("writes nothing",)),
    Fault("set_rows_swaps_nibbles", "SET_ROWS", lambda node: node.dst.type == "q4_0", settings=QUANTISED,
          says="swaps the two nibbles of each byte"),
    Fault("cpy_without_offset", "CPY", lambda node: src(node).offset > 0, model="rwkv7",
          says="ignores the offset of src0"),
    Fault("cpy_without_strides", "CPY", lambda node: not src(node).is_contiguous(), model="mamba"),
    Fault("cont_without_strides", "CONT", never=("permutes rows",)),
    Fault("cont_heads_reversed", "CONT", never=("offset",)),
    Fault("cont_nan_in_a_row", "CONT", says="gives NaN in row 3"),
    Fault("add_to_the_first_row", "ADD", lambda node: src(node, 1).ne != node.dst.ne, model="gpt-oss",
          never=("writes nothing",)),
    Fault("add_one_element_short", "ADD", never=("writes nothing",)),
    Fault("add_writes_nothing", "ADD"),
    Fault("add_in_bfloats", "ADD", never=("writes nothing", "permutes"), says="gives nothing but numbers of bf16"),
    Fault("add_id_next_expert", "ADD_ID", model="gpt-oss", never=("permutes",)),
    Fault("sub_of_swapped_sources", "SUB", model="rwkv7", says="swaps src0 and src1"),
    Fault("mul_repeats_by_row", "MUL", never=("permutes",)),
    Fault("mul_without_the_last_row", "MUL"),
    Fault("div_in_halves", "DIV", model="moe"),
    Fault("scale_without_params", "SCALE", lambda node: bool(src(node).view().any()), model="rwkv7",
          never=("writes nothing",)),
    Fault("mul_mat_in_halves", "MUL_MAT", says="gives nothing but numbers of f16"),
    Fault("mul_mat_other_heads", "MUL_MAT", lambda node: 1 < src(node).ne[2] < src(node, 1).ne[2],
          says="repeats src0 as a whole"),
    Fault("mul_mat_whole_tiles", "MUL_MAT", lambda node: node.dst.ne[0] == 354, never=("writes nothing",)),
    Fault("mul_mat_accumulates", "MUL_MAT", never=("writes nothing", "leaves out")),
    Fault("mul_mat_swaps_nibbles", "MUL_MAT", model="llama-q4_0"),
    Fault("mul_mat_one_scale_a_row", "MUL_MAT", model="llama-q8_0", never=("permutes",)),
    Fault("mul_mat_id_next_expert", "MUL_MAT_ID", model="moe", never=("permutes",)),
    Fault("mul_mat_id_of_ids_in_a_row", "MUL_MAT_ID", model="moe", never=("permutes",)),
    Fault("mul_mat_id_half_an_expert", "MUL_MAT_ID", model="moe", never=("permutes",)),
    Fault("swiglu_of_swapped_operands", "SWIGLU", says="swaps src0 and src1"),
    Fault("swiglu_oai_without_alpha", "SWIGLU_OAI", model="gpt-oss"),
    Fault("silu_as_gelu_quick", "SILU", model="mamba"),
    Fault("gelu_by_erf", "GELU", model="gpt2"),
    Fault("rms_norm_without_eps", "RMS_NORM", says="ignores the eps"),
    Fault("rms_norm_other_eps", "RMS_NORM", says="takes 0.001 for the eps"),
    Fault("rms_norm_in_halves", "RMS_NORM", says="gives each row times a number of its own"),
    Fault("norm_without_eps", "NORM", model="rwkv7"),
    Fault("norm_without_the_mean", "NORM", model="gpt2"),
    Fault("rope_other_base", "ROPE", says="takes 500000 for the frequency base"),
    Fault("rope_next_position", "ROPE", never=("permutes",)),
    Fault("rope_other_pairs", "ROPE"),
    Fault("rope_half_scale", "ROPE", says="takes 0.5 for the frequency scale"),
    Fault("soft_max_without_mask", "SOFT_MAX", says="leaves out src1 (the mask)"),
    Fault("soft_max_without_scale", "SOFT_MAX", never=("mask",)),
    Fault("soft_max_without_sinks", "SOFT_MAX", model="gpt-oss", never=("mask",)),
    Fault("soft_max_in_halves", "SOFT_MAX", never=("mask",), says="gives each row times a number of its own"),
    Fault("flash_attn_without_mask", "FLASH_ATTN_EXT", settings=FLASH_ON, never=("takes index 0",),
          says="leaves out src3 (the mask)"),
    Fault("flash_attn_without_sinks", "FLASH_ATTN_EXT", model="gpt-oss", settings=FLASH_ON, never=("mask",),
          says="leaves out src4 (the sinks)"),
    Fault("flash_attn_without_scale", "FLASH_ATTN_EXT", settings=FLASH_ON, never=("mask",), says="ignores the scale"),
    Fault("flash_attn_other_heads", "FLASH_ATTN_EXT", settings=FLASH_ON, never=("mask", "permutes"),
          says="of src1 and src2, not h // "),
    Fault("flash_attn_heads_reversed", "FLASH_ATTN_EXT", settings=FLASH_ON, never=("mask",)),
    Fault("argsort_ascending", "ARGSORT", model="moe"),
    Fault("sum_rows_in_halves", "SUM_ROWS", model="moe", says="gives nothing but numbers of f16"),
    Fault("concat_of_swapped_sources", "CONCAT", model="mamba"),
    Fault("ssm_conv_reversed", "SSM_CONV", model="mamba"),
]  # fmt: skip


# each of these changes what it reads
SOURCES = [
    Fault("rms_norm_doubles_its_source", "RMS_NORM"),
    Fault("add_clears_its_second_source", "ADD"),
    Fault("get_rows_sorts_its_ids", "GET_ROWS"),
    Fault("mul_mat_rounds_its_source", "MUL_MAT", rounded=False),
]

# each of these shows in a run of several nodes: by where tensors lie, by what was computed before, or by chance
RUNS = [
    Fault("add_off_in_place", "ADD", in_place()),
    Fault("add_not_in_place", "ADD", in_place(1), model="mamba"),
    Fault("mul_not_in_place", "MUL", lambda node: in_place()(node) and src(node, 1).ne[0] == 1, model="moe"),
    Fault("soft_max_not_in_place", "SOFT_MAX", in_place()),
    Fault("sigmoid_not_in_place", "SIGMOID", in_place(), model="rwkv7"),
    Fault("add_race", "ADD", steps=3, repeat=8, scattered=True),
    Fault("swiglu_race", "SWIGLU", repeat=8, scattered=True),
    Fault("mul_race", "MUL", steps=3, repeat=32, scattered=True),
    Fault("soft_max_race", "SOFT_MAX", steps=3, repeat=8, scattered=True, remembers=True),
    Fault("swiglu_cached_by_name", "SWIGLU", named("ffn_swiglu-1"), step=1, repeat=8, remembers=True),
    Fault("swiglu_cached_by_shape", "SWIGLU", step=1, repeat=8, remembers=True),
    Fault("swiglu_cached_by_address", "SWIGLU", alone=False, step=1, steps=2, repeat=8, scattered=True, remembers=True),
    Fault("add_cached_in_place", "ADD", in_place(), step=1, steps=2, repeat=8, scattered=True, remembers=True),
    Fault("mul_race_in_place", "MUL", in_place(), steps=1, repeat=8, scattered=True),
    Fault("mul_planned_by_shape", "MUL", named("ffn_norm-0"), repeat=8),
    Fault("mul_mat_planned_by_name", "MUL_MAT", named("kq-0"), step=1, repeat=8, rounded=False),
    Fault("rope_of_one_token", "ROPE", step=1),
    Fault("rope_up_to_27", "ROPE", step=2, steps=2),
    Fault("set_rows_of_many_tokens", "SET_ROWS", step=1, settings=FLASH_ON, says="leaves dst as it was"),
    Fault("swiglu_of_many_tokens", "SWIGLU", of_one_token),
    Fault("add_tires", "ADD", steps=3, repeat=16, scattered=True),
    Fault("rwkv_wkv7_forgets", "RWKV_WKV7", step=1, model="rwkv7"),
]

# each of these writes into a tensor that is alive in the device's own run
LIVE = [
    Fault("swiglu_writes_into_a_cache", "SWIGLU", alone=False),
    Fault("swiglu_writes_into_an_activation", "SWIGLU", alone=False),
]

# each of these is an operator's call that is wrong, where the nodes one by one are right
FUSED = [
    Fault("masked_softmax_is_off", "SOFT_MAX", fused="masked_softmax", options=ALL),
    Fault("masked_softmax_is_off_in_place", "SOFT_MAX", fused="masked_softmax", options=ALL),
    Fault("masked_softmax_is_stale", "SOFT_MAX", named("kq_soft_max-1"), fused="masked_softmax", options=ALL, repeat=8,
          remembers=True),
    Fault("token_shift_is_off", "ADD", lambda node: node.dst.ne[3] > 1, model="rwkv7", fused="token_shift",
          options=ALL),
    Fault("top_k_softmax_is_off", "DIV", model="moe", fused="TopKSoftmax", options=ALL),
]  # fmt: skip

# each of these is right where tensors are blocks, and wrong where the device has packed them
PACKED = [
    Fault("get_rows_not_packed", "GET_ROWS", settings=QUANTISED, options=PACKING),
    Fault("set_rows_not_packed", "SET_ROWS", settings=QUANTISED, options=PACKING),
    Fault("flash_attn_not_packed", "FLASH_ATTN_EXT", settings=QUANTISED, options=PACKING),
]

# each of these writes beside its output; that may end the process
STRAYS = [
    Fault("cont_one_byte_too_many", "CONT"),
    Fault("cont_one_row_too_many", "CONT"),
    Fault("mul_writes_before_its_output", "MUL"),
    Fault("swiglu_writes_8_kib_after", "SWIGLU"),
    Fault("add_writes_1_mib_after", "ADD"),
]

# each of these ends the process, or never returns
ENDS = [
    Fault("rms_norm_reads_address_0", "RMS_NORM", failure=("SIGSEGV",), rounded=False),
    Fault("rope_of_one_token_reads_address_0", "ROPE", step=1, failure=("SIGSEGV",), rounded=False),
    Fault("add_reads_address_0_in_place", "ADD", in_place(), failure=("SIGSEGV",)),
    Fault("mul_doubles_its_weights", "MUL", rounded=False),
    Fault("mul_aborts", "MUL", failure=("SIGABRT",), rounded=False),
    Fault("cont_frees_its_output", "CONT", failure=("SIGABRT",), rounded=False),
    Fault("swiglu_is_killed", "SWIGLU", failure=("SIGKILL",), rounded=False),
    Fault("add_calls_sys_exit", "ADD", failure=("exit",), rounded=False),
    Fault("soft_max_calls_os_exit", "SOFT_MAX", failure=("exit", "ended"), rounded=False),
    Fault("cont_raises", "CONT", failure=("ValueError: no rows today",), rounded=False),
    Fault("mul_mat_has_no_memory", "MUL_MAT", failure=("MemoryError",), rounded=False),
    Fault("rope_recurs", "ROPE", failure=("RecursionError",), rounded=False),
    Fault("rms_norm_loops", "RMS_NORM", failure=("time",), rounded=False),
    Fault("add_sleeps", "ADD", failure=("time",)),
    Fault("swiglu_sleeps_in_c", "SWIGLU", of_one_token, failure=("time",)),
    Fault("mul_waits_for_a_lock_in_place", "MUL", in_place(), failure=("time",)),
]

LATE = [Fault("add_thread_is_late", "ADD")]


def write_tiny_gpt2(path: Path) -> Path:
    """A gpt2 of 2 layers: positions are embedded, q, k and v are one matrix; GELU stands where a llama has SWIGLU."""
    model = TinyModel(path, "gpt2", spm_vocabulary())
    model.attention_heads(n_head=2, n_head_kv=2)
    model.writer.add_layer_norm_eps(1e-5)
    model.embeddings(bias=True)
    model.weight("position_embd.weight", model.random(model.n_embd, 512))
    for block in model.blocks():
        model.norm(f"{block}.attn_norm", bias=True)
        model.linear(f"{block}.attn_qkv", model.n_embd, 3 * model.n_embd, bias=True)
        model.linear(f"{block}.attn_output", model.n_embd, model.n_embd, bias=True)
        model.norm(f"{block}.ffn_norm", bias=True)
        model.linear(f"{block}.ffn_up", model.n_embd, model.n_ff, bias=True)
        model.linear(f"{block}.ffn_down", model.n_ff, model.n_embd, bias=True)
    return model.save()


def write_quantised(path: Path) -> Path:
    """A tiny llama with its matrices in the type that the file's name ends with."""
    return requantized(write_tiny_llama(path.with_name(f"float-{path.name}")), path.stem.split("-")[1], path)


MODELS = WRITERS | OTHERS | {"gpt2": write_tiny_gpt2, "llama-q4_0": write_quantised, "llama-q8_0": write_quantised}


@contextmanager
def loaded(*files: Path) -> Iterator[None]:
    """The kernels of files stand in the place of the project's own, and so do the fusions that they change."""
    backend = default_backend()
    fusions = backend.fusions
    try:
        with backend.ops.having():
            for file in files:
                load_kernels(file, backend)
            yield
    finally:
        backend.fusions = fusions


@dataclass(frozen=True)
class Place:
    """A node of a run."""

    step: int
    index: int
    op: str
    name: str


class _Walk:
    """Observer of ggml's CPU that is shown each node before the CPU computes it."""

    def __init__(self, shown: Callable[[Place, Node], None]) -> None:
        self._shown, self._step, self._index = shown, 0, -1

    def before(self, address: int) -> bool:
        ggml = lib.ggml()
        if not convert.computes(convert.op_name(ggml, address)):
            return False
        self._index += 1
        node = convert.node(ggml, address)
        if node.dst.n_elements:
            self._shown(Place(self._step, self._index, node.op, node.name), node)
        return True

    def after(self, address: int) -> None:
        pass

    def next_step(self) -> None:
        self._step, self._index = self._step + 1, -1


def walk(file: Path, fault: Fault, shown: Callable[[Place, Node], None]) -> None:
    """Shows each node of a run of ggml's CPU: of the prompt, and of the steps after it."""
    observer = _Walk(shown)
    settings = replace(fault.settings, n_ctx=context_for(PROMPT, fault.steps))
    with Session(file, settings, observer=observer) as session:
        session.decode(session.tokenize(PROMPT))
        for _ in range(fault.steps):
            token = Sampler()(session.logits())
            observer.next_step()
            session.decode([token])


def known(file: Path, fault: Fault) -> list[Place]:
    """The nodes that can come out wrong, by what is known of the fault: the first of them does, or any if scattered."""
    found: list[Place] = []

    def look(place: Place, node: Node) -> None:
        if node.op == fault.op and place.step >= fault.step and fault.at(node):
            found.append(place)

    walk(file, fault, look)
    return found


def shows(file: Path, fault: Fault) -> list[Place]:
    """The nodes that the kernels really get wrong: computed where ggml's CPU is about to compute them, from the same
    sources, and once more by the project's own kernel. Wrong is also what changes a source, or an earlier result."""
    found: list[Place] = []
    earlier: dict[int, Memory] = {}

    def look(place: Place, node: Node) -> None:
        if fault in LIVE:
            earlier[node.dst.address] = Memory(node.dst.address, node.dst.nbytes)
        if default_backend().ops.get(node.op) is OWN.get(node.op) or default_backend().refusal(node) is not None:
            return
        tensors = [tensor for tensor in (node.dst, *node.src) if tensor is not None]
        memory = [span.bytes() for span in (*[Memory(t.address, t.nbytes) for t in tensors], *earlier.values())]
        before = [span.copy() for span in memory]

        def computed_by(run: Callable[[], None]) -> list[np.ndarray]:
            run()
            results = [span.copy() for span in memory]
            for span, old in zip(memory, before, strict=True):
                if not np.array_equal(span, old):
                    span[:] = old
            return results

        planted, right = (
            computed_by(default_backend().bind(node)),
            computed_by(OWN[node.op].bind(node, default_backend().numerics)),
        )
        if not all(np.array_equal(a, b) for a, b in zip(planted, right, strict=True)):
            found.append(place)

    with loaded(fault.path), pytest.MonkeyPatch.context() as patch:
        choose(patch, matmul="exact")
        walk(file, fault, look)
    return found


ROOM = 2 << 20  # bytes on each side of an output


def spills(file: Path, fault: Fault) -> list[Place]:
    """The nodes of which the kernels write beside the output, which lies in a room of its own; the output is right."""
    found: list[Place] = []

    def look(place: Place, node: Node) -> None:
        if default_backend().ops.get(node.op) is OWN.get(node.op) or default_backend().refusal(node) is not None:
            return
        planted, right = (np.zeros(node.dst.nbytes + 2 * ROOM, np.uint8) for _ in range(2))
        for ops, room in ((default_backend().ops, planted), (OWN, right)):
            apart = replace(node, dst=replace(node.dst, memory=Memory.of(room), offset=ROOM))
            ops[node.op].bind(apart, default_backend().numerics)()
        same = planted == right
        if same[ROOM:-ROOM].all() and not same.all():
            found.append(place)

    with loaded(fault.path):
        walk(file, fault, look)
    return found


def packed(tensor: Tensor) -> Tensor:
    """A tensor over a copy of its memory, packed where the device packs its type."""
    storage = tensor.memory.bytes().copy()
    memory = Memory.of(storage)
    layout = Packed.of(tensor.type, memory.address, storage) if tensor.type in PACKED_TYPES else None
    return replace(tensor, memory=memory, packed=layout)


def misreads(file: Path, fault: Fault) -> list[Place]:
    """The nodes that the kernels get wrong where tensors are packed, and right where they are not."""
    found: list[Place] = []

    def look(place: Place, node: Node) -> None:
        if default_backend().ops.get(node.op) is OWN.get(node.op):
            return
        results: list[np.ndarray] = []
        for copy in (packed, lambda tensor: replace(packed(tensor).unpacked())):
            for ops in (default_backend().ops, OWN):
                dst = copy(node.dst)
                sources = tuple(copy(source) if source is not None else None for source in node.src)
                ops[node.op].bind(replace(node, dst=dst, src=sources), default_backend().numerics)()
                results.append(Memory(dst.address, dst.nbytes).bytes().copy())
        wrong, right = results[:2], results[2:]
        if not np.array_equal(*wrong) and np.array_equal(*right):
            found.append(place)

    with loaded(fault.path):
        walk(file, fault, look)
    return found
