"""Results for a person (tables on a terminal) and for a program (JSON)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich.console import Console
from rich.table import Table

from graph_runner.diff import DiffResult, NodeResult

SCHEMA = "ggml-npu diff 1"


def _verdict(result: DiffResult) -> str:
    different = len(result.different)
    if not result.nodes:
        return "no node was compared"
    if different:
        return f"{different:,} of {len(result.nodes):,} nodes differ from ggml's CPU"
    return f"{len(result.nodes):,} nodes compared, every byte equals ggml's CPU"


def _groups(result: DiffResult) -> dict[tuple[str, str], list[NodeResult]]:
    groups: dict[tuple[str, str], list[NodeResult]] = defaultdict(list)
    for node in result.nodes:
        groups[node.op, node.types].append(node)
    return dict(sorted(groups.items()))


def _number(x: float) -> str:
    return "0" if x == 0 else f"{x:.2e}"


def print_diff(result: DiffResult, console: Console, *, first: int = 5) -> None:
    """The diff as a table by op and type, the first nodes that differ, and a verdict."""
    settings = result.settings
    console.print(
        f"[bold]{result.description}[/]  ggml {result.ggml}  "
        f"cache {settings.cache_type_k}/{settings.cache_type_v}  flash attention {settings.flash_attention}",
        highlight=False,
    )
    console.print(f"prompt of {result.n_prompt} tokens and {result.steps} steps: ", end="", highlight=False)
    console.print(f"{result.prompt!r} -> {result.text!r}", highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("op", "types"):
        table.add_column(column)
    for column in ("nodes", "equal", "differ", "bytes", "NMSE", "max abs"):
        table.add_column(column, justify="right")
    for (op, types), nodes in _groups(result).items():
        differing = sum(not node.equal for node in nodes)
        compared = [node.comparison for node in nodes if node.comparison is not None]
        table.add_row(
            op,
            types,
            f"{len(nodes):,}",
            f"{len(nodes) - differing:,}",
            f"[red]{differing:,}[/]" if differing else "0",
            f"{sum(c.n_bytes for c in compared):,}",
            _number(max((c.nmse for c in compared), default=0.0)),
            _number(max((c.max_abs for c in compared), default=0.0)),
        )
    console.print(table)
    for (op, reason), count in sorted(result.refused.items()):
        console.print(f"{op}: {count:,} nodes left to the CPU: {reason}", highlight=False, markup=False)
    for node in result.different[:first]:
        console.print(_describe(node), style="red", highlight=False, markup=False)
    if len(result.different) > first:
        console.print(f"... and {len(result.different) - first:,} more", highlight=False)
    console.print(_verdict(result), style="bold green" if result else "bold red", highlight=False)


def _describe(node: NodeResult) -> str:
    where = f"step {node.step} node {node.index}: {node.op} {node.name!r} {node.types} ne {list(node.ne)}"
    if node.comparison is None:
        return f"{where}: failed: {node.failure}"
    found = node.comparison
    first = f", first at [{', '.join(map(str, found.where))}]" if found.where else ""
    outside = ", wrote outside its output" if found.outside else ""
    return (
        f"{where}: {found.n_different:,} of {found.n_bytes:,} bytes differ{first}{outside}, "
        f"NMSE {_number(found.nmse)}, max abs {_number(found.max_abs)}"
    )


def diff_json(result: DiffResult) -> dict[str, Any]:
    """The diff as data: schema, settings, verdict, a summary by op and type, and every node."""
    return {
        "schema": SCHEMA,
        "model": result.model,
        "description": result.description,
        "ggml": result.ggml,
        "q8_0_rounding": result.rounding,
        "prompt": result.prompt,
        "text": result.text,
        "n_prompt": result.n_prompt,
        "steps": result.steps,
        "cache_type_k": result.settings.cache_type_k,
        "cache_type_v": result.settings.cache_type_v,
        "flash_attention": result.settings.flash_attention,
        "equal": bool(result),
        "verdict": _verdict(result),
        "summary": [
            {"op": op, "types": types, "nodes": len(nodes), "differ": sum(not node.equal for node in nodes)}
            for (op, types), nodes in _groups(result).items()
        ],
        "refused": [
            {"op": op, "reason": reason, "nodes": count} for (op, reason), count in sorted(result.refused.items())
        ],
        "nodes": [_node_json(node) for node in result.nodes],
    }


def _node_json(node: NodeResult) -> dict[str, Any]:
    found = node.comparison
    data = {
        "step": node.step,
        "index": node.index,
        "op": node.op,
        "name": node.name,
        "types": node.types,
        "ne": list(node.ne),
        "equal": node.equal,
    }
    if found is None:
        return data | {"failure": node.failure}
    data |= {"n_bytes": found.n_bytes, "n_different": found.n_different}
    if not found:
        # JSON has no inf
        finite = found.max_abs if found.max_abs != float("inf") else None
        data |= {"outside": found.outside, "nmse": found.nmse, "max_abs": finite, "where": found.where}
    return data
