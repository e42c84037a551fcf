"""A diff as node data for Google's Model Explorer, which colours a graph's nodes by it."""

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
    """A node's key: "0/37 kqv_out-0" is node 37 of the prompt, "1/37 kqv_out-0" the same node of the first token.

    ggml gives one name to many nodes, and step and index alone do not tell the outputs of a fused operator apart.
    """
    return f"{node['step']}/{node['index']} {node['name']}"


def explorer_json(data: dict[str, Any]) -> dict[str, Any]:
    """Node data of one graph (what Model Explorer calls GraphNodeData), from the JSON of a diff (schema 4).

    results  by node_id: value, the normalised mean squared error, and colours, the verdict's

    The error is that from the reference's inputs; of a node that has none, that of the device's own run. Values have
    to be numbers, and JSON has no infinity: an error that is none, or of a node that failed, is the largest double.
    A node that was also compared as the output of a fused operator has the worse of its two results.
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
