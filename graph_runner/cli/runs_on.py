"""The device that a command runs a model on, as a group of options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from graph_runner.base.errors import BadInputError
from graph_runner.cli.common import gpu_layers, refuse_without_the_npu, use_device, use_kernels
from graph_runner.cli.options import BackendLibraries, DeviceFile, Kernels, OpOptions, RpcServers

if TYPE_CHECKING:
    from graph_runner.process.jobs import NpuOptions
    from graph_runner.run.devices import Devices

CPU, NPU = "CPU", "NPU"
AnyDevice = Annotated[
    str,
    typer.Option(
        metavar="DEVICE", help="Device to run on: npu, cpu, or any that ggml has, by its name; A,B share the layers."
    ),
]


@dataclass(frozen=True)
class RunsOn(OpOptions):
    """The device that a model runs on, where it is, and the options of the NPU."""

    kernels: Kernels = None
    device_file: DeviceFile = None
    device: AnyDevice = "npu"
    libraries: BackendLibraries = None
    servers: RpcServers = None

    def named(self) -> str:
        """Returns "CPU", "NPU" or the name that ggml gives a device. Raises BadInputError for an option of the NPU with
        another one."""
        name = self.device.upper() if self.device.upper() in (CPU, NPU) else self.device
        if name != NPU:
            own = OpOptions(**{each.name: getattr(self, each.name) for each in fields(OpOptions)})
            refuse_without_the_npu(self.device, own, kernels=self.kernels, takes_layers=name != CPU)
        return name

    @property
    def devices(self) -> Devices:
        """Where devices are, besides those that ggml has by itself."""
        from graph_runner.run.devices import Devices

        return Devices(tuple(self.libraries or ()), tuple(self.servers or ()))

    @property
    def npu(self) -> NpuOptions:
        """The NPU in another process."""
        from graph_runner.process.jobs import NpuOptions

        return NpuOptions(self.chosen, tuple(self.kernels or ()))

    def use(self) -> int:
        """Sets up the NPU in this process, if it is the device. Returns how many layers are offloaded."""
        name = self.named()
        if name != NPU:
            return self.layers if name != CPU else 0
        use_device(self)
        use_kernels(self.kernels)
        return gpu_layers(self)


@dataclass(frozen=True)
class RunsBesideCpu(RunsOn):
    """The same, if runs are compared with the CPU's."""

    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Device to run on: npu, or any that ggml has, by its name.")
    ] = "npu"

    def named(self) -> str:
        """As `RunsOn.named`. Raises BadInputError for the CPU too."""
        if self.device.upper() == CPU:
            raise BadInputError(f"--device {self.device!r}: the CPU is what runs are compared with")
        return super().named()
