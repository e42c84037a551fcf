"""Status codes of C interfaces, with the reason for an error."""

from __future__ import annotations


class Status(int):
    """A status code of a document, 0 for success, with the reason for an error.

    name     the code's name in the document
    message  one line that names the argument and its value; empty for success
    """

    name: str
    message: str

    def __new__(cls, code: int, name: str, message: str = "") -> Status:
        status = super().__new__(cls, code)
        status.name, status.message = name, message
        return status

    def __reduce__(self) -> tuple[type[Status], tuple[int, str, str]]:
        return Status, (int(self), self.name, self.message)

    def __repr__(self) -> str:
        return f"{int(self)} {self.name}" + (f": {self.message}" if self.message else "")

    __str__ = __repr__
