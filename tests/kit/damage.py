"""Damaged files, and commands, each run in a process of its own: forked from one that has everything imported
and its kernels loaded."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

SECONDS = 20

_SERVER = """
import gc, json, os, signal, sys, time
import graph_runner.cli.failures, graph_runner.diff.run, graph_runner.reports.report, graph_runner.run.token_graph
from graph_runner.cli import main
from graph_runner.cli.app import COMMANDS, function_of
from quant.kernels.jit import CFunction

for command in COMMANDS:
    function_of(command)
for each in gc.get_objects():
    if isinstance(each, CFunction):
        each.address
gc.freeze()

for line in sys.stdin:
    words = json.loads(line)
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        out = os.open(words["out"], os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(out, number)
        sys.argv = ["ggml-npu", *words["arguments"]]
        sys.stdout.flush()
        code = 99
        try:
            main()
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() - begin > words["seconds"]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            code = "hangs"
            break
        time.sleep(0.005)
    text = open(words["out"], errors="replace").read()
    print(json.dumps({"code": code, "text": text, "seconds": time.monotonic() - begin}), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, minus a signal's number, or "hangs"; what it printed on both streams."""

    code: int | str
    text: str
    seconds: float

    def is_fine(self, *codes: int) -> bool:
        """It ended with one of these codes and, where that is 2, with a line."""
        return self.code in codes and "Traceback" not in self.text and (self.code != 2 or self.text.count("\n") == 1)


class Commands:
    """Runs commands, each in a process of its own, for so many seconds at most. A context manager."""

    def __init__(self, folder: Path, seconds: float = SECONDS) -> None:
        self._out, self._seconds = folder / "printed", seconds

    def __enter__(self) -> Commands:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        )  # fmt: skip
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()

    def __call__(self, *arguments: object) -> Ended:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        words = {"arguments": [*map(str, arguments)], "out": str(self._out), "seconds": self._seconds}
        self._server.stdin.write(json.dumps(words) + "\n")
        self._server.stdin.flush()
        return Ended(**json.loads(self._server.stdout.readline()))


def flips(data: bytes, header: int, random: np.random.Generator) -> bytes:
    """One to three bits are others, most often in the header."""
    damaged = bytearray(data)
    for _ in range(random.integers(1, 4)):
        place = int(random.integers(0, header if random.random() < 0.8 else len(data)))
        damaged[place] ^= 1 << int(random.integers(0, 8))
    return bytes(damaged)


def cuts(data: bytes, header: int, random: np.random.Generator) -> bytes:
    """The end is missing."""
    return data[: int(random.integers(0, header if random.random() < 0.5 else len(data)))]


_WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_EXTREMES = (0, 1, 2, 3, 7, 255, 1 << 15, 1_000_000, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)
_FLOATS = (0.0, -1.0, 1e-45, 1e38, float("inf"), float("nan"))


def edits(path: Path) -> Callable[[bytes, int, np.random.Generator], bytes]:
    """A number of the header is another: a key's value, a tensor's dimension, its type or its place."""
    reader = GGUFReader(path)
    places = [*_numbers(reader)]

    def edit(data: bytes, header: int, random: np.random.Generator) -> bytes:
        damaged = bytearray(data)
        begin, width, is_float = places[int(random.integers(0, len(places)))]
        if is_float and width == 4:
            damaged[begin : begin + 4] = struct.pack("<f", _FLOATS[int(random.integers(0, len(_FLOATS)))])
        else:
            value = _EXTREMES[int(random.integers(0, len(_EXTREMES)))] % (1 << 8 * width)
            damaged[begin : begin + width] = struct.pack(f"<{_WIDTHS[width]}", value)
        return bytes(damaged)

    return edit


def _numbers(reader: GGUFReader) -> Iterator[tuple[int, int, bool]]:
    """Where the numbers of a header are: byte, width, whether it is a float. Of long arrays the first few."""
    base = reader.data.ctypes.data
    fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
    for field in fields:
        for part in field.parts[:40]:
            if part.dtype.kind in "iuf" and part.size <= 4 and part.dtype.itemsize in _WIDTHS:
                for i in range(part.size):
                    begin = part.ctypes.data - base + i * part.dtype.itemsize
                    yield begin, part.dtype.itemsize, part.dtype.kind == "f"
