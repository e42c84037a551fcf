"""Results for a person (tables on a terminal) and for a program (JSON)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:  # a replay on the NPU reports without llama.cpp
    from graph_runner.coverage import Coverage, Gain, RanGraph
    from graph_runner.diff import DiffResult, NodeResult
    from graph_runner.session import Session, Settings
    from graph_runner.suites import Case
    from graph_runner.trace import Captured, Replayed, ReplayResult

    _AnyNode = NodeResult | Replayed

SCHEMA = "ggml-npu diff 2"
COVERAGE_SCHEMA = "ggml-npu coverage 1"
REPLAY_SCHEMA = "ggml-npu replay 1"


def print_run(session: Session, n_prompt: int, times: list[float], console: Console) -> None:
    """What a session ran where, and how fast: `times` are of the prompt's begin and of each token."""
    total, on_npu = session.nodes, session.npu_nodes
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("nodes computed")
    table.add_column("NPU", justify="right")
    table.add_column("CPU", justify="right")
    for op, count in sorted(total.items(), key=lambda item: (-on_npu[item[0]], -item[1])):
        table.add_row(op, f"{on_npu[op]:,}", f"{count - on_npu[op]:,}")
    table.add_row("all", f"{on_npu.total():,}", f"{(total - on_npu).total():,}", style="bold")
    console.print(table)
    spans = ", ".join(f"{name} {count:,}" for name, count in session.npu_spans.most_common())
    if spans:
        console.print(f"run as one operator: {spans}", highlight=False)
    console.print(f"{session.description}; graph splits {session.splits}", highlight=False)
    generated = len(times) - 1
    if generated:
        line = f"prompt {n_prompt} tokens, {n_prompt / (times[1] - times[0]):.1f} tokens/s"
        if generated > 1:
            line += f"; generated {generated} tokens, {(generated - 1) / (times[-1] - times[1]):.1f} tokens/s"
        console.print(line, highlight=False)


def _verdict(result: DiffResult) -> str:
    different, rounded = len(result.different), sum(not node.equal for node in result.nodes)
    if not result.nodes:
        return "no node was compared"
    if different:
        return f"{different:,} of {len(result.nodes):,} nodes differ from ggml's CPU"
    if rounded:
        return f"{len(result.nodes):,} nodes compared, every byte equals ggml's CPU but for rounding in {rounded:,}"
    return f"{len(result.nodes):,} nodes compared, every byte equals ggml's CPU"


def _groups(nodes: Iterable[_AnyNode]) -> dict[tuple[str, str], list[_AnyNode]]:
    groups: dict[tuple[str, str], list[_AnyNode]] = defaultdict(list)
    for node in nodes:
        groups[node.op, node.types].append(node)
    return dict(sorted(groups.items()))


def _number(x: float) -> str:
    return "0" if x == 0 else f"{x:.2e}"


def _print_header(console: Console, model: str, device: str, settings: Settings) -> None:
    caches = f"cache {settings.cache_type_k}/{settings.cache_type_v}"
    line = f"[bold]{model}[/]  {device}  {caches}  flash attention {settings.flash_attention}"
    console.print(line, highlight=False)


def print_diff(result: DiffResult, console: Console, *, first: int = 5) -> None:
    """The diff as a table by op and type, the first nodes that differ, and a verdict."""
    _print_header(console, result.description, f"ggml {result.ggml}", result.settings)
    console.print(f"prompt of {result.n_prompt} tokens and {result.steps} steps: ", end="", highlight=False)
    console.print(f"{result.prompt!r} -> {result.text!r}", highlight=False, markup=False)
    _print_nodes(result.nodes, console)
    for (op, reason), count in sorted(result.refused.items()):
        console.print(f"{op}: {count:,} nodes left to the CPU: {reason}", highlight=False, markup=False)
    _print_different(result.different, console, first)
    console.print(_verdict(result), style="bold green" if result else "bold red", highlight=False)


