"""What is promised for the device's results on this machine: the same bytes as the bound ggml's CPU, or an error bound.

For much of ggml the source says in which order a sum is taken and where it is rounded: data movement, quantised and
float16 dot products, attention, softmax. Other loops are left to a compiler, which vectorises and fuses them as it is
told to: there, two builds of one ggml differ in the last bit. So the processor's name decides nothing: small nodes of
each op are computed on the bound ggml and by the kernels, and if all are equal, bytes are promised. The findings are
cached beside the kernels, for one ggml and one instruction set.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

from ggml_backend_npu import Node, Op
from ggml_backend_npu.ggml import codecs, lib
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.kernels import strided
from ggml_backend_npu.plugin.replica import Replica
from ggml_backend_npu.registry.checks import Probe
from graph_runner.base.files import write_file
from graph_runner.judging.compare import compare
from graph_runner.judging.rules import Rules, type_of
from graph_runner.judging.spans import copied
from quant.folders import FolderError
from quant.kernels.cache import PACKAGES, kept_in, sources
from quant.kernels.processor import target

_SEEDS = 2
_FIXED = "ggml's source says what every bit is"


@dataclass(frozen=True)
class Promise:
    """What is promised for nodes of an op.

    of     which nodes, if not all
    bytes  whether their results have the same bytes as on the bound ggml's CPU
    why    the reason in words
    """

    op: str
    of: str
    bytes: bool
    why: str


@dataclass(frozen=True)
class _OpProbe(Probe):
    """A probe of an op."""

    op: str = ""

    @property
    def name(self) -> str:
        return f"{self.op} {self.of}".rstrip()

    def nodes(self) -> Iterator[Node]:
        for make in self.makes:
            for seed in range(_SEEDS):
                yield make(np.random.default_rng(seed), self.types)


@cache
def _probes() -> dict[str, _OpProbe]:
    """Returns the probes by name."""
    found = [_OpProbe(**vars(probe), op=op.name) for op in OWN.values() for probe in _probes_of(op)]
    return {each.name: each for each in found}


def _probes_of(op: Op) -> Iterable[Probe]:
    if op.measured is not None:
        return op.measured()
    return [Probe("", op.makes)] if op.bound else []


@cache
def holds(name: str) -> bool:
    """Whether the kernels give the bytes of the bound ggml's CPU for a probe: an op, or an op and which of its nodes.
    Measured once, and cached beside the compiled kernels."""
    ggml = lib.ggml()
    kept: Path | None = None
    found: dict[str, bool] = {}
    with suppress(OSError, ValueError, FolderError):
        kept = kept_in() / f"promises-{_identity(ggml)}.json"
        found = {name: holds is True for name, holds in json.loads(kept.read_text()).items()}
    if name not in found:
        strided.make_ready()
        exactly = replace(codecs.bound(), matmul="exact")
        with Replica(ggml, "CPU") as cpu:
            nodes = [each for each in _probes()[name].nodes() if cpu.refusal(each) is None]
            found[name] = bool(nodes) and all(_is_equal(cpu, exactly, each) for each in nodes)
        with suppress(OSError):
            if kept is not None:
                write_file(kept, json.dumps(found, indent=1).encode())
    return found[name]


@cache
def _identity(ggml: lib.Ggml) -> str:
    """Returns a digest of a ggml, of the processor that kernels are compiled for, and of all sources: of what is
    measured, and of what measures it."""
    made_of = sources(*PACKAGES, "graph_runner").encode()
    parts = (target().encode(), ggml.version.encode(), ggml.cpu_file.read_bytes(), made_of)
    return xxhash.xxh3_64_hexdigest(b"\0".join(parts))


def _is_equal(cpu: Replica, numerics: Numerics, of: Node) -> bool:
    """Whether the CPU and the kernels give the same bytes."""
    expected, actual = copied(of), copied(of)
    cpu.compute(expected)
    OWN[of.op].bind(actual, numerics)()
    return bool(compare(expected.dst, actual.dst))


def promised(node: Node) -> bool:
    """Whether the bytes of the bound ggml's CPU are promised for a node: those of its op, of its types and of whatever
    else decides."""
    op = OWN[node.op]
    probes = [probe for probe in _probes().values() if probe.op == node.op]
    if not probes:
        return not op.bound and op.order is None
    tensors, _ = op.arguments(node)
    about = [each for each in probes if each.covers is None or each.covers(*tensors[: 1 + len(node.src)])]
    return bool(about) and all(holds(each.name) for each in about)


def promises(ops: Collection[str] | None = None) -> list[Promise]:
    """Returns the promises for these ops, or for all that the device and the bound ggml have, on this machine."""
    wanted = {*OWN} & {*(OWN if ops is None else ops)} & lib.ggml().op_names
    chosen = {name: probe for name, probe in _probes().items() if probe.op in wanted}
    rules, held = Rules(), {name: holds(name) for name in chosen}
    found = [Promise(op, "", *_unmeasured(op, rules)) for op in wanted - {probe.op for probe in chosen.values()}]
    found += [Promise(probe.op, probe.of, held[name], _why(probe, held[name], rules)) for name, probe in chosen.items()]
    return sorted(found, key=lambda each: (each.op, each.of))


def _unmeasured(op: str, rules: Rules) -> tuple[bool, str]:
    words = rules.describe(op, "f32")
    return (True, _FIXED) if words == "same bytes" else (False, words)


def _why(probe: _OpProbe, holds: bool, rules: Rules) -> str:
    if holds:
        return _FIXED if probe.fixed else "measured: this ggml computes the same"
    return f"{rules.describe(probe.op, type_of(next(probe.nodes())))}: this ggml adds or rounds otherwise"
