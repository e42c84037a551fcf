"""The parameters in the case names of ggml's test-backend-ops, as regular expressions."""

from __future__ import annotations

import re

from ggml_backend_npu.ir import Tensor

MORE_THAN_ONE = r"([2-9]|\d\d+)"


def has(name: str, value: str | int | bool) -> str:
    """A parameter with this value."""
    return f"{name}={re.escape(str(int(value) if isinstance(value, bool) else value))}"


def of_type(dst: Tensor, x: Tensor) -> list[str]:
    """Cases whose first source has the type of x."""
    return [has("type", x.type)]


def is_permuted(tensor: Tensor) -> bool:
    """Whether its dimensions lie in memory in another order than 0, 1, 2, 3."""
    strides = [stride for n, stride in zip((tensor.n_blocks, *tensor.ne[1:]), tensor.nb, strict=True) if n > 1]
    return strides != sorted(strides)


def repeats(ne: tuple[int, ...], of: tuple[int, ...]) -> str:
    """For each dimension "n" if a tensor of size ne is repeated to `of`, else "1"."""
    return "".join("1" if a == b else "n" for a, b in zip(ne, of, strict=True))


def nr(repeats: str) -> str:
    """The parameter nr: how often the second source repeats in each dimension."""
    return rf"nr=\[{','.join('1' if kind == '1' else MORE_THAN_ONE for kind in repeats)}\]"
