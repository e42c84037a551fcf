"""ggml's private structs and tables of functions: one module per layout, written by tests/tools/layouts.py."""

from __future__ import annotations

from ggml_backend_npu.ggml.layouts import api_3, ggml_0_13, ggml_0_20, ggml_0_25
from ggml_backend_npu.ggml.layouts.layout import Layout

# the newest first of each GGML_BACKEND_API_VERSION
KNOWN: tuple[Layout, ...] = tuple(each.LAYOUT for each in (ggml_0_25, ggml_0_20, ggml_0_13, api_3))
NEWEST = KNOWN[0]
VERSIONS = tuple(version for layout in reversed(KNOWN) for version in layout.versions)
