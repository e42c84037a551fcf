"""The command matrix."""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from graph_runner.base.console import printable
from graph_runner.base.errors import BadInputError
from graph_runner.base.files import check_outputs, write_file
from graph_runner.cli.command import Command, as_command, files_of, files_read, read_by_variables
from graph_runner.cli.common import stderr, stdout, warn_if_kernels_are_not_kept
from graph_runner.cli.diff import OURS, diff
from graph_runner.cli.failures import UsageError, usage
from graph_runner.cli.options import MODEL_HELP, READS, WRITES, BackendLibraries, JsonFile, RpcServers, finite
from graph_runner.cli.outputs import delivered, json_text, write
from quant.errors import UserError

if TYPE_CHECKING:
    from graph_runner.tools.matrix import Cell, Result, Setting, Sweep

JSON, PAGE = "matrix.json", "matrix.html"

# parameters of the diff that are the sweep's own
_GIVEN = (
    "reference", "device", "libraries", "servers", "json_file", "html_file", "explorer_file", "reproducers",
    "in_process", "verbose",
)  # fmt: skip
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help=f"{MODEL_HELP} Of a folder: each GGUF file in it and below.",
        show_default=False,
    ),
    READS,
]
DeviceNames = Annotated[
    list[str] | None,
    typer.Option("--device", metavar="DEVICE", help="A device to compare. Repeat it for more. Default: npu."),
]
SettingTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--settings",
        metavar="[NAME:] OPTIONS",
        help='Options of ggml-npu diff, with a name or without: "q8_0: -fa on -ctk q8_0". Repeat it for more; "" is a '
        "diff without options.",
        show_default=False,
    ),
]
Folder = Annotated[
    Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where reports are, and cells stand that have run.")
]
CellTimeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=1, callback=finite, help="Time limit of a cell.", show_default=True),
]
Jobs = Annotated[
    int, typer.Option("-j", "--jobs", metavar="N", min=1, max=1024, help="Cells that run at once.", show_default=True)
]
JunitFile = Annotated[
    str | None, typer.Option("--junit", metavar="FILE", help="Also write the cells as test cases of JUnit."), WRITES
]
OpsFile = Annotated[
    str | None,
    typer.Option(
        "--ops-csv",
        metavar="FILE",
        help="Also write which cases of test-backend-ops each device supports, as in ggml's docs/ops.",
    ),
    WRITES,
]
BaselineFile = Annotated[
    Path | None,
    typer.Option(
        "--baseline",
        metavar="FILE",
        help=f"{JSON} of a former sweep: a cell that is as wrong as it was there does not fail.",
    ),
    READS,
]


def matrix(
    models: Models,
    *,
    devices: DeviceNames = None,
    reference: Annotated[
        str, typer.Option(metavar="DEVICE", help="Reference device, taken as right: cpu, npu, or one of type ACCEL.")
    ] = "cpu",
    libraries: BackendLibraries = None,
    servers: RpcServers = None,
    settings: SettingTexts = None,
    folder: Folder = Path("matrix"),
    jobs: Jobs = 1,
    cell_timeout: CellTimeout = 1800.0,
    json_file: JsonFile = None,
    junit_file: JunitFile = None,
    ops_file: OpsFile = None,
    baseline_file: BaselineFile = None,
) -> None:
    """Compare models on devices under settings: a diff for each, one page and one JSON for all.

    Each cell is a diff in a process of its own. What has run stands in the folder, and is not run again with the same
    model, settings and versions. Exit code 0: every cell is right, or ended as in the baseline; 1: a cell is wrong, was
    not judged, or failed to run; 2: bad input; 3: an internal error.
    """
    from graph_runner.tools.matrix import Sweep, cells_of, models_of, results_of, run_diff, sweep

    chosen = _settings(settings or [""])
    baseline = None if baseline_file is None else results_of("--baseline", baseline_file)
    files = models_of(models, folder)
    outputs = {"--json": json_file, "--junit": junit_file, "--ops-csv": ops_file}
    inputs = {"MODEL": [*map(Path, files.values())], "--baseline": [baseline_file] if baseline_file else []}
    with alone_in(folder):
        for name in (JSON, PAGE):
            check_outputs({"--output": str(folder / name), **outputs}, inputs)
        if (folder / JSON).exists():
            results_of("--output", folder / JSON)
        names, reference = [*dict.fromkeys(map(_name, devices or ["npu"]))], _name(reference)
        common = ["--reference", reference]
        common += [word for path in libraries or () for word in ("--backend", str(path))]
        common += [word for server in servers or () for word in ("--rpc", server)]
        cells = cells_of(files, names, chosen, common, [*(libraries or ()), *chain(*read_by_variables().values())])
        found = Sweep(reference, cells, baseline=baseline)
        _save(folder, found)
        warn_if_kernels_are_not_kept()
        with _progress(cells) as seen:

            def done(result: Result, kept: bool) -> None:
                nonlocal found
                found = replace(found, results=[*found.results, result])
                _save(folder, found)
                seen(result, kept)

            sweep(cells, folder, partial(run_diff, timeout=cell_timeout), done, jobs)
    raise typer.Exit(_delivered(found, json_file, junit_file, ops_file, libraries or []))


