"""Two recorded runs beside each other: where they part first, how they drift apart, and how they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from graph_runner.base.errors import BadInputError
from graph_runner.base.settings import Gives
from graph_runner.diff.logits import Endings, nmse
from graph_runner.record.aligning import Aligned, aligned, layers
from graph_runner.record.measures import nmse as estimated
from graph_runner.record.origins import Origins
from graph_runner.record.run import Run, Step, flat


@dataclass(frozen=True)
class Parting:
    """A node whose result differs.

    step, place  where it is in the first run; other_place: in the second
    tokens   the first and the last token of the step, counted from 0; None if the record does not have them
    nmse     an estimate, or of the results themselves if both runs kept them: then is_exact
    before   how many compared nodes ran before it, all equal
    """

    step: int
    place: int
    other_place: int
    tokens: tuple[int, int] | None
    op: str
    name: str
    layer: int | None
    nmse: float
    is_exact: bool
    before: int

    def __str__(self) -> str:
        at = f"{self.op} {self.name!r}, node {self.place} of step {self.step}"
        if self.tokens is None:
            return at
        first, last = self.tokens
        return f"{at} ({f'token {first:,}' if first == last else f'tokens {first:,} to {last:,}'})"


@dataclass
class Drift:
    """The nodes of a layer, in all steps, or those of a step, in all layers: how many were compared and differ, and the
    worst of them, with its layer and step."""

    layer: int | None
    compared: int = 0
    differing: int = 0
    nmse: float = 0.0
    worst: str = ""
    step: int = 0

    def add(self, error: float, name: str, layer: int | None, step: int) -> None:
        """Adds a node that differs."""
        self.differing += 1
        if error >= self.nmse:
            self.nmse, self.worst, self.layer, self.step = error, name, layer, step


@dataclass(frozen=True)
class Ends:
    """What a step gives: whether it is equal and has the same most likely token, how far apart it is. The NMSE is an
    estimate, and there is no KL divergence, unless both runs kept it.

    of  "logits" or "embeddings", which have no KL divergence
    """

    step: int
    is_equal: bool
    same_token: bool
    nmse: float
    kl: float | None
    of: Gives = "logits"


@dataclass
class Comparison:
    """Two runs. Falsy if they part, or if nothing of them can be compared.

    differing  settings and versions that differ, with both texts
    origins    how nodes came to differ; None if the runs are of two files, whose weights nobody compares
    tokens     the first step in which other tokens were decoded; None if there is none. Nothing is compared from there
    steps      how many steps were compared; of each run
    shapes, alone_a, alone_b  nodes, by op, that have a partner of another type or shape, or none
    layers, by_step  how far they are apart; steps of which no node was recorded are not there
    same_state whether the states at the end have the same bytes; None if the runs have other tokens or no states
    """

    a: str
    b: str
    differing: list[tuple[str, str, str]]
    n_steps: tuple[int, int]
    first: Parting | None = None
    compared: int = 0
    differ: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    alone_a: Counter[str] = field(default_factory=Counter)
    alone_b: Counter[str] = field(default_factory=Counter)
    layers: list[Drift] = field(default_factory=list)
    by_step: list[Drift] = field(default_factory=list)
    ends: list[Ends] = field(default_factory=list)
    tokens: int | None = None
    same_state: bool | None = None
    origins: Origins | None = None

    @property
    def is_of_something(self) -> bool:
        """Whether anything was compared."""
        return bool(self.compared or self.ends)

    def __bool__(self) -> bool:
        same_steps = self.tokens is None and self.n_steps[0] == self.n_steps[1] and self.is_of_something
        same_ends = all(each.is_equal for each in self.ends) and self.same_state is not False
        return same_steps and not self.differ and same_ends


def compare(a: Run, b: Run, path_a: Path, path_b: Path) -> Comparison:
    """Compares two runs. Raises BadInputError if they are of two models."""
    if a.about.model and b.about.model and a.about.model != b.about.model:
        model, other = (" ".join(f"{name} {text}" for name, text in run.about.model.items()) for run in (a, b))
        raise BadInputError(f"record {str(path_b)!r}: is of another model: {other}; {str(path_a)!r} is of {model}")
    first, second = flat(a.about), flat(b.about)
    differing = [
        (name, str(first.get(name, "")), str(second.get(name, "")))
        for name in dict.fromkeys((*first, *second))
        if first.get(name) != second.get(name)
    ]
    result = Comparison(str(path_a), str(path_b), differing, (len(a.steps), len(b.steps)))
    pairs = list(_same_tokens(a.steps, b.steps))
    if len(pairs) < min(result.n_steps):
        result.tokens = len(pairs)
    if a.about.file.get("xxh3") == b.about.file.get("xxh3") is not None:
        result.origins = Origins()
    _compare_nodes(result, a, b, len(pairs))
    _compare_ends(result, a, b, len(pairs))
    if result.tokens is None and result.n_steps[0] == result.n_steps[1] and a.state and b.state:
        result.same_state = a.state == b.state
    return result


def _same_tokens(a: Sequence[Step], b: Sequence[Step]) -> Iterator[tuple[Step, Step]]:
    """Yields pairs of steps. A record of another program's graphs has no tokens, and steps for all that it computes."""
    for first, second in zip(a, b, strict=False):
        if first.tokens and second.tokens and [*map(list, first.tokens)] != [*map(list, second.tokens)]:
            return
        yield first, second


