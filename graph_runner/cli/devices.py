"""The command devices."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from graph_runner.cli.common import use_device
from graph_runner.cli.options import DeviceMemory, DeviceType, MemoryLimit, ProfileName


def devices(
    profile: ProfileName = None,
    memory: DeviceMemory = None,
    memory_limit: MemoryLimit = None,
    device_type: DeviceType = None,
) -> None:
    """List the devices that ggml knows, the NPU among them, and the NPU's profile."""
    import ggml_backend_npu
    from ggml_backend_npu.abi.lib import list_devices

    use_device(profile=profile, memory=memory, memory_limit=memory_limit, device_type=device_type)
    ggml = ggml_backend_npu.register().ggml
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("device", "type", "backend", "description"):
        table.add_column(column)
    for device in list_devices(ggml):
        table.add_row(device.name, device.type, device.backend, device.description)
    console = Console()
    console.print(table)
    chosen = ggml_backend_npu.DEVICE.profile
    console.print(f"ggml {ggml.version}; profile {chosen.name}: {chosen.description}", highlight=False)
