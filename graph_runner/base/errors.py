"""Errors of a user's input, and others that commands tell apart, in a module that does not need llama.cpp."""

from __future__ import annotations

from quant.errors import UserError


class SessionError(UserError):
    """A model cannot be loaded or run. The message is one line that names what and why."""


class TraceError(UserError):
    """A trace cannot be written, read or used. The message is one line that names the file and why."""


class BenchError(UserError):
    """A benchmark cannot be measured or plotted. The message is one line that names the file and why."""


class BadInputError(UserError):
    """A command cannot use the user's input. The message is one line."""


class LimitError(UserError):
    """The machine does not let a process go on: CPU time, memory. The message is one line that names the limit."""


class InternalError(Exception):
    """A bug of this project in a child process. The message is the last line of its traceback; a note holds all of
    it."""

    def __init__(self, trace: str) -> None:
        super().__init__(trace.strip().splitlines()[-1])
        self.add_note(trace)


class BlindError(Exception):
    """The judge of a diff calls a planted fault right, so that its verdicts say nothing: a bug of this project. The
    message is one line that begins with "the judge is blind" and names the fault."""


class SuiteError(UserError):
    """ggml's programs cannot be built, or did not run to their end. The message is one line that says why."""


class EndedElsewhereError(BaseException):
    """The process of a side of a diff has ended. Not an Exception: nobody who takes what a kernel raises for a node's
    failure is to take this for one.

    who    "the process of CPU build=before"
    how    "ended by SIGSEGV"
    at     " at MUL_MAT node 'kq-0'": the node that it was to compute last, or ""
    limit  of the machine, if that has ended it: one line; "" if not
    """

    def __init__(self, who: str, how: str, at: str = "", limit: str = "") -> None:
        super().__init__(who, how, at, limit)
        self.who, self.how, self.at, self.limit = who, how, at, limit

    def __str__(self) -> str:
        return self.limit or f"{self.who} {self.how}{self.at}"
