"""What becomes of the end of a run in which the reference computes some of the device's nodes, from what the device's
own run reads there: do these make the end wrong?"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ggml_backend_npu import AnyBackend
from graph_runner.base.errors import BadInputError, SessionError
from graph_runner.bisect.result import Unit
from graph_runner.bisect.whole import Whole, WholeOptions
from graph_runner.diff.result import DiffResult, Replaced
from graph_runner.diff.walks import Place
from graph_runner.judging.results import NodeResult, Verdict
from graph_runner.trace.capturing import is_item_of

_MUCH = 0.01  # of what the end is off by: what is left may be another fault, or rounding
_LAYERS = re.compile(r"layers?([0-9]{1,6})(?:-([0-9]{1,6}))?")
_LAYER_OF_NAME = re.compile(r"(?:-|_l)([0-9]{1,6})\b")
_UNNAMED = re.compile(r"node_[0-9]+\b")


def replaced(
    model: Path,
    prompt: str,
    options: WholeOptions,
    backend: AnyBackend,
    wanted: Sequence[str | tuple[str, ...]],
    seen: Callable[[Replaced], object],
) -> None:
    """Runs a model whole on a device, and again for each group of nodes, which the scheduler gives to the CPU then.

    wanted  groups of nodes: items as `chosen` takes them, in a text; or names
    seen    called with what became of each; if they are the names of suspects, until the end heals

    Raises BadInputError for an item that no node matches.
    """
    whole = Whole(model, prompt, options, backend)
    whole.prepare()
    groups = [(text, chosen(text, whole)) if isinstance(text, str) else ("", [*text]) for text in wanted]
    every = [unit.name for unit in whole.units]
    before, limit = whole.run(every).nmse, whole.natural()
    for text, names in groups:
        asked = set[str]()
        what = text or _named(names, whole.units)
        try:
            after = whole.run({*every} - {*names}, asked.add).nmse
        except SessionError as error:
            seen(Replaced(what, tuple(names), before, None, limit, str(error)))
            continue
        stay = sorted({*names} - asked)
        why = f"{stay[0]!r} has to run on the device, as it writes into its memory" if stay else ""
        found = Replaced(what, tuple(names), before, after, max(limit, _MUCH * before), why)
        seen(found)
        if found and not text:
            break


def _named(names: Sequence[str], units: Sequence[Unit]) -> str:
    units = [unit for unit in units if unit.name in names]
    ops = {unit.op for unit in units}
    if len(units) == 1:
        return str(units[0])
    return f"the {len(units)} nodes of {' and '.join(sorted(ops))}" if len(ops) <= 2 else f"{len(units)} nodes"


def suspects(result: DiffResult) -> list[tuple[str, ...]]:
    """Returns the nodes of a diff that may be why its end is wrong, if several are off: the first wrong one, the wrong
    ones of its op, all wrong ones. Each by its name."""
    off = [node for node in result.nodes if node.verdict in (Verdict.INHERITED, Verdict.AMPLIFIED) or not node]
    if not result.is_scheduled or result.ending is None or not result.ending.nmse or not result.wrong or len(off) < 2:
        return []
    first = result.wrong[0]
    of_op = [node for node in result.wrong if node.op == first.op]
    groups = [_names([first]), _names(of_op), _names(result.wrong)]
    return [group for place, group in enumerate(groups) if group not in groups[:place]]


def _names(nodes: Sequence[NodeResult]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node.name for node in nodes))


def chosen(text: str, whole: Whole) -> list[str]:
    """Returns the names of the nodes that items select, with commas between: those of `Selection`, but for steps;
    layer3 and layers3-5 stand for the nodes of these layers. Raises BadInputError for an item that selects none."""
    found: list[str] = []
    units = {unit.name: unit for unit in whole.units}
    layers = _layers(whole.at)
    for item in text.split(","):
        item = item.strip()
        if not item or ":" in item:
            why = "an item has no step, since a node is replaced in each" if item else "an item is empty"
            raise BadInputError(f"--replace {text!r}: {why}")
        if range_ := _LAYERS.fullmatch(item):
            first, last = int(range_[1]), int(range_[2] or range_[1])
            names = [name for place, name in whole.at.items() if first <= layers.get(place, -1) <= last]
        else:
            names = [name for place, name in whole.at.items() if is_item_of(item, place[1], units[name].op, name)]
        if not names:
            raise BadInputError(f"--replace {text!r}: no node is {item!r}")
        found += names
    return [*dict.fromkeys(found)]


def _layers(at: dict[Place, str]) -> dict[Place, int]:
    """Returns the layers of nodes: by the number in the name; of a node without a name that of the node before."""
    found: dict[Place, int] = {}
    last: int | None = None
    for place, name in at.items():
        in_name = _LAYER_OF_NAME.search(name)
        if in_name or not _UNNAMED.match(name):
            last = int(in_name[1]) if in_name else None
        if last is not None:
            found[place] = last
    return found
