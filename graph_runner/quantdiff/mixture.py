"""A type for each tensor: chosen for a size, by what tensors were found to cost."""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graph_runner.base.errors import BadInputError
from graph_runner.quantdiff.files import ModelFile, Weights
from graph_runner.quantdiff.result import Cost, Quantisation, Tensor
from graph_runner.quantdiff.weights import squared_error
from quant import codec, type_names

TYPES = ("q3_K", "q4_0", "q4_1", "q4_K", "q5_0", "q5_1", "q5_K", "q6_K", "q8_0")
"""Types that are chosen from if none are given."""
_WITHOUT_ENCODER = ("q8_1", "q8_K")  # of activations: no file has them
_LEAST = 0.1  # of what is expected of a tensor: the least that it is taken to cost


@dataclass(frozen=True)
class Choice:
    """A type for a tensor, its size in bytes, and the KL divergence that it is expected to cost, in nats."""

    type: str
    bytes: int
    cost: float


def checked_types(names: Iterable[str]) -> tuple[str, ...]:
    """Returns types by ggml's spelling, each once. Raises BadInputError for one that weights cannot be made of without
    an importance matrix."""
    quantised = [each for each in type_names() if codec(each).is_quantized and each not in _WITHOUT_ENCODER]
    known = ["f16", "bf16", *(each for each in quantised if not each.startswith(("iq1", "iq2")))]
    for name in names:
        if name.lower() not in map(str.lower, known):
            raise BadInputError(f"--types {name!r}: must be among {' '.join(known)}")
    return tuple(dict.fromkeys(codec(name).name for name in names))


def expected_costs(
    tensors: Sequence[Tensor], layers: Mapping[int, Cost], kinds: Mapping[str, Cost]
) -> dict[str, float]:
    """Returns what each tensor is expected to cost in its type of the small model, in nats.

    A tensor's cost goes by its squared error, by its kind and by its layer, which are measured over many tensors. If it
    was measured itself, that counts as much as its own error allows.
    """
    squared = sum(each.error.squared for each in tensors)
    total = max(sum(each.gain.value for each in kinds.values()), 1e-12)
    of_kind = {kind: sum(t.error.squared for t in tensors if t.kind == kind) for kind in kinds}
    of_layer = {layer: sum(t.error.squared for t in tensors if t.layer == layer) for layer in layers}
    in_kinds = {
        kind: max(cost.gain.value, _LEAST * total * of_kind[kind] / squared) / of_kind[kind]
        for kind, cost in kinds.items()
        if of_kind[kind]
    }
    found = {}
    for layer in layers:  # what its tensors would cost if layers were alike
        alike = sum(in_kinds[t.kind] * t.error.squared for t in tensors if t.layer == layer and t.kind in in_kinds)
        found[layer] = max(layers[layer].gain.value, _LEAST * alike) / alike if alike and of_layer[layer] else 1.0
    return {each.name: _expected(each, in_kinds.get(each.kind, 0.0), found) for each in tensors}


def costliest(found: Quantisation, count: int) -> list[Tensor]:
    """Returns the tensors whose cost is known that are expected to cost most, whatever their size."""
    expected = expected_costs(found.tensors, found.layers, found.kinds)
    known = [each for each in found.tensors if each.cost is not None]
    return sorted(known, key=lambda each: expected[each.name], reverse=True)[:count]


def _expected(tensor: Tensor, in_kind: float, of_layers: Mapping[int, float]) -> float:
    prior = tensor.error.squared * in_kind * (of_layers[tensor.layer] if tensor.layer is not None else 1.0)
    if tensor.cost is None or not prior:
        return prior
    gain = tensor.cost.gain
    share = prior**2 / (prior**2 + gain.error**2)  # the prior is taken to be off by as much as itself
    return max(prior + share * (gain.value - prior), _LEAST * prior)


