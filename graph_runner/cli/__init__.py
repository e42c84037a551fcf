"""The command ggml-npu, a module per command: `options` and `common` are what they share, `outputs` what they write."""

from __future__ import annotations

import io
import os
import sys

import typer

from graph_runner.cli import bench, capture, coverage, devices, diff, ops, plugin, replay, run, test
from graph_runner.errors import BadInputError

app = typer.Typer(
    name="ggml-npu",
    help="A ggml backend in Python: run GGUF models with its kernels, and compare them byte for byte with ggml's CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(run.run)
app.command()(diff.diff)
app.command()(capture.capture)
app.command()(replay.replay)
app.command()(coverage.coverage)
app.command()(devices.devices)
app.command()(plugin.plugin)
app.command("test")(test.judge)
app.command()(ops.ops)
app.command()(bench.bench)


def main() -> None:
    """Runs the command; a user's mistake is one line on stderr and exit code 2."""
    from ggml_backend_npu import DeviceError
    from ggml_backend_npu.abi.embedding import PluginError
    from ggml_backend_npu.abi.lib import UnknownGgmlError
    from ggml_backend_npu.kernels import KernelFileError
    from ggml_backend_npu.registry import KernelError
    from graph_runner.errors import BenchError, SessionError, TraceError
    from graph_runner.suites import SuiteError
    from graph_runner.tolerances import ToleranceError
    from quant.jit import EngineError

    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="ggml-npu")
    except (
        BadInputError, BenchError, DeviceError, EngineError, KernelError, KernelFileError, PluginError, SessionError,
        SuiteError, ToleranceError, TraceError, UnknownGgmlError,
    ) as error:  # fmt: skip
        print("ggml-npu:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
