"""What becomes of a user's code that ends in an unusual way: a kernel's or a device's, wherever ggml calls it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.models import Models

from ggml_backend_npu import Backend, DeviceBackend, DeviceError, KernelError, Node, Tensor
from ggml_backend_npu.device.sim import Simulator
from ggml_backend_npu.ggml import lib, modes
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.registry.calls import UserCode, calling
from ggml_backend_npu.registry.entry import Op
from graph_runner.run.session import Sampler, Session, SessionError, Settings, generate
from quant.kernels.threads import Team

PROMPT = "The capital of France is"
SET: Any = getattr(ctypes.PyDLL(None), "fesetmode", None)
TOWARD_ZERO, FTZ, DAZ = 3 << 45, 1 << 47, 1 << 38

on_x86 = pytest.mark.skipif(SET is None or os.uname().machine != "x86_64", reason="modes of x86")


@pytest.fixture(autouse=True)
def modes_stay() -> Iterator[None]:
    before = modes.modes()
    yield
    assert modes.put_back(before) is None


def change(bits: int) -> None:
    """Changes modes of this thread."""
    SET(ctypes.byref(ctypes.c_uint64(modes.modes() ^ bits)))


def squared(kernel: Any) -> Node:
    """Computes a node with a kernel."""
    node = Node("SQR", Tensor.of(np.zeros(4, np.float32)), (Tensor.of(np.ones(4, np.float32)),))
    Backend("NPU9", ops=[Op("SQR", kernel)]).compute(node)
    return node


# kernels


@on_x86
@pytest.mark.parametrize(
    ("bits", "said"),
    [
        (TOWARD_ZERO, "the rounding mode at toward zero"),
        (1 << 45, "the rounding mode at down"),
        (FTZ, r"results flushed to zero \(FTZ\)"),
        (DAZ, r"subnormals taken as zero \(DAZ\)"),
        (FTZ | DAZ, r"results flushed to zero \(FTZ\) and subnormals taken as zero \(DAZ\)"),
        (1 << 41, "other floating-point exceptions masked"),
    ],
)
@pytest.mark.parametrize("raises", [False, True])
def test_a_kernel_that_leaves_a_mode_changed_fails_and_the_mode_is_as_before(
    bits: int, said: str, raises: bool
) -> None:
    def kernel(dst: Tensor, x: Tensor) -> None:
        change(bits)
        if raises:
            raise ValueError("no rows today")

    before = modes.modes()
    with pytest.raises(ValueError if raises else KernelError, match="no rows today" if raises else said):
        squared(kernel)
    assert modes.modes() == before


@on_x86
def test_a_kernel_may_change_a_mode_and_set_it_back() -> None:
    def kernel(dst: Tensor, x: Tensor) -> None:
        change(FTZ)
        dst.view()[...] = x.view()
        change(FTZ)

    assert squared(kernel).dst.view().ravel().tolist() == [1] * 4


@on_x86
def test_a_program_that_has_modes_of_its_own_keeps_them() -> None:
    change(FTZ)
    try:
        before = modes.modes()
        squared(lambda dst, x: None)
        assert modes.modes() == before
    finally:
        change(FTZ)


@on_x86
def test_other_threads_of_the_team_get_their_modes_back() -> None:
    """An OpenMP region of a kernel sets them in all of its threads."""
    openmp = lib.ggml().openmp
    if not openmp:
        pytest.skip("this ggml has no OpenMP")
    before = modes.modes()
    flushing = ctypes.c_uint64(before ^ FTZ)
    function = ctypes.cast(SET, ctypes.c_void_p).value
    assert function is not None
    seen: list[int] = []
    look = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(lambda _: seen.append(modes.modes()))
    with Team(openmp, 2).working(), pytest.raises(KernelError, match="FTZ"), UserCode():
        modes._in_team(openmp, function, ctypes.addressof(flushing), 2)
    modes._in_team(openmp, ctypes.cast(look, ctypes.c_void_p).value or 0, 0, 2)
    assert seen == [before] * 2


def test_a_copy_of_the_process_that_a_kernel_makes_ends_with_the_call() -> None:
    read, write = os.pipe()
    copies = []

    def kernel(dst: Tensor, x: Tensor) -> None:
        copies.append(os.fork())

    squared(kernel)
    if not copies[0]:
        os.write(write, b"went on")  # and fails the test, which otherwise would run twice from here
        os._exit(0)
    os.close(write)
    assert os.waitpid(copies[0], 0)[1] == 0
    assert os.read(read, 16) == b""
    os.close(read)


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(3), GeneratorExit()], ids=repr)
def test_an_unusual_exception_of_a_kernel_is_an_error_of_its(error: BaseException) -> None:
    def kernel(dst: Tensor, x: Tensor) -> None:
        raise error

    with pytest.raises(KernelError, match=rf"{type(error).__name__}: .*\(test_calls.py line "):
        squared(kernel)


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), ValueError("x")], ids=repr)
def test_an_unusual_exception_of_a_refusal_is_an_error(error: BaseException) -> None:
    def refuse(dst: Tensor, x: Tensor) -> str:
        raise error

    node = squared(lambda dst, x: None)
    with pytest.raises(KernelError, match=type(error).__name__):
        Op("SQR", lambda dst, x: None, refuse=refuse).refusal(node)


# devices


class Broken(Simulator):
    """Raises an error in each call of a method, from the n-th on; at an address that is no class's method."""

    def __init__(self, method: str, error: object, first: int = 1) -> None:
        super().__init__("XNPU8")
        right, self.n = getattr(self, method), 0

        def broken(*arguments: Any) -> Any:
            self.n += 1
            if self.n < first:
                return right(*arguments)
            if isinstance(error, BaseException):
                raise error
            return error

        setattr(self, method, broken)


