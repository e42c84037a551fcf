"""What became of the end of a run in which the reference computed some nodes, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_runner.diff.result import Replaced


def replaced_line(found: Replaced) -> str:
    """Returns it in one line."""
    if found.after is None:
        return f"replacing {found.what}: the run did not end: {found.why}"
    does = "heals the end" if found else "does not heal the end"
    if found.before <= found.limit:
        does = "has nothing to heal"
    why = f"; {found.why}" if found.why else ""
    alone = " alone" if len(found.nodes) == 1 else ""
    return f"replacing {found.what}{alone} {does}: NMSE {_number(found.before)} -> {_number(found.after)}{why}"


def replaced_json(found: Replaced) -> dict[str, Any]:
    """Returns it as data for JSON."""
    numbers = {
        name: value if value is not None and isfinite(value) else None
        for name, value in (("before", found.before), ("after", found.after), ("limit", found.limit))
    }
    return asdict(found) | numbers | {"nodes": list(found.nodes), "heals": bool(found), "text": replaced_line(found)}


def _number(x: float) -> str:
    return "0" if x == 0 else f"{x:.2e}"
