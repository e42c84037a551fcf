"""An op of the backend. One decorated function is one op: the same entry says what is supported, and runs it."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from types import NoneType
from typing import Any, get_args, get_type_hints

from ggml_backend_npu.ggml.numerics import PLAIN, Numerics
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.registry.calls import KernelError as KernelError
from ggml_backend_npu.registry.calls import UserCode, said_by
from ggml_backend_npu.registry.checks import Checks, Types
from ggml_backend_npu.registry.params import Params
from quant import codec, type_names
from quant.kernels.jit import engine

Call = Callable[[], None]


@dataclass
class Op(Checks):
    """One op of the backend, with what else is known of it (`Checks`).

    name     ggml's name of it, as in `Node.op`
    define   the kernel: it fills dst from its sources. It is called with dst, with as many sources as it names, and
             with `params` and `numerics` (the backend's arithmetic) if it names these keywords
    types    the type combinations that it takes, (dst, src0, src1, ...); None: any
    refuse   gives a reason why a node of these types is not taken, or None
    default  for the backend's own ops: whether the device takes it when it does not take all ops
    prepare  for ops with a compiled kernel: called as `define`, it returns the bound call, or None if this node has
             no compiled kernel
    params   the record of its op_params, which define, refuse and prepare get as `params`; None: they get the bytes

    Raises TypeError for a kernel without dst, and for types of different lengths, of more sources than the kernel
    names, or of unknown names.
    """

    name: str
    define: Callable[..., None]
    types: frozenset[Types] | None = None
    refuse: Callable[..., str | None] | None = None
    default: bool = False
    prepare: Callable[..., Call | None] | None = None
    params: type[Params] | None = None
    sources: tuple[str, ...] = field(init=False)
    wants_params: bool = field(init=False)
    wants_numerics: bool = field(init=False)

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.define).parameters
        tensors = tuple(name for name in parameters if name not in ("params", "numerics"))
        if not tensors:
            raise TypeError(f"kernel {self.define.__name__} of op {self.name}: takes no dst")
        self.sources = tensors[1:]
        self.wants_params, self.wants_numerics = "params" in parameters, "numerics" in parameters
        if self.types is not None:
            for types in self.types:
                if not all(isinstance(name, str) for name in types):
                    raise TypeError(
                        f"op {self.name}: types {types!r}: must be names of types; a source that nodes may leave out "
                        "has none: its kernel takes it as `Tensor | None`"
                    )
            if len({len(types) for types in self.types}) != 1:
                raise TypeError(f"op {self.name}: types must be combinations of one length, got {sorted(self.types)}")
            combination = min(self.types)
            if len(combination) > 1 + self.n_src:
                raise TypeError(
                    f"op {self.name}: types {combination} name {len(combination) - 1} sources, "
                    f"{self.define.__name__} takes {self.n_src}"
                )
            unknown = sorted({name for types in self.types for name in types} - set(type_names()))
            if unknown:
                raise TypeError(f"op {self.name}: unknown type {unknown[0]!r}; known: {' '.join(type_names())}")

    @property
    def n_src(self) -> int:
        """How many sources the kernel reads."""
        return len(self.sources)

    @cached_property
    def n_required(self) -> int:
        """How many of them a node must have: those before the first that the kernel takes as `Tensor | None`."""
        hints = get_type_hints(self.define)
        return len([*takewhile(lambda name: NoneType not in get_args(hints.get(name)), self.sources)])

    @property
    def takes_blocks(self) -> bool:
        """Whether a source may be quantised."""
        return any(codec(name).is_quantized for types in self.types or () for name in types[1:])

    @property
    def functions(self) -> Mapping[str, str]:
        """ggml's functions that make or change such a node, as `built_by` says."""
        kinds = "" if self.params is None else self.params.kinds()
        return self.built_by or {f"ggml_{self.name.lower()}": f"c{'t' * self.n_src}{kinds}"}

    def compiled(self, prepare: Callable[..., Call | None]) -> Callable[..., Call | None]:
        """Decorator: sets `prepare`, whose compiled kernel stands beside the definition and equals it byte for byte."""
        self.prepare = prepare
        return prepare

    def signatures(self) -> list[tuple[str, str]]:
        """The types that it takes, to be read by people: pairs (sources, outputs), where "same" is an output of the
        first source's type."""
        if self.types is None:
            return [("any", "any")]
        outputs: dict[Types, set[str]] = defaultdict(set)
        for dst, *rest in self.types:
            outputs[tuple(rest)].add("same" if [dst] == rest else dst)
        groups: dict[tuple[str, ...], dict[Types, list[str]]] = defaultdict(lambda: defaultdict(list))
        for sources, found in sorted(outputs.items()):
            groups[tuple(sorted(found))][sources[1:]].append(sources[0] if sources else "none")
        return [
            (" + ".join([" ".join(first), *others]), " ".join(found))
            for found, by_others in groups.items()
            for others, first in by_others.items()
        ]

    def keywords(self, node: Node, numerics: Numerics = PLAIN) -> dict[str, Any]:
        """What the kernel gets besides tensors: the node's `params`, and `numerics`, if it names them."""
        return self._params(node) | ({"numerics": numerics} if self.wants_numerics else {})

    def _params(self, node: Node) -> dict[str, Any]:
        if not self.wants_params:
            return {}
        return {"params": node.params if self.params is None else self.params.of(node.params)}

    def arguments(self, node: Node) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """What the functions of `Checks` are called with: dst and as many sources as the kernel names; and `params`,
        if it names them."""
        return self._tensors(node), self._params(node)

    def _tensors(self, node: Node) -> tuple[Tensor | None, ...]:
        return node.dst, *(*node.src, *(None,) * self.n_src)[: self.n_src]

    def lacks_sources(self, node: Node) -> bool:
        """Whether the node leaves out a source that the kernel needs."""
        return len(node.src) < self.n_required or None in node.src[: self.n_required]

    def refusal(self, node: Node) -> str | None:
        """Why the op does not take the node, in a few words; None if it does. Raises KernelError if `refuse`
        fails."""
        if self.types is not None:
            length = len(next(iter(self.types)))
            dst, *sources = present = tuple(t.type for t in (node.dst, *node.src) if t is not None)[:length]
            if present not in self.types:
                return f"types {' '.join(sources)} -> {dst}"
        if self.refuse is None:
            return None
        try:
            with UserCode():
                reason = self.refuse(*self._tensors(node), **self._params(node))
        except Exception as error:
            raise KernelError(f"{node}: refuse: {said_by(error)}") from error
        if reason is not None and not isinstance(reason, str):
            raise KernelError(f"{node}: refuse: must give a reason or None, and gave {reason!r}")
        return reason

    def bind(self, node: Node, numerics: Numerics = PLAIN) -> Call:
        """The call that computes the node, as often as it is wanted: the compiled kernel if there is one, else the
        definition."""
        arguments, keywords = self._tensors(node), self.keywords(node, numerics)
        if self.prepare is not None and engine() == "compiled":
            call = self.prepare(*arguments, **keywords)
            if call is not None:
                return call
        if any(tensor is not None and tensor.packed is not None for tensor in arguments):
            return lambda: self._define_unpacked(arguments, keywords)
        return lambda: self._define(arguments, keywords)

    def _define(self, tensors: Iterable[Tensor | None], keywords: dict[str, Any]) -> None:
        kernel: Callable[..., object] = self.define  # a user's may return anything
        with UserCode():
            returned = kernel(*tensors, **keywords)
        if returned is not None:
            raise KernelError(
                f"returned {type(returned).__name__}; a kernel returns nothing and writes into dst.view()"
            )

    def _define_unpacked(self, tensors: tuple[Tensor | None, ...], keywords: dict[str, Any]) -> None:
        unpacked = [tensor.unpacked() if tensor is not None else None for tensor in tensors]
        self._define(unpacked, keywords)
        if tensors[0] is not None and unpacked[0] is not None:
            tensors[0].take(unpacked[0])


_recorded: ContextVar[list[Op] | None] = ContextVar("the ops of the file that is being loaded", default=None)


@contextmanager
def recording() -> Iterator[list[Op]]:
    """Collects the ops that `op` makes until the context ends, even two of the same name: those of a file, while it is
    loaded."""
    found: list[Op] = []
    before = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(before)


def is_recorded() -> bool:
    """Whether a `recording` is under way."""
    return _recorded.get() is not None


def op(
    name: str,
    *,
    types: Iterable[Types] | None = None,
    refuse: Callable[..., str | None] | None = None,
    default: bool = False,
    params: type[Params] | None = None,
    bound: float | Mapping[str, float] = 0.0,
    **checks: Any,
) -> Callable[[Callable[..., None]], Op]:
    """Decorator: makes a function a kernel of the ggml op `name`.

        @op("SQR", types=[("f32", "f32")])
        def sqr(dst, x):
            dst.view()[...] = x.view() ** 2

    name     ggml_op_desc of the nodes that it computes ("GET_ROWS", "SOFT_MAX", "SILU", ...)
    types    the type combinations (dst, src0, src1, ...) that it takes; default: any
    refuse   called like the kernel: returns a reason why such a node is not taken, or None
    params   the record of the node's op_params (`ggml_backend_npu.registry.params`)
    bound    for the backend's own ops: how far off rounding may be, for all types or by type; 0 for the same bytes
    checks   what else is known of it: the arguments of `Checks`
    default  for the backend's own ops: whether the device takes it without GGML_NPU_OPS=all. In any case it takes a
             node whose output is part of a tensor in the device's memory, and every op that a user registers

    The kernel gets `Tensor`s, reads its sources with `.view()` and writes into `dst.view()`. A source that a node
    leaves out is None. A keyword `params` gets the node's op_params, as the record, or as bytes if no record is
    given. A keyword `numerics` gets the backend's arithmetic, for a kernel that runs one of ours. An exception in the
    kernel fails the node, not the process.

    Raises TypeError if `name` is not a string or `types` no list of tuples, and if `Op` does.
    """

    if not isinstance(name, str):
        raise TypeError(f'@op of {getattr(name, "__name__", name)!r}: needs the op\'s name: @op("SQR")')

    combinations = None if types is None else [*types]
    if not all(isinstance(each, tuple) for each in combinations or ()):
        raise TypeError(f'op {name}: types {types!r}: must be a list of tuples, such as [("f32", "f32")]')

    def made(define: Callable[..., None]) -> Op:
        bounds = bound if isinstance(bound, Mapping) else {"*": bound} if bound else {}
        taken = None if combinations is None else frozenset(combinations)
        entry = Op(name, define, taken, refuse, default, params=params, bound=bounds, **checks)
        recorded = _recorded.get()
        if recorded is not None:
            recorded.append(entry)
        return entry

    return made
