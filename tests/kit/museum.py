"""The museum: fixes of ggml and llama.cpp, each rebuilt as a kernel or a device of ours that errs as theirs did.

The exhibits stand in tests/museum, one file for each family of ops. A diff in a process of its own must find each, and
say what kind of fault it is; the same diff without the fault must be right. What it does not find is recorded too.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kit.damage import Commands, Ended
from kit.diffs import PROMPT, planted
from kit.models import OTHERS, VARIED, WRITERS
from kit.shapes import SHAPES
from museum.models import LOUD

from ggml_backend_npu import register
from ggml_backend_npu.device.sim import Simulator
from ggml_backend_npu.registry.entry import op as registered

FOLDER = Path(__file__).parents[1] / "museum"
NODE_SECONDS = 10  # that a node may take; longer than any right one
SECONDS = 300  # that a diff may take

LONG = " ".join([PROMPT] * 4)  # 100 tokens and more

Outcome = Literal["named", "found", "missed"]


@dataclass(frozen=True)
class Exhibit:
    """A fault that was mended, and how it is shown here.

    make     a kernel of `op`, or a simulated device; its docstring says what happened
    thread   where it was reported or mended: repository and number
    backends  that had it
    op       of the first wrong node; of a device's memory: ""
    says     what the diagnosis or the failure of that node must say: a pattern
    outcome  "named": found, at that op, and the kind of fault is said; "found": found at that op, without a right name;
             "missed": called right
    why      why it is not named, or not found, and what would do it
    model    that shows it
    options  of the command
    memory   whether `test --memory` is what shows it, not a diff
    """

    make: Callable[..., Any]
    thread: str
    backends: str
    op: str
    says: str = ""
    outcome: Outcome = "named"
    why: str = ""
    model: str = "llama"
    options: tuple[object, ...] = ()
    memory: bool = False

    def __str__(self) -> str:
        return self.make.__name__

    @property
    def happened(self) -> str:
        """What happened, in a sentence or two."""
        return re.sub(r"\s+", " ", self.make.__doc__ or "").strip()

    @property
    def is_device(self) -> bool:
        """Whether a whole device errs, not one kernel."""
        return isinstance(self.make, type)

    def words(self, folder: Path, *, fixed: bool) -> list[object]:
        """The command that shows the exhibit, or the same without the fault."""
        given = self._files(folder, fixed=fixed)
        if self.memory:
            return ["test", "--memory", *given]
        options = self.options if "--prompt" in self.options else ("--prompt", PROMPT, *self.options)
        options = options if "-n" in options else ("-n", 1, *options)
        options = options if "--threads" in options else ("--threads", 1, *options)
        return ["diff", model_file(folder, self.model), *given, "--node-timeout", NODE_SECONDS, *options]

    def _files(self, folder: Path, *, fixed: bool) -> list[object]:
        if fixed and not self.is_device:
            return []
        file, module = folder / f"{self}{'-fixed' * fixed}.py", self.make.__module__
        file.write_text(
            f"import sys\n\nsys.path.append({str(FOLDER.parent)!r})\n"
            f"from kit.museum import hang\n\nhang({module!r}, {str(self)!r}, fixed={fixed})\n"
        )
        return ["--device-file" if self.is_device else "--kernels", file]


def exhibit(thread: str, backends: str, op: str, **known: Any) -> Callable[[Callable[..., Any]], Exhibit]:
    """Decorator: makes a kernel of an op, or a class of devices, an exhibit. `known` is the rest of `Exhibit`."""
    return lambda make: Exhibit(make, thread, backends, op, **known)


def hang(module: str, name: str, *, fixed: bool) -> None:
    """Registers what an exhibit shows in this process: its kernel, or its device, which may be the mended one."""
    shown: Exhibit = vars(importlib.import_module(module))[name]
    if shown.is_device:
        device: Simulator = shown.make(memory=1 << 28, delay=getattr(shown.make, "late", 0.0))
        device.fixed = fixed  # type: ignore[attr-defined]
        register(device)
    else:
        kernel = planted(shown.op, shown.make)
        registered(kernel.name, types=kernel.types, refuse=kernel.refuse, params=kernel.params)(kernel.define)


@cache
def exhibits() -> dict[str, Exhibit]:
    """All of them, by name."""
    found: dict[str, Exhibit] = {}
    for file in sorted(FOLDER.glob("*.py")):
        module = importlib.import_module(f"museum.{file.stem}")
        found |= {name: each for name, each in vars(module).items() if isinstance(each, Exhibit)}
    return found


def model_file(folder: Path, name: str) -> Path:
    """The file of a model, written when first asked for."""
    file = folder / f"{name}.gguf"
    return file if file.exists() else (WRITERS | OTHERS | VARIED | SHAPES | LOUD)[name](file)


@dataclass(frozen=True)
class Seen:
    """What a command made of an exhibit.

    outcome  "wrong": found, at another op than that at fault
    said     the sentence that names it, or the verdict
    seconds  that it took
    """

    outcome: Outcome | Literal["wrong"]
    said: str
    seconds: float


@dataclass
class Museum:
    """Runs exhibits by the command, in a folder for models and results.

    fixed  what the command said without a fault, by its words: one run serves all exhibits that differ in it alone
    """

    command: Commands
    folder: Path
    fixed: dict[tuple[str, ...], str] = field(default_factory=dict)

    def visit(self, shown: Exhibit) -> Seen:
        """The command with the fault. Raises AssertionError if it ends as no command does."""
        ended, data = self._run(shown.words(self.folder, fixed=False), shown)
        said = _said(shown, ended, data)
        if ended.code == 0:
            return Seen("missed", data.get("verdict", "right"), ended.seconds)
        assert ended.code == 1, ended.text
        if _first_op(shown, data) != shown.op:
            return Seen("wrong", f"{_first_op(shown, data)}: {said}", ended.seconds)
        is_named = shown.says and re.search(shown.says, said)
        return Seen("named" if is_named else "found", said, ended.seconds)

    def alarm(self, shown: Exhibit) -> str:
        """What the command without the fault says if it is not right; else ""."""
        words = shown.words(self.folder, fixed=True)
        key = tuple(map(str, words))
        if key not in self.fixed:
            ended, data = self._run(words, shown)
            self.fixed[key] = "" if ended.code == 0 else data.get("verdict", ended.text)
        return self.fixed[key]

    def _run(self, words: list[object], shown: Exhibit) -> tuple[Ended, dict[str, Any]]:
        if shown.memory:
            return self.command(*words), {}
        written = self.folder / "result.json"
        written.unlink(missing_ok=True)
        ended = self.command(*words, "--json", written, "--reproducers", self.folder)
        return ended, json.loads(written.read_text()) if written.exists() else {}


def _first(data: dict[str, Any]) -> dict[str, Any]:
    place = data.get("first_introduced")
    node: dict[str, Any] = {} if place is None else data["nodes"][place]
    return node


def _first_op(shown: Exhibit, data: dict[str, Any]) -> str:
    op: str = "" if shown.memory else _first(data).get("op", "")
    return op


def _said(shown: Exhibit, ended: Ended, data: dict[str, Any]) -> str:
    """What is said of the first wrong node; of memory, the verdict."""
    if shown.memory:
        return ended.text.strip().rpartition("\n")[2]
    node = _first(data)
    said: str = node.get("diagnosis") or node.get("failure") or data.get("verdict", ended.text)
    return f"between {node['since']} and it: {said}" if node.get("since") else said


def report(rows: list[tuple[Exhibit, Seen, str]]) -> Iterator[str]:
    """The table as Markdown, a line each: exhibits, what was seen of them, and what is said without the fault."""
    named = sum(seen.outcome == "named" for _, seen, _ in rows)
    found = sum(seen.outcome == "found" for _, seen, _ in rows)
    missed = len(rows) - named - found
    alarms = sum(bool(alarm) for *_, alarm in rows)
    yield f"{len(rows)} exhibits: {named + found} found, {named} of them named rightly; {missed} not found."
    yield f"False alarms without the fault: {alarms}."
    yield ""
    yield "| thread | where | what happened | first wrong node, and what the diff says of it | result | seconds |"
    yield "|---|---|---|---|---|---|"
    for shown, seen, _ in rows:
        is_found = seen.outcome in ("named", "found") and not seen.said.startswith(f"{shown.op} ")
        said = f"{shown.op or 'memory'}: {seen.said}" if is_found else seen.said
        why = f" {shown.why}" if shown.why else ""
        cells = (_link(shown.thread), shown.backends, shown.happened, _cut(said), f"{seen.outcome}.{why}")
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} | {seen.seconds:.1f} |"


def _link(thread: str) -> str:
    repository, number = thread.split()
    return f"[{repository.split('/')[-1]} {number}](https://github.com/{repository}/issues/{number})"


def _cut(text: str, most: int = 160) -> str:
    text = re.sub(r"\s+", " ", text).replace("`", "'").replace("<", "&lt;").replace("[", "(").replace("]", ")")
    return text if len(text) <= most else f"{text[:most].rpartition(' ')[0]} ..."
