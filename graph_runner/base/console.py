"""Terminal output: rich's console and tables, without truncation, and with control characters in a model's names shown,
not executed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable

from quant.errors import encodable as encodable
from quant.errors import printable as printable

_NOT_WRAPPED = 100_000  # columns where there is no terminal


def _printable(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


class Console(RichConsole):
    """A console that prints control characters as escapes, that does not wrap lines if there is no terminal, and that
    ends the command if nobody reads the output any more."""

    def __init__(self, *, stderr: bool = False, **keywords: Any) -> None:
        file = keywords.get("file") or (sys.stderr if stderr else sys.stdout)
        if not file.isatty():
            keywords.setdefault("width", _NOT_WRAPPED)
        super().__init__(stderr=stderr, **keywords)

    def print(self, *objects: Any, **keywords: Any) -> None:
        """Prints as rich does, with control characters in strings as escapes."""
        super().print(*map(_printable, objects), **keywords)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields segments as rich does, with control characters in their text as escapes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError, which ends the command."""
        raise BrokenPipeError


def table(*columns: str, **keywords: Any) -> Table:
    """Returns a table without lines; `columns` are the leftmost ones."""
    made = Table(box=None, pad_edge=False, header_style="bold", **keywords)
    for column in columns:
        made.add_column(column)
    return made


class Table(RichTable):
    """A table that wraps long cells instead of truncating them."""

    def add_row(self, *cells: Any, **keywords: Any) -> None:
        """Adds a row as rich does, with control characters in strings as escapes."""
        super().add_row(*map(_printable, cells), **keywords)

    def add_column(self, *arguments: Any, **keywords: Any) -> None:
        """Adds a column as rich does, with long cells wrapped by default."""
        super().add_column(*arguments, **{"overflow": "fold"} | keywords)