def choices(big: Weights, tensor: Tensor, cost: float, types: Iterable[str]) -> list[Choice]:
    """Returns the types that a tensor can have, with what each is expected to cost: as much more or less as its squared
    error is more or less."""
    fitting = [type for type in types if big.ne[0] % codec(type).block_size == 0]
    rate = cost / tensor.error.squared if tensor.error.squared else 0.0
    return [
        Choice(
            type,
            big.n_weights // codec(type).block_size * codec(type).block_bytes,
            rate * (tensor.error.squared if type == tensor.type_small else squared_error(big, type)),
        )
        for type in fitting
    ]


def chosen(of_each: Mapping[str, Sequence[Choice]], most: int) -> dict[str, Choice]:
    """Returns a choice for each tensor, of at most so many bytes in all: from the smallest on, those steps first that
    save most for each byte. If even the smallest are too large, they are returned."""
    ladders = {name: _ladder(each) for name, each in of_each.items()}
    places = dict.fromkeys(ladders, 0)
    left = most - sum(ladder[0].bytes for ladder in ladders.values())
    steps: list[tuple[float, str]] = []

    def offer(name: str) -> None:
        place, ladder = places[name], ladders[name]
        if place + 1 < len(ladder):
            heapq.heappush(steps, (_slope(ladder[place], ladder[place + 1]), name))

    for name in ladders:
        offer(name)
    while steps:
        _, name = heapq.heappop(steps)
        now, then = ladders[name][places[name] : places[name] + 2]
        if then.bytes - now.bytes <= left:
            left -= then.bytes - now.bytes
            places[name] += 1
            offer(name)
    return {name: ladder[places[name]] for name, ladder in ladders.items()}


def _ladder(of: Sequence[Choice]) -> list[Choice]:
    """Returns the choices that are worth their bytes, by size: each step saves less for a byte than the one before."""
    found: list[Choice] = []
    for each in sorted(of, key=lambda choice: (choice.bytes, choice.cost)):
        if found and each.cost >= found[-1].cost:
            continue
        while len(found) > 1 and _slope(found[-1], each) <= _slope(found[-2], found[-1]):
            found.pop()
        found.append(each)
    return found


def _slope(a: Choice, b: Choice) -> float:
    """Nats that a step adds for each byte; negative."""
    return (b.cost - a.cost) / (b.bytes - a.bytes)


def smallest_bpw(big: ModelFile, quantised: Iterable[str], types: Iterable[str]) -> float:
    """Returns the bits per weight of the whole model if each quantised tensor has the smallest type. Raises
    BadInputError for a tensor that can have none of the types."""
    n_bytes = big.n_bytes
    for name in quantised:
        each = big.tensors[name]
        sizes = [c.block_bytes / c.block_size for c in map(codec, types) if each.ne[0] % c.block_size == 0]
        if not sizes:
            given = " ".join(types)
            raise BadInputError(f"--types {given!r}: tensor {name!r} has rows of {each.ne[0]} weights, and fits none")
        n_bytes += int(each.n_weights * min(sizes)) - each.data.nbytes
    return 8 * n_bytes / big.n_weights


def quantize_command(big: ModelFile, types: Mapping[str, str]) -> str:
    """Returns the llama-quantize command that makes a model with these types. Patterns are those of std::regex: a list
    of layers for each kind and type."""
    layers: dict[tuple[str, str], list[int | None]] = defaultdict(list)
    for name, type in types.items():
        layers[big.tensors[name].kind, type].append(big.tensors[name].layer)
    words = [f"--tensor-type '{_pattern(kind, of)}={type.lower()}'" for (kind, type), of in layers.items()]
    quantised = Counter(type for type in types.values() if codec(type).is_quantized)
    usual = quantised.most_common(1)[0][0].upper() if quantised else "Q8_0"
    return " \\\n  ".join(["llama-quantize", *words, f"big.gguf mixed.gguf {usual}"])


def _pattern(kind: str, layers: Sequence[int | None]) -> str:
    named = re.escape(kind)
    numbers = [str(each) for each in layers if each is not None]
    return rf"^blk\.({'|'.join(numbers)})\.{named}$" if numbers else f"^{named}$"
