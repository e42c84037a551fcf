"""The museum: faults that ggml and llama.cpp had are found, and called what they are, as docs/record.md says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.damage import Commands
from kit.museum import SECONDS, Exhibit, Museum, exhibits
from tools.museum import PAGE


@pytest.fixture(scope="module")
def museum(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Museum]:
    folder: Path = tmp_path_factory.mktemp("museum")
    with Commands(folder, seconds=SECONDS) as command:
        yield Museum(command, folder)


@pytest.mark.daily(6)
@pytest.mark.slow
@pytest.mark.parametrize("shown", [*exhibits().values()], ids=str)
def test_an_exhibit_is_found_as_recorded(museum: Museum, shown: Exhibit) -> None:
    seen = museum.visit(shown)
    assert seen.outcome == shown.outcome, seen.said
    assert museum.alarm(shown) == ""


def test_there_are_many_and_few_are_not_named() -> None:
    outcomes = Counter(shown.outcome for shown in exhibits().values())
    assert outcomes.total() >= 30
    assert outcomes["named"] >= 27
    for shown in exhibits().values():
        assert shown.happened
        assert bool(shown.says) == (shown.outcome == "named")
        assert bool(shown.why) == (shown.outcome != "named")


def test_the_page_has_each() -> None:
    text = PAGE.read_text()
    assert [str(shown) for shown in exhibits().values() if shown.happened.replace("|", "/") not in text] == []
