"""The long tail of types where there is no ggml: what NumPy can do has ggml's bytes, the rest is refused in a line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import quant
from quant import longtail
from quant.errors import UserError

TAIL = [name for name in quant.type_names() if quant.codec(name).provider == "ggml"]
ENCODED = ["q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0", "mxfp4"]  # by gguf.quants
WITHOUT_GGML = """
import sys
sys.modules["llama_cpp"] = None  # importing it raises ModuleNotFoundError
import numpy as np
import quant

given = np.load(sys.argv[1])
found = {}
for name in given:
    function = quant.dequantize if given[name].dtype == np.uint8 else quant.quantize
    try:
        found[name] = function(given[name], name.removesuffix(" blocks"))
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
assert not [name for name in sys.modules if name.startswith("llama_cpp.")]
np.savez(sys.argv[2], **found)
"""


def test_what_numpy_can_do_without_a_ggml_has_its_bytes_and_the_rest_is_refused_in_a_line(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    values = {name: random.standard_normal((4, 512)).astype(np.float32) for name in TAIL}
    blocks = {
        f"{name} blocks": random.integers(0, 256, (64, quant.codec(name).block_bytes), dtype=np.uint8) for name in TAIL
    }
    given, found = tmp_path / "given.npz", tmp_path / "found.npz"
    np.savez(given, **values, **blocks)  # type: ignore[arg-type]
    command = [sys.executable, "-c", WITHOUT_GGML, str(given), str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    refused = [f"{name}: UserError: type {name!r}: to quantize it takes a ggml" for name in TAIL if name not in ENCODED]
    refused.append("q1_0 blocks: UserError: type 'q1_0': to dequantize it takes a ggml")
    lines = done.stdout.splitlines()
    assert [line.partition(", and ")[0] for line in lines] == refused
    assert {"pip install 'ggml-backend-npu[llama]'" in line for line in lines} == {True}
    with np.load(found) as results:
        assert {*results} == {*ENCODED, *blocks} - {"q1_0 blocks"}
        for name in results:
            if name in ENCODED:
                assert np.array_equal(results[name], quant.quantize(values[name], name)), name
            else:
                expected = quant.dequantize(blocks[name], name.removesuffix(" blocks"))
                assert np.array_equal(results[name], expected, equal_nan=True), name


def test_an_installation_whose_metadata_are_older_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longtail, "GROUP", "quant.none")
    longtail._found.cache_clear()
    try:
        with pytest.raises(UserError, match=r"^type 'q4_K': to quantize it takes a ggml, and .*ggml-backend-npu again"):
            quant.quantize(np.zeros(256, np.float32), "q4_K")
    finally:
        longtail._found.cache_clear()
