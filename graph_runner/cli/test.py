"""The command test."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from graph_runner.cli.common import stderr, use_device
from graph_runner.cli.options import DeviceMemory, DeviceType, MemoryLimit, ProfileName


def judge(
    kernels: Annotated[
        Path, typer.Argument(metavar="FILE.py", help="Your own kernels, as for --kernels.", show_default=False)
    ],
    profile: ProfileName = None,
    memory: DeviceMemory = None,
    memory_limit: MemoryLimit = None,
    device_type: DeviceType = None,
) -> None:
    """Judge your kernels: run ggml's own test cases (test-backend-ops) of the ops that a file registers.

    ggml's tests are built the first time, from the sources of llama-cpp-python. Exit code 0: every case that is
    supported passes; 1: one fails, or none is supported; 2: bad input.
    """
    from ggml_backend_npu.kernels import load_kernels
    from graph_runner.report import print_cases
    from graph_runner.suites import backend_ops, build

    chosen = {"profile": profile, "memory": memory, "memory_limit": memory_limit, "device_type": device_type}
    use_device(**chosen)
    ops = list(load_kernels(kernels))
    options = {f"GGML_NPU_{name.upper()}": value for name, value in chosen.items() if value is not None}
    build(stderr())
    with stderr().status("test-backend-ops") as status:
        cases = backend_ops(
            ops,
            {**options, "GGML_NPU_KERNELS": str(kernels)},
            seen=lambda case: status.update(f"{case.group}({case.name})"),
        )
    print_cases(ops, cases, Console())
    verdicts = {case.verdict for case in cases}
    raise typer.Exit(0 if "passed" in verdicts and "failed" not in verdicts else 1)
