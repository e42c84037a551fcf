"""Compiles kernels for the instructions that the ggml of this process was compiled for. Importing this module does so.

ggml's code adds up 16 products side by side with AVX-512, 8 with AVX2 and 4 with NEON: other sums, other last bits.
Which of them a ggml uses is its builder's choice, not the processor's, and it says so itself.
"""

from __future__ import annotations

import sys

from ggml_backend_npu.ggml import lib, llama, places
from quant.kernels.processor import follow


def _as_ggml() -> None:
    """Without a ggml, kernels are compiled for the processor. A ggml that the process has loaded already is the one:
    importing llama-cpp-python would make it that package's, as the libraries have the same name."""
    try:
        already = None if llama.FUNCTIONS in sys.modules else places.already_loaded()
        features = (lib.unchecked() if already is None else lib.Ggml(already)).features
    except lib.UnknownGgmlError:
        return
    follow(16 if "AVX512" in features else 4 if "NEON" in features else 8)


_as_ggml()
