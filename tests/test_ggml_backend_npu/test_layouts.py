"""Which ggml is served: each known layout, and that one which differs is refused by the probe that finds it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from kit import patched
from tools import layouts as generator

from ggml_backend_npu.ggml import layouts, lib, probes, structs
from ggml_backend_npu.ggml.layouts.layout import Layout
from ggml_backend_npu.ggml.lib import Ggml, UnknownGgmlError
from ggml_backend_npu.plugin.plugin import Plugin

# what no public function calls, and this backend leaves NULL
UNSEEN = {"graph_plan_update", "graph_optimize"}

EACH = pytest.mark.parametrize("layout", layouts.KNOWN, ids=lambda each: f"{each.api_version}:{each.versions}")


@pytest.fixture
def ggml(backend: Plugin) -> Ggml:
    """The ggml of this process, as if it had just been found."""
    return Ggml(backend.ggml.library)


def wrong(ggml: Ggml, layout: Layout) -> str | None:
    """The first fact that does not hold with a layout."""
    return next((what for what, holds in probes.facts(ggml, layout) if not holds), None)


def swapped(table: dict[str, str], a: str, b: str) -> dict[str, str]:
    """A table in which two slots stand in each other's place."""
    other = {a: b, b: a}
    return {other.get(slot, slot): table[other.get(slot, slot)] for slot in table}


def swaps() -> Iterator[tuple[str, str, str]]:
    for name, table in layouts.NEWEST.tables.items():
        for a, b in pairwise(table):
            if not {a, b} <= UNSEEN:
                yield name, a, b


@EACH
def test_fields_lie_where_a_compiler_puts_them(layout: Layout) -> None:
    for name, fields in layout.structs.items():
        found = {part: getattr(layout[name], part).offset for part, *_ in layout[name]._fields_}
        assert found == {part: offset for part, (offset, _) in fields.items()}


@EACH
def test_what_layouts_have_in_common(layout: Layout) -> None:
    tensor = layout.structs["ggml_tensor"]
    at = {name: offset for name, (offset, _) in tensor.items()}
    assert (at["buffer"], at["op"], at["flags"], at["src"]) == (
        structs.BUFFER_AT, structs.OP_AT, structs.FLAGS_AT, structs.SRC_AT,
    )  # fmt: skip
    assert (at["view_src"], at["data"], at["name"]) == (structs.VIEW_SRC_AT, structs.DATA_AT, structs.TENSOR_KEY_BYTES)
    assert at["padding"] + 8 == structs.TENSOR.size
    named = {"visited": "visited_hash_set"}
    graph = layout.structs["ggml_cgraph"]
    for field, *_ in structs.GgmlCGraph._fields_:
        assert getattr(structs.GgmlCGraph, field).offset == graph[named.get(field, field)][0]
    assert layout["ggml_backend"].context.offset == layouts.NEWEST["ggml_backend"].context.offset
    numbers = {name: value for values in layout.enumerations.values() for name, value in values.items()}
    assert numbers["GGML_STATUS_FAILED"] == structs.STATUS_FAILED
    assert numbers["GGML_TENSOR_FLAG_COMPUTE"] == structs.FLAG_COMPUTE
    assert numbers["GGML_BACKEND_BUFFER_USAGE_COMPUTE"] == structs.USAGE_COMPUTE
    assert numbers["GGML_BACKEND_DEVICE_TYPE_ACCEL"] == structs.DEVICE_TYPE_ACCEL


def test_the_layout_of_this_version_is_chosen(ggml: Ggml) -> None:
    assert wrong(ggml, ggml.layout) is None
    assert ggml.version in ggml.layout.versions


def test_every_slot_and_field_is_looked_at(ggml: Ggml) -> None:
    seen = {what for what, _ in probes.facts(ggml, ggml.layout)}
    slots = {
        f"{name.removesuffix('_i')}.{slot}"
        for name, table in ggml.layout.tables.items()
        for slot in table.keys() - UNSEEN
    }
    assert slots <= seen


@pytest.mark.parametrize(("table", "a", "b"), [*swaps()], ids=lambda part: part.removeprefix("ggml_backend_"))
def test_two_slots_in_each_others_place_are_found(ggml: Ggml, table: str, a: str, b: str) -> None:
    layout = ggml.layout
    tables = {**layout.tables, table: swapped(dict(layout.tables[table]), a, b)}
    holder = table.removesuffix("_i")
    assert wrong(ggml, replace(layout, tables=tables)) in (f"{holder}.{a}", f"{holder}.{b}")


