"""Results for a person (tables on a terminal) and for a program (JSON)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from ggml_backend_npu.device import DEVICE
from graph_runner.blocks import BlockComparison
from graph_runner.compare import Comparison
from graph_runner.console import Console, table
from graph_runner.results import NodeResult, Verdict
from graph_runner.state import StateResult

if TYPE_CHECKING:  # a replay on the NPU reports without llama.cpp
    from graph_runner.coverage import Coverage, Gain, RanGraph
    from graph_runner.diff import DiffResult
    from graph_runner.session import Session, Settings
    from graph_runner.suites import Case
    from graph_runner.token_graph import GraphRunner
    from graph_runner.trace import Captured, ReplayResult

SCHEMA = "ggml-npu diff 3"
COVERAGE_SCHEMA = "ggml-npu coverage 1"
REPLAY_SCHEMA = "ggml-npu replay 1"


def print_run(
    session: Session, runner: GraphRunner | None, n_prompt: int, times: list[float], console: Console
) -> None:
    """What a session ran where, or a runner of its graph, and how fast: `times` are of the prompt's begin and of each
    token."""
    total, on_npu, by_name = session.nodes, session.npu_nodes, session.npu_spans
    if runner is not None:
        total, on_npu, by_name = runner.nodes, runner.nodes, runner.spans
    shown = table()
    shown.add_column("nodes computed")
    shown.add_column("NPU", justify="right")
    shown.add_column("CPU", justify="right")
    for op, count in sorted(total.items(), key=lambda item: (-on_npu[item[0]], -item[1])):
        shown.add_row(op, f"{on_npu[op]:,}", f"{count - on_npu[op]:,}")
    shown.add_row("all", f"{on_npu.total():,}", f"{(total - on_npu).total():,}", style="bold")
    console.print(shown)
    spans = ", ".join(f"{name} {count:,}" for name, count in by_name.most_common())
    if spans:
        console.print(f"run as one operator: {spans}", highlight=False)
    console.print(f"{session.description}; graph splits {session.splits}", highlight=False, markup=False)
    if runner is not None:
        line = f"tokens: {runner.n_run:,} without llama.cpp's graph, {runner.n_asked:,} to get it"
        console.print(line, highlight=False)
    elif DEVICE.ops == "all" and session.npu is not None:
        console.print(_coverage_line(session), highlight=False, markup=False, soft_wrap=True)
    generated = len(times) - 1
    if generated:
        line = f"prompt {n_prompt} tokens, {n_prompt / (times[1] - times[0]):.1f} tokens/s"
        if generated > 1:
            line += f"; generated {generated} tokens, {(generated - 1) / (times[-1] - times[1]):.1f} tokens/s"
        console.print(line, highlight=False)


def _coverage_line(session: Session) -> str:
    """That the NPU computed every node, or which ones the CPU did, and why."""
    left = [f"{op} {count:,} ({why})" for op, (count, why) in session.left_to_the_cpu.items()]
    if left:
        return f"left to the CPU: {', '.join(left)}"
    splits = session.token_splits
    return f"every node on the NPU, {splits} {'split' if splits == 1 else 'splits'} a token"


def _verdict(result: DiffResult) -> str:
    compared, wrong, rounded = result.compared, result.wrong, sum(not node.isolated for node in result.compared)
    if not compared:
        return "no node was compared"
    if result.stray and not wrong:
        return f"cells of {result.stray[0].tensor} are wrong that no node wrote"
    if result.stopped and not wrong:
        return f"the {result.device} stopped: {result.stopped}"
    if wrong:
        return f"{len(wrong):,} of {len(compared):,} nodes differ from {_whose(result)}"
    if rounded:
        return f"{len(compared):,} nodes compared, every byte equals {_whose(result)} but for rounding in {rounded:,}"
    return f"{len(compared):,} nodes compared, every byte equals {_whose(result)}"


def _whose(result: DiffResult) -> str:
    return "ggml's CPU" if result.reference == "CPU" else f"the {result.reference}"


def _groups(nodes: Iterable[NodeResult]) -> dict[tuple[str, str], list[NodeResult]]:
    groups: dict[tuple[str, str], list[NodeResult]] = defaultdict(list)
    for node in nodes:
        groups[node.op, node.types].append(node)
    return dict(sorted(groups.items()))


def _number(x: float) -> str:
    return "0" if x == 0 else f"{x:.2e}"


def _print_header(console: Console, model: str, device: str, settings: Settings) -> None:
    caches = f"cache {settings.cache_type_k}/{settings.cache_type_v}"
    line = f"[bold]{escape(model)}[/]  {device}  {caches}  flash attention {settings.flash_attention}"
    console.print(line, highlight=False)


def print_diff(result: DiffResult, console: Console, *, first: int = 5) -> None:
    """The first node that introduced an error, a table by op and type, the device's own run, and a verdict."""
    if result.wrong:
        console.print("the first wrong node:", style="bold red", highlight=False)
        console.print(_describe(result.wrong[0]), style="red", highlight=False, markup=False, soft_wrap=True)
        for sentence in _explanation(result.wrong[0]):
            console.print(sentence, style="bold red", highlight=False, markup=False, soft_wrap=True)
    _print_header(console, result.description, f"ggml {result.ggml}", result.settings)
    console.print(f"prompt of {result.n_prompt} tokens and {result.steps} steps: ", end="", highlight=False)
    console.print(f"{result.prompt!r} -> {result.text!r}", highlight=False, markup=False)
    _print_nodes(result.compared, console)
    for (op, reason), count in sorted(result.refused.items()):
        console.print(f"{op}: {count:,} nodes left to the CPU: {reason}", highlight=False, markup=False)
    _print_wrong(result.wrong[1:], console, first - 1)
    console.print(_own_run(result), highlight=False, markup=False, soft_wrap=True)
    if result.states:
        console.print(_states(result.states), highlight=False, markup=False, soft_wrap=True)
    console.print(_verdict(result), style="bold green" if result else "bold red", highlight=False)


