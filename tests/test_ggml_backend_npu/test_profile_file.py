"""A user's own profile in a file, and how a mistake in it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.bare import STRIDED_F32, node, tensor

from ggml_backend_npu import DeviceError
from ggml_backend_npu.backend.options import Options
from ggml_backend_npu.profiles import load
from ggml_backend_npu.profiles.generations import PROFILES
from ggml_backend_npu.profiles.rules import ProfileError

BASES = [name for name, profile in PROFILES.items() if profile.ops is not None]
OWN = """\
name = "mine"
description = "an NPU of mine"
base = "ascend-310p"
ops = ["SSM_SCAN", "ADD"]

[op.GET_ROWS]
src0 = ["f32", "q4_0"]  # comment
contiguous = [
    "src0",
]
where = ["src0.ne0 % 32 == 0"]

[[op.CPY]]
src0 = ["f32"]
dst = ["f32"]

[[op.CPY]]
src0 = ["q8_0"]
dst = [
    "f32",
    "f16",
]
rows = ["dst"]

[op]
CONT = []
"""


def own(folder: Path, text: str) -> str:
    """A file of a profile."""
    path = folder / "own.toml"
    path.write_text(text)
    return str(path)


def test_a_users_own_profile(tmp_path: Path) -> None:
    mine = load(own(tmp_path, OWN))
    assert (mine.name, mine.description) == ("mine", "an NPU of mine")
    for n in (
        node("SSM_SCAN", "f32", "f32"),
        node("GET_ROWS", "f32", "q4_0", "i32"),
        node("CPY", "f32", "f32"),
        node("CPY", "f16", "q8_0"),
        node("SET_ROWS", "f16", "f32", "i64"),  # of the base
    ):
        assert mine.refusal(n) is None
    for n, why in (
        (node("GET_ROWS", "f32", "f16", "i32"), "types f16 i32 -> f32"),
        (node("GET_ROWS", "f32", STRIDED_F32, "i32"), "src0 is not contiguous: nb (4, 512, 2048, 2048)"),
        (node("CPY", "f16", "f32"), "types f32 -> f16"),
        (node("CPY", tensor("f16", gap=1), "q8_0"), "dst rows have gaps: nb0 4"),
        (node("CONT", "f32", "f32"), "no CONT"),
        (node("OUT_PROD", "f32", "f32", "f32"), "no OUT_PROD"),
    ):
        assert mine.refusal(n) == f"profile mine: {why}"


def test_the_least_that_a_file_says_is_nothing(tmp_path: Path) -> None:
    empty = load(own(tmp_path, ""))
    assert (empty.name, empty.source) == ("own", str(tmp_path / "own.toml"))
    assert empty.refusal(node("CPY", "f32", "f32")) == "profile own: no CPY"


@pytest.mark.parametrize(
    ("right", "wrong", "line", "what"),
    [
        ("contiguous", "contigous", 8, "unknown key 'contigous'; known: dst src0 "),
        ("ops", "op_s", 4, "unknown key 'op_s'; known: name description source base ops op"),
        ("op.GET_ROWS", "op.GET_ROW", 6, "unknown op 'GET_ROW'; did you mean GET_ROWS"),
        ('"SSM_SCAN"', '"SSMSCAN"', 4, "unknown op 'SSMSCAN'; did you mean SSM_SCAN"),
        ("CONT =", "KONT =", 26, "unknown op 'KONT'; did you mean CONT"),
        ('"q4_0"', '"q4_O"', 7, "src0: unknown type 'q4_O'; known: q8_0 q4_0 "),
        ('"f16",', '"f61",', 21, "dst: unknown type 'f61'; known: q8_0 "),
        ('    "src0"', '    "scr0"', 9, "contiguous: unknown tensor 'scr0'; known: dst src0 "),
        ("src0.ne0 % 32", "params.width", 11, "where: unknown parameter of GET_ROWS 'width'; known: 0 1 2 "),
        ("% 32", "& 32", 11, "where: condition 'src0.ne0 & 32 == 0': must be such as "),
        ("ascend-310p", "ascend-310", 3, f"unknown base 'ascend-310'; known: {' '.join(BASES)}"),
        ("ascend-310p", "full", 3, "unknown base 'full'; known: ascend-910b "),
        ('["q8_0"]', '"q8_0"', 18, 'src0: must be a list of texts, such as ["..."]'),
        ('"mine"', "3", 1, "name: must be a text"),
        ("CONT = []", "CONT = 1", 26, "CONT: must be a table [op.CONT]"),
        ('["f32", "q4_0"]', '["f32", "q4_0"', 8, "Unclosed array: contiguous = ["),
        ("dst = [\n", "dst [\n", 19, "Expected '=' after a key in a key/value pair: dst ["),
        ("rows = ", "src0 = ", 23, 'Cannot overwrite a value: src0 = ["dst"]'),
    ],
)
def test_a_typo_is_named_with_its_line(tmp_path: Path, right: str, wrong: str, line: int, what: str) -> None:
    assert right in OWN
    file = own(tmp_path, OWN.replace(right, wrong))
    with pytest.raises(DeviceError) as error:
        Options().updated({"profile": file})
    message = str(error.value)
    assert message.startswith(f"profile={file!r}: line {line}: {what}")
    assert "\n" not in message


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file"):
        load(str(tmp_path / "missing.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileError, match="is not text"):
        load(str(tmp_path / "binary.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ProfileError, match="Is a directory"):
        load(str(tmp_path / "folder.toml"))
    with pytest.raises(ProfileError, match=r"line 1: .*: name = \"open"):
        load(own(tmp_path, 'name = "open'))
