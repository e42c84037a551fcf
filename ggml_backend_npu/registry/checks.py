"""What is known of an op besides its kernels: which results are right, what it is measured on, how kernels get it
wrong, what it costs, and which of ggml's functions and test cases belong to it. No kernel needs any of this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Node, Tensor

Types = tuple[str, ...]  # of dst and of the sources
Exact = NDArray[np.float64]
Formula = Callable[..., Exact | None]
FormulaT = TypeVar("FormulaT", bound=Formula)
Make = Callable[["np.random.Generator", Types], Node]  # quoted: numpy.random is loaded when it is used


@dataclass(frozen=True)
class Probe:
    """Nodes that a promise is measured on.

    of     which of the op's nodes they are, if not all
    makes  functions that make them
    types  of dst and of the sources
    fixed  whether ggml's source, as written for x86-64 with AVX2 and with AVX-512, determines every bit
    fused  whether it still does if a compiler makes one step of a product and its sum
    covers which of the op's nodes they speak for, if not all; called as the kernel is, with dst and without params
    """

    of: str
    makes: tuple[Make, ...]
    types: Types = ("f32",) * 8
    fixed: bool = False
    fused: bool = False
    covers: Callable[..., bool] | None = None


@dataclass(frozen=True)
class Mistake:
    """Something that a kernel may do wrong.

    text     what it does, as a sentence about the op: "ignores nb[2] of src0: with 256 in place of 512"
    node     the altered node. Its dst may have another ne, nb and offset than the original's
    compute  what fills dst in place of the op's definition
    unknown  rows of dst that this says nothing about, (ne3, ne2, ne1)
    """

    text: str
    node: Node
    compute: Callable[[Tensor], None] | None = None
    unknown: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Sums:
    """The rows of a result, each a sum of n terms.

    terms    the weights (n,) and the values (n, ne0) of the row at i3, i2, i1: their product is the row
    is_mean  whether the weights are shares of 1: if some are left out, the others grow
    text     what is left out, with {} for which
    """

    n: int
    terms: Callable[[tuple[int, int, int]], tuple[Exact, Exact]]
    is_mean: bool
    text: str


@dataclass(frozen=True)
class Cost:
    """What a node asks of a device.

    operations  multiplications and additions of a matrix product, or elements
    matrix      the type of the matrix whose rows are multiplied; None if there is none
    touched     the share of a tensor's bytes that is read or written, if that is not all: 0 is dst, 1 the first
                source
    """

    operations: float
    matrix: str | None = None
    touched: Mapping[int, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Checks:
    """What is known of an op; the decorators below add the rest.

    bound      the normalised mean squared error that rounding may cause (`graph_runner.judging.rules`), by the type of
               the first source, "*" for any other; without one the bytes have to be equal
    bound_by   the source whose type selects the bound, if that is not the first
    judged_by  the source whose ne0 says how many elements of a result are judged together, if that is not dst's
    wide       whether the definition computes in the type of its sources: on float64 it is the formula
    products   whether dst is sums of products with a factor from each source
    weights    whether the first source is weights: rows that are multiplied with those of the second
    moved      whether integer sources are rounded on the way too
    keeps      whether a part of dst keeps its old bytes
    roles      what sources are for, by name: {"mask": "the mask"}
    built_by   ggml's functions that make or change such a node, and what they take: c context, t tensor, i int, l
               int64_t, z size_t, u uint32_t, f float, b bool, p int *, q int64_t *. Default: ggml_<name> of all sources
               and parameters
    """

    bound: Mapping[str, float] = field(default_factory=dict)
    bound_by: str | None = None
    judged_by: str | None = None
    wide: bool = False
    products: bool = False
    weights: bool = False
    moved: bool = False
    keeps: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    built_by: Mapping[str, str] = field(default_factory=dict)
    exact: Formula | None = field(default=None, init=False)
    size: Formula | None = field(default=None, init=False)
    largest: Formula | None = field(default=None, init=False)
    added_up: Callable[..., Sums | None] | None = field(default=None, init=False)
    order: tuple[Callable[..., bool], str] | None = field(default=None, init=False)
    makes: tuple[Make, ...] = field(default=(), init=False)
    measured: Callable[[], Iterable[Probe]] | None = field(default=None, init=False)
    mistaken: Callable[..., Iterator[Mistake]] | None = field(default=None, init=False)
    nearest: Callable[..., list[str]] | None = field(default=None, init=False)
    cost: Callable[..., Cost] | None = field(default=None, init=False)
    unset: Callable[..., NDArray[np.bool_]] | None = field(default=None, init=False)

    @property
    def has_formula(self) -> bool:
        """Whether the exact value of a result can be computed: by `formula`, or because the definition is `wide`."""
        return self.wide or self.exact is not None

    def formula(self, formula: FormulaT) -> FormulaT:
        """Decorator: the exact value. It is called as the kernel is, without dst; it returns float64 (ne3, ne2, ne1,
        ne0), or None for a node that is not as ggml makes them."""
        self.exact = formula
        return formula

    def terms(self, formula: FormulaT) -> FormulaT:
        """Decorator: how large the numbers are that are rounded on the way to each element. It is for ops where moving
        the sources does not show this: sums, and functions that end with a difference. It is called as `formula` is."""
        self.size = formula
        return formula

    def on_the_way(self, formula: FormulaT) -> FormulaT:
        """Decorator: how large a sum on the way to each element may become, for an op whose sums are not those of
        `products` or `weights`: if float32 cannot hold it, the order of terms decides. It is called as `formula` is."""
        self.largest = formula
        return formula

    def sums(self, added_up: Callable[..., Sums | None]) -> Callable[..., Sums | None]:
        """Decorator: what the rows of a result are sums of, a part of which may get lost; None for a node that is too
        large. It is called as `formula` is."""
        self.added_up = added_up
        return added_up

    def rule(self, words: str) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
        """Decorator: whether a result is right, for an op that has more than one right result. It is called as the
        kernel is; `words` say when a result is right."""

        def register(is_right: Callable[..., bool]) -> Callable[..., bool]:
            self.order = (is_right, words)
            return is_right

        return register

    def nodes(self, *makes: Make) -> Make:
        """Small nodes of the op, of any types: rules are tested with them, and promises are measured on them. It is a
        decorator if it gets one function."""
        self.makes = makes
        return makes[0]

    def probes(self, measured: Callable[[], Iterable[Probe]]) -> Callable[[], Iterable[Probe]]:
        """Decorator: the nodes used to measure byte equality. Default: the op's `nodes`, in f32."""
        self.measured = measured
        return measured

    def mistakes(self, mistaken: Callable[..., Iterator[Mistake]]) -> Callable[..., Iterator[Mistake]]:
        """Decorator: mistakes that kernels of this op make, besides those that any kernel may make. It is called with
        the node, then with its sources as the kernel gets them."""
        self.mistaken = mistaken
        return mistaken

    def cases(self, nearest: Callable[..., list[str]]) -> Callable[..., list[str]]:
        """Decorator: regular expressions that match the parameters of the cases of test-backend-ops nearest to a node,
        in the order of these parameters (`registry.cases`). It is called as the kernel is."""
        self.nearest = nearest
        return nearest

    def undefined(self, unset: Callable[..., NDArray[np.bool_]]) -> Callable[..., NDArray[np.bool_]]:
        """Decorator: which elements or blocks of dst ggml leaves undefined, (ne3, ne2, ne1, ne0); empty if it leaves
        none. It is called as the kernel is, with dst."""
        self.unset = unset
        return unset

    def costs(self, cost: Callable[..., Cost]) -> Callable[..., Cost]:
        """Decorator: what a node asks of a device, if that is not one operation per element. It is called as the
        kernel is."""
        self.cost = cost
        return cost
