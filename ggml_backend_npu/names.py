"""Checks, before anything imports `quant`, that Python finds the one of this distribution."""

from __future__ import annotations

import ggml_npu

ggml_npu.check("quant")
