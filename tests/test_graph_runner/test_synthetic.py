"""Faults of parameters that the inputs of a run cannot show: each is named among the blind, and synthetic nodes show
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from kit.commands import Cli, kernel_file
from kit.support import quantised_rows

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.replica import Replica
from graph_runner.diff.alone import Alone
from graph_runner.diff.blindness import Blindness
from graph_runner.diff.erring import Erring
from graph_runner.diff.explaining import Explainer
from graph_runner.diff.sides import Cpu
from graph_runner.diff.synthetic import Synthetic
from graph_runner.diff.turns import Compared
from graph_runner.judging.compare import compare
from graph_runner.judging.copies import copy, put
from graph_runner.judging.footprints import Footprints
from graph_runner.judging.mistakes import ignored
from graph_runner.judging.results import NodeResult
from graph_runner.judging.rules import Rules