def _print_nodes(results: Iterable[_AnyNode], console: Console) -> None:
    """Nodes that were compared, as a table by op and type."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("op", "types"):
        table.add_column(column)
    for column in ("equal", "rounded", "differ", "NMSE", "max abs"):
        table.add_column(column, justify="right")
    for (op, types), nodes in _groups(results).items():
        equal, differing = sum(node.equal for node in nodes), sum(not node for node in nodes)
        compared = [node.comparison for node in nodes if node.comparison is not None]
        table.add_row(
            op,
            types,
            f"{equal:,}",
            f"{len(nodes) - equal - differing:,}",
            f"[red]{differing:,}[/]" if differing else "0",
            _number(max((c.nmse for c in compared), default=0.0)),
            _number(max((c.max_abs for c in compared), default=0.0)),
        )
    console.print(table)


def _print_different(different: Sequence[_AnyNode], console: Console, first: int) -> None:
    """The first of the nodes that differ, a line each."""
    for node in different[:first]:
        console.print(_describe(node), style="red", highlight=False, markup=False, soft_wrap=True)
    if len(different) > first:
        console.print(f"... and {len(different) - first:,} more", highlight=False)


def _describe(node: _AnyNode) -> str:
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
        "equal": all(node.equal for node in result.nodes),
        "passed": bool(result),
        "verdict": _verdict(result),
        **_nodes_json(result),
    }


def _nodes_json(result: DiffResult | ReplayResult) -> dict[str, Any]:
    return {
        "summary": [
            {
                "op": op,
                "types": types,
                "nodes": len(nodes),
                "equal": sum(node.equal for node in nodes),
                "differ": sum(not node for node in nodes),
            }
            for (op, types), nodes in _groups(result.nodes).items()
        ],
        "refused": [
            {"op": op, "reason": reason, "nodes": count} for (op, reason), count in sorted(result.refused.items())
        ],
        "nodes": [_node_json(node) for node in result.nodes],
    }


def _node_json(node: _AnyNode) -> dict[str, Any]:
    found = node.comparison
    data = {
        "step": node.step,
        "index": node.index,
        "op": node.op,
        "name": node.name,
        "types": node.types,
        "ne": list(node.ne),
        "equal": node.equal,
        "passed": bool(node),
    }
    if found is None:
        return data | {"failure": node.failure}
    data |= {"n_bytes": found.n_bytes, "n_different": found.n_different}
    if not found:
        nmse, max_abs = (x if isfinite(x) else None for x in (found.nmse, found.max_abs))  # JSON has no inf
        data |= {"outside": found.outside, "nmse": nmse, "max_abs": max_abs, "where": found.where}
    return data


def print_captured(captured: Captured, file: str, console: Console) -> None:
    """What a capture wrote, in one line."""
    ops = ", ".join(f"{op} {count:,}" for op, count in captured.ops.most_common())
    line = f"{file}: {captured.ops.total():,} nodes, {captured.n_bytes / 1e6:,.1f} MB: {ops}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _replay_verdict(result: ReplayResult) -> str:
    different, rounded = len(result.different), sum(not node.equal for node in result.nodes)
    total = f"{len(result.nodes):,} nodes replayed"
    if not result.nodes:
        return "no node was replayed"
    if different:
        return f"{different:,} of {total} differ from the trace"
    if rounded:
        return f"{total}, every byte as in the trace but for rounding in {rounded:,}"
    return f"{total}, every byte as in the trace"


def print_replay(result: ReplayResult, console: Console, *, first: int = 5) -> None:
    """The replay as a table by op and type, the first nodes that differ, and a verdict."""
    origin = result.origin
    line = f"{result.path}  on {result.device}; {origin.model}, computed on {origin.device} by ggml {origin.ggml}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    _print_nodes(result.nodes, console)
    for (op, reason), count in sorted(result.refused.items()):
        console.print(f"{op}: {count:,} nodes not taken: {reason}", highlight=False, markup=False)
    _print_different(result.different, console, first)
    console.print(_replay_verdict(result), style="bold green" if result else "bold red", highlight=False)


def replay_json(result: ReplayResult) -> dict[str, Any]:
    """The replay as data: schema, where the trace comes from, verdict, a summary by op and type, and every node."""
    return {
        "schema": REPLAY_SCHEMA,
        "trace": result.path,
        "device": result.device,
        "origin": vars(result.origin),
        "equal": all(node.equal for node in result.nodes),
        "passed": bool(result),
        "verdict": _replay_verdict(result),
        **_nodes_json(result),
    }


def print_coverage(found: Coverage, console: Console, *, first: int = 5) -> None:
    """The coverage as a table of nodes, then splits, copies, and the kernels that would remove splits."""
    device = f"ggml {found.ggml}  profile {found.profile}  memory {found.memory}"
    _print_header(console, found.description, device, found.settings)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("op")
    table.add_column("types")
    table.add_column("on")
    table.add_column(f"prompt of {found.n_prompt}", justify="right")
    table.add_column("token", justify="right")
    table.add_column("why not on the NPU")
    for node, (prompt, token) in found.groups().items():
        on = "[green]NPU[/]" if node.on_npu else "CPU"
        table.add_row(node.op, node.types, on, f"{prompt:,}", f"{token:,}", node.why or "")
    console.print(table)
    for name, graph in (("prompt", found.prompt), ("token", found.token)):
        console.print(f"{name}: {_cost(graph)}", highlight=False, soft_wrap=True)
    _print_gains("with one more op", found.single[:first], console)
    _print_gains("with more ops together", [gain for gain in found.joint if len(gain.ops) > 1], console)
    console.print(_advice(found), style="bold", highlight=False, soft_wrap=True)


def _cost(graph: RanGraph) -> str:
    copied = ", ".join(f"{n:,} bytes {direction}" for direction, n in graph.copied.items() if n) or "nothing"
    return f"{graph.n_on_npu:,} of {graph.n_nodes:,} nodes on the NPU, {graph.splits:,} graph splits, copied {copied}"


def _print_gains(title: str, gains: list[Gain], console: Console) -> None:
    if not gains:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title)
    table.add_column("splits of a prompt", justify="right")
    table.add_column("of a token", justify="right")
    for gain in gains:
        changes = [f"{-less:+,}" if less else "same" for less in gain.removes]
        table.add_row(
            " ".join(gain.ops), *(f"{n:,} ({change})" for n, change in zip(gain.splits, changes, strict=True))
        )
    console.print(table)


def _advice(found: Coverage) -> str:
    gain = found.write_next
    if gain is None:
        return "no kernel would remove a graph split"
    together = "" if len(gain.ops) == 1 else " together"
    to_write = " ".join(op for op in gain.ops if op not in found.with_all)
    what = f"write next: {to_write}" if to_write else f"run with --all, for {' '.join(gain.ops)}"
    if to_write and set(gain.ops) & set(found.with_all):
        what += f", and run with --all for {' '.join(op for op in gain.ops if op in found.with_all)}"
    return f"{what}:{together} {gain.removes[1]:,} splits a token fewer"


def coverage_json(found: Coverage) -> dict[str, Any]:
    """The coverage as data: schema, settings, both graphs, nodes that are alike, and what kernels would bring."""
    return {
        "schema": COVERAGE_SCHEMA,
        "model": found.model,
        "description": found.description,
        "ggml": found.ggml,
        "profile": found.profile,
        "memory": found.memory,
        "device_type": found.device_type,
        "text": found.text,
        "n_prompt": found.n_prompt,
        "cache_type_k": found.settings.cache_type_k,
        "cache_type_v": found.settings.cache_type_v,
        "flash_attention": found.settings.flash_attention,
        "graphs": {"prompt": _graph_json(found.prompt), "token": _graph_json(found.token)},
        "nodes": [
            {"op": n.op, "types": n.types, "on": "NPU" if n.on_npu else "CPU", "prompt": p, "token": t, "why": n.why}
            for n, (p, t) in found.groups().items()
        ],
        "missing": found.missing,
        "with_all": found.with_all,
        "single": [_gain_json(gain) for gain in found.single],
        "joint": [_gain_json(gain) for gain in found.joint],
        "write_next": _gain_json(found.write_next) if found.write_next is not None else None,
    }


def _graph_json(graph: RanGraph) -> dict[str, Any]:
    return {
        "nodes": graph.n_nodes,
        "on_npu": graph.n_on_npu,
        "splits": graph.splits,
        "copied": graph.copied,
    }


def _gain_json(gain: Gain) -> dict[str, Any]:
    both = ("prompt", "token")
    return {
        "ops": list(gain.ops),
        "splits": dict(zip(both, gain.splits, strict=True)),
        "removes": dict(zip(both, gain.removes, strict=True)),
    }


def print_cases(ops: Iterable[str], cases: list[Case], console: Console) -> None:
    """What ggml's tests say about some ops: counts, then the first case of each op that fails."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("op")
    for column in ("passed", "failed", "not supported"):
        table.add_column(column, justify="right")
    failures = []
    for op in ops:
        own = [case for case in cases if case.group == op]
        failed = [case for case in own if case.verdict == "failed"]
        failures += failed[:1]
        table.add_row(
            op,
            f"{sum(case.verdict == 'passed' for case in own):,}",
            f"[red]{len(failed):,}[/]" if failed else "0",
            f"{sum(case.verdict == 'not supported' for case in own):,}",
        )
    console.print(table)
    for case in failures:
        console.print(f"first failing case of {case.group}:", style="bold red", highlight=False)
        console.print(case.log, highlight=False, markup=False, soft_wrap=True)
