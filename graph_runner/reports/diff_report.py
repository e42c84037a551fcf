"""The results of a diff or a replay, as text and tables on a terminal and as JSON."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from graph_runner.base.console import Console, table
from graph_runner.diff.state import StateResult
from graph_runner.judging.blocks import BlockComparison
from graph_runner.judging.compare import Comparison
from graph_runner.judging.promises import promises
from graph_runner.judging.results import OWN_RUN, RIGHT, ROUNDING, UNDECIDED, WRONG, Fate, NodeResult, Verdict
from graph_runner.judging.rules import Judged
from graph_runner.reports.hazards import graphs_json, hazard_lines, hazards_line
from graph_runner.reports.replaced import replaced_json, replaced_line
from graph_runner.reports.report import print_faults
from graph_runner.reports.scope import canary_json, canary_line, scope_json, scope_line

if TYPE_CHECKING:  # a replay on the NPU reports without llama.cpp
    from graph_runner.diff.logits import Ending
    from graph_runner.diff.result import DiffResult
    from graph_runner.trace import ReplayResult

SCHEMA = "ggml-npu diff 5"
REPLAY_SCHEMA = "ggml-npu replay 2"

_TRIED = (
    "strides, offsets, swapped dimensions, ids, broadcasts, parameters, operands, heads, sources left out, rows moved"
)
_REPEATS = 8  # of the replay of a node that is wrong in its own run alone, where no replay was tried


def _verdict(result: DiffResult) -> str:
    """Returns the diff in one line, which begins with RIGHT, ROUNDING, WRONG or UNDECIDED."""
    found, n = _found(result), result.fates[Fate.NOT_JUDGED]
    return f"{found}; {n:,} nodes of the own run not judged" if n and not found.startswith(UNDECIDED) else found


def _answer(result: DiffResult) -> str:
    """Returns which of three answers the verdict is: RIGHT, WRONG or UNDECIDED."""
    if result:
        return RIGHT
    return UNDECIDED if _verdict(result).startswith(UNDECIDED) else WRONG


def _found(result: DiffResult) -> str:
    compared, wrong = result.compared, result.wrong
    who = "ggml's CPU" if result.reference == "CPU" else _the(result.reference)
    if result.faults:
        return f"{WRONG}: the memory of the device errs: {result.faults[0]}"
    differ = f"{len(wrong):,} of {len(result.nodes):,} nodes differ from {who}" if wrong else ""
    if result.hazards:
        return f"{WRONG}: {hazards_line(result.hazards)}{'; ' if differ else ''}{differ}"
    if differ:
        return f"{WRONG}: {differ}"
    if not compared and result.stopped is None:
        return f"{UNDECIDED}: no node was compared{_why_none(result)}"
    if result.strays:
        return f"{WRONG}: {result.strays[0]}"
    if result.stray:
        return f"{WRONG}: cells of {result.stray[0].tensor} differ that no node wrote"
    if result.ends_apart:
        of = "logits" if result.ending is None else result.ending.of
        return f"{WRONG}: every node is right, but the {of} differ by more than rounding explains"
    if result.stopped:
        return f"{WRONG}: {_the(result.device)} stopped: {result.stopped}"
    if result.not_judged:
        return f"{UNDECIDED}: {_first_not_judged(result)}; what was judged is right"
    if result.ran_none:
        return f"{UNDECIDED}: {_the(result.device)} computed no node of its own run; {len(compared):,} alone are right"
    if not result.is_covered:
        blind = ", ".join(map(str, result.blind))
        return f"{UNDECIDED}: a device could ignore unseen {blind}; what was judged is right"
    counts = Counter(node.verdict for node in result.nodes)
    if counts[Verdict.EXACT] == len(result.nodes) and not result.remarks:
        return f"{RIGHT}: {len(compared):,} nodes compared, every byte equals {who}"
    rounded, later = counts[Verdict.ROUNDING], counts[Verdict.INHERITED] + counts[Verdict.AMPLIFIED]
    parts = [f"{len(compared):,} nodes compared, {rounded:,} differ from {who} by rounding"]
    parts += [f"{later:,} have inputs that differ"] if later else []
    return f"{ROUNDING}: {'; '.join(parts)}"


def _the(device: str) -> str:
    """Returns a device's name in a sentence: another backend's numbers its devices, and one may have settings."""
    return f"the {device}" if not device[-1].isdigit() and "=" not in device else device


def _first_not_judged(result: DiffResult) -> str:
    first, n = result.not_judged[0], result.fates[Fate.NOT_JUDGED]
    of = f"{n:,} of {result.fates.total():,} nodes of the own run"
    return f"{of}, first step {first.step} node {first.index}, {first.op} {first.name!r}: {first.not_judged}"


def _why_none(result: DiffResult) -> str:
    """Returns why no node of the chosen ops was compared, if the model has none of them."""
    ops = {node.op for node in result.nodes}
    if result.ops is None or not ops.isdisjoint(result.ops):
        return ""
    return f": the model has no {' and no '.join(sorted(result.ops))}"


def _groups(nodes: Iterable[NodeResult]) -> dict[tuple[str, str], list[NodeResult]]:
    groups: dict[tuple[str, str], list[NodeResult]] = defaultdict(list)
    for node in nodes:
        groups[node.op, node.types].append(node)
    return dict(sorted(groups.items()))


def _number(x: float) -> str:
    return "0" if x == 0 else f"{x:.2e}"


def print_diff(result: DiffResult, console: Console, *, first: int = 5) -> None:
    """Prints the first wrong node with what to do next, a table by op and type, the device's own run, and a verdict.

    first  how many wrong nodes to list
    """
    if result.faults:
        console.print("the memory of the device errs:", style="bold red", highlight=False)
        print_faults(result.faults, console, first)
        command = shlex.join(["ggml-npu", "test", "--memory", *_device_file(result.device_options)])
        _print_lines(console, [f"its memory alone: {command}"])
    _print_lines(console, hazard_lines(result.hazards, first), style="bold red")
    if result.wrong and not result.faults:
        console.print("the first wrong node:", style="bold red", highlight=False)
        _print_lines(console, [_describe(result.wrong[0])], style="red")
        _print_lines(console, _explanation(result.wrong[0]), style="bold red")
        _print_lines(console, _next_steps(result.wrong[0], result.device_options))
    _print_lines(console, [f"{result.description}  {_configuration(result)}"], style="bold")
    line = f"prompt of {result.n_prompt} tokens and {result.steps} steps: {result.prompt!r} -> {result.text!r}"
    _print_lines(console, [line])
    _print_nodes(result.compared, console)
    lines = [f"{op}: {count:,} nodes left to the CPU: {why}" for (op, why), count in sorted(result.refused.items())]
    _print_lines(console, lines)
    if result.faults and result.wrong:
        console.print("nodes that differ; the memory may be why:", highlight=False)
    _print_wrong(result.wrong[0 if result.faults else 1 :], console, first - 1)
    _print_lines(console, _own_run(result))
    if result.states:
        _print_lines(console, [_states(result.states)])
    if result.spoilt is not None:
        _print_lines(console, [str(result.spoilt)], style="yellow")
    _print_lines(console, map(replaced_line, result.replaced), style="bold")
    _print_lines(console, [scope_line(result), canary_line(result)])
    verdict = _verdict(result)
    style = "bold green" if result else "bold yellow" if verdict.startswith(UNDECIDED) else "bold red"
    _print_lines(console, [verdict], style=style)


def _print_lines(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    for line in lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def _configuration(result: DiffResult) -> str:
    settings, options = result.settings, result.device_options
    caches = f"cache {settings.cache_type_k}/{settings.cache_type_v}"
    if not result.variants.has("flash-attn"):
        caches += f", flash attention {settings.flash_attention}"
    if settings.sequences > 1:
        caches += f", {settings.sequences} sequences"
    usual = {"memory": "host", "device_type": "accel", "profile": "full", "ops": "default", "fusion": "on"}
    unusual = [f"{name} {options[name]}" for name, value in usual.items() if options.get(name, value) != value]
    is_ours = "matmul" in options and not result.variants.has("matmul")
    chosen = [*unusual, *([f"matmul {options['matmul']}"] if is_ours else [])]
    chosen += [] if result.variants.has("threads") else [f"{settings.threads} threads"]
    sides = f"{result.reference} beside {result.device}" if result.variants else result.device
    return f"ggml {result.ggml}; {caches}; {': '.join([sides, *([', '.join(chosen)] if chosen else [])])}"


def _print_nodes(results: Iterable[NodeResult], console: Console) -> None:
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
            _number(max((each.nmse for each in differ), default=0.0)),
            _number(max((each.max_abs for each in differ), default=0.0)),
        )
    console.print(shown)


def _gives_every_byte(node: NodeResult) -> bool:
    return bool(node) and not any(each is not None and not each for each in (node.isolated, node.mirrored))


def _print_wrong(wrong: Sequence[NodeResult], console: Console, first: int) -> None:
    """Prints the first wrong nodes, one line each."""
    _print_lines(console, map(_describe, wrong[:first]), style="red")
    if len(wrong) > first:
        console.print(f"... and {len(wrong) - first:,} more", highlight=False)


def _own_run(result: DiffResult) -> list[str]:
    """Returns lines on the device's own run: where nodes ran, their results, and how the run ended."""
    nodes = [node for node in result.nodes if node.fate is not None and node.on]
    if result.stopped is not None:
        return [f"own run of {_the(result.device)}: stopped after {len(nodes):,} nodes: {result.stopped}"]
    on = ", ".join(f"{count:,} on {_the(name)}" for name, count in Counter(node.on for node in nodes).most_common())
    known = [node for node in nodes if node.fate is not Fate.NOT_JUDGED]
    counts = Counter(node.verdict for node in known)
    verdicts = [f"{counts[verdict]:,} {verdict}" for verdict in Verdict if counts[verdict]]
    verdicts += [f"{len(nodes) - len(known):,} {Fate.NOT_JUDGED}"] if len(nodes) > len(known) else []
    line = f"own run of {_the(result.device)}: {len(nodes):,} nodes ({on}): {', '.join(verdicts)}"
    if skipped := Counter(node.fused for node in nodes if node.fate is Fate.FUSED):
        line += f"; {', '.join(f'{count:,} left out by {name}' for name, count in skipped.most_common())}"
    off = [(node.cumulative.error, node) for node in nodes if node.cumulative is not None and not node.cumulative]
    if off:
        error, worst = max(off, key=lambda pair: pair[0])
        where = f"step {worst.step} node {worst.index}, {worst.op} {worst.name!r}"
        line += f"; largest NMSE {_number(error)} at {where}"
    lines = [line]
    if counts[Verdict.INHERITED] or counts[Verdict.AMPLIFIED]:
        lines.append("inherited and amplified: the node itself is right, but its inputs already differ")
    lines += [*result.notes, *result.remarks]
    if result.ending is None or not result.ending.nmse:
        return lines
    if not result.ending and not result.ends_apart:
        return [*lines, f"{result.ending.of}: not compared, as they come from what ggml leaves undefined"]
    return [*lines, _ending(result.ending)]