def _print_nodes(results: Iterable[NodeResult], console: Console) -> None:
    """Nodes that were computed again, as a table by op and type."""
    shown = table()
    for column in ("op", "types"):
        shown.add_column(column)
    for column in ("equal", "rounded", "wrong", "NMSE", "max abs"):
        shown.add_column(column, justify="right")
    for (op, types), nodes in _groups(results).items():
        equal, wrong = sum(bool(node.isolated) for node in nodes), sum(not node for node in nodes)
        compared = [node.isolated for node in nodes if node.isolated is not None]
        shown.add_row(
            op,
            types,
            f"{equal:,}",
            f"{sum(bool(node) and not node.isolated for node in nodes):,}",
            f"[red]{wrong:,}[/]" if wrong else "0",
            _number(max((c.nmse for c in compared), default=0.0)),
            _number(max((c.max_abs for c in compared), default=0.0)),
        )
    console.print(shown)


def _print_wrong(wrong: Sequence[NodeResult], console: Console, first: int) -> None:
    """The first of the nodes that are wrong, a line each."""
    for node in wrong[:first]:
        console.print(_describe(node), style="red", highlight=False, markup=False, soft_wrap=True)
    if len(wrong) > first:
        console.print(f"... and {len(wrong) - first:,} more", highlight=False)


def _own_run(result: DiffResult) -> str:
    """The device's own run in a line."""
    nodes = [node for node in result.nodes if node.cumulative is not None]
    if result.stopped is not None:
        return f"own run of the {result.device}: stopped behind {len(nodes):,} nodes: {result.stopped}"
    on = ", ".join(f"{count:,} on the {name}" for name, count in Counter(node.on for node in nodes).most_common())
    counts = Counter(node.verdict for node in nodes)
    verdicts = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in Verdict if counts[verdict])
    worst = max(nodes, key=lambda node: node.cumulative.error if node.cumulative else 0.0, default=None)
    line = f"own run of the {result.device}: {len(nodes):,} nodes ({on}): {verdicts}"
    if worst is None or worst.cumulative is None or not worst.cumulative.error:
        return line
    where = f"step {worst.step} node {worst.index}, {worst.op} {worst.name!r}"
    return f"{line}; farthest off, with NMSE {_number(worst.cumulative.error)}, is {where}"


