"""The runs of a bisection in a file, so that it can go on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from graph_runner.base.errors import BadInputError
from graph_runner.base.files import write_file
from graph_runner.bisect.result import Trial

_SCHEMA = "ggml-npu bisect runs 1"


class Kept:
    """A file of runs.

    asked  what the runs depend on, by name
    known  the runs that the file has

    Raises BadInputError for a file that is none, or whose runs depend on something else.
    """

    def __init__(self, file: Path, asked: Mapping[str, str]) -> None:
        self._file, self._asked = file, dict(asked)
        self.known = tuple(self._read())
        self._trials = [*self.known]

    def _read(self) -> Sequence[Trial]:
        option = f"--resume {str(self._file)!r}"
        try:
            data = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise BadInputError(f"{option}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise BadInputError(f"{option}: is not JSON") from None
        if not isinstance(data, dict) or data.get("schema") != _SCHEMA:
            raise BadInputError(f"{option}: is no file of runs of ggml-npu bisect")
        before = data.get("asked")
        for name, value in self._asked.items():
            if not isinstance(before, dict) or before.get(name) != value:
                found = before.get(name) if isinstance(before, dict) else None
                raise BadInputError(f"{option}: its runs have {name} {found!r}, not {value!r}")
        try:
            return [_trial(each) for each in data["runs"]]
        except (KeyError, TypeError, ValueError):
            raise BadInputError(f"{option}: a run in it is none") from None

    def add(self, trial: Trial) -> None:
        """Writes a run into the file. Raises BadInputError if that cannot be."""
        self._trials.append(trial)
        data = {"schema": _SCHEMA, "asked": self._asked, "runs": [asdict(each) for each in self._trials]}
        try:
            write_file(self._file, json.dumps(data, indent=1).encode())
        except OSError as error:
            raise BadInputError(f"--resume {str(self._file)!r}: {error.strerror}") from None


_KINDS: dict[str, Any] = {
    "nodes": str, "nmse": (int, float, type(None)), "first_token": (int, type(None)), "seconds": (int, float),
    "error": str,
}  # fmt: skip


def _trial(data: Mapping[str, Any]) -> Trial:
    """Returns the run that JSON holds. Raises KeyError or TypeError if it holds none."""
    values = {each.name: data[each.name] for each in fields(Trial)}
    for name, value in values.items():
        if not isinstance(value, _KINDS[name]):
            raise TypeError(name)
    return Trial(**values)
