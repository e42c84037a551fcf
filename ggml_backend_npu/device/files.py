"""Devices of other packages and of files: entry points of the group "ggml_backend_npu.devices", and Python files that
register devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from ggml_backend_npu.backend.options import DeviceError
from ggml_backend_npu.device.device import Device, QueuedDevice
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.calls import said_by
from ggml_backend_npu.registry.entry import recording
from ggml_backend_npu.registry.user_files import FileError, run_file
from ggml_backend_npu.user_texts import no_file

GROUP = "ggml_backend_npu.devices"

_TYPES = ("accel", "gpu")
_NEEDED = (
    *(Device.alloc, Device.copy_in, Device.copy_out, Device.compile),
    *(QueuedDevice.copy_in_async, QueuedDevice.copy_out_async, QueuedDevice.copy_async),
    *(QueuedDevice.record, QueuedDevice.wait, QueuedDevice.wait_for),
)

_recorded: ContextVar[list[Device] | None] = ContextVar("devices of the file that is being loaded", default=None)


def recorded() -> list[Device] | None:
    """The list to which `register` adds a device, instead of telling ggml, while a file is loaded; None at any other
    time."""
    return _recorded.get()


def check(device: Device) -> None:
    """Raises DeviceError for a device without a method that it needs, and for a type or an op that ggml does not have.
    An op of this project's own is one of some version of ggml."""
    called = type(device).__name__
    for method in _NEEDED:
        if getattr(getattr(device, method.__name__, None), "__func__", None) is method:
            raise DeviceError(f"{called} has no method {method.__name__}")
    if device.type not in _TYPES:
        raise DeviceError(f"{called}: type {device.type!r}: must be {' or '.join(_TYPES)}")
    for op in device.ops:
        if op not in OWN and op not in lib.ggml().op_names:
            raise DeviceError(f"{called}: ops: {lib.ggml().has_no_op(op)}")


def load_devices(name: str) -> list[Device]:
    """The devices of a Python file, which is run, or of an entry point by its name; FILE.py:NAME is one of several.
    Raises DeviceError where there are none, or none of that name, and where `check` does."""
    where, chosen = place_of(name)
    with recording() as kernels:
        devices = _of_file(Path(where)) if where.endswith(".py") else _of_entry_point(where)
    if not devices:
        found = "kernels (@op) and no device; use --kernels" if kernels else "no device"
        raise DeviceError(f"device {name!r}: registers {found}")
    if chosen:
        names = " and ".join(device.name for device in devices)
        devices = [device for device in devices if device.name == chosen]
        if not devices:
            raise DeviceError(f"device {name!r}: registers {names}")
    for device in devices:
        try:
            check(device)
        except DeviceError as error:
            raise DeviceError(f"device {name!r}: {error}") from None
    return devices


def place_of(name: str) -> tuple[str, str]:
    """The file or entry point, and the device's name or "", of what GGML_NPU_DEVICE_FILE holds."""
    where, _, chosen = name.rpartition(":")
    return (where, chosen) if where and not name.endswith(".py") else (name, "")


def _of_file(path: Path) -> list[Device]:
    if not path.is_file():
        raise DeviceError(f"device {str(path)!r}: {no_file(path)}")
    with _recording() as found:
        try:
            run_file(path, f"device_{path.stem}")
        except FileError as error:
            raise DeviceError(f"device {str(path)!r}{error}") from None
    return found


def _of_entry_point(name: str) -> list[Device]:
    from importlib.metadata import entry_points  # late, as it is slow

    known = {each.name: each for each in entry_points(group=GROUP)}
    if name not in known and Path(name).is_dir():
        raise DeviceError(f"device {name!r}: {no_file(Path(name))}")
    if name not in known:
        names = " ".join(sorted(known)) or "none"
        raise DeviceError(f"device {name!r}: no file .py, and no entry point; there are: {names}")
    try:
        with _recording() as found:
            made = known[name].load()()
    except DeviceError as error:
        raise DeviceError(f"device {name!r}: {error}") from None
    except (Exception, SystemExit, GeneratorExit) as error:
        raise DeviceError(f"device {name!r}: {said_by(error)}") from None
    return [*found, *(made if isinstance(made, list) else [made] if isinstance(made, Device) else [])]


@contextmanager
def _recording() -> Iterator[list[Device]]:
    found: list[Device] = []
    before = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(before)
