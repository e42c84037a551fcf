"""The command test."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from graph_runner.base.console import Console, printable
from graph_runner.base.errors import BadInputError
from graph_runner.cli.common import stderr, use_device
from graph_runner.cli.options import READS, DeviceFile, KindOptions

KernelFiles = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE.py", help="Files of your own kernels, as for --kernels. They are run as code."),
    READS,
]
Ops = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--ops",
        metavar="OP,OP,...",
        help="Run the cases of these ops. Default: the ops that the files register.",
    ),
]
Pattern = Annotated[str | None, typer.Option("-p", metavar="REGEX", help="Run only cases whose parameters match.")]
BuildOnly = Annotated[
    bool, typer.Option("--build", help="Only build ggml's test programs: some 4 minutes the first time.")
]
Memory = Annotated[
    bool,
    typer.Option(
        "--memory",
        help="Test the device's memory in place of kernels, by ggml's own calls: every size and offset, fill, copies, "
        "queue, events, reuse. Kernels are tested in the memory of GGML_NPU_MEMORY.",
    ),
]


def test(
    kernels: KernelFiles = None,
    *,
    ops: Ops = None,
    pattern: Pattern = None,
    build_only: BuildOnly = False,
    memory: Memory = False,
    device_file: DeviceFile = None,
    device: KindOptions,
) -> None:
    """Test kernels: run ggml's own test cases (test-backend-ops) for the ops that a file registers.

    ggml's tests are built the first time, from the sources of llama-cpp-python. Without a file, -o chooses ops of the
    backend's own kernels, or of a device of your own. `diff` prints such a command for a wrong node. Exit code 0: every
    case that is supported passes; 1: one fails, or none is supported; 2: bad input.
    """
    from ggml_backend_npu import default_backend
    from ggml_backend_npu.backend.kernel_files import load_kernels
    from ggml_backend_npu.plugin.embedding import check_package
    from graph_runner.reports.report import print_cases
    from graph_runner.tools.suites import backend_ops, build

    if build_only:
        stderr().print(f"ggml's test programs: {build(stderr())}", highlight=False, soft_wrap=True)
        return
    check_package()
    if memory:
        if kernels or ops or pattern:
            raise BadInputError("test: --memory is about a device, and takes no kernels, -o or -p")
        raise typer.Exit(_memory(device))
    use_device(device)
    registered = [name for file in kernels or () for name in load_kernels(file, default_backend())]
    names = [name.strip().upper() for name in (ops or "").split(",") if name.strip()] or registered
    if not names:
        raise BadInputError("test: needs a file of kernels, or ops with -o")
    options = {f"GGML_NPU_{name.upper()}": value for name, value in device.chosen.items() if value is not None}
    if kernels:
        options["GGML_NPU_KERNELS"] = os.pathsep.join(map(str, kernels))
    else:
        options["GGML_NPU_OPS"] = "all"
    console = stderr()
    build(console)
    with console.status("test-backend-ops") as status:
        cases = backend_ops(
            names,
            options,
            pattern=pattern,
            device=default_backend().name,
            seen=lambda case: status.update(f"{case.group}({case.name})"),
            printed=lambda line: print(printable(line), file=sys.stderr),
        )
    without = [name for name in names if not any(case.group == name for case in cases)]
    if without:
        among = f" whose parameters match {pattern!r}" if pattern is not None else ""
        raise BadInputError(f"test: test-backend-ops has no case of {' '.join(without)}{among}")
    print_cases(names, cases, Console())
    verdicts = {case.verdict for case in cases}
    raise typer.Exit(0 if "passed" in verdicts and "failed" not in verdicts else 1)


def _memory(options: KindOptions) -> int:
    """Tests the memory of the device of --device-file, and of others that the file registers, or of the NPU in memory
    of its own. Returns the exit code."""
    from ggml_backend_npu import default_backend
    from ggml_backend_npu.device.backend import backends_of
    from ggml_backend_npu.ggml.lib import ggml
    from graph_runner.reports.report import print_battery
    from graph_runner.tools.battery import run_battery

    backend = default_backend()
    chosen = backend.options.updated({**options.chosen, "memory": "device"})
    chosen.check()
    file = os.environ.get("GGML_NPU_DEVICE_FILE")
    backends = [each.like() for each in backends_of(file)] if file else [backend.like(options=chosen)]
    with stderr().status("memory") as status:
        found = run_battery(ggml(), backends, status.update)
    print_battery(found, Console())
    return 1 if any(each.faults for each in found) else 0
