"""Graphs as JSON: what any program can write that knows its nodes, their order and their addresses."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ggml_backend_npu import Memory, Tensor
from ggml_backend_npu.ir import Dims
from graph_runner.base.errors import BadInputError
from graph_runner.hazards.graph import Graph, Node, Operand, Step
from quant import codec, type_names

SCHEMA = "ggml-npu graphs 1"
_MOST = 1 << 62  # an address, and what is added to one


def graphs_json(graphs: Iterable[Graph]) -> dict[str, Any]:
    """Returns graphs as data for JSON. Nodes, inputs, outputs and what steps write name tensors by their numbers."""
    return {"schema": SCHEMA, "graphs": [_Writer(graph).data for graph in graphs]}


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self._tensors: list[dict[str, Any]] = []
        self._numbers: dict[Operand, int] = {}
        nodes = [
            {
                "op": node.op, "name": node.name, "reads": self._of(node.reads), "writes": self._of(node.writes),
                "in_place": node.in_place,
            }
            for node in graph.nodes
        ]  # fmt: skip
        self.data = {
            "name": graph.name, "is_as_built": graph.is_as_built, "nodes": nodes,
            "steps": [self._step(step) for step in graph.order], "inputs": self._of(graph.inputs),
            "outputs": self._of(graph.outputs), "tensors": self._tensors,
        }  # fmt: skip

    def _step(self, step: Step) -> dict[str, Any]:
        written = {str(node): self._of(each) for node, each in (step.written or {}).items()}
        return {
            "nodes": [*step.nodes], "written": None if step.written is None else written,
            "in_place": sorted(step.in_place), "group": step.group,
        }  # fmt: skip

    def _of(self, operands: Iterable[Operand]) -> list[int]:
        return [self._number(each) for each in operands]

    def _number(self, operand: Operand) -> int:
        if operand not in self._numbers:
            self._numbers[operand] = len(self._numbers)
            tensor = operand.tensor
            self._tensors.append(
                {
                    "name": tensor.name, "type": tensor.type, "ne": tensor.ne, "nb": tensor.nb,
                    "address": tensor.address, "root": operand.root, "offset": operand.offset, "space": operand.space,
                }
            )  # fmt: skip
        return self._numbers[operand]


def read_graphs(path: Path) -> list[Graph]:
    """Returns the graphs of a file that `graphs_json` describes. Raises BadInputError for any other."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInputError(f"graphs {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise BadInputError(f"graphs {str(path)!r}: is no JSON") from None
    try:
        if _get(data, "schema", str) != SCHEMA:
            raise _WrongError(f"schema: must be {SCHEMA!r}")
        return [_graph(each) for each in _get(data, "graphs", list)]
    except _WrongError as error:
        raise BadInputError(f"graphs {str(path)!r}: {error}") from None


class _WrongError(Exception):
    """What is wrong with a file."""


def _get(data: object, key: str, kind: type | tuple[type, ...], default: object = ...) -> Any:
    """Returns a value of an object. Raises _WrongError if it is missing, or of another kind."""
    if not isinstance(data, Mapping):
        raise _WrongError(f"{key}: must be in an object, not in {data!r:.40}")
    value = data.get(key, default)
    wanted = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in wanted and not (value is default and default is not ...):
        names = " or ".join("null" if each is type(None) else each.__name__ for each in wanted)
        raise _WrongError(f"{key}: {'is missing' if value is ... else f'{value!r:.40} is no {names}'}")
    return value


def _numbers(data: object, key: str, n: int) -> tuple[int, ...]:
    """Returns a list of numbers from 0 up to n."""
    values = _get(data, key, list, [])
    for each in values:
        if type(each) is not int or not 0 <= each < n:
            raise _WrongError(f"{key}: {each!r:.40} is no number from 0 to {n - 1}")
    return tuple(values)


def _graph(data: object) -> Graph:
    tensors = [_operand(each) for each in _get(data, "tensors", list)]

    def named(source: object, key: str) -> tuple[Operand, ...]:
        return tuple(tensors[number] for number in _numbers(source, key, len(tensors)))

    nodes = tuple(
        Node(
            _get(each, "op", str), _get(each, "name", str), named(each, "reads"), named(each, "writes"),
            _get(each, "in_place", bool, False),
        )
        for each in _get(data, "nodes", list)
    )  # fmt: skip
    steps = []
    for each in _get(data, "steps", list, []):
        own = _numbers(each, "nodes", len(nodes))
        written = _get(each, "written", (dict, type(None)), None)
        parts = None if written is None else {node: named(written, str(node)) for node in own if str(node) in written}
        in_place = frozenset(_numbers(each, "in_place", len(nodes)))
        steps.append(Step(own, parts, in_place, _get(each, "group", (int, type(None)), None)))
    if len(ran := [node for step in steps for node in step.nodes]) != len({*ran}):
        raise _WrongError("steps: a node is in two")
    named_inputs, named_outputs = named(data, "inputs"), named(data, "outputs")
    name, known = _get(data, "name", str, "graph"), _get(data, "is_as_built", bool, True)
    return Graph(nodes, tuple(steps), named_inputs, named_outputs, name, known)


def _operand(data: object) -> Operand:
    type, ne = _get(data, "type", str), _dims(_get(data, "ne", list))
    if type not in type_names():
        raise _WrongError(f"type: {type!r:.40} is no type of ggml")
    if ne[0] % codec(type).block_size:
        raise _WrongError(f"ne: {ne[0]} is no multiple of the blocks of {type}")
    root, address, offset, space = (_get(data, key, int, 0) for key in ("root", "address", "offset", "space"))
    if not (0 <= address < _MOST and 0 <= offset < _MOST):
        raise _WrongError("address: must be from 0 to 2^62, as offset")
    tensor = Tensor(_get(data, "name", str), type, ne, _dims(_get(data, "nb", list)), Memory(address, 0))
    if tensor.nbytes >= _MOST:
        raise _WrongError(f"nb: tensor {tensor.name!r} is larger than memory can be")
    return Operand(tensor, root, offset, space)


def _dims(values: Sequence[object]) -> Dims:
    numbers = tuple(each for each in values if type(each) is int and 0 <= each < _MOST)
    if len(values) != 4 or len(numbers) != 4:
        raise _WrongError(f"ne or nb: {values!r:.60} are no four numbers")
    a, b, c, d = numbers
    return a, b, c, d
