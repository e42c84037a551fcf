"""How much rounding explains, by op and type: tolerances.toml, and a user's own table over it."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any


class ToleranceError(Exception):
    """A table that cannot be used: one line that names the file, the key and its value."""


class Tolerances:
    """Bounds of the normalised mean squared error.

    extra  a TOML file of the same form, of which each value takes the place of ours
    """

    def __init__(self, extra: Path | None = None) -> None:
        self._table = _read(Path(__file__).with_name("tolerances.toml"))
        if extra is not None:
            for op, bounds in _read(extra).items():
                self._table[op] = self._table.get(op, {}) | bounds

    def nmse(self, op: str, type: str) -> float:
        """The bound of an op's nodes whose first source has a type; 0 where every byte has to be the same."""
        bounds = self._table.get(op, {})
        return bounds.get(type, bounds.get("*", 0.0))


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ToleranceError(f"tolerances {str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ToleranceError(f"tolerances {str(path)!r}: {error}") from None
    return {op: _bounds(path, op, bounds) for op, bounds in table.items()}


def _bounds(path: Path, op: str, bounds: Any) -> dict[str, float]:
    if not isinstance(bounds, dict):
        raise ToleranceError(f"tolerances {str(path)!r}: {op} = {bounds!r}: must be a table of types")
    for type, bound in bounds.items():
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound) or bound < 0:
            raise ToleranceError(f"tolerances {str(path)!r}: {op}.{type} = {bound!r}: must be a number of 0 or more")
    return {type: float(bound) for type, bound in bounds.items()}
