"""Faults of whole runs are named by the command that docs/record.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.whole_faults import FAULTS, Fault, Looker
from tools.whole_faults import PAGE


@pytest.fixture(scope="module")
def looker(tmp_path_factory: pytest.TempPathFactory) -> Looker:
    return Looker(tmp_path_factory.mktemp("whole"))


@pytest.mark.daily(4)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_named_as_recorded(looker: Looker, fault: Fault) -> None:
    seen = looker.look(fault)
    assert seen.by == fault.by, seen


@pytest.mark.slow
def test_a_device_without_a_fault_is_right(looker: Looker) -> None:
    assert looker.is_right() == []


def test_there_are_many_and_the_page_has_each() -> None:
    text = Path(PAGE).read_text()
    assert len(FAULTS) >= 25
    assert {fault.where for fault in FAULTS} == {"C++", "this project's"}
    assert [str(fault) for fault in FAULTS if f"| {fault.kind} | {fault.where} |" not in text] == []
    assert " at 0x" not in text, "an address is another one in each run"
