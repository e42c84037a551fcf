"""Finds the cases of ggml's own test-backend-ops that are nearest to a node, as the command line that runs them."""

from __future__ import annotations

import shlex

from ggml_backend_npu import Node
from ggml_backend_npu.ops import OWN


def backend_ops_line(node: Node) -> str:
    """Returns the test-backend-ops call (`graph_runner.tools.suites.build` makes the program) with ggml's cases nearest
    to a node: of its op, types and, if its cases have them, its kind of layout. For an op that is not known here, all
    its cases."""
    words = ["test-backend-ops", "test", "-o", node.op]
    own = OWN.get(node.op)
    if own is not None and own.nearest is not None and not own.lacks_sources(node):
        tensors, keywords = own.arguments(node)
        words += ["-p", pattern(own.nearest(*tensors, **keywords))]
    return shlex.join(words)


def pattern(conditions: list[str]) -> str:
    """Returns a regular expression for parameters that contain these, in this order."""
    return "^" + ".*".join(rf"\b{condition}(,|$)" for condition in conditions)
