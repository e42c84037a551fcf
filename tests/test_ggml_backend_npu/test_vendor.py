"""docs/vendor.md: its class, word for word, runs a model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ggml_backend_npu import DeviceError, QueuedDevice, default, register
from ggml_backend_npu.device import files
from ggml_backend_npu.device.backend import backends_of
from ggml_backend_npu.device.files import load_devices
from ggml_backend_npu.device.sim import Simulator

WITHOUT_A_CARD = """
from ggml_backend_npu import DeviceError, register
from ggml_backend_npu.device.sim import Simulator

class NoCard(Simulator):
    def open(self):
        raise DeviceError("no card")

register(NoCard())
"""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "vendor.md"


@pytest.fixture(scope="module")
def device_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (text,) = re.findall(r"```python title=\"my_npu.py\"\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(text.splitlines()) <= 60
    path = tmp_path_factory.mktemp("vendor") / "my_npu.py"
    path.write_text(text)
    return path


def diff(device: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run("diff", "tiny", "--all", "--device-file", device, *options)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "graph_runner", *map(str, command)]
    return subprocess.run(whole, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_class_of_the_page_is_right_on_a_model(device_file: Path) -> None:
    done = diff(device_file, "-n", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    taken = set(re.findall(r"^(MUL_MAT|ADD|MUL|SWIGLU) ", done.stdout, re.MULTILINE))
    assert taken == {"MUL_MAT", "ADD", "MUL", "SWIGLU"}, done.stdout


@pytest.mark.slow
def test_a_device_replays_a_trace_of_another_device(device_file: Path, tmp_path: Path) -> None:
    """The options in a trace are those of the NPU that wrote it; a device file has its own."""
    trace = tmp_path / "t.gguf"
    assert run("capture", "tiny", "-o", trace).returncode == 0
    for device in ("sim", device_file):
        done = run("replay", trace, "--device-file", device)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_wrong_kernel_of_the_class_is_found(device_file: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong_npu.py"
    wrong.write_text(device_file.read_text().replace("dst[...] = a * b", "dst[...] = a * b * 1.01"))
    done = diff(wrong, "-n", "0", "--reproducers", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"the first wrong node:\s+step 0 node \d+: MUL ", done.stdout), done.stdout
    told = re.search(r"without the model: ggml-npu (.*)", done.stdout)
    assert told is not None
    again = run(*shlex.split(told[1]))
    assert again.returncode == 1
    assert again.stdout.endswith("wrong: 1 of 1 nodes replayed differ from the trace\n")


@pytest.mark.slow
def test_what_the_class_lacks_is_named(device_file: Path) -> None:
    covered = run("coverage", "tiny", "--all", "--device-file", device_file)
    assert re.search(r"^RMS_NORM +\d+ \(-\d+\) +\d+ \(-\d+\)$", covered.stdout, re.MULTILINE), covered.stdout
    ran = run("run", "tiny", "-n", "1", "--all", "--device-file", device_file)
    assert re.search(r"left to the CPU: .*SET_ROWS \d+ \(no kernel\)", ran.stderr), ran.stderr
    listed = run("devices", "--device-file", device_file)
    assert "XNPU0 may take: ADD MUL MUL_MAT SWIGLU" in listed.stdout


@pytest.mark.conformance
def test_ggmls_cases_of_the_class(device_file: Path) -> None:
    done = run("test", "-o", "ADD", "--device-file", device_file)
    assert done.returncode == 0, done.stdout + done.stderr


MISTAKES = {
    "a file of kernels": (
        r".*",
        "from ggml_backend_npu import op\n\n@op('SQR')\ndef sqr(dst, x):\n    pass\n",
        ": registers kernels (@op) and no device; use --kernels",
    ),
    "no copy_out": (r"    def copy_out.*?\n\n", "", ": MyNPU has no method copy_out"),
    "no compile": (r"    def compile.*\]\n", "", ": MyNPU has no method compile"),
    "misspelt type": ('"accel"', '"acel"', ": MyNPU: type 'acel': must be accel or gpu"),
    "misspelt op": ("tuple.KERNELS.", '("MULL",)', " has no op 'MULL'; did you mean 'MUL'?"),
    "a class": (
        r"MyNPU\(\)\)",
        "MyNPU)",
        ": TypeError: register(MyNPU): needs an instance, register(MyNPU())",
    ),
}


@pytest.mark.parametrize(("pattern", "instead", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_the_class_is_told(
    device_file: Path, tmp_path: Path, pattern: str, instead: str, said: str
) -> None:
    path = tmp_path / "device.py"
    text, count = re.subn(pattern, lambda _: instead, device_file.read_text(), count=1, flags=re.DOTALL)
    assert count == 1
    path.write_text(text)
    with pytest.raises(DeviceError) as refused:
        load_devices(str(path))
    assert str(refused.value).startswith(f"device {str(path)!r}")
    assert str(refused.value).endswith(said)


def test_a_device_that_is_registered_in_a_program_is_checked() -> None:
    class Late(Simulator):
        record = QueuedDevice.record

    with pytest.raises(DeviceError, match=r"^Late has no method record$"):
        register(Late())
    with pytest.raises(TypeError, match=r"^register\(Late\): needs an instance"):
        register(Late)  # type: ignore[call-overload]


def test_a_folder_is_no_device(tmp_path: Path) -> None:
    named = tmp_path / "folder.py"
    named.mkdir()
    for path in (tmp_path, named):
        with pytest.raises(DeviceError, match=r"is a directory$"):
            load_devices(str(path))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DeviceError("torch cannot be imported"), r"^device 'torch': torch cannot be imported$"),
        (ValueError("7"), r"^device 'torch': ValueError: 7 \(test_vendor.py line \d+\)$"),
    ],
)
def test_a_package_that_has_no_device_says_why(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def devices() -> None:
        raise error

    point = EntryPoint("torch", "a.module:devices", files.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda _: devices)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    with pytest.raises(DeviceError, match=said):
        load_devices("torch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", "registers no device"),
        ("from ggml_backend_npu import op\n@op('SQR')\ndef sqr(dst, x): pass", "use --kernels"),
        (WITHOUT_A_CARD, "no card"),
    ],
)
def test_a_file_that_is_no_device_is_told_in_a_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "device.py"
    path.write_text(text)
    done = run("run", "tiny", "-n", "1", "--device-file", path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


TWO = """
from ggml_backend_npu import register
from ggml_backend_npu.device.sim import Simulator

