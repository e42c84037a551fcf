"""ggml's own suites on the device, in a program that knows nothing of this project: pytest -m conformance.

The programs are built from the sources of the installed llama-cpp-python, once, in some minutes.
"""

from __future__ import annotations

import os
from itertools import product

import pytest

from graph_runner.suites import Case, SuiteError, architectures, backend_ops

pytestmark = pytest.mark.conformance

MEMORY = ("host", "device")
DEVICE_TYPES = ("accel", "gpu")

# per op, how many cases of test-backend-ops the CPU of ggml 0.25.3 supports
CASES = {"GET_ROWS": 240, "SET_ROWS": 559, "CPY": 493, "CONT": 78, "DUP": 10, "SCALE": 7}

MODELS = 133  # that test-llama-archs runs, in ggml 0.25.3


@pytest.fixture(scope="module", params=product(MEMORY, DEVICE_TYPES), ids="-".join)
def cases(request: pytest.FixtureRequest) -> list[Case]:
    memory, device_type = request.param
    return backend_ops(CASES, {"GGML_NPU_MEMORY": memory, "GGML_NPU_DEVICE_TYPE": device_type})


@pytest.mark.parametrize("op", CASES)
def test_every_case_that_the_cpu_supports_passes(cases: list[Case], op: str) -> None:
    own = [case for case in cases if case.group == op]
    assert not [case.log for case in own if case.verdict == "failed"]
    assert not [case.name for case in own if case.refused_by == ("NPU",)], "the CPU alone supports these"
    assert sum(case.verdict == "passed" for case in own) == CASES[op]


@pytest.mark.parametrize("memory", MEMORY)
def test_every_model_computes_what_it_does_on_the_cpu(memory: str) -> None:
    models = architectures({"GGML_NPU_MEMORY": memory})
    assert not [model.log for model in models if model.verdict == "failed"]
    assert sum(model.verdict == "passed" for model in models) == MODELS


def test_a_plugin_that_is_not_loaded_is_no_success() -> None:
    with pytest.raises(SuiteError, match="no device NPU: GGML_NPU_MEMORY='disk'"):
        backend_ops(["DUP"], {"GGML_NPU_MEMORY": "disk"})
    with pytest.raises(SuiteError, match="test-backend-ops has no device NPU"):
        backend_ops(["DUP"], {"GGML_BACKEND_PATH": os.devnull})
    with pytest.raises(SuiteError, match="test-llama-archs has no device NPU"):
        architectures({"GGML_BACKEND_PATH": os.devnull})
