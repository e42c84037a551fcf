"""Device generations: which nodes each takes, of those that the backend has a kernel for.

A generation is one `Profile`, declared in `generations` or in a TOML file of the user's own.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

from ggml_backend_npu.ir import PARAMS_BYTES, Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.profiles.clock import Clock
from ggml_backend_npu.registry.params import Params
from quant import type_names
from quant.errors import UserError

Types = tuple[str, ...]

ROLES = ("dst", *(f"src{i}" for i in range(10)))

_NUMBER = r"(?:dst|src\d)\.n[eb][0-3]|params\.(?:\d|1[0-5]|[A-Za-z_]\w*)|-?\d+"
_SIDE = rf"({_NUMBER})(?: ([*%]) ({_NUMBER}))?"
_NUMBERS = re.compile(rf"{_SIDE} (==|!=|<=|>=|<|>) {_SIDE}")
_PARAMETERS = re.compile(r"\bparams\.([A-Za-z_]\w*)")
_TYPES = re.compile(r"((?:dst|src\d)\.type) (==|!=) (\w+(?:\.type)?)")
_CONDITIONS = 'such as "src0.ne0 % 16 == 0", "src0.ne0 <= 896", "params.n_dims == 64" or "dst.type == src0.type"'
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
    "*": operator.mul, "%": lambda a, b: a % b if b else a,
}  # fmt: skip


class ProfileError(UserError):
    """A profile that cannot be used: one line. `word` is what is wrong in it."""

    def __init__(self, message: str, word: str = "") -> None:
        super().__init__(message)
        self.word = word


def one_of(what: str, word: str, known: Collection[str]) -> None:
    """Raises ProfileError for a word that is not known. The message lists the known words; of more than 50, those that
    are like it, if there are any."""
    if word not in known:
        like = get_close_matches(word, known) if len(known) > 50 else []
        hint = f"did you mean {' or '.join(like)}?" if like else f"known: {' '.join(known)}"
        raise ProfileError(f"unknown {what} {word!r}; {hint}", word)


def _tensor(node: Node, role: str) -> Tensor | None:
    if role == "dst":
        return node.dst
    at = int(role[3:])
    return node.src[at] if at < len(node.src) else None


def _record(op: str) -> type[Params] | None:
    """The backend's record of an op's parameters, even where a user has replaced the kernel."""
    return OWN[op].params if op in OWN else None


def _number(operand: str, node: Node) -> int | float:
    role, _, what = operand.partition(".")
    if not what:
        return int(operand)
    if role == "params":
        return _parameter(what, node)
    tensor = _tensor(node, role)
    return 0 if tensor is None else (tensor.ne if what.startswith("ne") else tensor.nb)[int(what[2])]


def _parameter(what: str, node: Node) -> int | float:
    """A parameter, by its name, or by the number of its 4-byte word, which is read as an integer."""
    if what.isdigit():
        return int.from_bytes(node.params.ljust(PARAMS_BYTES, b"\0")[4 * int(what) :][:4], "little", signed=True)
    record = _record(node.op)
    assert record is not None
    value: int | float = getattr(record.of(node.params), what)
    return value


def _type(operand: str, node: Node) -> str:
    role, _, what = operand.partition(".")
    if not what:
        return operand
    tensor = _tensor(node, role)
    return "none" if tensor is None else tensor.type


class _Condition(NamedTuple):
    """A condition, read: `left relation right`, each a type, or a number or two with an operator between them."""

    text: str
    left: tuple[str, ...]
    relation: str
    right: tuple[str, ...]
    is_of_types: bool

    def unmet(self, node: Node) -> str | None:
        """Why the node does not meet the condition, with its own value; None if it meets it."""
        value = _type if self.is_of_types else _number
        left, right = (_value(side, node, value) for side in (self.left, self.right))
        met = _OPERATORS[self.relation](left, right)
        return None if met else f"needs {self.text}, {self.left[0]} is {value(self.left[0], node)}"


def _value(side: tuple[str, ...], node: Node, value: Callable[[str, Node], Any]) -> Any:
    if len(side) == 1:
        return value(side[0], node)
    a, by, b = side
    return _OPERATORS[by](value(a, node), value(b, node))


def _condition(text: str) -> _Condition:
    """Reads a condition. Raises ProfileError."""
    if types := _TYPES.fullmatch(text):
        left, relation, right = types.groups()
        if "." not in right:
            one_of("type", right, (*type_names(), "none"))
        return _Condition(text, (left,), relation, (right,), True)
    numbers = _NUMBERS.fullmatch(text)
    if numbers is None:
        raise ProfileError(f"condition {text!r}: must be {_CONDITIONS}", text)
    first, relation, second = numbers.groups()[:3], numbers[4], numbers.groups()[4:]
    if any(by == "%" and re.fullmatch(r"-?0+", b) for _, by, b in (first, second)):
        raise ProfileError(f"condition {text!r}: divides by 0", text)
    left, right = (tuple(part for part in side if part is not None) for side in (first, second))
    return _Condition(text, left, relation, right, False)


@dataclass(frozen=True)
class Rule:
    """One form in which a device takes an op. Tensors are named by role: "dst", "src0", "src1", ...

    types       types that a tensor may have, by role; a role that is left out may have any
    contiguous  roles whose tensors must be contiguous
    rows        roles whose rows must have no gaps between elements
    where       further conditions on types, ne, nb and op_params: "src0.ne0 <= 896"; "params.n_dims == 64", or
                "params.1 == 64" by the number of its word, an integer. A source that a node leaves out has the type
                "none"

    Raises ProfileError for a role, type or condition that does not exist.
    """

    types: Mapping[str, Types] = field(default_factory=dict)
    contiguous: Types = ()
    rows: Types = ()
    where: Types = ()
    _conditions: tuple[_Condition, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = type_names()
        for role in (*self.types, *self.contiguous, *self.rows):
            one_of("tensor", role, ROLES)
        for name in (name for names in self.types.values() for name in names):
            one_of("type", name, known)
        object.__setattr__(self, "_conditions", tuple(map(_condition, self.where)))

    def check_parameters(self, op: str) -> None:
        """Raises ProfileError where a condition names a parameter that the op does not have."""
        for condition in self.where:
            for name in _PARAMETERS.findall(condition):
                record = _record(op)
                one_of(
                    f"parameter of {op}",
                    name,
                    [str(i) for i in range(PARAMS_BYTES // 4)] if record is None else record.names(),
                )

    def has_types(self, node: Node) -> bool:
        """Whether the node's tensors have the types of this rule."""
        tensors = {role: _tensor(node, role) for role in self.types}
        return all(tensor is not None and tensor.type in self.types[role] for role, tensor in tensors.items())

    def refusal(self, node: Node) -> str | None:
        """Why a node of these types is not taken; None where it is."""
        for role in self.contiguous:
            tensor = _tensor(node, role)
            if tensor is not None and not tensor.is_contiguous():
                return f"{role} is not contiguous: nb {tensor.nb}"
        for role in self.rows:
            tensor = _tensor(node, role)
            if tensor is not None and not tensor.has_contiguous_rows():
                return f"{role} rows have gaps: nb0 {tensor.nb[0]}"
        return next((unmet for condition in self._conditions if (unmet := condition.unmet(node))), None)