def _name(device: str) -> str:
    return device.upper() if device.lower() in OURS else device


def _settings(texts: Iterable[str]) -> list[Setting]:
    """Returns the settings of a sweep, each once. Raises BadInputError if two of a name differ."""
    found: dict[str, Setting] = {}
    for text in texts:
        setting = setting_of(text)
        if found.setdefault(setting.name, setting) != setting:
            raise BadInputError(f"--settings {text!r}: {setting.name!r} is given twice, with other options")
    return [*found.values()]


def setting_of(text: str) -> Setting:
    """Returns the options of a column. Raises BadInputError if diff does not take them, or if they are the sweep's."""
    from graph_runner.tools.matrix import Setting

    one = typer.Typer()
    one.command("diff", cls=Command)(as_command(diff))
    command: Any = typer.main.get_command(one)
    file = os.environ.get("GGML_NPU_DEVICE_FILE")  # an option of diff sets it
    try:
        words = shlex.split(text)
        name = words.pop(0)[:-1] if words and words[0].endswith(":") else None
        if {"-h", "--help"} & {*words}:
            raise BadInputError("--help is no setting")
        context = command.make_context("diff", ["tiny", *words])
    except (ValueError, UserError) as error:
        raise BadInputError(f"--settings {text!r}: {error}") from None
    except UsageError as error:
        raise BadInputError(f"--settings {text!r}: {usage(error)}") from None
    finally:
        os.environ.pop("GGML_NPU_DEVICE_FILE", None)
        if file is not None:
            os.environ["GGML_NPU_DEVICE_FILE"] = file
    for parameter in command.params:
        if parameter.name in _GIVEN and context.get_parameter_source(parameter.name).name == "COMMANDLINE":
            raise BadInputError(f"--settings {text!r}: {parameter.opts[-1]} is the same for all cells")
    files = [file for name in files_of(diff, READS) if name != "model" for file in files_read(context.params[name])]
    return Setting(name or shlex.join(words), tuple(words), tuple(files))


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Makes the folder for results, and keeps other sweeps from it. Raises BadInputError if that cannot be."""
    option = f"--output {str(folder)!r}"
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInputError(f"{option}: another sweep runs there") from None
        except OSError as error:
            raise BadInputError(f"{option}: {error.strerror}") from None
        yield


def _save(folder: Path, found: Sweep) -> None:
    """Writes the page and the JSON of a sweep as far as it has come."""
    from graph_runner.reports.matrix import matrix_html, matrix_json

    try:
        write_file(folder / JSON, json_text(matrix_json(found)).encode())
        write_file(folder / PAGE, matrix_html(found).encode())
    except OSError as error:
        raise BadInputError(f"--output {str(folder)!r}: {error.strerror}") from None


@contextmanager
def _progress(cells: list[Cell]) -> Iterator[Callable[[Result, bool], None]]:
    """Yields what is called with each result: prints it on stderr, and on a terminal which cell runs."""
    from graph_runner.reports.matrix import DEFAULTS, told

    console, n = stderr(), 0

    def running() -> str:
        if n == len(cells):
            return ""
        cell = cells[n]
        where = f"{cell.model} on {cell.device}, {cell.settings or DEFAULTS}"
        return escape(printable(f"cell {n + 1:,} of {len(cells):,}: {where}"))

    with console.status(running()) as status:

        def seen(result: Result, kept: bool) -> None:
            nonlocal n
            n += 1
            line = f"{n:,} of {len(cells):,}: {told(result)}{' (has run before)' if kept else ''}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
            status.update(running())

        yield seen


def _delivered(
    found: Sweep, json_file: str | None, junit_file: str | None, ops_file: str | None, libraries: list[Path]
) -> int:
    """Prints the table and writes the requested files. Returns the exit code."""
    from graph_runner.reports.matrix import junit_xml, matrix_json, print_matrix
    from graph_runner.tools.suites import support

    console = stdout(json_file, junit_file, ops_file)
    outputs: list[Callable[[], None]] = [lambda: print_matrix(found, console)]
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(matrix_json(found))))
    if junit_file is not None:
        outputs.append(lambda: write("--junit", junit_file, junit_xml(found)))
    if ops_file is not None:
        devices = [*dict.fromkeys(cell.device for cell in found.cells)]
        outputs.append(lambda: write("--ops-csv", ops_file, support(devices, libraries)))
    return delivered(bool(found), *outputs)
