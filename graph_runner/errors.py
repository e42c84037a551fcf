"""What goes wrong with what a user gave, where it is told apart from the modules that need llama.cpp."""

from __future__ import annotations

from quant.errors import UserError


class SessionError(UserError):
    """A model that cannot be loaded or run: one line that names what and why."""


class TraceError(UserError):
    """A trace that cannot be written, read or used: one line that names the file and why."""


class BenchError(UserError):
    """A plot of a benchmark that cannot be made: one line that names the file and why."""


class BadInputError(UserError):
    """What the user gave to a command cannot be used: one line."""


class InternalError(Exception):
    """A mistake of this project in a child process: the last line of its traceback. All of it is a note."""

    def __init__(self, trace: str) -> None:
        super().__init__(trace.strip().splitlines()[-1])
        self.add_note(trace)


class SuiteError(UserError):
    """ggml's programs cannot be built, or did not run to their end: one line that says why."""