def _compare_nodes(result: Comparison, a: Run, b: Run, n_steps: int) -> None:
    known: dict[object, Aligned] = {}
    drifts: dict[int | None, Drift] = {}
    of_layers = [layers(node.name for node in form.nodes) for form in a.forms]
    n_tokens = 0
    for number in range(n_steps):
        first, second = a.steps[number], b.steps[number]
        begin, n_tokens = n_tokens, n_tokens + max(map(len, first.tokens), default=0)
        if first.form is None or second.form is None:
            continue
        form, other = a.forms[first.form], b.forms[second.form]
        key = first.form, first.sizes, second.form, second.sizes
        if key not in known:
            known[key] = aligned(form, first.sizes, other, second.sizes)
        pairs = known[key]
        result.shapes.update(form.nodes[place].op for place, _ in pairs.shapes)
        result.alone_a.update(form.nodes[place].op for place in pairs.alone_a)
        result.alone_b.update(other.nodes[place].op for place in pairs.alone_b)
        rows, others = first.rows[pairs.a], second.rows[pairs.b]
        all_errors, differs = estimated(rows, others), rows["hash"] != others["hash"]
        apart = np.flatnonzero(differs)
        errors = all_errors[apart]
        if result.origins is not None:
            result.origins.add(form, pairs, differs, all_errors)
        if apart.size and result.first is None:
            i = int(apart[0])
            place, place_b = int(pairs.a[i]), int(pairs.b[i])
            exact = _exact(a, b, number, place, place_b) if form.nodes[place].type == "f32" else None
            result.first = Parting(
                number, place, place_b, (begin, n_tokens - 1) if first.tokens else None,
                form.nodes[place].op, form.nodes[place].name,
                of_layers[first.form][place], float(errors[0]) if exact is None else exact, exact is not None,
                result.compared + i,
            )  # fmt: skip
        result.compared += len(pairs.a)
        result.differ += apart.size
        for layer, n in Counter(of_layers[first.form][place] for place in pairs.a).items():
            drifts.setdefault(layer, Drift(layer)).compared += n
        of_step = Drift(None, len(pairs.a), step=number)
        result.by_step.append(of_step)
        for place, error in zip(pairs.a[apart].tolist(), errors.tolist(), strict=True):
            layer, name = of_layers[first.form][place], form.nodes[place].name
            for drift in (drifts[layer], of_step):
                drift.add(error, name, layer, number)
    result.layers = sorted(drifts.values(), key=lambda each: (each.layer is None, each.layer or 0))


def _exact(a: Run, b: Run, step: int, place: int, place_b: int) -> float | None:
    """Returns the NMSE of a node's results, if both runs kept them."""
    if (step, place) not in a.data or (step, place_b) not in b.data:
        return None
    return nmse(a.data[step, place].view(np.float32), b.data[step, place_b].view(np.float32))


def _compare_ends(result: Comparison, a: Run, b: Run, n_steps: int) -> None:
    for number in range(n_steps):
        first, second = a.steps[number].ends, b.steps[number].ends
        if not first or not second:
            continue
        rows, others = (np.concatenate([each.row for each in ends]) for ends in (first, second))
        same = all(x.tokens[:1] == y.tokens[:1] for x, y in zip(first, second, strict=True))
        error, kl = float(estimated(rows, others).max()), None
        of: Gives = "logits" if first[0].tokens else "embeddings"
        if number in a.logits and number in b.logits:
            endings = Endings([(a.logits[number], b.logits[number])], [of])
            error, kl = endings.ending().nmse, endings.ending().kl
        equal = bool((rows["hash"] == others["hash"]).all())
        result.ends.append(Ends(number, equal, same, error, kl, of))