def _ending(ending: Ending) -> str:
    line = f"{ending.of}: NMSE {_number(ending.nmse)}"
    if ending.kl is not None:
        first = ending.first_token
        tokens = "the same tokens" if first is None else f"another token first after step {first}"
        line += f", KL divergence {_number(ending.kl)} nats, {tokens}"
    if ending.natural is None or ending.limit is None:
        return line
    if not isfinite(ending.natural):
        return f"{line}; no limit, as rounding alone has the CPU give NaN or infinity in other places"
    return (
        f"{line}; rounding alone moves the CPU by NMSE {_number(ending.natural)}, the limit is {_number(ending.limit)}"
    )


def _states(states: list[StateResult]) -> str:
    first = states[0]
    cells = ", ".join(map(str, first.cells[:8])) + (", ..." if len(first.cells) > 8 else "")
    tensors = len({state.tensor for state in states})
    wrote = f"written by {first.node}" if first.node is not None else "and no node wrote them"
    return (
        f"caches and states: cells differ in {tensors:,} tensors, first at step {first.step} of {first.tensor!r}: "
        f"cells {cells} of {first.n_cells:,}, {wrote}"
    )


def _describe(node: NodeResult) -> str:
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
        f"NMSE {_number(found.nmse)}, max abs {_number(found.max_abs)}{noise}{judged}"
    )


