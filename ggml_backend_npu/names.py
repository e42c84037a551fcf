"""Checks, before anything imports `quant`, that Python finds the `quant` of this distribution."""

from __future__ import annotations

import ggml_npu

ggml_npu.check("quant")
