"""Does a libllama fit the Python package that calls it? Structs go by value, and nothing else would tell."""

from __future__ import annotations

from typing import Any

from ggml_backend_npu.ggml import llama
from graph_runner.base.errors import BadInputError

_F16 = 1  # GGML_TYPE_F16
# what llama.cpp's defaults have been in every version, from the begin of a struct to its end
_OF_CONTEXTS = {
    "n_ctx": 512, "n_batch": 2048, "defrag_thold": -1.0, "type_k": _F16, "type_v": _F16, "no_perf": True,
    "op_offload": True, "swa_full": True, "kv_unified": False,
}  # fmt: skip
_OF_MODELS = {"n_gpu_layers": -1, "vocab_only": False, "check_tensors": False, "use_extra_bufts": True}


def refuse_other_structs(functions: Any) -> None:
    """Raises BadInputError for a libllama whose parameters lie elsewhere in their structs than the package says.

    functions  the module llama_cpp.llama_cpp
    """
    for defaults, known in (
        (functions.llama_context_default_params, _OF_CONTEXTS),
        (functions.llama_model_default_params, _OF_MODELS),
    ):
        found = defaults()
        wrong = next((name for name, value in known.items() if getattr(found, name) != value), None)
        if wrong is not None:
            struct = type(found).__name__
            raise BadInputError(
                f"its libllama has another {struct} than llama-cpp-python {llama.version()}: {wrong} is not where it "
                "was; python=PATH takes an environment with a llama-cpp-python of its own"
            )