def _judged(row: Judged) -> str:
    which = f"row {row.row:,} of {row.n_rows:,} rows"
    return f"{which} is {_number(row.error)} from {row.against}, the limit is {_number(row.limit)}"


def _explanation(node: NodeResult) -> list[str]:
    """Returns what is known about why a node is wrong, one sentence each."""
    if node.diagnosis is not None:
        return [node.diagnosis]
    if node.verdict is not Verdict.INTRODUCED or node.test is None:
        return []
    blocks = [] if node.blocks is None else [node.blocks.sentence()]
    return [*(text for text in blocks if text), f"no common mistake gives exactly these bytes; tried: {_TRIED}"]


def _next_steps(node: NodeResult, options: dict[str, str]) -> list[str]:
    """Returns what to do next about a wrong node, one line each."""
    lines = []
    command = _replay_command(node, options)
    if command is not None:
        lines.append(f"compute it again without the model: {command}")
    elif node.reproducer is not None:
        lines.append(f"computed again without the model it is right each time: {shlex.quote(node.reproducer)}")
    test = _test_command(node, options)
    if test is not None:
        lines.append(f"nearest test cases of ggml: {test}")
    return lines


def _test_command(node: NodeResult, options: dict[str, str]) -> str | None:
    """Returns the command that runs ggml's nearest test cases with the diff's kernel files and device."""
    if node.test is None or "device" in options:
        return None
    command = shlex.join(["ggml-npu", "test", *_kernel_files(options), *_device_file(options)])
    return f"{command} {node.test.removeprefix('test-backend-ops test ')}"