ANY = (Rule(),)


@dataclass(frozen=True)
class Profile:
    """A device generation.

    ops     the ops that it takes, each in any of the forms of its rules; None: all ops in any form
    source  where this is known from
    clock   how fast it is, and how fast the host's CPU beside it is; None where nobody has said

    Raises ProfileError for a rule with a parameter that its op does not have.
    """

    name: str
    description: str
    source: str
    ops: Mapping[str, tuple[Rule, ...]] | None
    clock: tuple[Clock, Clock] | None = None

    def __post_init__(self) -> None:
        for op, rules in (self.ops or {}).items():
            for rule in rules:
                rule.check_parameters(op)

    def refusal(self, node: Node) -> str | None:
        """Why the generation does not take the node, in a few words; None where it does."""
        if self.ops is None:
            return None
        reason = _refusal(self.ops.get(node.op, ()), node)
        return None if reason is None else f"profile {self.name}: {reason}"


def _refusal(rules: tuple[Rule, ...], node: Node) -> str | None:
    if not rules:
        return f"no {node.op}"
    fitting = [rule for rule in rules if rule.has_types(node)]
    if not fitting:
        return f"types {' '.join(t.type for t in node.src if t is not None)} -> {node.dst.type}"
    reasons = [rule.refusal(node) for rule in fitting]
    return None if None in reasons else reasons[0]


FULL = Profile("full", "whatever the backend has a kernel for", "the registry", None)
