"""A diff of two builds: here, of the installed one and of the same in another process."""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp
import pytest
from kit.commands import Cli, assert_refused, strict_json
from kit.diffs import FLASH_OFF, run

from graph_runner.base.builds import short
from graph_runner.base.errors import BadInputError
from graph_runner.base.models import model_file
from graph_runner.base.variants import Variants
from graph_runner.diff.run import DiffResult
from graph_runner.judging.results import Fate, Verdict

INSTALLED = Path(llama_cpp.__file__).with_name("lib")
BUILD = f"build={INSTALLED}"


def beside(device: str, reference: str = "", **options: object) -> DiffResult:
    found = Variants.of(("CPU", reference.split()), ("CPU", device.split()))
    with model_file("tiny") as file:
        return run(file, FLASH_OFF, steps=1, device="CPU", variants=found, **options)


@pytest.mark.slow
def test_every_node_is_judged_from_equal_inputs_and_in_the_own_run() -> None:
    result = beside(BUILD)
    assert result
    assert {node.verdict for node in result.nodes} == {Verdict.EXACT}
    assert result.fates == {Fate.JUDGED: len(result.nodes)}
    assert len(result.compared) == len(result.nodes) > 0
    assert result.is_unobserved
    assert len(result.order) == 2
    assert result.order_unknown == ""
    assert (result.reference, result.device) == ("CPU", f"CPU build={short(str(INSTALLED))}")
    assert result.builds is not None
    assert [each.where for each in result.builds][1] == str(INSTALLED)
    assert result.ending is not None
    assert result.ending.nmse == 0


@pytest.mark.slow
def test_settings_beside_a_build() -> None:
    result = beside(f"{BUILD} flash-attn=on", "flash-attn=off")
    assert not result.wrong
    assert result.not_judged, "two graphs"


def test_a_reference_that_this_process_does_not_have() -> None:
    with pytest.raises(BadInputError, match=r"reference of .*: this process has another llama.cpp"):
        beside("", BUILD)


@pytest.mark.slow
def test_a_reference_of_another_build_by_the_command(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "diff.json"
    arguments = ("-n", "0", "--reference", "cpu", "--device", "cpu", "--reference-with", BUILD, "--json", file)
    outcome = cli("diff", "tiny", *arguments)
    assert outcome.code == 0, outcome
    data = strict_json(file.read_text())
    assert (data["reference"], data["device"]) == (f"CPU build={short(str(INSTALLED))}", "CPU")
    assert [each["where"] for each in data["builds"]] == [str(INSTALLED), "this environment's llama-cpp-python"]
    assert f"CPU build={short(str(INSTALLED))}: ggml {data['ggml']}, " in outcome.out
    assert "LLAMA_CPP_LIB_PATH" not in os.environ


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("build=/no/such", "no such directory"),
        ("build={}", "has no libllama.so and no libggml.so"),
        ("python=/no/such", "no such file"),
        ("python=/bin/ls", "is no Python that runs"),
    ],
)
def test_what_is_no_build(cli: Cli, tmp_path: Path, setting: str, says: str) -> None:
    given = setting.format(tmp_path)
    outcome = cli("diff", "tiny", "--reference", "cpu", "--device", "cpu", "--device-with", given)
    assert_refused(outcome, f"--device-with {given!r}: {says}")