def generated(model: Path, device: Simulator) -> list[int]:
    plugin = Plugin(lib.ggml(), DeviceBackend(device))
    plugin.failures.printed = False
    with Session(model, Settings(device="npu", gpu_layers=999), npu=plugin) as session:
        return list(generate(session, session.tokenize(PROMPT), 3, Sampler()))


UNUSUAL = [SystemExit(0), GeneratorExit()]


@pytest.mark.some(7)
@pytest.mark.parametrize("error", UNUSUAL, ids=repr)
@pytest.mark.parametrize(
    ("method", "first"),
    [
        *(("copy_in", 1), ("fill", 1), ("compile", 1), ("compile", 2), ("synchronize", 2), ("synchronize", 9)),
        *(("copy_in", 30), ("copy_out_async", 1), ("copy_out_async", 3), ("refusal", 1)),
    ],
)
def test_a_run_does_not_end_well_if_the_device_did_not(
    model: Models, method: str, first: int, error: BaseException
) -> None:
    device = Broken(method, error, first)
    with pytest.raises(SessionError, match=rf"XNPU8: {method}.*{type(error).__name__}"):
        generated(model("llama"), device)


def test_ctrl_c_in_a_copy_is_raised_or_fails_the_run(model: Models) -> None:
    with pytest.raises((KeyboardInterrupt, SessionError)):
        generated(model("llama"), Broken("copy_out_async", KeyboardInterrupt(), 2))


@pytest.mark.parametrize("answer", [["no"], False, 0, b"no"], ids=repr)
def test_a_refusal_that_is_no_text_is_a_users_error(model: Models, answer: object) -> None:
    with pytest.raises(SessionError, match=r"XNPU8: refusal of .*: must give a reason or None, and gave ") as error:
        generated(model("llama"), Broken("refusal", answer))
    assert repr(answer) in str(error.value)


@pytest.mark.parametrize("error", [*UNUSUAL, RuntimeError("no\n card"), OSError(5, "I/O error")], ids=repr)
def test_an_exception_of_an_sdk_in_open_is_a_users_error(error: BaseException) -> None:
    with pytest.raises(DeviceError, match=rf"^XNPU8: open: {type(error).__name__}: ") as told:
        DeviceBackend(Broken("open", error)).memory()
    assert "\n" not in str(told.value)


def test_what_a_device_says_in_open_is_said_as_it_is() -> None:
    with pytest.raises(DeviceError, match=r"^no card in slot 0$"):
        DeviceBackend(Broken("open", DeviceError("no card in slot 0"))).memory()


@on_x86
@pytest.mark.parametrize("method", ["copy_in", "compile", "refusal"])
def test_a_device_that_leaves_a_mode_changed_is_named(model: Models, method: str) -> None:
    class Changing(Simulator):
        pass

    def changed(self: Simulator, *arguments: Any) -> Any:
        change(FTZ)
        return getattr(Simulator, method)(self, *arguments)

    setattr(Changing, method, changed)
    before = modes.modes()
    with pytest.raises(SessionError, match=rf"XNPU8: {method} .*: leaves the processor with .*FTZ"):
        generated(model("llama"), Changing("XNPU8"))
    assert modes.modes() == before


@on_x86
def test_a_library_that_changes_a_mode_when_it_is_loaded_is_no_error(model: Models) -> None:
    class Changing(Simulator):
        def open(self) -> None:
            change(FTZ)
            super().open()

    before = modes.modes()
    assert len(generated(model("llama"), Changing("XNPU8"))) == 3
    assert modes.modes() == before


def test_a_call_is_named_once() -> None:
    with (
        pytest.raises(KernelError, match=r"^XNPU8: copy of 3 bytes: ValueError: two lines "),
        calling("XNPU8", "copy", 3),
    ):
        raise ValueError("two\n lines")
