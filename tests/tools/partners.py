"""Devices of other backends beside ggml's CPU, by a diff, in models that ggml's test-llama-archs writes: ggml-blas with
a BLAS of our own (ACCEL, host memory), a ggml-rpc-server on loopback (GPU, memory of its own), ggml-vulkan on Mesa's
lavapipe (GPU, memory and order of its own, half floats), where kit/vulkan.py can build that, and ggml-openvino (GPU,
host memory, whole graphs only) where kit/openvino.py can. The last two are judged with --tolerances gpu.

    python tests/tools/partners.py FOLDER                  20 models on each partner
    python tests/tools/partners.py FOLDER --every 1        all 140
    python tests/tools/partners.py FOLDER --only Vulkan0   on one

Prints a table: models, nodes of the own run by what became of them, verdicts, seconds; and each node that is wrong.
A device that stops where its nodes are observed, and then ends right unobserved, is printed and is not wrong. Exits
with 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":  # what tests share lies beside this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from kit import openvino, vulkan
from kit.backends import blas, rpc_library, served
from rich.console import Console
from rich.table import Table
from tools.architectures import models

from graph_runner.base.settings import FlashAttention, Settings
from graph_runner.diff.run import DiffOptions, DiffResult
from graph_runner.judging.rules import GPU
from graph_runner.process.child import begun
from graph_runner.process.jobs import DiffJob, NpuOptions, run_diff
from graph_runner.process.start import DIFF
from graph_runner.reports.nodes import describe, explanation
from graph_runner.run.devices import Devices
from quant.errors import UserError

_TOKENS = 40  # of a prompt: ggml-blas takes products of 32 columns and more
_CHARACTERS = 5  # that a token of these models has
_SECONDS = 600.0  # that a node may take
_ROUNDS_OTHERWISE = (vulkan.DEVICE, openvino.DEVICE)  # half floats, and functions of its own
_PARTNERS = ("RPC0", "BLAS", vulkan.DEVICE, openvino.DEVICE)


def compared(model: Path, device: str, devices: Devices) -> DiffResult:
    """A diff of a model on a partner, in a process of its own, which a partner may end. Without flash attention but on
    OpenVINO, which cannot run a model without."""
    letters = random.Random(model.stem).choices("abcdefghijklmnopqrstuvwxyz ", k=_CHARACTERS * _TOKENS)
    attention: FlashAttention = "on" if device == openvino.DEVICE else "off"
    options = DiffOptions(steps=1, device=device, devices=devices, settings=Settings(flash_attention=attention))
    rules = GPU if device in _ROUNDS_OTHERWISE else None
    with begun(DIFF) as child:
        job = DiffJob(NpuOptions({}), model, "".join(letters), options, rules=rules)
        return run_diff(child, job, node_timeout=_SECONDS, seen=lambda _: None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for models and what is built")
    parser.add_argument("--every", type=int, default=7, metavar="N", help="each N-th model")
    parser.add_argument("--only", choices=_PARTNERS, action="append", help="a partner; repeat it for more")
    options = parser.parse_args()
    os.environ["GGML_NO_BACKTRACE"] = "1"
    partners = options.only or [*_PARTNERS]
    for kit in (vulkan, openvino):
        if kit.DEVICE in partners and kit.missing():
            print(f"no {kit.DEVICE}: this machine has no {kit.missing()}")
            partners.remove(kit.DEVICE)
    libraries = [rpc_library(), blas(options.folder)]
    if vulkan.DEVICE in partners:
        libraries.append(vulkan.library())
        os.environ.update(vulkan.environment())
    if openvino.DEVICE in partners:
        libraries.append(openvino.library())
    files, wrong = models(options.folder)[:: options.every], 0
    shown = Table("partner", "models", "judged", "on the CPU", "verdicts", "wrong", "seconds")
    with served(options.folder / "server.log") as (address, _):
        devices = Devices(tuple(libraries), (address,))
        for device in partners:
            fates, verdicts, begin = Counter[str](), Counter[str](), time.perf_counter()
            for file in files:
                try:
                    result = compared(file, device, devices)
                except UserError as error:
                    wrong += 1
                    print(f"{device}, {file.stem}: {error}", flush=True)
                    continue
                fates.update({str(fate.value): n for fate, n in result.fates.items()})
                verdicts.update(str(node.verdict) for node in result.nodes)
                for node in result.wrong:
                    wrong += 1
                    print(f"{device}, {file.stem}: {describe(node)}", *explanation(node), sep="; ", flush=True)
                if not result and not result.wrong:
                    wrong += not (result.stopped and result.ending)
                    stopped = result.stopped or "the run ends elsewhere"
                    print(f"{device}, {file.stem}: {stopped}", *result.remarks, flush=True)
            words = ", ".join(f"{count:,} {name}" for name, count in verdicts.most_common())
            seconds = f"{time.perf_counter() - begin:.0f}"
            counts = (f"{len(files)}", f"{fates['judged']:,}", f"{fates['on the CPU']:,}")
            shown.add_row(device, *counts, words, str(wrong), seconds)
    Console(width=None if sys.stdout.isatty() else 140).print(shown)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
