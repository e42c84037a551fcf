"""Files that are no whole trace, or cannot be written: each is refused in one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from kit.diffs import FLASH_OFF, PROMPT
from kit.models import Models
from kit.traced import ORIGIN, get_rows

from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.errors import TraceError
from graph_runner.trace import CaptureOptions, Recorded, Selection, capture, read_trace, replay, write_trace
from graph_runner.trace.format import SEAL


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as error:
        read_trace(path)
    message = str(error.value)
    assert message.startswith(f"trace {str(path)!r}: ")
    assert "\n" not in message
    return message


@given(data=st.data())
def test_a_file_that_is_cut_off_is_refused(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = small.read_bytes()
    path = tmp_path / "cut.gguf"
    for _ in range(20):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        assert "cut off" in refusal(path) or path.stat().st_size < 4


@given(data=st.data())
def test_a_file_of_which_a_byte_was_changed_is_refused(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(small.read_bytes())
    path = tmp_path / "changed.gguf"
    for _ in range(20):
        at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
        whole[at] ^= 1 << bit
        path.write_bytes(whole)
        assert any(words in refusal(path) for words in ("was changed", "but no trace", "not a GGUF file"))
        whole[at] ^= 1 << bit
    path.write_bytes(whole + b"\0")
    assert "was changed" in refusal(path)


def test_files_of_other_kinds_are_refused(model: Models, tmp_path: Path) -> None:
    assert "a GGUF file, but no trace" in refusal(model("llama"))
    text = tmp_path / "text"
    text.write_text("once upon a time")
    assert "not a GGUF file (begins with b'once')" in refusal(text)
    text.write_text("")
    assert "not a GGUF file" in refusal(text)
    assert "is a directory" in refusal(tmp_path)
    assert "no such file" in refusal(tmp_path / "none")
    assert "is a device" in refusal(Path("/dev/null"))


def crafted(path: Path, change: Callable[[dict[str, Any]], object], without: tuple[str, ...] = (), **keys: Any) -> Path:
    """A trace whose digest is right and whose one node was changed, made by other means than `write_trace`.

    without  keys that are left out
    """
    whole = GGUFReader(path.with_name("small.gguf"))
    writer = GGUFWriter(path, "ggml-npu-trace")
    for name, found in whole.fields.items():
        if name.startswith("trace.") and name != "trace.nodes" and name[6:] not in without:
            writer.add_key_value(name, keys.get(name[6:], found.contents()), found.types[0])
    node = json.loads(whole.fields["trace.nodes"].contents()[0])
    change(node)
    writer.add_array("trace.nodes", [json.dumps(node)])
    for tensor in whole.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = bytearray(path.read_bytes())
    content[SEAL.digest_at : SEAL.digest_at + 64] = SEAL.digest(path)
    path.write_bytes(content)
    return path


def first(entry: dict[str, Any]) -> dict[str, Any]:
    """The first of the nodes of an entry."""
    found: dict[str, Any] = entry["nodes"][0]
    return found


CRAFTED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no output": lambda entry: first(entry).pop("dst"),
    "an output of no bytes": lambda entry: first(entry)["dst"].update(ne=[0, 1, 1, 1]),
    "an unknown type": lambda entry: first(entry)["dst"].update(type="q9_9"),
    "three dimensions": lambda entry: first(entry)["dst"].update(ne=[1, 2, 3]),
    "rows below zero": lambda entry: first(entry)["dst"].update(ne=[64, -3, 1, 1]),
    "dimensions that are words": lambda entry: first(entry)["dst"].update(ne="wide"),
    "more than memory": lambda entry: first(entry)["src"][0].update(ne=[64, 9, 1, 1]),
    "strides beyond memory": lambda entry: first(entry)["src"][0].update(nb=[34, 1 << 40, 1, 1]),
    "an offset beyond memory": lambda entry: first(entry)["src"][1].update(offset=1 << 50),
    "an offset below zero": lambda entry: first(entry)["src"][1].update(offset=-4),
    "no whole blocks": lambda entry: first(entry)["src"][0].update(ne=[65, 1, 1, 1]),
    "a group that is not there": lambda entry: first(entry)["src"][0].update(group=7),
    "bytes that are not there": lambda entry: entry["groups"][0].update(bytes=99),
    "a result of another size": lambda entry: entry.update(expected=entry["groups"][1]["bytes"]),
    "parameters that are no bytes": lambda entry: first(entry).update(params="xyz"),
    "a number for the sources": lambda entry: first(entry).update(src=3),
}


@pytest.mark.parametrize("change", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_file_with_the_right_digest_is_refused_too(
    small: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    assert "cannot be read: " in refusal(crafted(small.with_name("crafted.gguf"), change))


def test_a_file_of_another_format_or_rounding_is_refused(small: Path) -> None:
    path = small.with_name("crafted.gguf")
    assert read_trace(crafted(path, lambda entry: None))
    assert "is of format 3; format 2 is read here" in refusal(crafted(path, lambda entry: None, format=3))
    assert "q8_0 rounding 'up'" in refusal(crafted(path, lambda entry: None, rounding="up"))


def test_an_op_of_a_crafted_file_that_calls_an_address_is_not_run(backend: Plugin, small: Path) -> None:
    path = small.with_name("crafted.gguf")
    crafted(path, lambda entry: first(entry).update(op="MAP_CUSTOM1", params="ab" * 64))
    result = replay(path, "CPU")
    assert not result.nodes
    assert list(result.refused) == [("MAP_CUSTOM1", "calls a function of the program that made it")]


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(model: Models, tmp_path: Path) -> None:
    file = tmp_path / "t.gguf"
    for path, words in {
        tmp_path: "is a directory",
        tmp_path / "none" / "t.gguf": "no such directory",
        Path("/dev/full"): "is no file",
    }.items():
        with pytest.raises(TraceError, match=words):
            write_trace(path, [get_rows()], ORIGIN)
    with pytest.raises(TraceError, match="no node to write"):
        write_trace(file, [], ORIGIN)
    with pytest.raises(TraceError, match=r"nodes 'FOO': no node of this run is that"):
        capture(model("llama"), PROMPT, file, CaptureOptions(steps=0, settings=FLASH_OFF, select=Selection("CONT,FOO")))

    def fails() -> Iterator[Recorded]:
        yield get_rows()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_trace(file, fails(), ORIGIN)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_was_there_stays_where_the_new_one_fails(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    path.write_bytes(small.read_bytes())
    with pytest.raises(TraceError):
        write_trace(path, [], ORIGIN)
    assert replay(path)