def _states(states: list[StateResult]) -> str:
    first = states[0]
    cells = ", ".join(map(str, first.cells[:8])) + (", ..." if len(first.cells) > 8 else "")
    tensors = len({state.tensor for state in states})
    wrote = f"written by {first.node}" if first.node is not None else "written by no node that writes there"
    return (
        f"caches and states: cells differ in {tensors:,} tensors, first at step {first.step} of {first.tensor!r}: "
        f"cells {cells} of {first.n_cells:,}, {wrote}"
    )


def _describe(node: NodeResult) -> str:
    where = f"step {node.step} node {node.index}: {node.op} {node.name!r} {node.types} ne {list(node.ne)}"
    if node.failure is not None:
        return f"{where}: failed: {node.failure}"
    alone = node.isolated is not None and not node.isolated
    found = node.isolated if alone else node.cumulative
    assert found is not None
    first = f", first at [{', '.join(map(str, found.where))}]" if found.where else ""
    outside = ", wrote outside its output" if found.outside else ""
    run = "" if alone else " in the device's own run, though right from the same inputs"
    noise = f", {node.noise:.1f} times the noise of the reference" if node.noise is not None else ""
    return (
        f"{where}: {found.n_different:,} of {found.n_bytes:,} bytes differ{run}{first}{outside}, "
        f"NMSE {_number(found.nmse)}, max abs {_number(found.max_abs)}{noise}"
    )


def _explanation(node: NodeResult) -> list[str]:
    """What is known of why a node is wrong, a sentence each."""
    blocks = node.blocks.sentence() if node.blocks is not None and node.diagnosis is None else None
    test = f"ggml's own cases nearest to it: {node.test}" if node.test else None
    return [sentence for sentence in (node.diagnosis, blocks, test) if sentence]


def diff_json(result: DiffResult) -> dict[str, Any]:
    """The diff as data: schema, settings, verdict, a summary by op and type, and every node."""
    wrong = result.wrong
    return {
        "schema": SCHEMA,
        "model": result.model,
        "description": result.description,
        "ggml": result.ggml,
        "reference": result.reference,
        "device": result.device,
        "q8_0_rounding": result.rounding,
        "prompt": result.prompt,
        "text": result.text,
        "n_prompt": result.n_prompt,
        "steps": result.steps,
        "cache_type_k": result.settings.cache_type_k,
        "cache_type_v": result.settings.cache_type_v,
        "flash_attention": result.settings.flash_attention,
        "passed": bool(result),
        "verdict": _verdict(result),
        "stopped": result.stopped,
        "first_introduced": result.nodes.index(wrong[0]) if wrong else None,
        "states": [asdict(state) for state in result.states],
        **_nodes_json(result.nodes, result.refused),
    }


def _nodes_json(nodes: list[NodeResult], refused: Counter[tuple[str, str]]) -> dict[str, Any]:
    groups = _groups(node for node in nodes if node.compared)
    return {
        "summary": [_summary_json(op, types, alike) for (op, types), alike in groups.items()],
        "refused": [{"op": op, "reason": reason, "nodes": count} for (op, reason), count in sorted(refused.items())],
        "nodes": [_node_json(node) for node in nodes],
    }


def _summary_json(op: str, types: str, nodes: list[NodeResult]) -> dict[str, Any]:
    counts = Counter(node.verdict for node in nodes)
    compared = [node.isolated for node in nodes if node.isolated is not None]
    return {
        "op": op,
        "types": types,
        "nodes": len(nodes),
        **{str(verdict): counts[verdict] for verdict in Verdict},
        "nmse": _finite(max((c.nmse for c in compared), default=0.0)),
        "max_abs": _finite(max((c.max_abs for c in compared), default=0.0)),
    }


def _finite(x: float) -> float | None:
    """JSON has no inf and no NaN."""
    return x if isfinite(x) else None


