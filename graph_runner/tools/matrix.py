"""A sweep of diffs: models, devices and settings. Each diff runs in a process of its own, and its result is kept."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from threading import Event
from types import NoneType
from typing import Any

from ggml_backend_npu.ggml import llama
from graph_runner.base.endings import undone
from graph_runner.base.errors import BadInputError
from graph_runner.base.files import parts_of, write_file
from graph_runner.base.models import check_file, demo_file
from graph_runner.base.python import command, environment
from graph_runner.judging.results import RIGHT, ROUNDING, UNDECIDED, WRONG

SCHEMA = "ggml-npu matrix 1"
FAILED = "failed to run"
VERDICTS = (RIGHT, ROUNDING, WRONG, UNDECIDED, FAILED)
OWN = ("demo", "tiny")  # models that are no files of the user

_VERSIONS = ("ggml-backend-npu", "numba", "numpy")
_NO_MATTER = ("GGML_NPU_VERBOSE", "GGML_NO_BACKTRACE")
_JSON, _PAGE, _LOG, _CELL = "diff.json", "diff.html", "log.txt", "cell.json"
_PATIENCE = 2.5  # seconds that a diff has to end after it was told
_HASTE = 0.8  # the same, if the sweep itself was told to end
_LOOK = 0.2  # seconds after which a thread that waits for a diff looks whether the sweep has ended
_SAID = "ggml-npu: "
_KINDS: dict[str, Any] = {"nodes": int, "nmse": (int, float, NoneType), "seconds": (int, float)}  # others are texts


@dataclass(frozen=True)
class Setting:
    """Options of `diff`.

    name   what they are called; their text, if the user gave no name
    words  the options
    files  that they name
    """

    name: str = ""
    words: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Cell:
    """A diff of a sweep.

    model     its name; with device and settings, what a cell is known by
    file      MODEL of the diff
    settings  name of its `Setting`
    words     all options of the diff
    key       a digest of all that its result depends on
    """

    model: str
    file: str
    device: str
    settings: str
    words: tuple[str, ...]
    key: str

    @property
    def name(self) -> tuple[str, str, str]:
        """What it is known by in other sweeps."""
        return self.model, self.device, self.settings

    @property
    def command(self) -> str:
        """The command that runs its diff alone."""
        return shlex.join(["ggml-npu", "diff", self.file, *self.words])

    @property
    def folder(self) -> Path:
        """Where its reports are, within the sweep's folder."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{self.model[-40:]}-{self.device[:24]}").lstrip(".")
        return Path("cells", f"{name}-{self.key[:12]}")


@dataclass(frozen=True)
class Result:
    """What became of a cell.

    verdict  one of VERDICTS
    why      in one line
    nodes    that were compared
    nmse     the largest of these, from equal inputs; None if it is not finite
    first_op  of the first wrong node, or ""
    report   its page, or what it printed if there is none, within the sweep's folder
    """

    model: str
    device: str
    settings: str
    key: str
    verdict: str
    why: str
    nodes: int
    nmse: float | None
    first_op: str
    seconds: float
    report: str

    def __bool__(self) -> bool:
        """Whether the cell has passed."""
        return self.verdict in (RIGHT, ROUNDING)

    @property
    def cell(self) -> tuple[str, str, str]:
        """What the cell is known by in other sweeps."""
        return self.model, self.device, self.settings


Baseline = Mapping[tuple[str, str, str], Result]
Runner = Callable[[Cell, Path, Event], Result]


class StoppedError(Exception):
    """A cell that is not run, or not to its end, since the sweep has ended."""


@dataclass(frozen=True)
class Sweep:
    """The results of a sweep, as far as it has come. Truthy if nothing is wrong but what is known.

    cells     all that are to be run
    results   of those that have run, in their order
    baseline  results of a former sweep; None if none was given
    """

    reference: str
    cells: Sequence[Cell]
    results: Sequence[Result] = ()
    baseline: Baseline | None = None

    def __bool__(self) -> bool:
        return len(self.results) == len(self.cells) and not self.wrong

    @property
    def wrong(self) -> list[Result]:
        """The cells that have not passed and are not known."""
        return [each for each in self.results if not each and not self.is_known(each)]

    @property
    def known(self) -> list[Result]:
        """The cells that have not passed and are known."""
        return [each for each in self.results if not each and self.is_known(each)]

    @property
    def newly_right(self) -> list[Result]:
        """The cells that have passed, and had not in the baseline."""
        return [each for each in self.results if each and (before := self.before(each)) is not None and not before]

    @property
    def gone(self) -> list[Result]:
        """Results of the baseline whose cells are none of this sweep."""
        cells = {each.name for each in self.cells}
        return [each for each in (self.baseline or {}).values() if each.cell not in cells]

    def before(self, result: Result) -> Result | None:
        """Returns the result of a cell in the baseline."""
        return (self.baseline or {}).get(result.cell)

    def is_known(self, result: Result) -> bool:
        """Whether a cell has ended so in the baseline: with the same verdict, and if a node is wrong its op."""
        before = self.before(result)
        return before is not None and (before.verdict, before.first_op) == (result.verdict, result.first_op)


