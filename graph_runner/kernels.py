"""The NPU as one that computes a node: its kernels in this process, without ggml. For others see `abi.replica`."""

from __future__ import annotations

from ggml_backend_npu import OPS, Node

NPU = "NPU"


class Kernels:
    """What stands in OPS, with the interface of `abi.replica.Replica`."""

    device = NPU

    def refusal(self, node: Node) -> str | None:
        """Why the device does not take the node; None where it does."""
        return OPS.refusal(node)

    def compute(self, node: Node) -> None:
        """Computes the node into its output's memory. Raises what the kernel raises."""
        OPS.bind(node)()
