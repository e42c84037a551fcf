"""The page of a diff: what it says, that data stays text, and how it works in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, Browser, chromium

from graph_runner.html import VERDICTS, diff_html

OPS = ("GET_ROWS", "MUL_MAT", "ADD", "CPY", "CONT", "SET_ROWS", "SOFT_MAX", "ROPE")
BINS = 24
WRONG = {"inherited": (1e-14, 1e-3), "amplified": (1e-9, 1e-2), "introduced": (1e-2, 1e-2), "rounding": (1e-15, 1e-15)}


def comparison(random: np.random.Generator, n_bytes: int, nmse: float | None, where: list[int] | None) -> dict[str, Any]:
    """A comparison of bytes that differ; nmse None: a value is not finite."""
    ulp = (random.random(BINS) * 4000 * np.exp(-np.arange(BINS) / 2)).astype(int).tolist()
    return {
        "n_bytes": n_bytes,
        "n_different": n_bytes // 3,
        "outside": False,
        "nmse": nmse,
        "max_abs": None if nmse is None else nmse**0.5,
        "max_rel": None if nmse is None else nmse**0.4,
        "cosine": None if nmse is None else 1 - nmse,
        "ulp": ulp,
        "nan": [0, 3 if nmse is None else 0],
        "inf": [0, 0],
        "where": where,
        "blocks": None,
    }


def heat(random: np.random.Generator, rows: int, cols: int, ne0: int, n_rows: int) -> dict[str, Any]:
    values: list[float | None] = [*map(float, (10 ** (-6 * random.random(rows * cols))) * (random.random(rows * cols) < 0.7))]
    values[cols // 2] = None
    return {"rows": rows, "cols": cols, "values": values, "ne0": ne0, "n_rows": n_rows}


def made_node(random: np.random.Generator, step: int, index: int, verdict: str) -> dict[str, Any]:
    op, n_bytes = OPS[index % len(OPS)], 4 * 64 * 26
    exact = {"n_bytes": n_bytes, "n_different": 0, "outside": False}
    node: dict[str, Any] = {
        "step": step, "index": index, "op": op, "name": f"blk.{index // 8}.{op.lower()}-{index}",
        "types": "f32 i64 -> q8_0" if op == "SET_ROWS" else "f32 f32 -> f32", "ne": [64, 26, 1, 1],
        "device": "CPU" if op == "MUL_MAT" else "NPU", "verdict": verdict, "failure": None, "diagnosis": None,
        "noise": None, "isolated": exact, "cumulative": exact, "heat": None,
    }  # fmt: skip
    if verdict == "failed":
        node |= {"isolated": None, "cumulative": None, "failure": "KernelError: a kernel that does not come back"}
    elif verdict != "exact":
        spread = 10 ** random.normal(0, 0.6, 2)
        isolated, cumulative = (float(error * more) for error, more in zip(WRONG[verdict], spread, strict=True))
        node["noise"] = float(isolated * 1e14)
        node["isolated"] = comparison(random, n_bytes, isolated, [0, 0, 3, 17])
        node["cumulative"] = comparison(random, n_bytes, cumulative, [0, 0, 0, 0])
    if verdict == "introduced":
        node["diagnosis"] = "Reading the second source with nb[2] ignored gives exactly the device's bytes."
        node["heat"] = heat(random, 26, 64, 64, 26)
        blocks = dict(n_blocks=52, n_different=17, n_scale=0, n_quants=17, off_by_one=30, off_by_more=4)
        node["isolated"] |= {"blocks": blocks | {"swapped_nibbles": 0, "rounding": "simd"}}
    return node


def made_diff(per_step: int = 200, steps: int = 3, *, clean: bool = False) -> dict[str, Any]:
    """A diff of a prompt and steps: exact up to a node that introduces an error, which is inherited from there on."""
    random = np.random.default_rng(5)
    nodes = []
    for step in range(steps):
        for index in range(per_step):
            verdict = "rounding" if index % 8 == 6 else "exact"
            if not clean and (step or index > per_step // 3):
                draw = random.random()
                verdict = "inherited" if draw < 0.6 else "amplified" if draw < 0.64 else verdict
            nodes.append(made_node(random, step, index, verdict))
    first = per_step // 3
    if not clean:
        for place in (first, first + per_step, 2 * per_step - 3):
            node = nodes[place]
            nodes[place] = made_node(random, node["step"], node["index"], "introduced")
        nodes[first + 9] = made_node(random, 0, first + 9, "failed")
        not_finite = nodes[per_step + 5] = made_node(random, 1, 5, "introduced")
        not_finite["isolated"] |= comparison(random, 4 * 64 * 26, None, None)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for node in nodes:
        groups.setdefault((node["op"], node["types"]), []).append(node)
    return {
        "schema": "ggml-npu diff 3", "model": "models/llama.gguf", "description": "llama 135M Q8_0", "ggml": "0.9.4",
        "reference": "CPU", "device": "NPU", "q8_0_rounding": "simd", "prompt": "The capital of France is",
        "text": " Paris.\n\nThe", "n_prompt": 26, "steps": steps - 1, "cache_type_k": "f16", "cache_type_v": "f16",
        "flash_attention": "off", "passed": clean,
        "verdict": f"{len(nodes):,} nodes compared, every byte equals ggml's CPU" if clean
        else f"4 of {len(nodes):,} nodes introduced an error; the first is step 0, node {first}",
        "first_introduced": None if clean else first,
        "summary": [
            {"op": op, "types": types, "nodes": len(own), "nmse": None if op == "ROPE" else 1e-3, "max_abs": 0.25}
            | {verdict: sum(node["verdict"] == verdict for node in own) for verdict in VERDICTS}
            for (op, types), own in sorted(groups.items())
        ],
        "refused": [{"op": "CPY", "reason": "f32 -> iq2_xs needs an importance matrix", "nodes": 3}],
        "states": [] if clean else [{"tensor": "cache_k_l0", "step": 1, "node": first, "cells": [26, 27], "n_cells": 9}],
        "nodes": nodes,
    }  # fmt: skip
