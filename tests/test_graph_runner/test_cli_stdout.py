"""What stands on stdout where an output file is stdout: that file alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.commands import Cli, fresh, kernel_file, strict_json

TALKS = """
import os
from ggml_backend_npu import op

print("loaded")
os.write(1, b"loaded, by C\\n")

@op("CONT")
def cont(dst, x):
    print("computing")
    dst.view()[...] = x.view().reshape(dst.ne[::-1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--json", "--model-explorer", "--html"])
@pytest.mark.parametrize(
    "command",
    ["ops", "coverage tiny --flash-attn off", "diff tiny -n 0 --ops CONT", "diff tiny -n 0 --ops CONT --in-process"],
)
def test_a_kernel_that_prints_does_not_spoil_it(tmp_path: Path, command: str, option: str) -> None:
    if option != "--json" and not command.startswith("diff"):
        return
    outcome = fresh(*command.split(), "--kernels", kernel_file(tmp_path, TALKS), option, "-")
    assert outcome.code == 0
    assert {"loaded", "loaded, by C"} <= {*outcome.err.splitlines()}
    assert outcome.out.startswith("<!doctype html>") if option == "--html" else strict_json(outcome.out)
    assert "loaded" not in outcome.out.partition("{")[0]


def test_in_one_process_too(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("ops", "--kernels", kernel_file(tmp_path, TALKS), "--json", "-")
    assert strict_json(outcome.out)["ops"]
    assert "loaded" in outcome.err
