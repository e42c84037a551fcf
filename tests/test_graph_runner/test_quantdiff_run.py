"""A comparison of two quantisations, from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.quantised import SETTINGS, TEXT, in_type, scaled, write_pair, write_with

import graph_runner
from graph_runner import QuantOptions, SessionError, quantisation
from graph_runner.base.errors import BadInputError
from graph_runner.quantdiff.files import ModelFile
from graph_runner.quantdiff.result import Quantisation

RUINED = "blk.1.attn_v.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same with all matrices of layer 1 in q8_0, of which one is ruined."""
    folder = tmp_path_factory.mktemp("models")
    big, _ = write_pair(folder)
    layer = [name for name, each in ModelFile(big).tensors.items() if each.layer == 1 and len(each.ne) > 1]
    changed = dict.fromkeys(layer, in_type("q8_0")) | {RUINED: scaled(-1)}
    return big, write_with(folder / "ruined.gguf", big, changed)


@pytest.fixture(scope="module")
def found(models: tuple[Path, Path]) -> Quantisation:
    return quantisation(*models, TEXT, QuantOptions(settings=SETTINGS))


def test_the_tensor_that_is_ruined_is_named_first(found: Quantisation) -> None:
    first, *others = sorted(found.tensors, key=lambda each: -each.cost.gain.value)  # type: ignore[union-attr]
    assert first.name == RUINED
    assert first.cost is not None
    assert first.cost.gain.value > 10 * max(each.cost.gain.value for each in others if each.cost is not None)
    assert first.error.nmse == pytest.approx(4, rel=1e-3)
    assert {*found.layers} == {1}
    assert max(found.kinds, key=lambda kind: found.kinds[kind].gain.value) == "attn_v.weight"
    assert found.layers[1].gain.value == pytest.approx(found.scores.kls[:31].mean(), abs=1e-4)


def test_no_more_than_one_run_for_a_tensor_that_is_a_kind_of_its_own(models: tuple[Path, Path]) -> None:
    seen: list[tuple[int, int, str]] = []
    options = QuantOptions(settings=SETTINGS, tensors=2, seen=lambda *each: seen.append(each))
    result = quantisation(*models, TEXT, options)
    assert [done for done, _, _ in seen] == [*range(len(seen))]
    assert {n for _, n, _ in seen} == {len(seen)}
    assert len(seen) == 2 + 1 + 7 + 2
    assert sum(each.cost is not None for each in result.tensors) == 2
    assert [each.name for each in result.by_cost if each.error.nmse > 1] == [RUINED]


def test_the_table_has_every_tensor(found: Quantisation) -> None:
    assert [row.name for row in found.table] == [each.name for each in found.tensors]


def test_types_for_a_size(tmp_path: Path) -> None:
    big, small = write_pair(tmp_path)
    options = QuantOptions(settings=SETTINGS, bpw=6.0, tensors=0, types=("q4_0", "q5_0", "Q8_0"))
    result = quantisation(str(big), str(small), TEXT, options)
    proposal = result.proposal
    assert proposal is not None
    assert 5.5 < proposal.bpw <= 6.0
    assert {*proposal.types.values()} <= {"q4_0", "q5_0", "q8_0"}
    assert len({*proposal.types.values()}) > 1
    assert proposal.scores.kl.value < result.scores.kl.value
    assert 0.2 < proposal.predicted / proposal.scores.kl.value < 5


def test_what_cannot_be(models: tuple[Path, Path]) -> None:
    big, small = models
    with pytest.raises(SessionError, match="every tensor has the same bytes"):
        quantisation(big, big, TEXT)
    with pytest.raises(BadInputError, match=r"--bpw 2: the smallest of the types given take \d"):
        quantisation(big, small, TEXT, QuantOptions(bpw=2.0))


def test_weights_that_are_not_finite(models: tuple[Path, Path], tmp_path: Path) -> None:
    broken = write_with(tmp_path / "nan.gguf", models[0], {RUINED: scaled(float("nan"))})
    with pytest.raises(SessionError, match=f"tensor '{RUINED}' is not finite in both"):
        quantisation(models[0], broken, TEXT)


def test_it_is_public() -> None:
    assert graph_runner.quantisation is quantisation
