"""Contents: a tensor that holds something else than was written into it is found; what is set from outside is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kit.support import seeds

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ggml.convert import Read, Storage
from graph_runner.diff.contents import Changed, Contents, Rest, Stray

_addresses: Iterator[int] = count(64, 64)


def storage(name: str, *, is_set: bool = False, memory: Memory | None = None) -> Storage:
    """A row of eight floats."""
    memory = memory or Memory.of(np.arange(8, dtype=np.float32))
    tensor = Tensor(name, "f32", (8, 1, 1, 1), (4, 32, 32, 32), memory)
    return Storage(next(_addresses), tensor, 0, is_set)


def read(op: str, dst: Storage, *src: Storage, view: bool = False) -> Read:
    """A node as it is read; `view`: its output is a view of dst."""
    node = Node(op, dst.tensor, tuple(source.tensor for source in src))
    address = next(_addresses) if view else dst.address
    return Read(address, node, tuple(source.address for source in src), dst.address if view else 0, dst, src)


def spoil(tensor: Storage) -> None:
    tensor.tensor.memory.bytes()[5] ^= 1


def test_a_tensor_that_changed_between_writer_and_reader_is_found_once() -> None:
    weights, x, y, z = (storage(name) for name in ("weights", "x", "y", "z"))
    contents, mul, add = Contents(), read("MUL", y, x, weights), read("ADD", z, y, weights)
    assert contents.changed([mul]) == []
    contents.written(mul)
    assert contents.changed([add]) == []
    spoil(y)
    assert contents.changed([add]) == [Changed("y", "MUL node 'y'")]
    assert contents.changed([add]) == []
    spoil(weights)
    (found,) = contents.changed([add])
    assert found == Changed("weights", None)
    assert str(found) == "'weights'"
    assert str(Changed("y", "MUL node 'y'")) == "'y', which MUL node 'y' wrote"


def test_weights_may_be_looked_at_first_and_last_alone() -> None:
    weights, x, y = replace(storage("weights"), is_weight=True), storage("x"), storage("y")
    mul = read("MUL", y, x, weights)
    for closely, found, at_the_end in ((True, [Changed("weights", None)], []), (False, [], [Changed("weights", None)])):
        contents = Contents(closely=closely)
        assert contents.changed([mul]) == contents.weights_changed() == []
        spoil(weights)
        assert contents.changed([mul]) == found
        assert contents.weights_changed() == at_the_end
        spoil(x)
        assert contents.changed([mul]) == [Changed("x", None)]
    assert str(Stray(Changed("weights", None), 0, 0, None)) == (
        "after the last step, 'weights' holds something else than it did"
    )


def test_what_is_written_again_is_as_it_is_to_be() -> None:
    x, y, z = (storage(name) for name in "xyz")
    contents, mul = Contents(), read("MUL", y, x)
    contents.written(mul)
    spoil(y)
    contents.written(mul)
    assert contents.changed([read("ADD", z, y)]) == []


def test_what_is_set_from_outside_is_not_kept() -> None:
    ids, y = storage("ids", is_set=True), storage("y")
    contents, node = Contents(), read("GET_ROWS", y, ids)
    assert contents.changed([node]) == []
    spoil(ids)
    assert contents.changed([node]) == []


def test_storages_that_are_left_out() -> None:
    x, y = storage("x"), storage("y")
    contents, node = Contents(), read("MUL", y, x)
    contents.changed([node])
    spoil(x)
    assert contents.changed([node], {x.address}) == []
    assert contents.changed([node]) == [Changed("x", None)]


def test_of_a_cache_that_is_written_row_by_row_the_rest_is_kept() -> None:
    rows, cache = storage("rows"), storage("cache")
    contents, node = Contents(), read("SET_ROWS", cache, rows, view=True)
    assert contents.changed([node]) == []
    contents.written(node)
    spoil(cache)
    assert contents.changed([node]) == [Changed("cache", "SET_ROWS node 'cache'")]


def test_what_lay_where_an_output_lies_in_place_of_a_source_is_no_part_of_it() -> None:
    """Step by step the same memory holds the source, then the output."""
    memory = Memory.of(np.arange(8, dtype=np.float32))
    x, y = storage("x", memory=memory), storage("y", memory=memory)
    contents, norm, mul = Contents(), read("RMS_NORM", x, storage("inp")), read("MUL", y, x)
    for step in range(3):
        memory.bytes()[:] = step
        contents.written(norm)
        assert contents.changed([mul]) == []
        memory.bytes()[:] = 9
        contents.written(mul)


def test_a_tensor_is_constant_until_a_node_writes_to_it() -> None:
    weights, cache, x = storage("weights"), storage("cache"), storage("x")
    contents = Contents()
    contents.changed([read("MUL", x, weights, cache)])
    assert contents.is_constant(weights)
    assert contents.is_constant(cache)
    contents.written(read("SET_ROWS", cache, x, view=True))
    assert contents.is_constant(weights)
    assert not contents.is_constant(cache)


def test_of_all_tensors_those_that_differ() -> None:
    x, y, z = (storage(name) for name in "xyz")
    contents = Contents()
    for node in (read("MUL", y, x), read("ADD", z, x, y)):
        contents.changed([node])
        contents.written(node)
    assert contents.differing([]) == []
    for each in (x, z):
        spoil(each)
    assert contents.differing([]) == [Changed("x", None), Changed("z", "ADD node 'z'")]
    assert contents.differing([z.address]) == [Changed("x", None)]


@given(seed=seeds, size=st.integers(64, 400), data=st.data())
def test_a_byte_beside_the_outputs_changes_the_rest_and_one_in_them_does_not(
    seed: int, size: int, data: st.DataObject
) -> None:
    memory = Memory.of(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))
    places = data.draw(st.lists(st.integers(0, (size - 32) // 4), max_size=3))
    outputs = [4 * place for place in places]
    reads = []
    for offset in outputs:
        tensor = Tensor("y", "f32", (8, 1, 1, 1), (4, 32, 32, 32), memory, offset)
        reads.append(read("MUL", Storage(next(_addresses), tensor, 0, False)))
    begin = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(begin, size))
    rest = Rest([(memory.address + begin, memory.address + end)], reads)
    assert not rest.has_changed()
    at = data.draw(st.integers(0, size - 1))
    memory.bytes()[at] ^= 0x40
    is_output = any(offset <= at < offset + 32 for offset in outputs)
    assert rest.has_changed() == (begin <= at < end and not is_output)
