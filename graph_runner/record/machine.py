"""What a run is computed by: processor, ggml, packages."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash

from ggml_backend_npu.ggml.lib import Ggml
from quant.kernels.processor import processor_name

_CHUNK = 1 << 24
_PACKAGES = ("ggml-backend-npu", "llama-cpp-python", "numpy")


def machine(ggml: Ggml) -> dict[str, str]:
    """Returns what computes, by name; of a package that is not there ""."""
    features = " ".join(name for name, value in ggml.features.items() if value != "0")
    return {
        "processor": processor_name(), "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "ggml": ggml.version,
        "ggml build": f"{hash_of(Path(ggml.cpu_file))} {features}".strip(),
        **{name: _version(name) for name in _PACKAGES},
    }  # fmt: skip


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def hash_of(*files: Path) -> str:
    """Returns the xxh3-64 of files, one after the other."""
    digest = xxhash.xxh3_64()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