def _node_json(node: NodeResult) -> dict[str, Any]:
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
        "failure": node.failure,
        "diagnosis": node.diagnosis,
        "test": node.test,
        "noise": None if node.noise is None else _finite(node.noise),
        "isolated": _comparison_json(node.isolated, node.blocks),
        "cumulative": _comparison_json(node.cumulative),
        "heat": None if node.heat is None else asdict(node.heat) | {"values": [_finite(x) for x in node.heat.values]},
    }


def _comparison_json(found: Comparison | None, blocks: BlockComparison | None = None) -> dict[str, Any] | None:
    if found is None:
        return None
    data: dict[str, Any] = {"n_bytes": found.n_bytes, "n_different": found.n_different, "outside": found.outside}
    if found:
        return data
    numbers = {name: _finite(getattr(found, name)) for name in ("nmse", "max_abs", "max_rel", "cosine")}
    if blocks is not None:
        data["blocks"] = asdict(blocks)
    return data | numbers | {"ulp": found.ulp, "nan": found.nan, "inf": found.inf, "where": found.where}


def print_captured(captured: Captured, file: str, console: Console) -> None:
    """What a capture wrote, in one line."""
    ops = ", ".join(f"{op} {count:,}" for op, count in captured.ops.most_common())
    line = f"{file}: {captured.ops.total():,} nodes, {captured.n_bytes / 1e6:,.1f} MB: {ops}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _replay_verdict(result: ReplayResult) -> str:
    wrong, rounded = len(result.wrong), sum(not node.isolated for node in result.nodes)
    total = f"{len(result.nodes):,} nodes replayed"
    if not result.nodes:
        return "no node was replayed"
    if wrong:
        return f"{wrong:,} of {total} differ from the trace"
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
    _print_wrong(result.wrong, console, first)
    console.print(_replay_verdict(result), style="bold green" if result else "bold red", highlight=False)


def replay_json(result: ReplayResult) -> dict[str, Any]:
    """The replay as data: schema, where the trace comes from, verdict, a summary by op and type, and every node."""
    return {
        "schema": REPLAY_SCHEMA,
        "trace": result.path,
        "device": result.device,
        "origin": vars(result.origin),
        "passed": bool(result),
        "verdict": _replay_verdict(result),
        **_nodes_json(result.nodes, result.refused),
    }


def print_coverage(found: Coverage, console: Console, *, first: int = 5) -> None:
    """The coverage as a table of nodes, then splits, copies, and the kernels that would remove splits."""
    device = f"ggml {found.ggml}  profile {found.profile}  memory {found.memory}"
    _print_header(console, found.description, device, found.settings)
    shown = table()
    shown.add_column("op")
    shown.add_column("types")
    shown.add_column("on")
    shown.add_column(f"prompt of {found.n_prompt}", justify="right")
    shown.add_column("token", justify="right")
    shown.add_column("why not on the NPU")
    for node, (prompt, token) in found.groups().items():
        on = "[green]NPU[/]" if node.on_npu else "CPU"
        shown.add_row(node.op, node.types, on, f"{prompt:,}", f"{token:,}", escape(node.why or ""))
    console.print(shown)
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
    shown = table()
    shown.add_column(title)
    shown.add_column("splits of a prompt", justify="right")
    shown.add_column("of a token", justify="right")
    for gain in gains:
        changes = [f"{-less:+,}" if less else "same" for less in gain.removes]
        shown.add_row(
            " ".join(gain.ops), *(f"{n:,} ({change})" for n, change in zip(gain.splits, changes, strict=True))
        )
    console.print(shown)


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
    shown = table()
    shown.add_column("op")
    for column in ("passed", "failed", "not supported"):
        shown.add_column(column, justify="right")
    failures = []
    for op in ops:
        own = [case for case in cases if case.group == op]
        failed = [case for case in own if case.verdict == "failed"]
        failures += failed[:1]
        shown.add_row(
            op,
            f"{sum(case.verdict == 'passed' for case in own):,}",
            f"[red]{len(failed):,}[/]" if failed else "0",
            f"{sum(case.verdict == 'not supported' for case in own):,}",
        )
    console.print(shown)
    for case in failures:
        console.print(f"first failing case of {case.group}:", style="bold red", highlight=False)
        console.print(case.log, highlight=False, markup=False, soft_wrap=True)