register(Simulator("XNPU0"))
register(Simulator("XNPU1"))
"""
REGISTERED = """
import ggml_backend_npu
from ggml_backend_npu.ggml import lib
print(ggml_backend_npu.register().backend.name, *(device.name for device in lib.list_devices(lib.ggml())))
"""


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A file of two devices."""
    path = tmp_path / "two.py"
    path.write_text(TWO)
    return path


def test_one_of_two_devices_is_chosen_by_its_name(two: Path) -> None:
    for name, names in ("", ["XNPU0", "XNPU1"]), (":XNPU0", ["XNPU0"]), (":XNPU1", ["XNPU1"]):
        assert [device.name for device in load_devices(f"{two}{name}")] == names
    with pytest.raises(DeviceError, match=r"two.py:XNPU2': registers XNPU0 and XNPU1$"):
        load_devices(f"{two}:XNPU2")


def test_a_command_that_runs_one_device_says_that_there_are_two(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NPU_DEVICE_FILE", str(two))
    monkeypatch.setattr(default, "default_backends", lambda: backends_of(str(two)))
    with pytest.raises(DeviceError, match=f"registers XNPU0 and XNPU1, and one runs here: choose it, as {two}:XNPU0$"):
        default.only_backend()


@pytest.mark.slow
def test_all_devices_of_a_file_are_registered(two: Path) -> None:
    environment = os.environ | {"GGML_NPU_DEVICE_FILE": str(two)}
    line = [sys.executable, "-c", REGISTERED]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    first, *names = done.stdout.split()
    assert (first, {"XNPU0", "XNPU1"} - {*names}) == ("XNPU0", set()), done.stderr


@pytest.mark.slow
def test_commands_with_a_file_of_two_devices(two: Path) -> None:
    listed = run("devices", "--device-file", two)
    assert "XNPU0 may take: " in listed.stdout
    assert "XNPU1 may take: " in listed.stdout
    for words in "run tiny -n 1", "diff tiny -n 0", "coverage tiny", "test -o ADD", "capture tiny -o {}":
        done = run(*words.format(two.with_suffix(".gguf")).split(), "--device-file", two)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert "registers XNPU0 and XNPU1" in done.stderr
    ran = run("run", "tiny", "-n", "1", "--all", "--device-file", f"{two}:XNPU1")
    assert ran.returncode == 0, ran.stderr