# which cells there are


def models_of(names: Iterable[str], without: Path) -> dict[str, str]:
    """Returns the models that arguments name, by the names that a sweep has for them: of a folder, each GGUF file in
    it and in folders below, but for the later parts of a split one, and what lies in the folder `without`. Raises
    BadInputError for a folder that has none, and SessionError for a file that is none."""
    files: dict[str, str] = {}
    for name in names:
        if name in OWN:
            files[name] = name
            continue
        path = Path(name)
        inside = [each for each in sorted(path.rglob("*.gguf")) if each.is_file() and min(parts_of(each)) == each]
        found = [each for each in inside if not each.resolve().is_relative_to(without.resolve())]
        if not path.is_dir():
            check_file(path)
            found = [path]
        elif not found:
            raise BadInputError(f"model {name!r}: a folder without a GGUF file")
        for file in found:
            files.setdefault(os.path.realpath(file), str(file))
    stems = Counter(Path(file).stem for file in files.values())
    return {Path(file).stem if stems[Path(file).stem] == 1 else file: file for file in files.values()}


def cells_of(
    models: dict[str, str],
    devices: Iterable[str],
    settings: Sequence[Setting],
    common: Sequence[str],
    files: Iterable[Path] = (),
) -> list[Cell]:
    """Returns the cells of a sweep, model by model.

    common  options of each diff, besides its device and settings
    files   that each diff reads, besides those that its settings name
    """
    known = [SCHEMA, [llama.version(), *map(version, _VERSIONS)], _variables(), [*map(_identity, files)]]
    made = []
    for name, file in models.items():
        path = demo_file() if file == "demo" else Path(file)
        of_model = [name] if file == "tiny" else [*map(_identity, parts_of(path))]
        for device in devices:
            for setting in settings:
                words = ("--device", device, *common, *setting.words)
                parts = [known, of_model, words, [*map(_identity, setting.files)]]
                key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
                made.append(Cell(name, file, device, setting.name, words, key))
    return made


def _variables() -> list[tuple[str, str]]:
    found = {name: value for name, value in os.environ.items() if name.startswith("GGML_") and name not in _NO_MATTER}
    return sorted(found.items())


def _identity(file: Path) -> list[str | int]:
    """Returns what a file is known by: its name, size and time of change."""
    try:
        found = file.stat()
    except OSError:
        return [str(file)]
    return [str(file), found.st_size, found.st_mtime_ns]


# running them


def sweep(
    cells: Iterable[Cell],
    folder: Path,
    run: Runner,
    seen: Callable[[Result, bool], object] = lambda result, kept: None,
    jobs: int = 1,
) -> list[Result]:
    """Returns the result of each cell. One that stands in the folder is not run again, unless it failed to run.

    run   runs a cell in an empty folder of its own; raises StoppedError if its event is set before the end
    seen  called with each result, in the order of cells, and whether it stood there
    jobs  cells that run at once
    """
    found, stopped = [], Event()
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(_ran, cell, folder, run, stopped) for cell in cells]
        try:
            for each in running:
                result, kept = each.result()
                found.append(result)
                seen(result, kept)
        finally:
            stopped.set()
    return found


def _ran(cell: Cell, folder: Path, run: Runner, stopped: Event) -> tuple[Result, bool]:
    """Returns the result of a cell, and whether it stood in the folder."""
    if stopped.is_set():
        raise StoppedError
    result, place = _standing(cell, folder), folder / cell.folder
    if result is not None:
        return result, True
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    result = run(cell, place, stopped)
    result = replace(result, report=str(cell.folder / result.report))
    write_file(place / _CELL, json.dumps(asdict(result), indent=1).encode())
    return result, False


