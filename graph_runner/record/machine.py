"""What a run is computed by: processor, ggml, packages."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from ggml_backend_npu.ggml.lib import Ggml
from graph_runner.base.builds import build_of
from quant.kernels.processor import processor_name

_PACKAGES = ("ggml-backend-npu", "llama-cpp-python", "numpy")


def machine(ggml: Ggml) -> dict[str, str]:
    """Returns what computes, by name; of a package that is not there ""."""
    return {
        "processor": processor_name(), "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "ggml": ggml.version,
        "ggml build": build_of(ggml),
        **{name: _version(name) for name in _PACKAGES},
    }  # fmt: skip


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
