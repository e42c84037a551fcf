"""Checks that Python finds this distribution's packages.

`quant` and `graph_runner` are names that other distributions have, too. One of those may hide ours, by its place in
sys.path, or overwrite it in the same site-packages.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_OURS = 'version("ggml-backend-npu")'  # stands in the __init__.py of each of our packages


def check(*packages: str) -> None:
    """Raises ImportError for the first package that is somebody else's. It does not import any."""
    for package in packages:
        spec = find_spec(package)
        if spec is None:
            raise ImportError(f"package {package!r} is missing; install ggml-backend-npu again")
        origin = spec.origin or ", ".join(spec.submodule_search_locations or ())
        if spec.origin is None or _OURS not in Path(spec.origin).read_text(encoding="utf-8", errors="replace"):
            from importlib.metadata import packages_distributions  # late, as it is slow

            others = sorted({*packages_distributions().get(package, ())} - {"ggml-backend-npu"})
            remedy = f"uninstall {' and '.join(others)}, then " if others else "take its folder out of sys.path or "
            raise ImportError(
                f"package {package!r} at {origin!r} is not ggml-backend-npu's: {remedy}install ggml-backend-npu "
                "again, or in a virtual environment of its own"
            )
