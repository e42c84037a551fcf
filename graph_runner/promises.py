"""What is promised of the device's results on this machine: the bytes of the bound ggml's CPU, or a bound of the error.

Much of ggml is written so that its source says in which order a sum is taken and where it is rounded: what moves data,
quantised and float16 dot products, attention, softmax. Other loops are left to a compiler, which vectorises and fuses
them as it is told to: two builds of one ggml differ there in the last bit. So nobody is asked which processor this is.
Small nodes of each op are computed on the bound ggml and by the kernels; where all are equal, bytes are promised. What
was found is kept beside the kernels, for one ggml and one set of instructions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import xxhash

from ggml_backend_npu import Node
from ggml_backend_npu.abi import codecs, lib
from ggml_backend_npu.abi.replica import Replica
from ggml_backend_npu.numerics import Numerics
from ggml_backend_npu.ops import OWN, strided
from ggml_backend_npu.ops.elementwise import Scale
from ggml_backend_npu.ops.norms import Norm
from ggml_backend_npu.ops.recurrent import LinearAttn
from graph_runner import probes
from graph_runner.compare import compare
from graph_runner.files import write_file
from graph_runner.probes import (
    NODES,
    Make,
    Types,
    attention,
    conv_2d,
    conv_2d_dw,
    conv_3d,
    conv_transpose_1d,
    conv_transpose_2d,
    delta_net,
    gated,
    hc_post,
    hc_pre,
    mul_mat,
    of_elements,
    of_halves,
    of_rows,
    soft_max,
    ssm_conv,
    ssm_scan,
    timestep_embedding,
    turned,
    upscale,
    wkv,
)
from graph_runner.rules import Rules, type_of
from graph_runner.spans import copy
from quant.kernels.jit import cache_directory, target

_SEEDS = 2
_WIDTHS = (*range(1, 36), 47, 64, 70, 130)
_SIZES = (28, 20), (33, 19), (9, 4)  # of images
_F32: Types = ("f32",) * 8
_FIXED = "ggml's source says what every bit is"


@dataclass(frozen=True)
class Promise:
    """What is promised of nodes of an op.

    of     which nodes, where not all
    bytes  whether their results are those of the bound ggml's CPU in every byte
    why    in words
    """

    op: str
    of: str
    bytes: bool
    why: str


@dataclass(frozen=True)
class _Probe:
    """Nodes that a promise is measured on.

    fixed  whether ggml's source says what every bit is, as it is written for x86-64 with AVX2 and with AVX-512
    fused  whether it does but for products that a compiler may add in one step (-ffp-contract), as most are told to
    """

    op: str
    of: str
    makes: tuple[Make, ...]
    types: Types = _F32
    fixed: bool = False
    fused: bool = False

    @property
    def name(self) -> str:
        return f"{self.op} {self.of}".rstrip()

    def nodes(self) -> Iterator[Node]:
        for make in self.makes:
            for seed in range(_SEEDS):
                yield make(np.random.default_rng(seed), self.types)


def _of_widths(make: Callable[[int], Make], widths: Iterable[int] = _WIDTHS) -> tuple[Make, ...]:
    return tuple(map(make, widths))


def _of_streams(make: Callable[[int, int], Make]) -> tuple[Make, ...]:
    plain = [make(n, streams) for streams in range(1, 10) for n in (1, 3, 8, 17, 40)]
    return *plain, *(turned(each, *places) for each in plain for places in ((0,), (1,), (0, 1, 2, 3)))


_QUANTISED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
_EPS = Norm(1e-6)
_FUNCTIONS = ("SILU", "GELU_ERF", "SIGMOID", "TANH", "EXP", "EXPM1", "ELU", "SOFTPLUS", "SIN")
_IN_TABLES = ("GELU", "GELU_QUICK")
_GLU = ("SWIGLU", "GEGLU", "GEGLU_QUICK", "GEGLU_ERF")


def _elements(op: str, width: int) -> Make:
    return of_elements(op, width=width)


def _scaled(bias: float, width: int) -> Make:
    return of_elements("SCALE", params=Scale(1.7, bias), width=width)


def _gated(op: str, width: int) -> Make:
    return gated(op, width=width)


def _rows(op: str, width: int) -> Make:
    return of_rows(op, width, _EPS)


def _convolutions(op: str, make: Callable[[int], Make], per_channel: int) -> list[_Probe]:
    """Of a convolution whose dot products have so many elements of each channel."""
    whole, other = ([n for n in (*range(1, 20), 32, 64, 128) if (n * per_channel % 64 == 0) == fits] for fits in (1, 0))
    return [
        _Probe(op, "of f16", _of_widths(make, (*other, *whole)), ("f32", "f16", "f32"), fixed=True),
        _Probe(op, "of f32, rows of whole 64s", _of_widths(make, whole), fixed=True),
        _Probe(op, "of f32, other rows", _of_widths(make, other)),
    ]


# of other ops the nodes are those of NODES
_MEASURED: dict[str, list[_Probe]] = {
    **{op: [_Probe(op, "", _of_widths(partial(_elements, op)))] for op in _FUNCTIONS},
    **{op: [_Probe(op, "", (*_of_widths(partial(_elements, op)), of_halves(op)))] for op in _IN_TABLES},
    **{op: [_Probe(op, "", _of_widths(partial(_gated, op)))] for op in _GLU},
    "MUL_MAT": [
        _Probe("MUL_MAT", "of f16", _of_widths(mul_mat), ("f32", "f16", "f32"), fixed=True),
        _Probe("MUL_MAT", "of f32, rows of whole 64s", _of_widths(mul_mat, (64, 128, 576)), fixed=True),
        _Probe("MUL_MAT", "of f32, other rows", _of_widths(mul_mat, (7, 33, 48, 63, 80, 121))),
        *(_Probe("MUL_MAT", f"of {type}", (mul_mat(),), ("f32", type, "f32"), fixed=True) for type in _QUANTISED),
        *(_Probe("MUL_MAT", f"of {type}", (mul_mat(columns=1),), ("f32", type, "f32")) for type in ("q4_K", "q6_K")),
    ],
    "MUL_MAT_ID": [
        _Probe("MUL_MAT_ID", f"of {type}", tuple(NODES["MUL_MAT_ID"]), ("f32", type, "f32"), fixed=True)
        for type in ("f16", "q8_0")
    ],
    "NORM": [
        _Probe("NORM", "of rows without gaps", _of_widths(partial(_rows, "NORM")), fixed=True),
        _Probe("NORM", "of rows with gaps", tuple(turned(each, 0) for each in _of_widths(partial(_rows, "NORM")))),
    ],
    **{op: [_Probe(op, "", _of_widths(partial(_rows, op)))] for op in ("RMS_NORM", "L2_NORM")},
    "FLASH_ATTN_EXT": [
        _Probe(
            "FLASH_ATTN_EXT", "of f16, fewer than 64 queries",
            (*NODES["FLASH_ATTN_EXT"][:2], *_of_widths(lambda n: attention(widths=(64, n)), (64, 65, 66, 79, 80, 130))),
            ("f32", "f32", "f16", "f16"), fused=True,
        ),
        _Probe("FLASH_ATTN_EXT", "of f16, 64 queries or more", (attention(queries=70),), ("f32", "f32", "f16", "f16")),
        _Probe("FLASH_ATTN_EXT", "of q8_0", (attention(),), ("f32", "f32", "q8_0", "q8_0")),
        _Probe("FLASH_ATTN_EXT", "of f32", (attention(),)),
    ],
    "SSM_CONV": [_Probe("SSM_CONV", "", _of_widths(ssm_conv))],
    "SSM_SCAN": [
        _Probe("SSM_SCAN", "with a decay for each element", _of_widths(partial(ssm_scan, dim=1), (2, 16, 17, 70))),
        _Probe("SSM_SCAN", "with a decay for each head", _of_widths(ssm_scan)),
    ],
    "RWKV_WKV6": [_Probe("RWKV_WKV6", "", _of_widths(lambda n: wkv("RWKV_WKV6", 5, size=n)))],
    "RWKV_WKV7": [_Probe("RWKV_WKV7", "", _of_widths(lambda n: wkv("RWKV_WKV7", 6, size=n), (64, 128)), fixed=True)],
    "GATED_LINEAR_ATTN": [
        _Probe(
            "GATED_LINEAR_ATTN", "",
            _of_widths(lambda n: wkv("GATED_LINEAR_ATTN", 4, LinearAttn(0.3), size=n)),
        )
    ],
    "GATED_DELTA_NET": [
        _Probe(
            "GATED_DELTA_NET", "", (*_of_widths(delta_net), *_of_widths(partial(delta_net, gates=True), (7, 16, 40)))
        )
    ],
    "DSV4_HC_PRE": [
        _Probe("DSV4_HC_PRE", "with gates", _of_streams(hc_pre)),
        _Probe("DSV4_HC_PRE", "with weights", _of_streams(partial(hc_pre, gated=False))),
    ],
    "CONV_2D": _convolutions("CONV_2D", lambda n: conv_2d(n, 5 + n % 4), 6),
    "CONV_3D": _convolutions("CONV_3D", lambda n: conv_3d(n, 5 + n % 4), 12),
    "CONV_TRANSPOSE_1D": _convolutions("CONV_TRANSPOSE_1D", conv_transpose_1d, 1),
    "CONV_TRANSPOSE_2D": _convolutions("CONV_TRANSPOSE_2D", conv_transpose_2d, 1),
    "CONV_2D_DW": [
        _Probe("CONV_2D_DW", f"of {type}", tuple(
            conv_2d_dw(size, n, together=together)
            for size in (1, 2, 3, 5) for n in (3, 16, 37) for together in (False, True)
        ), ("f32", type, "f32"))
        for type in ("f32", "f16")
    ],
    "UPSCALE": [
        _Probe("UPSCALE", name, tuple(upscale(m, *to) for m in (mode, mode | 256) for to in _SIZES))
        for name, mode in (("bilinear", 1), ("bicubic", 2), ("antialiased", 1 | 512))
    ],
    "TIMESTEP_EMBEDDING": [_Probe("TIMESTEP_EMBEDDING", "", _of_widths(timestep_embedding, (2, 7, 40, 320)))],
    "DSV4_HC_POST": [_Probe("DSV4_HC_POST", "", _of_streams(hc_post))],
    "SCALE": [
        _Probe("SCALE", "without a bias", _of_widths(partial(_scaled, 0.0)), fixed=True),
        _Probe("SCALE", "with a bias", _of_widths(partial(_scaled, 0.3))),
    ],
    "SOFT_MAX": [
        _Probe("SOFT_MAX", "of a mask that slopes of 2 ** n scale", tuple(NODES["SOFT_MAX"]), fixed=True),
        _Probe("SOFT_MAX", "of a mask that other slopes scale", (partial(soft_max, max_bias=1.5),), fused=True),
    ],
}  # fmt: skip


@cache
def _probes() -> dict[str, _Probe]:
    """By name."""
    others = {op: [_Probe(op, "", tuple(makes))] for op, makes in NODES.items() if op not in _MEASURED}
    return {probe.name: probe for probes in (_MEASURED | others).values() for probe in probes}


@cache
def holds(name: str) -> bool:
    """Whether the kernels give the bytes of the bound ggml's CPU, of nodes by the name of an op and which of them.
    Measured once, and kept beside the compiled kernels."""
    ggml = lib.ggml()
    kept = cache_directory() / f"promises-{_identity(ggml)}.json"
    found: dict[str, bool] = {}
    with suppress(OSError, ValueError):
        found = {name: holds is True for name, holds in json.loads(kept.read_text()).items()}
    if name not in found:
        strided.make_ready()
        exactly = replace(codecs.bound(), matmul="exact")
        with Replica(ggml, "CPU") as cpu:
            found[name] = all(_is_equal(cpu, exactly, each) for each in _probes()[name].nodes())
        with suppress(OSError):
            write_file(kept, json.dumps(found, indent=1).encode())
    return found[name]


@cache
def _identity(ggml: lib.Ggml) -> str:
    """Of a ggml, of what kernels are compiled for, and of what is measured."""
    sources = [Path(file).read_bytes() for file in (__file__, probes.__file__)]
    parts = (target().encode(), ggml.version.encode(), ggml.cpu_file.read_bytes(), *sources)
    return xxhash.xxh3_64_hexdigest(b"\0".join(parts))


def _is_equal(cpu: Replica, numerics: Numerics, of: Node) -> bool:
    """Whether the CPU and the kernels give the same bytes."""
    expected, actual = copy(of.dst), copy(of.dst)
    cpu.compute(replace(of, dst=expected))
    OWN[of.op].bind(replace(of, dst=actual), numerics)()
    return bool(compare(expected, actual))


def promises(ops: Collection[str] | None = None) -> list[Promise]:
    """Of these ops, or of all that the device has, on this machine."""
    wanted = {*OWN} & {*(OWN if ops is None else ops)}
    chosen = {name: probe for name, probe in _probes().items() if probe.op in wanted}
    rules, held = Rules(), {name: holds(name) for name in chosen}
    found = [Promise(op, "", *_unmeasured(op, rules)) for op in wanted - {probe.op for probe in chosen.values()}]
    found += [Promise(probe.op, probe.of, held[name], _why(probe, held[name], rules)) for name, probe in chosen.items()]
    return sorted(found, key=lambda each: (each.op, each.of))


def _unmeasured(op: str, rules: Rules) -> tuple[bool, str]:
    words = rules.describe(op, "f32")
    return (True, _FIXED) if words == "same bytes" else (False, words)


def _why(probe: _Probe, holds: bool, rules: Rules) -> str:
    if holds:
        return _FIXED if probe.fixed else "measured: this ggml computes the same"
    return f"{rules.describe(probe.op, type_of(next(probe.nodes())))}: this ggml adds or rounds otherwise"
