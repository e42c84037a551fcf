"""Names of the documents' operators: where they are, their arguments and defaults; importing them compiles nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import ggml_backend_npu
from ggml_backend_npu.documents import rbln


def test_what_the_package_has_not_is_told() -> None:
    with pytest.raises(AttributeError, match="no_such_operator"):
        _ = ggml_backend_npu.no_such_operator


def test_the_operators_have_the_names_arguments_and_defaults_of_the_document() -> None:
    documented = {
        "to_dynamic_index": "(data, max=-1)",
        "dynamic_load": "(ptr, axis=-1, index=None)",
        "dynamic_store": "(ptr, value, axis=-1, index=None)",
        "insert": "(data, updates, axis, index)",
        "softmax": "(input, axis=-1)",
        "masked_softmax": "(input, mask, sink=None, axis=-1)",
        "dynamic_masked_softmax": "(input, index, mask=None, sink=None, axis=-1)",
        "flash_attn_tile": "(input, mask, row_max_i=None)",
        "dynamic_flash_attn_tile": "(input, index, row_max_i=None, mask=None, sink=None)",
        "flash_attn_recompute": "(row_max_prev, row_max_global, row_sum_prev, row_sum_cur, "
        "attn_out_prev, attn_out_cur)",
        "window_insert": "(data, updates, axis, index)",
        "window_slice": "(data, index, axis, window_size)",
        "window_softmax": "(input, index, sink=None, window_size=None, axis=-1, pad_c=-1)",
        "nn_pad": "(input, value, axis, pad_size, mode='constant')",
    }
    assert sorted(documented) == rbln.__all__
    for name, expected in documented.items():
        function = getattr(rbln, name)
        parameters = inspect.signature(function).parameters.values()
        positional = [p.replace(annotation=p.empty) for p in parameters if p.kind is not p.KEYWORD_ONLY]
        assert str(inspect.Signature(positional)) == expected, name


@pytest.mark.slow
def test_importing_compiles_nothing() -> None:
    script = (
        "import ggml_backend_npu; from ggml_backend_npu.ops.kernels.softmax import softmax;"
        "assert not softmax.is_compiled;"
        "import numpy; from ggml_backend_npu.documents import rbln; rbln.softmax(numpy.ones(3, numpy.float32));"
        "assert softmax.is_compiled"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
