"""Nodes that were compared, in a diff or in a replay: as lines, as a table by op and type, and as JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from graph_runner.base.console import Console, table
from graph_runner.judging.blocks import BlockComparison
from graph_runner.judging.compare import Comparison
from graph_runner.judging.results import OWN_RUN, NodeResult, Verdict
from graph_runner.judging.rules import Judged
from graph_runner.reports.next_steps import replay_command, test_command

_TRIED = (
    "strides, offsets, swapped dimensions, ids, broadcasts, parameters, operands, heads, sources left out, rows moved"
)


def _groups(nodes: Iterable[NodeResult]) -> dict[tuple[str, str], list[NodeResult]]:
    groups: dict[tuple[str, str], list[NodeResult]] = defaultdict(list)
    for node in nodes:
        groups[node.op, node.types].append(node)
    return dict(sorted(groups.items()))


def number(x: float) -> str:
    """Returns an error in three digits."""
    return "0" if x == 0 else f"{x:.2e}"


def print_lines(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    """Prints lines as they are, however long."""
    for line in lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def print_nodes(results: Iterable[NodeResult], console: Console) -> None:
    """Prints nodes that were computed again, as a table by op and type."""
    shown = table("op", "types")
    for column in ("equal", "rounded", "wrong", "NMSE", "max abs"):
        shown.add_column(column, justify="right")
    for (op, types), nodes in _groups(results).items():
        wrong = sum(not node for node in nodes)
        differ = [each for node in nodes for each in (node.isolated, node.mirrored) if each is not None]
        equal = sum(_gives_every_byte(node) for node in nodes)
        shown.add_row(
            op,
            types,
            f"{equal:,}",
            f"{len(nodes) - equal - wrong:,}",
            f"[red]{wrong:,}[/]" if wrong else "0",
            number(max((each.nmse for each in differ), default=0.0)),
            number(max((each.max_abs for each in differ), default=0.0)),
        )
    console.print(shown)


def _gives_every_byte(node: NodeResult) -> bool:
    return bool(node) and not any(each is not None and not each for each in (node.isolated, node.mirrored))


def print_wrong(wrong: Sequence[NodeResult], console: Console, first: int) -> None:
    """Prints the first wrong nodes, one line each."""
    print_lines(console, map(describe, wrong[:first]), style="red")
    if len(wrong) > first:
        console.print(f"... and {len(wrong) - first:,} more", highlight=False)


def describe(node: NodeResult) -> str:
    """Returns in a line which node it is, and by how much its result is off."""
    where = f"step {node.step} node {node.index}: {node.op} {node.name!r} {node.types} ne {list(node.ne)}"
    if node.since:
        return f"between {node.since} and {where}: {node.failure}"
    if node.failure is not None:
        return f"{where}: failed: {node.failure}"
    found = node.shown
    if found is None:
        return where
    first = f", first at [{', '.join(map(str, found.where))}]" if found.where else ""
    outside = ", wrote outside its output" if found.outside else ""
    by = f" by {node.fused}" if node.fused else ""
    run = f" in the device's own run{by}, though not alone" if node.wrong_in == OWN_RUN else ""
    noise = f", {node.noise:,.1f} times as far from the exact value as the reference" if node.noise is not None else ""
    judged = "" if node.judged is None else f"; judged: {_judged(node.judged)}"
    return (
        f"{where}: {found.n_different:,} of {found.n_bytes:,} bytes differ{run}{first}{outside}, "
        f"NMSE {number(found.nmse)}, max abs {number(found.max_abs)}{noise}{judged}"
    )


def _judged(row: Judged) -> str:
    which = f"row {row.row:,} of {row.n_rows:,} rows"
    return f"{which} is {number(row.error)} from {row.against}, the limit is {number(row.limit)}"


def explanation(node: NodeResult) -> list[str]:
    """Returns what is known about why a node is wrong, one sentence each."""
    if node.diagnosis is not None:
        return [node.diagnosis]
    if node.verdict is not Verdict.INTRODUCED or node.test is None:
        return []
    blocks = [] if node.blocks is None else [node.blocks.sentence()]
    return [*(text for text in blocks if text), f"no common mistake gives exactly these bytes; tried: {_TRIED}"]


def nodes_json(nodes: list[NodeResult], refused: Counter[tuple[str, str]], options: dict[str, str]) -> dict[str, Any]:
    """Returns nodes as data: a summary by op and type, those that were not taken, and each node.

    refused  how many were not taken, by op and reason
    options  of the device
    """
    groups = _groups(node for node in nodes if node.compared)
    return {
        "summary": [_summary_json(op, types, alike) for (op, types), alike in groups.items()],
        "refused": [{"op": op, "reason": reason, "nodes": count} for (op, reason), count in sorted(refused.items())],
        "nodes": [_node_json(node, options) for node in nodes],
    }


def _summary_json(op: str, types: str, nodes: list[NodeResult]) -> dict[str, Any]:
    counts = Counter(node.verdict for node in nodes)
    compared = [node.isolated for node in nodes if node.isolated is not None]
    return {
        "op": op,
        "types": types,
        "nodes": len(nodes),
        **{str(verdict): counts[verdict] for verdict in Verdict},
        "nmse": finite(max((c.nmse for c in compared), default=0.0)),
        "max_abs": finite(max((c.max_abs for c in compared), default=0.0)),
    }


def finite(x: float) -> float | None:
    """Returns a number that JSON can hold: JSON has no inf and no NaN."""
    return x if isfinite(x) else None


def _node_json(node: NodeResult, options: dict[str, str]) -> dict[str, Any]:
    return {
        "step": node.step,
        "index": node.index,
        "op": node.op,
        "name": node.name,
        "types": node.types,
        "ne": list(node.ne),
        "device": node.on,
        "verdict": str(node.verdict),
        "passed": bool(node),
        "wrong_in": node.wrong_in,
        "own_run": node.fate,
        "fused": node.fused,
        "not_judged": node.not_judged,
        "since": node.since,
        "failure": node.failure,
        "diagnosis": node.diagnosis,
        "reproducer": node.reproducer,
        "replay": replay_command(node, options),
        "test": test_command(node, options),
        "noise": None if node.noise is None else finite(node.noise),
        "judged": None if node.judged is None else asdict(node.judged) | {"error": finite(node.judged.error)},
        "isolated": _comparison_json(node.isolated, node.blocks),
        "mirrored": _comparison_json(node.mirrored),
        "cumulative": _comparison_json(node.cumulative),
        "heat": None if node.heat is None else asdict(node.heat) | {"values": [finite(x) for x in node.heat.values]},
    }


def _comparison_json(found: Comparison | None, blocks: BlockComparison | None = None) -> dict[str, Any] | None:
    if found is None:
        return None
    data: dict[str, Any] = {"n_bytes": found.n_bytes, "n_different": found.n_different, "outside": found.outside}
    if found:
        return data
    numbers = {name: finite(getattr(found, name)) for name in ("nmse", "max_abs", "max_rel", "cosine")}
    if blocks is not None:
        data["blocks"] = asdict(blocks)
    return data | numbers | {"ulp": found.ulp, "nan": found.nan, "inf": found.inf, "where": found.where}
