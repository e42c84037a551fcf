"""A sweep of diffs on a terminal, as JSON, as a page, and as test cases of JUnit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from rich.markup import escape

from graph_runner.base.console import Console, printable, table
from graph_runner.judging.results import RIGHT, ROUNDING, UNDECIDED, WRONG
from graph_runner.reports.html import page
from graph_runner.tools.matrix import FAILED, SCHEMA, VERDICTS, Result, Sweep

DEFAULTS = "defaults"  # what settings are called that are none

_STYLES = {RIGHT: "green", ROUNDING: "green", WRONG: "bold red", UNDECIDED: "yellow", FAILED: "magenta"}
_CLASSES = {RIGHT: "exact", ROUNDING: "rounding", WRONG: "introduced", UNDECIDED: "inherited", FAILED: "failed"}


def verdict(sweep: Sweep) -> str:
    """Returns the sweep in one line."""
    counts = Counter(each.verdict for each in sweep.results)
    found = ", ".join(f"{counts[each]:,} {each}" for each in VERDICTS if counts[each]) or "none"
    n, done = len(sweep.cells), len(sweep.results)
    line = f"{n:,} cells: {found}" if done == n else f"{done:,} of {n:,} cells: {found}"
    if sweep.baseline is None:
        return line
    new = f"{len(sweep.wrong):,} not as in the baseline, {len(sweep.known):,} as in it"
    return f"{line}; {new}, {len(sweep.newly_right):,} newly right"


def told(result: Result) -> str:
    """Returns a cell and what became of it in one line."""
    why = f": {result.why}" if result.why else ""
    return f"{result.model} on {result.device}, {result.settings or DEFAULTS}: {result.verdict}{why}"


def _number(result: Result) -> str:
    if result.nmse is None:
        return "not finite"
    return "0" if result.nmse == 0 else f"{result.nmse:.2e}"


def print_matrix(sweep: Sweep, console: Console) -> None:
    """Prints a row for each cell, a line for each that has not passed or has passed for the first time, and the
    verdict."""
    shown = table("model", "device", "settings", "verdict")
    for column in ("nodes", "NMSE", "s"):
        shown.add_column(column, justify="right")
    for each in sweep.results:
        style = _STYLES[each.verdict]
        numbers = ("", "") if each.verdict == FAILED else (f"{each.nodes:,}", _number(each))
        found = f"[{style}]{each.verdict}[/]"
        row = (escape(each.model), escape(each.device), escape(each.settings or DEFAULTS))
        shown.add_row(*row, found, *numbers, f"{each.seconds:.1f}")
    console.print(shown)
    _lines(console, (told(each) for each in sweep.wrong), "red")
    _lines(console, (f"known: {told(each)}" for each in sweep.known), "yellow")
    _lines(console, (f"newly right: {told(each)}" for each in sweep.newly_right), "green")
    _lines(console, (f"only in the baseline: {told(each)}" for each in sweep.gone), None)
    _lines(console, [verdict(sweep)], "bold green" if sweep else "bold red")


def _lines(console: Console, lines: Iterable[str], style: str | None) -> None:
    for line in lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def matrix_json(sweep: Sweep) -> dict[str, Any]:
    """Returns the sweep as data: schema, verdict, and every cell."""
    commands = {each.name: each.command for each in sweep.cells}
    return {
        "schema": SCHEMA,
        "reference": sweep.reference,
        "passed": bool(sweep),
        "verdict": verdict(sweep),
        "complete": len(sweep.results) == len(sweep.cells),
        "cells": [
            asdict(each)
            | {"passed": bool(each), "known": not each and sweep.is_known(each), "command": commands[each.cell]}
            for each in sweep.results
        ],
    }


def matrix_html(sweep: Sweep) -> str:
    """Returns the page of a sweep: a table for each device, of models and settings. It links to the reports of cells,
    from the sweep's folder."""
    found, commands = {each.cell: each for each in sweep.results}, {each.name: each.command for each in sweep.cells}
    devices, models, settings = (
        [*dict.fromkeys(getattr(each, name) for each in sweep.cells)] for name in ("device", "model", "settings")
    )
    newly_right = {each.cell for each in sweep.newly_right}
    cells = {
        key: {
            "verdict": each.verdict, "class": _CLASSES[each.verdict], "why": each.why, "command": commands[key],
            "number": _number(each), "nodes": each.nodes, "ran": each.verdict != FAILED,
            "link": quote(each.report, errors="surrogateescape"), "known": not each and sweep.is_known(each),
            "right": key in newly_right,
        }
        for key, each in found.items()
    }  # fmt: skip
    counts = Counter(each.verdict for each in sweep.results)
    return page(
        "matrix",
        styles=("diff.css", "matrix.css"),
        scripts=("matrix.js",),
        sweep=sweep,
        passed=bool(sweep),
        complete=len(sweep.results) == len(sweep.cells),
        verdict=verdict(sweep),
        devices=devices,
        models=models,
        settings=settings,
        defaults=DEFAULTS,
        cells=cells,
        wrong=[(told(each), cells[each.cell]) for each in sweep.wrong],
        chips=[(each, _CLASSES[each], counts[each]) for each in VERDICTS],
    )


def junit_xml(sweep: Sweep) -> str:
    """Returns the sweep as JUnit's XML: a suite for each device, a test case for each cell. A cell that failed to run
    is an error, any other that has not passed a failure; what is known from the baseline is skipped."""
    root = ElementTree.Element("testsuites", name="ggml-npu matrix")
    for device in dict.fromkeys(each.device for each in sweep.results):
        suite = ElementTree.SubElement(root, "testsuite", name=_text(device))
        for each in (each for each in sweep.results if each.device == device):
            _test_case(suite, sweep, each)
        _count(suite, ("failure", "error", "skipped"))
    _count(root, ("failure", "error"))
    ElementTree.indent(root, " ")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _test_case(suite: ElementTree.Element, sweep: Sweep, result: Result) -> None:
    name = f"{result.model} {result.settings}".rstrip()
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=_text(f"ggml-npu.matrix.{result.device}"),
        name=_text(name),
        time=f"{result.seconds:.1f}",
    )
    if not result:
        kind = "skipped" if sweep.is_known(result) else "error" if result.verdict == FAILED else "failure"
        said = _text(f"{result.verdict}: {result.why}")
        attributes = {"message": f"known: {said}"} if kind == "skipped" else {"message": said, "type": result.verdict}
        ElementTree.SubElement(case, kind, attributes).text = None if kind == "skipped" else said
    ElementTree.SubElement(case, "system-out").text = _text(f"{result.nodes} nodes compared; report: {result.report}")


def _count(element: ElementTree.Element, tags: Iterable[str]) -> None:
    """Sets the numbers of a suite, or of all."""
    cases = [*element.iter("testcase")]
    element.set("tests", str(len(cases)))
    for tag in tags:
        name = tag if tag == "skipped" else f"{tag}s"
        element.set(name, str(sum(case.find(tag) is not None for case in cases)))
    element.set("time", f"{sum(float(case.get('time', 0)) for case in cases):.1f}")


def _text(text: str) -> str:
    """Returns a text that XML can hold."""
    return printable(text).encode(errors="replace").decode().translate({0xFFFE: "?", 0xFFFF: "?"})
