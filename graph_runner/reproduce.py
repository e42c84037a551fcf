"""The cases of ggml's own test-backend-ops that are nearest to a node, as the line that runs them."""

from __future__ import annotations

import shlex

from ggml_backend_npu import Node
from ggml_backend_npu.ops import OWN


def backend_ops_line(node: Node) -> str:
    """The call of test-backend-ops (`graph_runner.suites.build` makes it) with ggml's cases nearest to a node: of its
    op, types and, where its cases have them, its kind of layout. Of an op that is not known here it is all cases."""
    words = ["test-backend-ops", "test", "-o", node.op]
    own = OWN.get(node.op)
    if own is not None and own.nearest is not None and not own.lacks_sources(node):
        tensors, keywords = own.arguments(node)
        words += ["-p", pattern(own.nearest(*tensors, **keywords))]
    return shlex.join(words)


def pattern(conditions: list[str]) -> str:
    """The regular expression of parameters that have these, in this order."""
    return "^" + ".*".join(rf"\b{condition}(,|$)" for condition in conditions)
