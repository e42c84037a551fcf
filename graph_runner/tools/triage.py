"""The order of looking: what is cheap comes first, and it ends when the fault has a name. Each step is a command in a
process of its own, which the user can run alone."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from graph_runner.base.endings import undone
from graph_runner.base.errors import BadInputError
from graph_runner.base.python import command, environment
from graph_runner.judging.results import UNDECIDED
from graph_runner.tools.matrix import what_is_wrong

_SAID = "ggml-npu: "
_WRONG, _BAD_INPUT = 1, 2
_NEAR = 8  # nodes: one of them is wrong, and no command need look for it
_RUNS = "10"  # of flaky, and of bisect if only some runs are wrong


@dataclass(frozen=True)
class Step:
    """A command that was run.

    what   it does, in a word or two
    code   its exit code
    said   its verdict
    name   of the fault, if it has found one; else ""
    data   its JSON
    """

    what: str
    command: str
    code: int
    said: str
    name: str
    seconds: float
    data: dict[str, Any]

    def __bool__(self) -> bool:
        return self.code == 0 or self.is_open

    @property
    def is_open(self) -> bool:
        """Whether it could not tell: no node was compared, or one was not judged."""
        return self.said.startswith(UNDECIDED)


Run = Callable[[str, Sequence[str]], Step]


def triage(words: Sequence[str], movers: Sequence[str], run: Run, seen: Callable[[Step], object]) -> list[Step]:
    """Runs commands until the fault has a name, or there is none. Returns them.

    words  of each command: the model and options that all of them have
    movers names of the ops that move data, which are quickly compared; none: these come with all others
    run    runs a command, given what it does and its words
    seen   called with each step
    """
    done: list[Step] = []

    def step(what: str, command: str, *more: str) -> Step:
        done.append(run(what, [command, *more, *words]))
        seen(done[-1])
        return done[-1]

    if step("order", "hazards").name:
        return done
    ends = step("ends", "bisect", "--ends", "--repeat", "1")
    if movers and step("movers", "diff", "--ops", ",".join(movers)).name:
        return done
    if step("all nodes", "diff").name:
        return done
    same = step("again", "flaky", "--repeat", _RUNS)
    if not same.name and not (ends and same):
        step("halving", "bisect", *([] if same else ["--repeat", _RUNS]))
    return done


def run_command(what: str, words: Sequence[str]) -> Step:
    """Runs a command in a process of its own. Raises BadInputError if it refuses its words, and RuntimeError if it ends
    as no command does."""
    begin = time.monotonic()
    with TemporaryDirectory() as folder:
        written = Path(folder) / "result.json"
        process = subprocess.Popen(
            command(words[0], "--json", written, *words[1:]), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            env=environment(GGML_NO_BACKTRACE="1"),
        )  # fmt: skip
        with undone(process.kill):
            printed = process.communicate()[1]
        data = json.loads(written.read_bytes()) if written.exists() else {}
    lines = [line.removeprefix(_SAID) for line in printed.splitlines() if line.startswith(_SAID)]
    said = lines[-1] if lines else f"ended with exit code {process.returncode}"
    if process.returncode == _BAD_INPUT:
        raise BadInputError(said)
    if process.returncode not in (0, _WRONG) or not data:
        raise RuntimeError(f"{shlex.join(['ggml-npu', *words])}: {said}")
    return Step(
        what, shlex.join(["ggml-npu", *words]), process.returncode, data["verdict"], named(data),
        time.monotonic() - begin, data,
    )  # fmt: skip


def named(data: dict[str, Any]) -> str:
    """Returns the name that a command's JSON has for a fault: a hazard, a node and what is wrong with it; "" if it has
    none."""
    if data["passed"]:
        return ""
    kind = data["schema"].split()[1]
    if kind == "hazards":
        return next(str(each["text"]) for graph in data["graphs"] for each in graph["hazards"])
    if kind == "diff":
        return _of_diff(data)
    if kind == "flaky":
        parting = data["parting"]
        return str(parting["text"]) if parting is not None and parting["place"] is not None else ""
    if data["span"] is not None:
        return str(data["verdict"]).removeprefix("wrong: ")
    return " and ".join(f"{unit['op']} {unit['name']!r}" for unit in (data["nodes"][n] for n in data["needed"]))


def _of_diff(data: dict[str, Any]) -> str:
    if data["faults"]:
        return str(data["verdict"])
    for graph in data.get("order", {}).get("graphs", ()):
        if graph["hazards"]:
            return str(graph["hazards"][0]["text"])
    if data["first_introduced"] is None:
        return str(data["verdict"]) if data["strays"] or data["stopped"] else ""
    node = data["nodes"][data["first_introduced"]]
    where = f"step {node['step']} node {node['index']}: {node['op']} {node['name']!r}"
    what = what_is_wrong(node) or "gives other values"
    if not node["since"]:
        return f"{where}: {what}"
    first = re.match(r"step (\d+) node (\d+):", node["since"])
    is_near = first is not None and int(first[1]) == node["step"] and node["index"] - int(first[2]) <= _NEAR
    return f"between {node['since']} and {where}: {what}" if is_near else ""