def _replay_command(node: NodeResult, options: dict[str, str]) -> str | None:
    """Returns the command that replays a node's reproducer with the diff's kernel files and device: the one that was
    seen to show it wrong, if that was tried. None if none did."""
    if node.reproducer is None or node.repeats == 0:
        return None
    command = ["ggml-npu", "replay", node.reproducer]
    for name in _kernel_files(options):
        command += ["--kernels", name]
    command += [*_device_file(options), *_foreign(options)]
    repeats = node.repeats or (_REPEATS if node.wrong_in == OWN_RUN else 1)
    if repeats > 1:
        command += ["--repeat", str(repeats)]
    return shlex.join(command)


def _kernel_files(options: dict[str, str]) -> list[str]:
    return [name.rpartition(" sha256:")[0] for name in options.get("kernels", "").split(", ") if name]


def _foreign(options: dict[str, str]) -> list[str]:
    """Returns the options that name a device of another backend."""
    given = [(name, each) for name in ("device", "backend", "rpc") for each in options.get(name, "").split(", ")]
    return [word for name, each in given if each for word in (f"--{name}", each)]


def _device_file(options: dict[str, str]) -> list[str]:
    return ["--device-file", options["device_file"]] if "device_file" in options else []


def diff_json(result: DiffResult) -> dict[str, Any]:
    """Returns the diff as data: schema, settings, verdict, a summary by op and type, and every node."""
    wrong = result.wrong
    return {
        "schema": SCHEMA,
        "model": result.model,
        "description": result.description,
        "ggml": result.ggml,
        "reference": result.reference,
        "device": result.device,
        "reference_with": dict(result.variants.reference.texts),
        "device_with": dict(result.variants.device.texts),
        "device_options": result.device_options,
        "q8_0_rounding": result.rounding,
        "promises": [asdict(each) for each in promises({node.op for node in result.compared})]
        if result.device.split()[0] != "CPU"
        else [],
        "prompt": result.prompt,
        "text": result.text,
        "n_prompt": result.n_prompt,
        "steps": result.steps,
        "threads": result.settings.threads,
        "sequences": result.settings.sequences,
        "cache_type_k": result.settings.cache_type_k,
        "cache_type_v": result.settings.cache_type_v,
        "flash_attention": result.settings.flash_attention,
        "strict": result.strict,
        "passed": bool(result),
        "verdict": _verdict(result),
        "answer": _answer(result),
        "scope": scope_json(result),
        "canary": canary_json(result),
        "order": {"unknown": result.order_unknown, "graphs": graphs_json(result.order)},
        "own_run": {fate.name.lower(): result.fates[fate] for fate in Fate},
        "stopped": result.stopped,
        "first_introduced": result.nodes.index(wrong[0]) if wrong else None,
        "states": [asdict(state) for state in result.states],
        "strays": [str(stray) for stray in result.strays],
        "remarks": result.remarks,
        "notes": result.notes,
        "replaced": [*map(replaced_json, result.replaced)],
        "spoilt": None if result.spoilt is None else asdict(result.spoilt) | {"text": str(result.spoilt)},
        "faults": [asdict(fault) for fault in result.faults],
        "ending": None if result.ending is None else _ending_json(result.ending),
        **_nodes_json(result.nodes, result.refused, result.device_options),
    }


