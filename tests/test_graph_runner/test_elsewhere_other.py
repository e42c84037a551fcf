"""A process with the ggml of another build: here, of the installed one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from ggml_backend_npu import KernelError, Node, Tensor
from graph_runner.base.builds import Build
from graph_runner.base.errors import BadInputError, EndedElsewhereError
from graph_runner.elsewhere import other as module
from graph_runner.elsewhere.other import Other

INSTALLED = Path(llama_cpp.__file__).with_name("lib")


def begun(build: Build) -> Other:
    return Other("CPU build=x", build, repacks=False, threads=1)


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    with begun(Build.of_folder(str(INSTALLED))) as found:
        yield found


def node(n: int = 8, op: str = "ADD") -> Node:
    a, b = (np.random.default_rng(seed).standard_normal((2, n)).astype(np.float32) for seed in (1, 2))
    return Node(op, Tensor.of(np.zeros((2, n), np.float32)), (Tensor.of(a), Tensor.of(b)), bytes(64))


def is_sum(computed: Node) -> bool:
    a, b = computed.src
    assert a is not None
    assert b is not None
    return np.array_equal(computed.dst.view(), a.view() + b.view())


def test_it_says_what_it_is(other: Other) -> None:
    assert other.about.where == str(INSTALLED)
    assert other.about.ggml[0].isdigit()


def test_it_computes_a_node(other: Other) -> None:
    asked = node()
    assert other.refusal(asked) is None
    other.compute(asked)
    assert is_sum(asked)


def test_a_node_larger_than_the_memory_that_both_have(other: Other) -> None:
    small, large = node(), node(module._SHARED // 8)
    again = other.bound(small)
    again()
    other.compute(large)
    assert is_sum(large)
    small.dst.view()[...] = 0
    again()
    assert is_sum(small)


def test_a_node_that_it_does_not_take(other: Other) -> None:
    assert other.refusal(node(op="NEWER")) is not None
    with pytest.raises(KernelError, match=r"NEWER node '': .*has no such op"):
        other.compute(node(op="NEWER"))


def test_a_folder_without_a_whole_build(tmp_path: Path) -> None:
    (tmp_path / "libllama.so").write_bytes(b"")
    with pytest.raises(BadInputError, match=r"^CPU build=x: llama-cpp-python cannot be imported: .*libllama.so"):
        begun(Build(str(tmp_path)))


@pytest.mark.slow
def test_one_that_is_killed_is_told_with_the_node_that_it_was_at() -> None:
    with begun(Build()) as found:
        found.compute(node())
        os.kill(found._process.pid, signal.SIGKILL)
        with pytest.raises(EndedElsewhereError) as error:
            found.compute(node())
    assert str(error.value) == "the process of CPU build=x ended by SIGKILL at ADD node ''"


@pytest.mark.slow
def test_it_ends_with_its_context() -> None:
    with begun(Build()) as found:
        process = found._process
    assert process.returncode == 0
