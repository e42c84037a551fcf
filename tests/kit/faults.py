"""The corpus of faults: each is a kernel in tests/faults, beside what is known of it without a diff."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from kit.diffs import FLASH_OFF, planted
from kit.nodes import src

from ggml_backend_npu import Node, default_backend
from ggml_backend_npu.backend.fusion import Fused, Fusion, Span
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import Call, Op, op
from graph_runner.run.session import Settings

FOLDER = Path(__file__).parents[1] / "faults"

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


@dataclass(frozen=True)
class Fault:
    """A kernel with one fault.

    op        of the first node that comes out wrong
    kernel    computes such a node; of a fused operator: called with its nodes after each call of it
    kind      "isolated": it shows when the node is computed by itself, from right sources
              "sources": it changes what it reads
              "runs": it shows in a run of several nodes: by where tensors lie, by what was computed before, by chance
              "live": it writes into a tensor that is alive in the device's own run
              "fused": an operator's call is wrong, and its nodes one by one are right
              "packed": it is right if tensors are blocks, and wrong if the device has packed them
              "strays": it writes beside its output; that may end the process
              "ends": it ends the process, or never returns
              "late": it writes after it has returned
              "right": it is right, but for rounding
    at        whether a node of that op can be the first one
    step      in which it is, at the earliest
    says      part of the diagnosis; None: any that is true, or none
    never     what is not true of it
    repeat    how often a replay has to run the node until it shows
    scattered  whether it shows at any of these nodes, since that depends on how often the kernel is called
    fused     name of the operator whose call is at fault; the node is the last one of its pattern
    rounded   whether it is to be found after rounding too, with the "right" kernel beside it
    remembers  whether a call gives what one before it was to give: after rounding, that of the isolated run may be it
    alone     whether a replay of that one node can show it
    failure   words for how the process ends, of which one is in the failure
    ops       what it registers
    """

    op: str
    kernel: Callable[..., None]
    ops: tuple[Op, ...]
    kind: str = "isolated"
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

    def __str__(self) -> str:
        return self.kernel.__name__

    @property
    def path(self) -> Path:
        """The file that its kernel stands in."""
        return Path(self.kernel.__code__.co_filename)

    def compiled(self, prepare: Callable[..., Call | None]) -> Callable[..., Call | None]:
        """Decorator: as that of an op."""
        return self.ops[0].compiled(prepare)

    def written(self, folder: Path) -> Path:
        """A file of this kernel alone, as `--kernels` takes it in any process."""
        file = folder / f"{self}.py"
        file.write_text(
            f"import sys\n\nsys.path.append({str(FOLDER.parent)!r})\n"
            f"from kit.faults import load\n\nload({self.path.stem!r}, {str(self)!r})\n"
        )
        return file

    def register(self) -> None:
        """Registers its ops, as a file of kernels does."""
        for each in self.ops:
            op(each.name, types=each.types, refuse=each.refuse, params=each.params, prepare=each.prepare)(each.define)
        if self.fused:
            backend = default_backend()
            backend.fusions = [self._spoilt(each) for each in backend.fusions]

    def _spoilt(self, fusion: Fusion) -> Fusion:
        if (fusion.name, fusion.op_names[-1]) != (self.fused, self.op):
            return fusion

        def match(span: Span) -> Fused | None:
            found = fusion.match(span)
            if found is None:
                return None

            def call() -> None:
                found.call()
                self.kernel(span.nodes)

            return replace(found, call=call)

        return replace(fusion, match=match)


def fault(op: str, kind: str = "isolated", beside: tuple[Op, ...] = (), **known: Any) -> Callable[..., Fault]:
    """Decorator: makes a function the kernel of a fault. Types, refusals and params are those of the project's own op;
    `known` is the rest of `Fault`; ops `beside` are registered too."""
    return lambda kernel: Fault(op, kernel, (planted(op, kernel), *beside), kind, **known)


def spoils(operator: str, op: str, **known: Any) -> Callable[..., Fault]:
    """Decorator: makes a function, which gets nodes, what an operator that ends with `op` does after its call."""
    sqr = planted("SQR", OWN["SQR"].define)  # a file of kernels registers one
    return lambda kernel: Fault(op, kernel, (sqr,), "fused", fused=operator, options=ALL, **known)


def family(name: str) -> dict[str, Fault]:
    """The faults of a file, which is run anew: calls are counted, and results kept, from now on."""
    found = runpy.run_path(str(FOLDER / f"{name}.py"))
    return {name: each for name, each in found.items() if isinstance(each, Fault)}


def load(name: str, fault: str) -> None:
    """Registers a fault of a family, as it is before its first call."""
    family(name)[fault].register()


@cache
def corpus() -> dict[str, Fault]:
    """Every fault, by name."""
    return {name: each for file in sorted(FOLDER.glob("*.py")) for name, each in family(file.stem).items()}


def of(*kinds: str) -> list[Fault]:
    """All faults of these kinds."""
    return [each for kind in kinds for each in corpus().values() if each.kind == kind]
