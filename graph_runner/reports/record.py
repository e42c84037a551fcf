"""Recorded runs, as text, as JSON and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from graph_runner.base.console import Console, table
from graph_runner.record.origins import MUCH
from graph_runner.reports.html import json_for_script, page

if TYPE_CHECKING:
    from graph_runner.record import Comparison
    from graph_runner.record.comparing import Drift
    from graph_runner.record.origins import Origins

COMPARE_SCHEMA = "ggml-npu compare 1"
_LONGEST = 60  # characters of a setting
_MOST_KINDS = 8  # that are printed of each way to differ


def print_recorded(found: dict[str, Any], path: str, console: Console) -> None:
    """Prints how large a record is."""
    nodes = f"{found['nodes']:,} results of nodes" if found["nodes"] else "the ends alone"
    each = f", {found['bytes_a_node']:.1f} bytes each" if found["nodes"] else ""
    text = f"{found['tokens']:,} tokens in {found['steps']:,} steps, {nodes}{each}; {found['bytes'] / 1e6:.1f} MB"
    console.print(f"{text}, in {path}", highlight=False, markup=False, soft_wrap=True)


def print_comparison(result: Comparison, console: Console) -> None:
    """Prints what two runs were, where they part, how they drift apart, and the verdict."""

    def say(text: str, **keywords: Any) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True, **keywords)

    if result.differing:
        shown = table("differs", result.a, result.b)
        for name, first, second in result.differing:
            shown.add_row(name, _short(first, second), _short(second, first))
        console.print(shown)
    drifting = [each for each in result.layers if each.differing]
    if drifting:
        shown = table("layer")
        for column in ("nodes", "differ", "worst NMSE"):
            shown.add_column(column, justify="right")
        shown.add_column("at")
        for drift in result.layers:
            layer = "none" if drift.layer is None else str(drift.layer)
            at = f"{drift.worst}, step {drift.step}" if drift.differing else ""
            shown.add_row(layer, f"{drift.compared:,}", f"{drift.differing:,}", f"{drift.nmse:.1e}", at)
        console.print(shown)
    if result.origins is not None and result.differ:
        _print_origins(result.origins, console)
    for line in (*_alignment(result), *_ends(result)):
        say(line)
    say(verdict(result), style="bold")


_WAYS = {
    "begins": "differs, and all that it reads is equal",
    "unknown": "differs, and reads what is not compared",
    "grows": f"differs {MUCH} times as much as what it reads",
    "absorbs": "is equal, though it reads what differs",
}


def _print_origins(origins: Origins, console: Console) -> None:
    """Prints how nodes came to differ: of each way the kinds of nodes with the worst NMSE, or the most nodes."""
    shown = table("what", "node")
    for column in ("nodes", "worst NMSE"):
        shown.add_column(column, justify="right")
    for way, text in _WAYS.items():
        found = getattr(origins, way)
        ordered = sorted(found, key=lambda kind: (-found[kind].nmse, -found[kind].nodes))
        for i, kind in enumerate(ordered[:_MOST_KINDS]):
            error = "" if way == "absorbs" else f"{found[kind].nmse:.1e}"
            shown.add_row("" if i else text, kind, f"{found[kind].nodes:,}", error)
        if left := ordered[_MOST_KINDS:]:
            shown.add_row("", f"and {len(left)} other kinds", f"{sum(found[kind].nodes for kind in left):,}", "")
    shown.add_row("differs, and reads what differs", "all others", f"{origins.inherits:,}", "")
    console.print(shown)


def _short(text: str, other: str) -> str:
    """Returns a text, or of a long one the words that the other has not."""
    if len(text) <= _LONGEST:
        return text
    words = [word for word in text.split() if word not in other.split()]
    short = f"... {' '.join(words)}" if words else text
    return short if len(short) <= _LONGEST else f"{short[: _LONGEST - 3]}..."


def _ops(ops: Counter[str]) -> str:
    return f"{ops.total():,} nodes ({', '.join(f'{n:,} {op}' for op, n in ops.most_common(8))})"


def _alignment(result: Comparison) -> list[str]:
    """Returns what could not be compared, a line each."""
    lines = [
        f"{_ops(ops)} of {name} have no partner and are not compared"
        for name, ops in ((result.a, result.alone_a), (result.b, result.alone_b))
        if ops
    ]
    if result.shapes:
        lines.append(f"{_ops(result.shapes)} have another type or shape and are not compared")
    if result.tokens is not None:
        lines.append(f"step {result.tokens} and all after it have other tokens and are not compared")
    elif result.n_steps[0] != result.n_steps[1]:
        lines.append(f"{result.a} has {result.n_steps[0]:,} steps, {result.b} {result.n_steps[1]:,}")
    return lines


def _ends(result: Comparison) -> list[str]:
    """Returns how the logits or embeddings compare, in a line, if the records have any."""
    if not result.ends:
        return []
    apart, of = [each for each in result.ends if not each.is_equal], [each.of for each in result.ends]
    what = " and ".join(dict.fromkeys(of))
    state = {True: "; the states at the end are equal", False: "; the states at the end differ", None: ""}
    if not apart:
        return [f"{what}: equal after {len(result.ends):,} steps{state[result.same_state]}"]
    worst = max(apart, key=lambda each: each.nmse)
    known = [each.kl for each in result.ends if each.kl is not None]
    exact = f"NMSE at most {worst.nmse:.1e}, KL divergence at most {max(known, default=0):.1e}"
    error = exact if known else f"NMSE at most some {worst.nmse:.1e}"
    others = [each.step for each in apart if not each.same_token]
    tokens = f", another most likely token after {len(others):,}, first step {others[0]}" if others else ""
    tokens = tokens or (", the same tokens" if "logits" in of else "")
    number = f"{len(apart):,} of {len(result.ends):,} steps"
    return [f"{what}: differ after {number}, {error}{tokens}{state[result.same_state]}"]


def verdict(result: Comparison) -> str:
    """Returns what was found, in a line."""
    if result:
        nodes = f"{result.compared:,} results of nodes" if result.compared else "ends and states"
        return f"equal: {nodes} in {result.n_steps[0]:,} steps"
    first = result.first
    if not result.is_of_something:
        return "part: nothing of them can be compared"
    if first is None:
        return "part: no compared node differs, but the ends or the tokens do" if result.compared else "part at the end"
    error = f"{'' if first.is_exact else 'some '}{first.nmse:.1e}"
    where = f"first at {first}, NMSE {error}; {first.before:,} before it are equal"
    return f"part: {where}; {result.differ:,} of {result.compared:,} differ"


def comparison_json(result: Comparison) -> dict[str, Any]:
    """Returns a comparison as data for JSON; an NMSE that is infinite is null."""
    first = None
    if result.first is not None:
        first = asdict(result.first) | {"nmse": _finite(result.first.nmse), "text": str(result.first)}
    return {
        "schema": COMPARE_SCHEMA,
        "passed": bool(result),
        "verdict": verdict(result),
        "a": result.a,
        "b": result.b,
        "differing": [{"name": name, "a": first, "b": second} for name, first, second in result.differing],
        "steps": list(result.n_steps),
        "first": first,
        "compared": result.compared,
        "differ": result.differ,
        "not_compared": {
            "shapes": dict(result.shapes), "alone_a": dict(result.alone_a), "alone_b": dict(result.alone_b),
            "tokens_from_step": result.tokens,
        },
        "layers": _drifts_json(result.layers),
        "by_step": _drifts_json(result.by_step),
        "ends": [asdict(each) | {"nmse": _finite(each.nmse), "kl": _finite(each.kl)} for each in result.ends],
        "same_state": result.same_state,
        "origins": _origins_json(result.origins) if result.origins is not None else None,
    }  # fmt: skip


def _drifts_json(drifts: Iterable[Drift]) -> list[dict[str, Any]]:
    return [asdict(each) | {"nmse": _finite(each.nmse)} for each in drifts]


def _origins_json(origins: Origins) -> dict[str, Any]:
    ways: dict[str, Any] = {
        way: [{"kind": kind, "nodes": each.nodes, "nmse": _finite(each.nmse)} for kind, each in found.items()]
        for way in _WAYS
        for found in (getattr(origins, way),)
    }
    return ways | {"inherits": origins.inherits}


def _finite(number: float | None) -> float | None:
    return number if number is not None and isfinite(number) else None


def compare_html(data: dict[str, Any]) -> str:
    """Returns the page of a comparison, from its JSON: where the runs part, how they drift apart along layers and steps
    as a picture, how they end, and what could not be compared. The page's state is in the address's fragment:
    "#along=steps"."""
    return page(
        "compare",
        styles=("diff.css", "chart.css"),
        scripts=("tools.js", "chart.js", "compare.js"),
        data=data,
        json=json_for_script(data),
        ways=_WAYS,
    )
