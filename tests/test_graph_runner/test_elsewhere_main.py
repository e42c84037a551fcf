"""How the other process starts."""

from __future__ import annotations

import os
import subprocess
from multiprocessing.connection import Pipe
from pathlib import Path

from graph_runner.base.python import environment, python
from graph_runner.elsewhere.layout import Say
from quant.errors import UserError


def test_what_it_cannot_load_is_its_first_answer(tmp_path: Path) -> None:
    mine, theirs = Pipe()
    fd = os.memfd_create("test")
    passed = theirs.fileno(), fd
    code = "from graph_runner.elsewhere.main import main; main()"
    process = subprocess.Popen(
        python("-c", code, *map(str, passed)), env=environment(LLAMA_CPP_LIB_PATH=str(tmp_path)), pass_fds=passed
    )
    theirs.close()
    mine.send((Say.ASK, ("begin", (False, 1))))
    kind, error = mine.recv()
    assert kind is Say.RAISES
    assert isinstance(error, UserError)
    assert "cannot be imported" in str(error)
    assert process.wait(20) == 0
    os.close(fd)