@pytest.mark.parametrize("table", layouts.NEWEST.tables)
def test_a_slot_more_is_found(ggml: Ggml, table: str) -> None:
    """At the end, where it moves what stands behind the table; of a registry that is its context alone."""
    layout, holder = ggml.layout, table.removesuffix("_i")
    tables = {**layout.tables, table: {**layout.tables[table], "new": "void(pointer)"}}
    begin = layout.structs[holder]["iface"][0] + 8 * len(layout.tables[table])
    moved = {part: (offset + 8 * (offset >= begin), type) for part, (offset, type) in layout.structs[holder].items()}
    found = wrong(ggml, replace(layout, tables=tables, structs={**layout.structs, holder: moved}))
    assert found is None if table == "ggml_backend_reg_i" else found is not None and found.startswith(holder)


def test_properties_that_changed_are_found(ggml: Ggml) -> None:
    layout = ggml.layout
    fields = dict(layout.structs["ggml_backend_dev_props"])
    props = {part: fields[part] for part in ("memory_free", "memory_total", "name", "description", "type", "caps")}
    changed = replace(layout, structs={**layout.structs, "ggml_backend_dev_props": props})
    assert wrong(ggml, changed) == "ggml_backend_dev_props"


@contextmanager
def api_version(ggml: Ggml, version: int) -> Iterator[None]:
    """The CPU backend says that it has another one."""
    said = ctypes.c_int.from_address(ggml.ggml_backend_reg_by_name(b"CPU"))
    before, said.value = said.value, version
    try:
        yield
    finally:
        said.value = before


@pytest.mark.parametrize("version", [0, 1, 4, 1000])
def test_another_api_version_is_refused_with_both_numbers(ggml: Ggml, version: int) -> None:
    with api_version(ggml, version), pytest.raises(UnknownGgmlError) as refused:
        _ = ggml.layout
    assert f"GGML_BACKEND_API_VERSION is {version}, known are 2 and 3" in str(refused.value)


def test_a_table_of_another_api_version_is_refused_by_its_first_slot_that_differs(ggml: Ggml) -> None:
    with api_version(ggml, 3), pytest.raises(UnknownGgmlError) as refused:
        _ = ggml.layout
    assert "ggml_backend_buffer_type." in str(refused.value)


@pytest.mark.parametrize("version", ["0.99.0", "1.0.0-dirty", "0.12.0"])
def test_another_version_whose_tables_fit_is_served_with_a_line(
    version: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Ggml, "version", version)
        assert lib.ggml.__wrapped__().layout in layouts.KNOWN
    known = f"{layouts.VERSIONS[0]} to {layouts.VERSIONS[-1]}"
    line = f"ggml-npu: ggml {version} is not one of the versions known to this backend ({known}); its layouts fit\n"
    assert capsys.readouterr().err == line


def test_a_version_between_those_known_is_served_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Ggml, "version", "0.21.7")
        assert lib.ggml.__wrapped__().layout in layouts.KNOWN
    assert capsys.readouterr().err == ""


REGISTER = """
import ggml_backend_npu
from ggml_backend_npu.ggml.lib import UnknownGgmlError

try:
    print(ggml_backend_npu.register(into=LIBRARY).ggml.layout.api_version)
except UnknownGgmlError as error:
    print(error)
"""

COMPUTE = """
import os
os.environ["GGML_NPU_MEMORY"] = "device"
import numpy as np
import ggml_backend_npu
from ggml_backend_npu.plugin.build import Builder

ggml = ggml_backend_npu.register(into=LIBRARY).ggml

def rows(device):
    with Builder(ggml, device) as build:
        table, ids = build.tensor("q8_0", (64, 10)), build.tensor("i32", (3,))
        node = build.op("get_rows", table, ids)
        build.set(table, np.arange(build.nbytes(table), dtype=np.uint8) % 60)
        build.set(ids, np.array([1, 5, 5], np.int32))
        assert build.supported(node)
        assert build.compute(node) == 0
        return build.get(node)

assert np.array_equal(rows("NPU"), rows("CPU"))
print(ggml.layout.api_version)
"""


@pytest.mark.builds
@pytest.mark.parametrize("struct", patched.SHUFFLED)
def test_a_shuffled_build_is_refused_by_a_probe(struct: str) -> None:
    done = patched.run(REGISTER, patched.build(struct))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        rf"ggml [\d.]+: {struct}\.\w+ is not where the versions known to this backend have it\n", done.stdout
    )


@pytest.mark.builds
@pytest.mark.parametrize("name", patched.TO_COME)
def test_what_is_to_come_is_served(name: str) -> None:
    done = patched.run(COMPUTE, patched.build(name))
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert "is not one of the versions known" in done.stderr


@pytest.mark.conformance
def test_the_layouts_are_those_of_the_headers() -> None:
    for name, text in generator.modules().items():
        assert (generator.LAYOUTS / f"{name}.py").read_text() == text