def _ending_json(ending: Ending) -> dict[str, Any]:
    return {name: _finite(value) if isinstance(value, float) else value for name, value in asdict(ending).items()} | {
        "passed": bool(ending)
    }


def _nodes_json(nodes: list[NodeResult], refused: Counter[tuple[str, str]], options: dict[str, str]) -> dict[str, Any]:
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
        "nmse": _finite(max((c.nmse for c in compared), default=0.0)),
        "max_abs": _finite(max((c.max_abs for c in compared), default=0.0)),
    }


def _finite(x: float) -> float | None:
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
        "replay": _replay_command(node, options),
        "test": _test_command(node, options),
        "noise": None if node.noise is None else _finite(node.noise),
        "judged": None if node.judged is None else asdict(node.judged) | {"error": _finite(node.judged.error)},
        "isolated": _comparison_json(node.isolated, node.blocks),
        "mirrored": _comparison_json(node.mirrored),
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


def _replay_verdict(result: ReplayResult) -> str:
    wrong, rounded = len(result.wrong), sum(not node.isolated for node in result.nodes)
    total = f"{len(result.nodes):,} nodes replayed"
    if not result.nodes:
        return "no node was replayed"
    if wrong:
        return f"{WRONG}: {wrong:,} of {total} differ from the trace"
    if rounded:
        return f"{ROUNDING}: {total}, {rounded:,} differ from the trace by rounding"
    return f"{RIGHT}: {total}, every byte as in the trace"


def print_replay(result: ReplayResult, console: Console, *, first: int = 5) -> None:
    """Prints the replay as a table by op and type, the first nodes that differ, and a verdict.

    first  how many wrong nodes to list
    """
    origin = result.origin
    model = origin.model or "any program"
    line = f"{result.path}  on {result.device}; {model}, computed on {origin.device} by ggml {origin.ggml}"
    _print_lines(console, [line])
    _print_nodes(result.nodes, console)
    _print_lines(console, [f"{op}: {n:,} nodes not taken: {why}" for (op, why), n in sorted(result.refused.items())])
    _print_wrong(result.wrong, console, first)
    _print_lines(console, [_replay_verdict(result)], style="bold green" if result else "bold red")


def replay_json(result: ReplayResult) -> dict[str, Any]:
    """Returns the replay as data: schema, where the trace comes from, verdict, a summary by op and type, and every
    node."""
    return {
        "schema": REPLAY_SCHEMA,
        "trace": result.path,
        "device": result.device,
        "origin": vars(result.origin),
        "passed": bool(result),
        "verdict": _replay_verdict(result),
        **_nodes_json(result.nodes, result.refused, {}),
    }
