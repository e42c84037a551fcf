"""What a diff of a model of 1.1 billion weights costs: ggml's CPU beside ggml-blas with OpenBLAS, and beside the same
CPU behind a ggml-rpc-server on loopback, which is to take at most twice the time of the CPU beside itself with as many
threads: a server computes with half of them if nobody says a number.

    python tests/tools/large.py FOLDER    writes 620 MB there

Prints seconds, those of the processor, and the peak of resident memory as a multiple of the model's size. On a machine
that does something else too, the seconds say nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # what tests share lies beside this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from kit.backends import openblas, rpc_library, served
from kit.large import write_large

from quant.kernels.processor import processors

_PROMPT = "the quick brown fox jumps over the lazy dog"  # 45 tokens: ggml-blas takes products of 32 columns and more


def measured(model: Path, *arguments: str | Path) -> str:
    """A diff's costs and its verdict."""
    command: list[str | Path] = ["ggml-npu", "diff", model, "--prompt", _PROMPT, *arguments]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        verdict = process.stdout.read().splitlines()[-1]
        _, _, used = os.wait4(process.pid, 0)  # with the process that it runs the diff in
        process.returncode = 0
    seconds, busy = time.perf_counter() - begin, used.ru_utime + used.ru_stime
    peak = used.ru_maxrss * 1024 / model.stat().st_size
    return f"{seconds:.0f} s, {busy:.0f} s of the processor, {peak:.2f} times the model: {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for the model and what is built")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    model = write_large(folder / "large.gguf")
    print("BLAS:", measured(model, "--device", "BLAS", "--backend", openblas(folder)), flush=True)
    threads = ("--reference-with", f"threads={processors()}", "--device-with", f"threads={max(1, processors() // 2)}")
    itself = ("--reference", "cpu", "--device", "cpu", *threads)
    print("CPU beside itself:", measured(model, *itself), flush=True)
    with served(folder / "server.log") as (address, _):
        print("RPC0:", measured(model, "--device", "RPC0", "--backend", rpc_library(), "--rpc", address))


if __name__ == "__main__":
    main()