def _standing(cell: Cell, folder: Path) -> Result | None:
    """Returns the result of a cell that was run before, if its reports are still there."""
    try:
        result = _result(json.loads((folder / cell.folder / _CELL).read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None
    stands = result.key == cell.key and result.verdict != FAILED and (folder / result.report).is_file()
    return replace(result, model=cell.model, device=cell.device, settings=cell.settings) if stands else None


def run_diff(cell: Cell, folder: Path, stopped: Event, timeout: float) -> Result:
    """Runs the diff of a cell in a process of its own, which is ended after `timeout` seconds, or if the event is set:
    then it raises StoppedError."""
    files = ("--json", folder / _JSON, "--html", folder / _PAGE, "--reproducers", folder)
    words = command("diff", *cell.words, *files, "--", cell.file)
    begin = time.monotonic()
    with (folder / _LOG).open("wb") as log:
        process = subprocess.Popen(
            words, env=environment(GGML_NO_BACKTRACE="1", COLUMNS="120"), stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        with undone(process.kill):
            reason = _waited_for(process, timeout, stopped)
    found: dict[str, Any] = {"verdict": FAILED, "why": reason, "nodes": 0, "nmse": 0.0, "first_op": "", "report": _LOG}
    if reason is None and (folder / _JSON).is_file():
        found = judged(json.loads((folder / _JSON).read_bytes())) | {
            "report": _PAGE if (folder / _PAGE).is_file() else _LOG
        }
    elif reason is None:
        found["why"] = _last_line(folder / _LOG) or f"ended with exit code {process.returncode}"
    seconds = round(time.monotonic() - begin, 1)
    return Result(model=cell.model, device=cell.device, settings=cell.settings, key=cell.key, seconds=seconds, **found)


def _waited_for(process: subprocess.Popen[bytes], timeout: float, stopped: Event) -> str | None:
    """Waits for the end of a diff. Returns why it was no result, if that is known by its end."""
    end = time.monotonic() + timeout
    while not stopped.is_set():
        try:
            code = process.wait(max(0.0, min(_LOOK, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() < end:
                continue
            _end(process, _PATIENCE)
            return f"was not done after {timeout:g} s (--cell-timeout)"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else None
    _end(process, _HASTE)
    raise StoppedError


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Ends a diff: it is told to, so that it leaves nothing, and killed if it does not."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(log: Path) -> str:
    """Returns what a command said at last, without its name."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(_SAID)]
    return lines[-1].removeprefix(_SAID) if lines else ""


def judged(data: dict[str, Any]) -> dict[str, Any]:
    """Returns verdict, why, nodes, nmse and first_op of a `Result`, from the JSON of a diff."""
    found, _, why = data["verdict"].partition(": ")
    if found not in (RIGHT, ROUNDING, WRONG, UNDECIDED):
        found, why = UNDECIDED, data["verdict"]
    place = data["first_introduced"]
    first = None if place is None else data["nodes"][place]
    if first is not None and found == WRONG and not data["faults"]:
        what = what_is_wrong(first) or why
        why = f"step {first['step']} node {first['index']}, {first['op']} {first['name']!r}: {what}"
    errors = [
        each.get("nmse", 0.0)
        for node in data["nodes"]
        for each in (node["isolated"], node["mirrored"])
        if each is not None
    ]
    return {
        "verdict": found,
        "why": " ".join(why.split()),
        "nodes": sum(each["nodes"] for each in data["summary"]),
        "nmse": None if None in errors else max(errors, default=0.0),
        "first_op": first["op"] if first else "",
    }


def what_is_wrong(node: dict[str, Any]) -> str | None:
    """Returns what is known of a wrong node, in a sentence."""
    if node["judged"] is not None and not node["diagnosis"]:
        row = node["judged"]
        error = "not finite" if row["error"] is None else f"{row['error']:.2e}"
        return f"row {row['row']:,} is {error} from {row['against']}, the limit is {row['limit']:.2e}"
    found: str | None = node["diagnosis"] or node["failure"]
    return found


# a former sweep


def results_of(option: str, file: Path) -> Baseline:
    """Returns the results of a former sweep, by their cells. Raises BadInputError, which names the option, if the file
    is not its JSON."""
    try:
        data = json.loads(file.read_bytes())
    except OSError as error:
        raise BadInputError(f"{option} {str(file)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        why = f": {error}" if isinstance(error, json.JSONDecodeError) else ""
        raise BadInputError(f"{option} {str(file)!r}: is not JSON{why}") from None
    try:
        if data["schema"] != SCHEMA:
            raise ValueError(f"has the schema {data['schema']!r}, not {SCHEMA!r}")
        results = [_result(each) for each in data["cells"]]
    except (KeyError, TypeError):
        raise BadInputError(f"{option} {str(file)!r}: is no JSON of ggml-npu matrix") from None
    except ValueError as error:
        raise BadInputError(f"{option} {str(file)!r}: {error}") from None
    return {result.cell: result for result in results}


def _result(data: Any) -> Result:
    """Returns the result that JSON holds. Raises ValueError, naming the key, if it holds none."""
    if not isinstance(data, dict):
        raise ValueError(f"a cell is {data!r:.60}")
    for each in fields(Result):
        value = data.get(each.name)
        kinds = _KINDS.get(each.name, str)
        if each.name not in data or isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"a cell has {each.name} {value!r:.60}")
    if data["verdict"] not in VERDICTS:
        raise ValueError(f"a cell has verdict {data['verdict']!r:.60}")
    return Result(**{each.name: data[each.name] for each in fields(Result)})
