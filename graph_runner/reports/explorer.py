"""A diff as node data for Google's Model Explorer, which uses it to colour a graph's nodes."""

from __future__ import annotations

import sys
from typing import Any

COLOURS = {
    "exact": "#d5e8da",
    "rounding": "#cfe5ef",
    "inherited": "#f3e3ad",
    "amplified": "#f7c99b",
    "introduced": "#f2a0a3",
    "failed": "#dfb8ee",
}
"""Of a node's background, by verdict, from harmless to worst; text on them is black."""


def node_id(node: dict[str, Any]) -> str:
    """Returns a node's key: "0/37 kqv_out-0" is node 37 of the prompt, "1/37 kqv_out-0" the same node of the first
    token.

    ggml gives many nodes the same name, and step and index alone do not tell the outputs of a fused operator apart.
    """
    return f"{node['step']}/{node['index']} {node['name']}"


def explorer_json(data: dict[str, Any]) -> dict[str, Any]:
    """Returns node data of one graph (Model Explorer's GraphNodeData), from the JSON of a diff
    (`diff_report.diff_json`).

    results  by node_id: the value (normalised mean squared error) and the colour of the verdict

    The error is that from the reference's inputs, or if there is none, that of the device's own run. Values have to be
    numbers, and JSON has no infinity: an infinite error, or that of a node that failed, is the largest double. A node
    that was also compared as the output of a fused operator has the worse of its two results.
    """
    order = [*COLOURS]
    results: dict[str, dict[str, Any]] = {}
    for node in sorted(data["nodes"], key=lambda node: (order.index(node["verdict"]), _error(node))):
        results[node_id(node)] = {"value": _error(node), "bgColor": COLOURS[node["verdict"]], "textColor": "#000000"}
    return {"name": f"{data.get('device', 'NPU')} against {data.get('reference', 'CPU')}: NMSE", "results": results}


def _error(node: dict[str, Any]) -> float:
    found = node.get("isolated") or node.get("cumulative")
    if found is not None and found["n_different"] == 0:
        return 0.0
    nmse = found.get("nmse") if found is not None else None
    return sys.float_info.max if nmse is None else float(nmse)
