"""The command devices."""

from __future__ import annotations

from graph_runner.base.console import Console, table
from graph_runner.cli.options import BackendLibraries, DeviceFile, DeviceOptions, RpcServers


def devices(
    *,
    device_file: DeviceFile = None,
    libraries: BackendLibraries = None,
    servers: RpcServers = None,
    options: DeviceOptions,
) -> None:
    """List ggml's devices, the NPU's profile, and what the NPU promises for each op on this machine: the bytes of this
    ggml's CPU, or a bound. For a device of your own, list the ops that it may take.

    Promises are measured once for each ggml. The first time, this takes as long as compiling all kernels.
    """
    import ggml_backend_npu
    from ggml_backend_npu.default import default_backends
    from graph_runner.judging.promises import promises
    from graph_runner.run.devices import Devices

    for backend in default_backends():
        backend.options = backend.options.updated(options.chosen)
    npu = ggml_backend_npu.register()
    ggml = npu.ggml
    shown = table("device", "type", "backend", "description")
    for device in Devices(tuple(libraries or ()), tuple(servers or ())).all(ggml):
        shown.add_row(*device.info)
    console = Console()
    console.print(shown)
    if not npu.backend.ops:
        for backend in default_backends():
            computed = " ".join(sorted(backend.op_names))
            console.print(f"ggml {ggml.version}; {backend.name} may take: {computed}", highlight=False)
        return
    chosen = npu.backend.options.profile
    console.print(f"ggml {ggml.version}; profile {chosen.name}: {chosen.description}", highlight=False)
    promised = table("op", "nodes", "promise", "why")
    for each in promises():
        promised.add_row(each.op, each.of, "bytes" if each.bytes else "bound", each.why)
    console.print()
    console.print(promised)
