"""Two judges of the same results: the project's rules, and the second judge, which shares nothing with them."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import second_judge
from kit.support import with_avx2
from second_judge import Given, judge
from second_judge import Node as Bare
from second_judge.judge import OPS
from tools.fuzz import Numbered, series
from tools.two_judges import Both, flipped, gross, judged, scaled, verdicts

from ggml_backend_npu.ops import OWN


def test_the_second_judge_shares_nothing_with_the_project() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "gguf"}
    for path in Path(second_judge.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path.name
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1 or (node.module or "").split(".")[0] in allowed, path.name


def test_it_knows_every_op_of_the_backend() -> None:
    assert OWN.keys() <= OPS.keys()


@with_avx2
def test_both_judges_agree_and_neither_misses_a_gross_fault() -> None:
    """ggml's CPU's result, the kernel's, three faults: a node of each op."""
    opinions, wrong = Counter[str](), []
    with Both() as both:
        for op in OWN:
            numbers = (Numbered(3, place, op, special=False) for place in range(9))
            of, rng = next(each for each in numbers if both.takes(each.node())), np.random.default_rng(3)
            for name, found in both.agreements(of.node(), rng, (scaled, flipped, gross)):
                opinions[op] += found.right[1] is not None
                missed = name.startswith("gross") and found.right not in ((False, False), (False, None))
                if missed or found.kind == "disagree":
                    wrong.append((str(of), name, found))
    assert wrong == []
    assert sorted(opinions) == sorted(OWN)
    assert sum(opinions.values()) > 4 * len(OWN)


@with_avx2
@pytest.mark.parametrize(
    ("op", "seed", "place"),
    [
        ("ARANGE", 301, 478),
        ("UPSCALE", 303, 232),
        ("FLASH_ATTN_EXT", 303, 509),
        ("MUL_MAT", 501, 534),
        ("HARDSIGMOID", 303, 1231),
        ("HARDSIGMOID", 303, 2057),
        ("HARDSIGMOID", 41, 198),
        ("ADD", 304, 2008),
    ],
)
def test_they_agree_where_one_was_mended(op: str, seed: int, place: int) -> None:
    with Both() as both:
        found = judged(Numbered(seed, place, op, special=False), both)
    assert [agreement.text for _, agreement in found if agreement.kind == "disagree"] == []


@with_avx2
@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(8))
def test_many_verdicts(seed: int) -> None:
    found = verdicts([*series(seed, 0, 800, sorted(OWN), special=False)], processes=1)
    assert [(str(each), a.text) for each, all_ in found for _, a in all_ if a.kind == "disagree"] == []


def _product(k: int) -> tuple[Bare, np.ndarray]:
    """A product of two vectors of k numbers between 1 and 2, and its value."""
    a, b = (np.random.default_rng(k).uniform(1, 2, (2, k))).astype(np.float32)
    x = [Given("f32", (k, 1, 1, 1), (4, 4 * k, 4 * k, 4 * k), v.tobytes()) for v in (a, b)]
    return Bare("MUL_MAT", b"", Given("f32", (1, 1, 1, 1), (4, 4, 4, 4), bytes(4)), tuple(x)), a * b


def test_a_sum_without_its_last_term_is_wrong() -> None:
    node, terms = _product(100)
    whole, part = (np.float32(x.sum()).tobytes() for x in (terms, terms[:-1]))
    assert judge(node, whole).right is True
    assert judge(node, part).right is False
    assert judge(node, part).error > 100


def test_a_byte_between_the_elements_is_not_to_change() -> None:
    node, terms = _product(4)
    dst = Given("f32", (1, 2, 1, 1), (4, 8, 16, 16), bytes(12))
    twice = replace(node, dst=dst, src=(node.src[0], replace(node.source(1), ne=(4, 2, 1, 1), nb=(4, 0, 0, 0))))
    value = np.float32(terms.sum()).tobytes()
    assert judge(twice, value + bytes(4) + value).right is True
    assert "byte 5" in judge(twice, value + b"\0\1\0\0" + value).why


def test_it_has_no_opinion_of_what_it_does_not_know() -> None:
    node, _ = _product(4)
    for unknown in (replace(node, op="CUSTOM"), replace(node, src=(replace(node.source(0), type="q9_9"), node.src[1]))):
        assert judge(unknown, bytes(4)).right is None
