"""The results of a diff, as text and tables on a terminal and as JSON."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from graph_runner.base.console import Console
from graph_runner.diff.state import StateResult
from graph_runner.judging.promises import promises
from graph_runner.judging.results import RIGHT, ROUNDING, UNDECIDED, WRONG, Fate, Verdict
from graph_runner.reports.hazards import graphs_json, hazard_lines, hazards_line
from graph_runner.reports.next_steps import device_file, next_steps
from graph_runner.reports.nodes import (
    describe,
    explanation,
    finite,
    nodes_json,
    number,
    print_lines,
    print_nodes,
    print_wrong,
)
from graph_runner.reports.replaced import replaced_json, replaced_line
from graph_runner.reports.report import print_faults
from graph_runner.reports.scope import canary_json, canary_line, scope_json, scope_line

if TYPE_CHECKING:
    from graph_runner.diff.logits import Ending
    from graph_runner.diff.result import DiffResult

SCHEMA = "ggml-npu diff 5"


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


def print_diff(result: DiffResult, console: Console, *, first: int = 5) -> None:
    """Prints the first wrong node with what to do next, a table by op and type, the device's own run, and a verdict.

    first  how many wrong nodes to list
    """
    if result.faults:
        console.print("the memory of the device errs:", style="bold red", highlight=False)
        print_faults(result.faults, console, first)
        command = shlex.join(["ggml-npu", "test", "--memory", *device_file(result.device_options)])
        print_lines(console, [f"its memory alone: {command}"])
    print_lines(console, hazard_lines(result.hazards, first), style="bold red")
    if result.wrong and not result.faults:
        console.print("the first wrong node:", style="bold red", highlight=False)
        print_lines(console, [describe(result.wrong[0])], style="red")
        print_lines(console, explanation(result.wrong[0]), style="bold red")
        print_lines(console, next_steps(result.wrong[0], result.device_options))
    print_lines(console, [f"{result.description}  {_configuration(result)}"], style="bold")
    print_lines(console, _builds(result))
    line = f"prompt of {result.n_prompt} tokens and {result.steps} steps: {result.prompt!r} -> {result.text!r}"
    print_lines(console, [line])
    print_nodes(result.compared, console)
    lines = [f"{op}: {count:,} nodes left to the CPU: {why}" for (op, why), count in sorted(result.refused.items())]
    print_lines(console, lines)
    if result.faults and result.wrong:
        console.print("nodes that differ; the memory may be why:", highlight=False)
    print_wrong(result.wrong[0 if result.faults else 1 :], console, first - 1)
    print_lines(console, _own_run(result))
    if result.states:
        print_lines(console, [_states(result.states)])
    if result.spoilt is not None:
        print_lines(console, [str(result.spoilt)], style="yellow")
    print_lines(console, map(replaced_line, result.replaced), style="bold")
    print_lines(console, [scope_line(result), canary_line(result)])
    verdict = _verdict(result)
    style = "bold green" if result else "bold yellow" if verdict.startswith(UNDECIDED) else "bold red"
    print_lines(console, [verdict], style=style)


def _configuration(result: DiffResult) -> str:
    settings, options = result.settings, result.device_options
    caches = f"cache {settings.cache_type_k}/{settings.cache_type_v}"
    if not result.variants.has("flash-attn"):
        caches += f", flash attention {settings.flash_attention}"
    if settings.sequences > 1:
        caches += f", {settings.sequences} sequences"
    if settings.draft:
        caches += f", draft of {settings.draft}"
    usual = {"memory": "host", "device_type": "accel", "profile": "full", "ops": "default", "fusion": "on"}
    unusual = [f"{name} {options[name]}" for name, value in usual.items() if options.get(name, value) != value]
    is_ours = "matmul" in options and not result.variants.has("matmul")
    chosen = [*unusual, *([f"matmul {options['matmul']}"] if is_ours else [])]
    chosen += [] if result.variants.has("threads") else [f"{settings.threads} threads"]
    sides = f"{result.reference} beside {result.device}" if result.variants else result.device
    return f"ggml {result.ggml}; {caches}; {': '.join([sides, *([', '.join(chosen)] if chosen else [])])}"


def _builds(result: DiffResult) -> list[str]:
    """Returns a line on each side, if they are of two builds."""
    names = (result.reference, result.device)
    return [f"{name}: {about}" for name, about in zip(names, result.builds or (), strict=False)]


def _own_run(result: DiffResult) -> list[str]:
    """Returns lines on the device's own run: where nodes ran, their results, and how the run ended."""
    nodes = [node for node in result.nodes if node.fate is not None and node.on]
    if result.stopped is not None:
        stopped = f"own run of {_the(result.device)}: stopped after {len(nodes):,} nodes: {result.stopped}"
        return [stopped, *result.remarks, *([_ending(result.ending)] if result.ending is not None else [])]
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
        line += f"; largest NMSE {number(error)} at {where}"
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
    line = f"{ending.of}: NMSE {number(ending.nmse)}"
    if ending.kl is not None:
        first = ending.first_token
        tokens = "the same tokens" if first is None else f"another token first after step {first}"
        line += f", KL divergence {number(ending.kl)} nats, {tokens}"
    if ending.natural is None or ending.limit is None:
        return line
    if not isfinite(ending.natural):
        return f"{line}; no limit, as rounding alone has the CPU give NaN or infinity in other places"
    return f"{line}; rounding alone moves the CPU by NMSE {number(ending.natural)}, the limit is {number(ending.limit)}"


def _states(states: list[StateResult]) -> str:
    first = states[0]
    cells = ", ".join(map(str, first.cells[:8])) + (", ..." if len(first.cells) > 8 else "")
    tensors = len({state.tensor for state in states})
    wrote = f"written by {first.node}" if first.node is not None else "and no node wrote them"
    return (
        f"caches and states: cells differ in {tensors:,} tensors, first at step {first.step} of {first.tensor!r}: "
        f"cells {cells} of {first.n_cells:,}, {wrote}"
    )


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
        "builds": [asdict(each) for each in result.builds or ()],
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
        "draft": result.settings.draft,
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
        **nodes_json(result.nodes, result.refused, result.device_options),
    }


def _ending_json(ending: Ending) -> dict[str, Any]:
    return {name: finite(value) if isinstance(value, float) else value for name, value in asdict(ending).items()} | {
        "passed": bool(ending)
    }
