"""No false alarm in any model of test-llama-archs, over a sample of settings that is another one each day."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import combinations, product
from pathlib import Path

import pytest
from kit.shapes import SHAPES, written
from kit.support import choose
from rich.console import Console
from tools.architectures import SETTINGS, Case, chosen, design, judged, outcomes, runs, table

from graph_runner.tools.suites import folder

SAMPLE = 60


def settings(case: Case) -> dict[str, str]:
    return {name: str(getattr(case, name)) for name in SETTINGS}


def possible(flash_attention: str, cache_type: str) -> bool:
    return flash_attention == "on" or cache_type == "f16"


@pytest.mark.parametrize("seed", range(8))
def test_each_pair_of_settings_is_in_a_case_of_each_model(seed: int) -> None:
    cases = design(["a", "b"], lambda name, *way: possible(*way), seed)
    for model in ("a", "b"):
        own = [settings(case) for case in cases if case.model == model]
        assert len(own) <= 34
        for first, second in combinations(SETTINGS, 2):
            found = {(case[first], case[second]) for case in own}
            pairs = set(product(SETTINGS[first], SETTINGS[second]))
            if (first, second) == ("flash_attention", "cache_type"):
                pairs = {pair for pair in pairs if possible(*pair)}
            assert found == pairs
    assert cases == design(["a", "b"], lambda name, *way: possible(*way), seed)


def test_what_llama_cpp_refuses_of_a_model_is_in_no_case() -> None:
    cases = design(["heads of 80", "none"], lambda name, flash, cache: name != "none" and cache == "f16")
    assert {case.model for case in cases} == {"heads of 80"}
    assert {case.cache_type for case in cases} == {"f16"}


@pytest.mark.daily(2)
@pytest.mark.conformance
def test_an_unmodified_device_is_right_in_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(f"{datetime.now(UTC):%Y%m%d}")
    models = folder().with_name("models")
    with capsys.disabled():
        print(f"\n\n{SAMPLE} diffs: python tests/tools/architectures.py {models} --sample {SAMPLE} --seed {seed}")
        found = list(outcomes(models, chosen(models, SAMPLE, seed)))
        Console(width=120).print(table(found))
    assert len(found) == SAMPLE
    assert not [f"{outcome.case}: {outcome.why}" for outcome in found if not outcome]


@pytest.mark.conformance
@pytest.mark.parametrize("model", ["deepseek4-moe", "glm5-next-moe", "qwen4exp-moe"])
def test_a_graph_without_fused_ops_is_compared_with_one_like_it(model: str) -> None:
    """llama.cpp computes DSV4_HC_PRE and its like by other ops where the device of the layers does not compute them."""
    case = Case(model, "default", "off", "device", "gpu", "f16", 59)
    assert [outcome.why for outcome in outcomes(folder().with_name("models"), [case]) if not outcome] == []


@pytest.mark.conformance
@pytest.mark.parametrize(
    "case",
    [
        Case(
            "glm5-next-moe", "all", "off", "device", "accel", "f16", 71
        ),  # a sort of scores that later nodes overwrite
        Case("dream-dense", "default", "on", "device", "gpu", "q8_0", 71),  # of which the device computes no node
    ],
)
def test_cases_that_were_wrong(case: Case) -> None:
    assert [outcome.why for outcome in outcomes(folder().with_name("models"), [case]) if not outcome] == []


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {path.stem: path for path in written(tmp_path_factory.mktemp("shapes"))}


@pytest.mark.slow
@pytest.mark.daily(12)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("cache_type", SETTINGS["cache_type"])
def test_attention_of_real_shapes_is_right(
    shapes: dict[str, Path], name: str, cache_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 70 queries, which ggml's CPU computes otherwise than fewer, over each type of caches."""
    if not runs(shapes[name], "on", cache_type):
        pytest.skip(f"llama.cpp has no {cache_type} caches of such heads")
    choose(monkeypatch, ops="all")
    outcome = judged(shapes[name], Case(name, "all", "on", "host", "accel", cache_type, 70))
    assert outcome, outcome.why
