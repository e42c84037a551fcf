"""The work of the other process, asked in this one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Pipe

import numpy as np
import pytest

from ggml_backend_npu import KernelError, Memory, Node, Tensor
from graph_runner.elsewhere.desk import Desk
from graph_runner.elsewhere.layout import Form, Handed, Say

NODE = Node("ADD", Tensor.of(np.zeros((2, 8), np.float32)), (Tensor.of(np.ones((2, 8), np.float32)),) * 2, bytes(64))


class Desks:
    """A desk, its other end, and the memory that both have."""

    def __init__(self) -> None:
        self.end, theirs = Pipe()
        fd = os.memfd_create("test")
        os.ftruncate(fd, 1 << 16)
        self.memory = np.frombuffer(mmap.mmap(fd, 1 << 16), np.uint8)
        self.desk = Desk(theirs, fd)

    def asked(self, *what: object) -> tuple[Say, object]:
        self.end.send((Say.ASK, (what[0], what[1:])))
        self.end.send((Say.GO, True))
        assert self.desk.serve()
        found: tuple[Say, object] = self.end.recv()
        return found

    def put(self, node: Node) -> Form:
        handed = Handed.of(node)
        for group, at in handed.parts:
            self.memory[at : at + group.size] = group.held().bytes()
        return handed.form

    def result(self, form: Form) -> np.ndarray:
        at = form.dst.begin + form.dst.offset
        return self.memory[at : at + 64].view(np.float32)


@pytest.fixture
def desks() -> Iterator[Desks]:
    found = Desks()
    assert found.asked("begin", False, 1)[0] is Say.DONE
    yield found
    found.end.close()


def test_a_node_is_computed_where_both_have_it(desks: Desks) -> None:
    form = desks.put(NODE)
    assert desks.asked("refusal", form) == (Say.DONE, None)
    assert desks.asked("compute", 0, form) == (Say.DONE, "")
    assert (desks.result(form) == 2).all()
    desks.memory[: 1 << 12] = 0
    assert desks.asked("compute", 0, None) == (Say.DONE, ""), "a form that it knows"
    assert (desks.result(form) == 0).all()


def _fails(node: Node) -> None:
    raise KernelError("cannot do it")


def _writes_beyond(node: Node) -> None:
    Memory(node.dst.end, 4).bytes()[:] = 0


def _changes_a_source(node: Node) -> None:
    assert node.src[0] is not None
    Memory(node.src[0].address, 4).bytes()[:] = 0


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (_fails, "cannot do it"),
        (_writes_beyond, "writes outside its output"),
        (_changes_a_source, "changes src0 and src1, which it is only to read"),
    ],
)
def test_what_a_build_does_wrong_is_said(
    desks: Desks, monkeypatch: pytest.MonkeyPatch, kernel: Callable[[Node], None], says: str
) -> None:
    monkeypatch.setattr(desks.desk._replica, "compute", kernel)
    assert desks.asked("compute", 0, desks.put(NODE)) == (Say.DONE, says)


def test_an_op_that_this_ggml_does_not_have(desks: Desks) -> None:
    form = desks.put(NODE)._replace(op="NEWER")
    kind, said = desks.asked("refusal", form)
    assert kind is Say.DONE
    assert str(said).endswith("has no such op")


def test_an_error_of_ours_is_told_and_any_other_is_a_bug(desks: Desks) -> None:
    kind, error = desks.asked("open", "no-such-file.gguf", None, False)
    assert kind is Say.BROKEN, "a text is no path"
    assert "Traceback" in str(error)


def test_it_ends_when_nobody_asks_any_more() -> None:
    found = Desks()
    found.end.close()
    with pytest.raises(EOFError):
        found.desk.serve()


def test_a_run_that_is_to_stop(desks: Desks) -> None:
    desks.end.send((Say.STOP, None))
    with pytest.raises(Exception, match="the other run has stopped"):
        desks.desk.serve()
