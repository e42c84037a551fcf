"""Limits for a user's input, known before llama.cpp is loaded."""

from __future__ import annotations

import os

MOST_CELLS = 1 << 24  # llama.cpp takes minutes to refuse a context of many more
MOST_THREADS = 4 * (
    os.cpu_count() or 1
)  # beyond that they only wait for each other; llama.cpp has no bound and crashes
