"""What gpu.sh runs: each row of the table in a process of its own, so that none stops another.

python gpu.py [MODEL.gguf ...]   the table
python gpu.py row NAME [MODEL]   one row
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_ROW_SECONDS = 150
_PROMPT = "The capital of France is Paris. The capital of Germany is"
_FUZZED = 5_000


def movers() -> str:
    """Random nodes that move data, beside ggml's CPU."""
    from ggml_npu_torch import Torch
    from kit.beside_cpu import MOVERS, differing

    found = differing(Torch(), MOVERS, _FUZZED)
    for line in found.wrong:
        print(line)
    return f"{found.n} nodes, {len(found.wrong)} wrong"


def split() -> str:
    """The cost of a graph of one node and of one of 300, in microseconds: queued, and until it is done."""
    import numpy as np
    from ggml_npu_torch import Torch

    from ggml_backend_npu import DeviceBackend, Graph, Node, Tensor

    backend = DeviceBackend(Torch())
    memory = backend.memory()
    said = []
    for n_nodes in (1, 300):
        host = [Tensor.of(np.ones(4, np.float32)) for _ in range(n_nodes + 2)]
        there = [_moved(each, memory) for each in host]
        nodes = tuple(Node("ADD", there[i + 2], (there[i + 1], there[0])) for i in range(n_nodes))
        plan = backend.plan(Graph(nodes, ((None, None),) * n_nodes, tuple((node.dst,) for node in nodes)))
        queued, done = [], []
        for _ in range(200):
            begin = time.perf_counter()
            plan.run()
            queued.append(time.perf_counter() - begin)
            memory.synchronize()
            done.append(time.perf_counter() - begin)
        said.append(f"{n_nodes} nodes: {np.median(queued) * 1e6:.0f} us queued, {np.median(done) * 1e6:.0f} us done")
    return "; ".join(said)


def _moved(tensor, memory):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    buffer = memory.allocate(tensor.nbytes)
    memory.write(buffer.address, tensor.memory.bytes())
    return replace(tensor, memory=replace(tensor.memory, address=buffer.address, owner=None), buffer=buffer)


def speed(model: str) -> str:
    """Tokens a second beside ggml's CPU, and whether the text is the same."""
    import numpy as np
    from ggml_npu_torch import Torch

    from ggml_backend_npu import DeviceBackend
    from ggml_backend_npu.ggml import lib
    from ggml_backend_npu.plugin.plugin import Plugin
    from graph_runner.run.sampling import Sampler, generate
    from graph_runner.run.session import Session, Settings

    found: dict[str, tuple[float, float, list[int], np.ndarray]] = {}
    for name in ("cpu", "npu"):
        plugin = Plugin(lib.ggml(), DeviceBackend(Torch())) if name == "npu" else None
        settings = Settings(device=name, gpu_layers=999, n_ctx=1024, flash_attention="on", repack=name == "cpu")
        with Session(Path(model), settings, npu=plugin, counts_nodes=False) as session:
            tokens = session.tokenize(_PROMPT)
            many = (tokens * 512)[:512]
            times = [_seconds(session, [many]) for _ in range(3)]
            session.clear()
            text = list(generate(session, tokens, 32, Sampler()))
            session.clear()
            session.decode(tokens)
            logits = session.logits().copy()
            _seconds(session, [[token] for token in many[:4]], clear=False)
            steps = [_seconds(session, [[token] for token in many[:16]], clear=False) for _ in range(3)]
            found[name] = 512 / min(times), 16 / min(steps), text, logits
            if name == "npu" and session.splits is not None:
                splits = session.splits
    cpu, npu = found["cpu"], found["npu"]
    nmse = float(np.square(cpu[3] - npu[3]).sum() / np.square(cpu[3]).sum())
    same = next((i for i, (a, b) in enumerate(zip(cpu[2], npu[2], strict=False)) if a != b), None)
    text = "32 tokens equal" if same is None else f"token {same} differs"
    return (
        f"prompt of 512: {npu[0]:.0f} tokens/s, ggml's CPU {cpu[0]:.0f}; generation: {npu[1]:.1f}, CPU {cpu[1]:.1f}; "
        f"{text}, logits NMSE {nmse:.1e}; splits {splits}"
    )


