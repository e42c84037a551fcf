"""A node that comes again is converted once; one that changed in anything is converted anew."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from ggml_backend_npu.ggml import convert, lib, structs
from ggml_backend_npu.ggml.node_reader import Reader
from ggml_backend_npu.plugin.build import Builder


@pytest.fixture
def build() -> Iterator[Builder]:
    with Builder(lib.ggml(), "CPU") as build:
        yield build


def node_of_views(build: Builder) -> int:
    """Rows in a view of a tensor, written into a view of another."""
    rows = build.view(build.tensor("f32", (8, 6)), (8, 4, 1, 1), (32, 128, 128), 64)
    view = build.view(build.tensor("f16", (8, 6)), (8, 4, 1, 1), (16, 64, 64), 16)
    return build.op("set_rows", view, rows, build.tensor("i64", (4,)))


def test_it_reads_what_convert_reads(build: Builder) -> None:
    node, read = node_of_views(build), Reader(build.ggml)
    found = read(node)
    assert found.node == convert.node(build.ggml, node)
    assert found.address == node
    assert found.view_source == convert.view_source_of(node)
    assert read(node) is found


@pytest.mark.parametrize("at", [structs.OP_AT + 4, structs.DATA_AT, structs.VIEW_SRC_AT + 8, 256])
def test_a_change_of_any_tensor_is_seen(build: Builder, at: int) -> None:
    """Parameters, data, offset of a view, name: of the node, of its sources, and of what these are views of."""
    node, read = node_of_views(build), Reader(build.ggml)
    tensors = {node, *convert.sources_of(node)}
    roots = {convert.view_source_of(each) for each in tensors} - {0}
    for each in [*tensors, *(roots if at < structs.TENSOR_KEY_BYTES else ())]:
        before = read(node)
        ctypes.c_uint8.from_address(each + at).value ^= 4
        assert read(node) is not before
        ctypes.c_uint8.from_address(each + at).value ^= 4
        assert read(node) is before
