"""The kernels, one file per family of ops. Importing this package imports every module of it.

OWN  the ops as this project defines them; in a backend, a user's kernel may replace one
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from ggml_backend_npu.ggml import target  # noqa: F401  (before any kernel is made)
from ggml_backend_npu.registry.entry import Op, recording

with recording() as _made:
    for _module in iter_modules(__path__):
        import_module(f"{__name__}.{_module.name}")

OWN: Mapping[str, Op] = MappingProxyType({op.name: op for op in _made})
