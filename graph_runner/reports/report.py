"""Results as tables on a terminal and as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from graph_runner.base.console import Console, table

if TYPE_CHECKING:  # a replay on the NPU reports without llama.cpp
    from ggml_backend_npu.device.faults import MemoryFault
    from graph_runner.run.session import Session, Settings
    from graph_runner.run.token_graph import GraphRunner
    from graph_runner.tools.battery import BatteryResult
    from graph_runner.tools.coverage import Coverage, Gain, RanGraph
    from graph_runner.tools.prediction import Prediction
    from graph_runner.tools.suites import Case
    from graph_runner.trace import Captured

_MOST_FAULTS = 8  # of a method, that are printed
COVERAGE_SCHEMA = "ggml-npu coverage 1"


def print_run(
    session: Session, runner: GraphRunner | None, n_prompt: int, times: list[float], console: Console
) -> None:
    """Prints which device computed which nodes in a session, or in a runner of its graph, and the speed in tokens/s.

    n_prompt  tokens of the prompt
    times     seconds at the start of the prompt, then at each generated token
    """
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
    elif session.npu is not None and session.npu.backend.options.ops == "all":
        console.print(_coverage_line(session), highlight=False, markup=False, soft_wrap=True)
    generated = len(times) - 1
    if generated:
        line = f"prompt {n_prompt} tokens, {n_prompt / (times[1] - times[0]):.1f} tokens/s"
        if generated > 1:
            line += f"; generated {generated} tokens, {(generated - 1) / (times[-1] - times[1]):.1f} tokens/s"
        console.print(line, highlight=False)


def _coverage_line(session: Session) -> str:
    """Returns that the NPU computed every node, or which ones the CPU computed, and why."""
    left = [f"{op} {count:,} ({why})" for op, (count, why) in session.left_to_the_cpu.items()]
    if left:
        return f"left to the CPU: {', '.join(left)}"
    splits = session.token_splits
    return f"every node on the NPU, {splits} {'split' if splits == 1 else 'splits'} a token"


def _print_header(console: Console, model: str, device: str, settings: Settings) -> None:
    caches = f"cache {settings.cache_type_k}/{settings.cache_type_v}"
    line = f"[bold]{escape(model)}[/]  {device}  {caches}  flash attention {settings.flash_attention}"
    console.print(line, highlight=False)


def print_captured(captured: Captured, file: str, console: Console) -> None:
    """Prints in one line what a capture wrote."""
    ops = ", ".join(f"{op} {count:,}" for op, count in captured.ops.most_common())
    line = f"{file}: {captured.ops.total():,} nodes, {captured.n_bytes / 1e6:,.1f} MB: {ops}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_coverage(found: Coverage, console: Console, *, first: int = 5) -> None:
    """Prints the coverage as a table of nodes, then splits, copies, and the kernels that would remove splits.

    first  how many single ops to list
    """
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
    for name, graph, n in (("prompt", found.prompt, found.n_prompt), ("token", found.token, 1)):
        if (predicted := graph.predicted()) is not None:
            console.print(f"{name} by the clock: {_predicted(predicted, n)}", highlight=False, soft_wrap=True)
    _print_gains("with one more op", found.single[:first], console)
    _print_gains("with more ops together", [gain for gain in found.joint if len(gain.ops) > 1], console)
    console.print(_advice(found), style="bold", highlight=False, soft_wrap=True)


def _cost(graph: RanGraph) -> str:
    copied = ", ".join(f"{n:,} bytes {direction}" for direction, n in graph.copied.items() if n) or "nothing"
    return f"{graph.n_on_npu:,} of {graph.n_nodes:,} nodes on the NPU, {graph.splits:,} graph splits, copied {copied}"


def _predicted(predicted: Prediction, n_tokens: int) -> str:
    """Returns tokens/s, and what takes the time, in ms."""
    total = predicted.total
    speed = f"{n_tokens / total:,.1f} tokens/s" if total else "no time"
    parts = [
        *((f"{op}", seconds) for op, seconds in predicted.ops.most_common()),
        ("transfer", predicted.transfer),
        *((f"{op} on the CPU", seconds) for op, seconds in predicted.fallback.most_common()),
    ]
    shown = ", ".join(f"{name} {seconds * 1e3:,.3f}" for name, seconds in parts if seconds)
    return f"{speed}, {total * 1e3:,.3f} ms: {shown}"


def _print_gains(title: str, gains: list[Gain], console: Console) -> None:
    if not gains:
        return
    shown = table()
    shown.add_column(title)
    shown.add_column("splits of a prompt", justify="right")
    shown.add_column("of a token", justify="right")
    timed = any(any(gain.saves) for gain in gains)
    if timed:
        shown.add_column("ms saved of a prompt", justify="right")
        shown.add_column("of a token", justify="right")
    for gain in gains:
        changes = [f"{-less:+,}" if less else "same" for less in gain.removes]
        shown.add_row(
            " ".join(gain.ops),
            *(f"{n:,} ({change})" for n, change in zip(gain.splits, changes, strict=True)),
            *(f"{seconds * 1e3:,.3f}" for seconds in gain.saves if timed),
        )
    console.print(shown)


def _advice(found: Coverage) -> str:
    gain = found.write_next
    if gain is None:
        return "no kernel would save time" if found.token.timer else "no kernel would remove a graph split"
    together = "" if len(gain.ops) == 1 else " together"
    to_write = " ".join(op for op in gain.ops if op not in found.with_all)
    what = f"write next: {to_write}" if to_write else f"run with --all, for {' '.join(gain.ops)}"
    if to_write and set(gain.ops) & set(found.with_all):
        what += f", and run with --all for {' '.join(op for op in gain.ops if op in found.with_all)}"
    if found.token.timer is not None:
        return f"{what}:{together} {gain.saves[1] * 1e3:,.3f} ms a token saved"
    return f"{what}:{together} {gain.removes[1]:,} splits a token fewer"


def coverage_json(found: Coverage) -> dict[str, Any]:
    """Returns the coverage as data: schema, settings, both graphs, groups of alike nodes, and what kernels would
    bring."""
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
    predicted = graph.predicted()
    return {
        "nodes": graph.n_nodes,
        "on_npu": graph.n_on_npu,
        "splits": graph.splits,
        "copied": graph.copied,
        **({} if predicted is None else {"seconds": _seconds_json(predicted)}),
    }


def _seconds_json(predicted: Prediction) -> dict[str, Any]:
    parts = {"ops": dict(predicted.ops), "fallback": dict(predicted.fallback), "transfer": predicted.transfer}
    return {"total": predicted.total, **parts}


def _gain_json(gain: Gain) -> dict[str, Any]:
    both = ("prompt", "token")
    return {
        "ops": list(gain.ops),
        "splits": dict(zip(both, gain.splits, strict=True)),
        "removes": dict(zip(both, gain.removes, strict=True)),
        **({"saves": dict(zip(both, gain.saves, strict=True))} if any(gain.saves) else {}),
    }


def print_cases(ops: Iterable[str], cases: list[Case], console: Console) -> None:
    """Prints results of ggml's tests for some ops: counts, then the first failing case of each op, or, if none of its
    cases was computed, the first refused one."""
    shown = table()
    shown.add_column("op")
    for column in ("passed", "failed", "not supported"):
        shown.add_column(column, justify="right")
    firsts: list[tuple[str, Case]] = []
    for op in ops:
        own = [case for case in cases if case.group == op]
        passed, failed, refused = (
            [case for case in own if case.verdict == verdict] for verdict in ("passed", "failed", "not supported")
        )
        firsts += [("failing", case) for case in failed[:1]]
        firsts += [("refused", case) for case in refused[:1] if not passed and not failed]
        n_failed = f"[red]{len(failed):,}[/]" if failed else "0"
        shown.add_row(op, f"{len(passed):,}", n_failed, f"{len(refused):,}")
    console.print(shown)
    for kind, case in firsts:
        console.print(f"first {kind} case of {case.group}:", style="bold red", highlight=False)
        console.print(case.log, highlight=False, markup=False, soft_wrap=True)


def print_faults(faults: Iterable[MemoryFault], console: Console, most: int = _MOST_FAULTS) -> None:
    """Prints what memory was caught at, a line each; of each method no more than `most`."""
    by_method: dict[str, list[MemoryFault]] = defaultdict(list)
    for fault in faults:
        by_method[fault.method].append(fault)
    for method, alike in by_method.items():
        for fault in alike[:most]:
            console.print(str(fault), style="red", highlight=False, markup=False, soft_wrap=True)
        if len(alike) > most:
            console.print(f"... and {len(alike) - most:,} more of {method}", highlight=False)


def print_battery(results: list[BatteryResult], console: Console) -> None:
    """Prints for each device what of its memory is wrong, what was left out, and a verdict."""
    for result in results:
        print_faults(result.faults, console)
        for text in result.left_out:
            console.print(f"left out: {text}", highlight=False, markup=False, soft_wrap=True)
        methods = ", ".join(dict.fromkeys(fault.method for fault in result.faults))
        checks = f"{result.n_checks:,} checks of {result.device}'s memory"
        line = f"wrong: {methods}: {checks}" if result.faults else f"right: {checks}"
        console.print(line, style="bold red" if result.faults else "bold green", highlight=False, soft_wrap=True)
