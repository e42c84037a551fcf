"""Recorded runs as files: `graph_runner.record.files`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kit.models import Models

from ggml_backend_npu import default_backend
from graph_runner.base.errors import BadInputError
from graph_runner.base.settings import Settings
from graph_runner.record import RecordOptions, Run, compare, read_run, record, write_run
from graph_runner.record.files import size_of

SETTINGS = Settings(flash_attention="off", threads=1)
OPTIONS = RecordOptions("CPU", steps=40, settings=SETTINGS, data="SOFT_MAX", logits=True)


@pytest.fixture(scope="module")
def run(model: Models) -> Run:
    return record(model("llama"), "hello", OPTIONS, default_backend())


def test_a_run_comes_back(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.gguf"
    run.steps[1].rows["nan"][7] = 3
    write_run(path, run)
    back = read_run(path)
    for before, after in zip(run.steps, back.steps, strict=True):
        assert before.rows.tobytes() == after.rows.tobytes()
        (end,), (found,) = before.ends, after.ends
        assert (found.row.tobytes(), found.tokens, found.logits) == (end.row.tobytes(), end.tokens, end.logits)
    assert (back.about, back.forms, back.state) == (run.about, run.forms, run.state)
    assert [(step.form, step.sizes) for step in back.steps] == [(step.form, step.sizes) for step in run.steps]
    assert {place: data.tobytes() for place, data in back.data.items()} == {
        place: data.tobytes() for place, data in run.data.items()
    }
    assert (back.logits[3] == run.logits[3]).all()
    result = compare(run, back, path, path)
    assert result
    assert result.compared == run.n_rows
    assert result.ends[0].kl == 0


def test_an_end_of_a_small_vocabulary_comes_back(run: Run, tmp_path: Path) -> None:
    path, end = tmp_path / "run.gguf", run.steps[0].ends[0]
    small = replace(end, tokens=end.tokens[:3], logits=end.logits[:3])
    write_run(path, replace(run, steps=[replace(run.steps[0], ends=[small, end, small])], data={}, logits={}))
    found = read_run(path).steps[0].ends
    assert [(each.tokens, each.logits) for each in found] == [
        (each.tokens, each.logits) for each in (small, end, small)
    ]


def test_a_node_and_step_takes_at_most_64_bytes(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.gguf"
    write_run(path, run)
    assert size_of(path, run)["bytes_a_node"] < 64


def test_what_is_no_whole_record_is_one_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.gguf"
    with pytest.raises(BadInputError, match=r"^record '.*run\.gguf': no such file"):
        read_run(path)
    write_run(path, run)
    data = path.read_bytes()
    for bad, why in (
        (data[: len(data) // 2], "is cut off or was changed"),
        (data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], "is cut off or was changed"),
        (b"GGUF" + bytes(200), "a GGUF file, but no record"),
        (b"text", r"not a GGUF file"),
    ):
        path.write_bytes(bad)
        with pytest.raises(BadInputError, match=why) as error:
            read_run(path)
        assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_written_is_named(run: Run, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"^record '.*': "):
        write_run(tmp_path / "none" / "run.gguf", run)
    assert not [*tmp_path.iterdir()]
