"""The observer of a recorded run: each row is that of the node's result: `graph_runner.record.recorder`."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from kit.models import Models
from numpy.typing import NDArray

from ggml_backend_npu.ggml import convert, lib
from graph_runner.base.settings import Settings
from graph_runner.record.measures import ROW
from graph_runner.record.recorder import Recorder, measured
from graph_runner.run.session import Session
from quant import codec

SETTINGS = {
    "f16": Settings(flash_attention="off", threads=1),
    "q8_0": Settings(flash_attention="on", cache_type_k="q8_0", cache_type_v="q8_0", threads=1),
}


class Checked(Recorder):
    """Looks at each result with NumPy too."""

    def after(self, node: int) -> None:
        super().after(node)
        tensor = convert.tensor(self._ggml, node)
        row = self._rows[self._n - 1]
        if tensor.type not in ("f32", "f16"):
            return
        if convert.op_name(self._ggml, node) == "SET_ROWS":
            places = convert.tensor(self._ggml, convert.sources_of(node)[1]).view()[0, 0, 0]
            values = tensor.view()[..., places.astype(int), :]
        else:
            values = tensor.view()
        values = np.ascontiguousarray(values)
        assert self._hashes[self._n - 1] == xxhash.xxh3_64_intdigest(values.data)
        assert bytes(row)[8:] == bytes(measured(values.astype(np.float32))[0])[8:]
        self.seen[convert.op_name(self._ggml, node)] = self.seen.get(convert.op_name(self._ggml, node), 0) + 1

    seen: dict[str, int]


@pytest.mark.parametrize("caches", SETTINGS)
def test_each_row_is_that_of_the_result(model: Models, caches: str) -> None:
    recorder = Checked(lib.ggml())
    recorder.seen = {}
    with Session(model("llama"), SETTINGS[caches], observer=recorder) as session:
        for tokens in ([3, 4, 5, 6], [7]):
            session.decode(tokens)
            number, _, rows = recorder.step()
            assert len(rows) == len(recorder.forms[number].nodes)
    assert len(recorder.seen) > 5
    assert ("SET_ROWS" in recorder.seen) == (caches == "f16")


def test_rows_of_a_quantised_cache_are_decoded(model: Models) -> None:
    kept: dict[int, bytes] = {}

    def keep(place: int, data: NDArray[np.uint8]) -> None:
        kept[place] = data.tobytes()

    recorder = Recorder(lib.ggml(), None, lambda place, op, name: op == "SET_ROWS", keep)
    with Session(model("llama"), SETTINGS["q8_0"], observer=recorder) as session:
        session.decode([3, 4, 5, 6])
        _, _, rows = recorder.step()
    assert len(kept) == 4
    for place, data in kept.items():
        blocks = np.frombuffer(data, np.uint8).reshape(-1, 34)
        assert rows[place]["hash"] == xxhash.xxh3_64_intdigest(data)
        assert bytes(rows[place])[8:] == bytes(measured(codec("q8_0").decode(blocks).reshape(-1))[0])[8:]


def test_a_row_of_more_nodes_than_the_first_notes_hold(model: Models) -> None:
    """The memory for notes grows while a graph runs."""
    recorder = Recorder(lib.ggml())
    recorder._noted = np.empty(4096, np.uint8)
    recorder._notes[0], recorder._notes[1] = recorder._noted.ctypes.data, recorder._noted.size
    with Session(model("llama"), SETTINGS["f16"], observer=recorder) as session:
        session.decode([3, 4])
        number, _, rows = recorder.step()
    assert len(rows) == len(recorder.forms[number].nodes) > 40
    assert rows.dtype == ROW
