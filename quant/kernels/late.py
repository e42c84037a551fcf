"""Names of numba and LLVM that kernels are written with. Importing them imports neither: what a name stands for is made
when a kernel that has it is compiled, so that a process whose kernels are all kept loads no compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any


class Late:
    """Something that is made when it is needed first."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @functools.cached_property
    def real(self) -> Any:
        """What it stands for."""
        return self._make()

    @functools.cached_property
    def _numba_type_(self) -> Any:
        """numba asks for it: the type of what it stands for."""
        return _type_of(self.real)


def _type_of(value: Any) -> Any:
    context = import_module("numba.core.registry").cpu_target.typing_context
    context.refresh()  # it may be new
    return context.resolve_value_type(value)


def real(value: Any) -> Any:
    """What a late value stands for; any other value itself."""
    return value.real if isinstance(value, Late) else value


class Type(Late):
    """A type of numba by its name; called with types, the signature of a function that returns it."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda: getattr(import_module("numba.types"), name))
        self.name = name

    def __call__(self, *arguments: Any) -> Signature:
        return Signature(self, arguments)


class Signature(Late):
    """The signature of a function: the type that it returns, and those of its arguments."""

    def __init__(self, result: Type, arguments: tuple[Any, ...]) -> None:
        super().__init__(lambda: result.real(*map(real, arguments)))
        self.result, self.arguments = result, arguments

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the types: of the result, then of the arguments."""
        return tuple(each.name for each in (self.result, *self.arguments))


class Types:
    """numba.types. In Python code what it has is late, in the code of kernels it is numba's."""

    @property
    def _numba_type_(self) -> Any:
        return _type_of(import_module("numba.types"))

    def __getattr__(self, name: str) -> Type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Type(name)


class Module:
    """A module that is imported when an attribute of it is needed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


types: Any = Types()
ir: Any = Module("llvmlite.ir")
cgutils: Any = Module("numba.core.cgutils")


class Part(Late):
    """A Python function that is compiled into the kernels which call it.

    make  makes of the function what numba knows it by
    """

    def __init__(self, function: Callable[..., Any], make: Callable[[Callable[..., Any]], Any]) -> None:
        super().__init__(lambda: make(function))
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def intrinsic(function: Callable[..., Any]) -> Part:
    """Decorator, as numba's: of a function that gets numba's types, and returns a signature and what emits the code of
    a call."""

    def make(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def typed(*arguments: Any) -> Any:
            found = function(*arguments)
            return found and (real(found[0]), found[1])

        return import_module("numba.extending").intrinsic(typed)

    return Part(function, make)


def jitable(**options: Any) -> Callable[[Callable[..., Any]], Part]:
    """Decorator, as numba's `register_jitable`."""
    return functools.partial(
        Part, make=lambda function: import_module("numba.extending").register_jitable(**options)(function)
    )