def _seconds(session, batches: list[list[int]], *, clear: bool = True) -> float:  # type: ignore[no-untyped-def]
    if clear:
        session.clear()
    begin = time.perf_counter()
    for batch in batches:
        session.decode(batch)
    session.logits()
    return time.perf_counter() - begin


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from graph_runner.cli import main; main()", *arguments]


def _of_row(*arguments: str) -> list[str]:
    return [sys.executable, __file__, "row", *arguments]


def _requantised(model: Path, folder: Path, type: str, number: int) -> Path | None:
    """The model with its matrices of another type; None if llama.cpp cannot."""
    from llama_cpp import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = number, True
    path = folder / f"{model.stem.split('.')[0]}-{type}.gguf"
    failed = llama_cpp.llama_model_quantize(str(model).encode(), str(path).encode(), ctypes.byref(params))
    return None if failed else path


def _rows(folder: Path, given: list[str]) -> list[tuple[str, list[str]]]:
    """Names and commands."""
    file = folder / "torch_device.py"
    file.write_text("from ggml_backend_npu import register\nfrom ggml_npu_torch import Torch\nregister(Torch())\n")
    device = ("--device-file", str(file))
    small, models = [], [Path(each) for each in given]
    try:
        from kit.encoders import write_tiny_bert
        from kit.models import write_tiny_gpt_oss, write_tiny_moe

        small = [
            write(folder / f"{name}.gguf")
            for name, write in (("moe", write_tiny_moe), ("gpt_oss", write_tiny_gpt_oss), ("bert", write_tiny_bert))
        ]
    except Exception as error:
        print(f"small models left out: {type(error).__name__}: {error}")
    try:
        from graph_runner.base.models import demo_file

        demo = demo_file()
        models = [demo, *models]
        made = [_requantised(demo, folder, type, number) for type, number in (("q8_0", 7), ("f16", 1))]
        models[1:1] = [each for each in made if each is not None]
    except Exception as error:
        print(f"SmolLM2 left out: {type(error).__name__}: {error}")
    rows = [
        ("memory", _command("test", "--memory", *device)),
        ("movers", _of_row("movers")),
        ("split", _of_row("split")),
        *((f"speed {model.name}", _of_row("speed", str(model))) for model in models),
    ]
    for model in ("tiny", *map(str, small)):
        for attention in ("on", "off"):
            name = f"diff {Path(model).name} -fa {attention}"
            rows.append((name, _command("diff", model, "--all", "--flash-attn", attention, *device)))
    for model in models:
        rows.append((f"diff {model.name}", _command("diff", str(model), "--all", "--flash-attn", "on", *device)))
    return rows


_SAID = re.compile(r"^(right|wrong)\b.*|^own run of .*|^logits: .*|^left out: .*", re.MULTILINE)


def _result(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_ROW_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"FAILED: not done after {_ROW_SECONDS} s"
    lines = done.stdout.strip().splitlines()
    warned = [line for line in done.stderr.splitlines() if "UserWarning" in line]
    if done.returncode:
        last = [*(line for line in lines if line.startswith(("step ", "wrong"))), *done.stderr.strip().splitlines()]
        return "\n".join([f"FAILED with {done.returncode}", *last[:3], *last[-3:]])
    said = [found[0] for found in _SAID.finditer(done.stdout)] if "row" not in command else lines[-1:]
    return "\n".join([*said, *warned])


def main(arguments: list[str]) -> None:
    rows: dict[str, Callable[..., str]] = {"movers": movers, "split": split, "speed": speed}
    if arguments[:1] == ["row"]:
        print(rows[arguments[1]](*arguments[2:]))
        return
    import torch

    device = os.environ["TORCH_DEVICE"]
    print(f"TORCH_DEVICE {device}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        for name, command in _rows(Path(folder), arguments):
            start = time.monotonic()
            first, *rest = _result(command).splitlines() or ["nothing was printed"]
            print(f"{name:36} {time.monotonic() - start:5.1f} s  {first}", flush=True)
            for line in rest:
                print(f"{'':46}{line}", flush=True)
        print(f"all of it took {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
