"""What a diff has looked at and what not, and what became of its canaries: the report's last lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ggml_backend_npu.backend.fusion import FUSIONS
from graph_runner.judging.results import NodeResult
from quant import type_names

if TYPE_CHECKING:
    from graph_runner.diff.result import DiffResult

_MOST_NAMES = 4  # named in the line


def scope_json(result: DiffResult) -> dict[str, Any]:
    """Returns the scope of a diff as data: see docs/diff.md."""
    looked_at = [node for node in result.nodes if _is_looked_at(node)]
    operators = {fusion.name for fusion in FUSIONS} & {node.op for node in looked_at}
    words = {word for node in looked_at for word in node.types.split()}
    n_after = result.steps * (1 + result.settings.draft)
    scope = {
        "sequences": result.settings.sequences,
        "tokens": result.n_prompt + n_after,
        "lengths": [n + n_after for n in result.lengths],
        "types": sorted(words & {*type_names()}),
        "fusions": sorted(operators | {node.fused for node in result.nodes if node.fused}),
        "order": _order(result),
        "unobserved": result.is_unobserved,
        "not_compared": dict(Counter(node.op for node in result.nodes if not _is_looked_at(node)).most_common()),
        "synthetic": [str(sight) for sight in result.sights if sight.is_synthetic],
        "blind": [*map(str, result.blind)],
        "tried": [asdict(sight) for sight in result.sights if sight.n_tried],
        "computed": result.n_computed,
        "counted_by": "the device" if result.counted is not None else "where results lie",
    }
    return scope | {"text": _text(scope, result)}


def scope_line(result: DiffResult) -> str:
    """Returns the scope of a diff in one line."""
    return f"scope: {scope_json(result)['text']}"


def canary_line(result: DiffResult) -> str:
    """Returns in one line what became of the canaries, and how many nodes the device computed."""
    n, device = result.n_computed, result.device
    computed = f"by its own count {device} computed {n:,} nodes"
    if result.counted is None:
        computed = f"by where results lie {device} computed {n:,} nodes, as it has no counter"
    return f"canary: {_canary(result)}; {computed}"


def canary_json(result: DiffResult) -> dict[str, Any]:
    """Returns the canaries of a diff as data."""
    found = result.canaries
    data: dict[str, Any] = {"text": _canary(result), "seed": None, "hidden": 0, "planted": []}
    if found is None:
        return data
    return data | {"seed": found.seed, "hidden": found.hidden, "planted": [asdict(each) for each in found.seen]}


def _canary(result: DiffResult) -> str:
    return "none, as the run ended early" if result.canaries is None else str(result.canaries)


def _order(result: DiffResult) -> str:
    """Returns in how many graphs of the device's own run it is known that each node reads what it was built to read."""
    if result.order_unknown:
        return f"order not checked: {result.order_unknown}"
    n, is_as_built = len(result.order), all(each.is_as_built for each in result.order)
    as_it_ran = "" if is_as_built else f" as it ran, since the graph of {result.reference} has other nodes"
    return f"order of {n} graph{'s' if n > 1 else ''} checked{as_it_ran}"


def _is_looked_at(node: NodeResult) -> bool:
    """Whether a node's result was compared, or an operator ran in its place."""
    return node.compared or node.mirrored is not None or bool(node.fused)


def _few(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


def _proposal(tokens: int) -> str:
    """Returns what shows parameters to which a run of so many tokens was blind."""
    return f" ({'a longer prompt, or ' if tokens == 1 else ''}--see, shows them)"


def _text(scope: dict[str, Any], result: DiffResult) -> str:
    not_compared = scope["not_compared"]
    n, tokens = scope["sequences"], scope["tokens"]
    least = min(scope["lengths"], default=tokens)
    lengths = f"{least:,} to {tokens:,}" if least < tokens else f"{tokens:,}"
    parts = [f"{n} sequence{'s' if n > 1 else ''} of {lengths} token{'s' if tokens != 1 else ''}"]
    parts += [f"no types but {' '.join(scope['types'])}"] if scope["types"] else []
    parts += [f"fusions {', '.join(scope['fusions'])}" if scope["fusions"] else "no fusion seen"]
    parts += [f"ends in {result.ending.of}"] if result.ending is not None and result.ending.of != "logits" else []
    parts += [scope["order"]]
    parts += [f"order of an unobserved run {'' if scope['unobserved'] else 'not '}checked"]
    parts += [f"{sum(not_compared.values()):,} nodes not compared: {_few([*not_compared])}"] if not_compared else []
    parts += [f"seen by synthetic nodes: {', '.join(scope['synthetic'])}"] if scope["synthetic"] else []
    parts += [f"blind to {_few(scope['blind'])}{'' if result.see else _proposal(tokens)}"] if scope["blind"] else []
    return "; ".join(parts)
