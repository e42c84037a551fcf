"""Lays out a step: what ran when on which device, from the times of the scheduler and of the device of this project."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.plugin.times import Ran
from graph_runner.timeline.events import COPY, NODE, SPLIT, Event
from graph_runner.timeline.nodes import StepNode


@dataclass(frozen=True)
class _Run:
    """Nodes that ran as one.

    operator  that they ran as; "" of a single node
    split     a number that nodes of one split have in common, if it is known; -1: it is not
    """

    begin: int
    end: int
    nodes: list[StepNode]
    operator: str
    device: str
    split: int


def lay_out(
    step: int,
    entries: NDArray[np.int64],
    nodes: Sequence[StepNode],
    ran: Sequence[tuple[str, Ran]],
    device_of: Callable[[int], str],
) -> tuple[list[Event], int]:
    """Returns the events of a step, and how many nodes have no time of their own.

    entries    what the scheduler came to, as `Watcher.entries` has it
    nodes      those, in order
    ran        what the device of this project ran, with its name
    device_of  returns where a node ran that this did not, by its address
    """
    runs = sorted(_runs(entries, nodes, ran, device_of), key=lambda run: run.begin)
    splits: list[list[_Run]] = []
    for run in runs:
        last = splits[-1][-1] if splits else None
        if last is not None and (last.device, last.split) == (run.device, run.split):
            splits[-1].append(run)
        else:
            splits.append([run])
    events: list[Event] = []
    at = {node.address: place for place, node in enumerate(nodes)}
    asked = entries[entries[:, 0] != 0, 1]
    first = 0
    for number, split in enumerate(splits):
        last_node = at[split[-1].nodes[-1].address] + 1
        copied = {address: copy for node in nodes[first:last_node] for address, copy in node.reads.items()}
        first = last_node
        if number and copied:
            begin = splits[number - 1][-1].end
            end = int(asked[min(np.searchsorted(asked, begin), len(asked) - 1)])
            tensors, nbytes = [copy.name for copy in copied.values()], sum(copy.nbytes for copy in copied.values())
            args: dict[str, Any] = {"step": step, "tensors": tensors, "bytes": nbytes}
            events.append(Event(COPY, "copies", split[0].device, begin, max(begin, end), args))
        name = f"split {number}"
        args = {"step": step, "nodes": sum(len(run.nodes) for run in split)}
        events.append(Event(SPLIT, name, split[0].device, split[0].begin, split[-1].end, args))
        events += [_event(step, run) for run in split]
    timed = {node.address for run in runs for node in run.nodes}
    return events, sum(node.computes and node.address not in timed for node in nodes)


def _runs(
    entries: NDArray[np.int64],
    nodes: Sequence[StepNode],
    ran: Sequence[tuple[str, Ran]],
    device_of: Callable[[int], str],
) -> list[_Run]:
    known, found, seen = {node.address: node for node in nodes}, [], set[int]()
    for split, (device, each) in enumerate(ran):
        ends, addresses, at = each.ends.tolist(), each.nodes.tolist(), 0
        for number, part in enumerate(each.plan.parts):
            n = part.n_nodes or len(addresses)
            these = [known[address] for address in addresses[at : at + n]]
            at += n
            name = (part.name or f"graph of {n} nodes") if n > 1 else ""
            found.append(_Run(ends[number], ends[number + 1], these, name, device, split))
            seen.update(addresses)
    last, came = 0, 0
    for address, time in entries.tolist():
        if address:
            last, came = address, time
        elif last not in seen:
            found.append(_Run(came, time, [known[last]], "", device_of(last), -1))
    return found


def _event(step: int, run: _Run) -> Event:
    ids = [node_id(step, node) for node in run.nodes]
    last = run.nodes[-1]
    args: dict[str, Any] = {"id": ids[-1], "step": step, "node": last.place, "types": last.types, "ne": [*last.ne]}
    if run.operator:
        args["nodes"] = ids
    args["bytes"] = round(sum(node.nbytes for node in run.nodes))
    args["operations"] = round(sum(node.operations for node in run.nodes))
    return Event(NODE, run.operator or last.op, run.device, run.begin, run.end, args)


def node_id(step: int, node: StepNode) -> str:
    """Returns a node's name in the words of a diff."""
    return f"step {step} node {node.place}, {node.op} {node.name!r}"
