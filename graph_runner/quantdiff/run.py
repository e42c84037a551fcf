"""Compares a quantised model with the one that it was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path

import numpy as np

from graph_runner.base.errors import BadInputError, SessionError
from graph_runner.base.settings import Settings
from graph_runner.quantdiff import mixture
from graph_runner.quantdiff.files import ModelFile, Weights
from graph_runner.quantdiff.result import Cost, Proposal, Quantisation, Tensor
from graph_runner.quantdiff.running import Mixed, Text
from graph_runner.quantdiff.scores import mean
from graph_runner.quantdiff.weights import encoded, weight_error


def _unseen(_: int, __: int, ___: str) -> None:
    pass


@dataclass(frozen=True)
class QuantOptions:
    """What is measured.

    settings  of the runs; n_ctx is the size of a chunk of the text
    chunks    of the text that the two models are compared on; 0 = all
    put_back  of these, the chunks for runs in which tensors are put back
    tensors   how many are put back alone: those that by their layer, kind and squared error should cost most for their
              bytes. None: all
    bpw       bits per weight of the whole model, for which types are chosen; None: none are
    types     that are chosen from
    seen      called before each run with the number of runs that are done and of all, and what runs
    """

    settings: Settings = field(default_factory=Settings)
    chunks: int = 0
    put_back: int = 1
    tensors: int | None = None
    bpw: float | None = None
    types: Sequence[str] = mixture.TYPES
    seen: Callable[[int, int, str], None] = _unseen


def quantisation(big: Path | str, small: Path | str, text: str, options: QuantOptions | None = None) -> Quantisation:
    """Compares a small model with the big one that it was quantised from, on a text.

    Returns KL divergence, same-top share and perplexity with errors of the mean; the error of each tensor alone; and
    what each tensor costs: it is put back, as the big model has it, and the KL divergence falls. `result.table` is a
    list of dataclasses, which pandas.DataFrame takes. Nothing is written to a disk.

    Raises SessionError for files that are not of one model, and for a text that is too short; BadInputError for types
    and sizes that cannot be.
    """
    options = options or QuantOptions()
    types = mixture.checked_types(options.types)
    files = ModelFile(Path(big)), ModelFile(Path(small))
    files[0].refuse_another(files[1])
    tensors = _compared(*files)
    if options.bpw is not None:
        least = mixture.smallest_bpw(files[0], [each.name for each in tensors], types)
        if options.bpw < least:
            raise BadInputError(f"--bpw {options.bpw:g}: the smallest of the types given take {least:.2f}")
    return _Comparison(*files, tensors, options).result(text, types)


def _compared(big: ModelFile, small: ModelFile) -> list[Tensor]:
    """Returns the tensors whose bytes differ. Raises SessionError if there are none, or if they are no weights."""
    found = []
    for name, a in big.tensors.items():
        b = small.tensors[name]
        if a.type == b.type and np.array_equal(a.data, b.data):
            continue
        error = weight_error(a, b)
        if not isfinite(error.squared):
            raise SessionError(
                f"models {str(big.path)!r} and {str(small.path)!r}: tensor {name!r} is not finite in both"
            )
        found.append(Tensor(name, a.layer, a.kind, a.type, b.type, a.n_weights, error))
    if not found:
        raise SessionError(f"models {str(big.path)!r} and {str(small.path)!r}: every tensor has the same bytes")
    return found


class _Comparison:
    """Runs of the two models, and of those between them."""

    def __init__(self, big: ModelFile, small: ModelFile, tensors: Sequence[Tensor], options: QuantOptions) -> None:
        self._big, self._small, self._tensors, self._options = big, small, tensors, options
        self._n_alone = len(tensors) if options.tensors is None else min(options.tensors, len(tensors))
        self._layers = sorted({each.layer for each in tensors if each.layer is not None})
        self._kinds = list(dict.fromkeys(each.kind for each in tensors))
        n_groups = len(self._layers) + len(self._kinds)
        self._n_runs = 2 + n_groups + self._n_alone + (options.bpw is not None)
        self._done = 0

    def _begins(self, what: str) -> None:
        self._options.seen(self._done, self._n_runs, what)
        self._done += 1

    def result(self, text: str, types: Sequence[str]) -> Quantisation:
        """Runs all."""
        options = self._options
        self._begins("big model")
        whole = Text.of(self._big, text, options.settings, options.chunks)
        self._begins("small model")
        scores = whole.scores(self._small.path)
        self._text = whole.first(options.put_back)
        self._mixed = Mixed(self._small, self._text)
        self._kls = scores.kls[: self._text.n_scored]
        kinds = {kind: self._cost(f"all {kind}", (t.name for t in self._tensors if t.kind == kind))
                 for kind in self._kinds}  # fmt: skip
        layers = {n: self._cost(f"layer {n}", (t.name for t in self._tensors if t.layer == n)) for n in self._layers}
        expected = mixture.expected_costs(self._tensors, layers, kinds)
        costs = {name: self._cost(name, [name]) for name in self._first(expected)}
        tensors = [replace(each, cost=costs.get(each.name)) for each in self._tensors]
        found = Quantisation(
            self._big.path, self._small.path, self._big.n_bytes, self._small.n_bytes, self._big.bpw, self._small.bpw,
            options.settings, sum(map(len, whole.chunks)), sum(map(len, self._text.chunks)), scores, tensors, layers,
            kinds,
        )  # fmt: skip
        return found if options.bpw is None else replace(found, proposal=self._proposal(found, whole, types))

    def _first(self, expected: Mapping[str, float]) -> list[str]:
        """Returns the tensors that are to be put back alone, those first that should cost most for their bytes."""

        def rate(name: str) -> float:
            return expected[name] / max(1, self._growth([self._big.tensors[name]]))

        return sorted(expected, key=rate, reverse=True)[: self._n_alone]

    def _growth(self, back: Sequence[Weights]) -> int:
        """By how many bytes the small model grows with these tensors."""
        return sum(each.data.nbytes - self._small.tensors[each.name].data.nbytes for each in back)

    def _cost(self, what: str, names: Iterable[str]) -> Cost:
        """Puts tensors back and runs the model."""
        self._begins(what)
        back = [self._big.tensors[name] for name in names]
        return Cost(self._growth(back), mean(self._kls - self._mixed.scores(back).kls))

    def _proposal(self, found: Quantisation, whole: Text, types: Sequence[str]) -> Proposal:
        assert self._options.bpw is not None
        self._begins("chosen types")
        expected = mixture.expected_costs(found.tensors, found.layers, found.kinds)
        weights = self._big.tensors
        of_each = {
            each.name: mixture.choices(weights[each.name], each, expected[each.name], types) for each in found.tensors
        }
        others = self._big.n_bytes - sum(weights[name].data.nbytes for name in of_each)
        most = int(self._options.bpw * self._big.n_weights / 8) - others
        picked = mixture.chosen(of_each, most)
        made = [encoded(weights[name], choice.type) for name, choice in picked.items()]
        n_bytes = others + sum(each.data.nbytes for each in made)
        kept = {name: each.type for name, each in weights.items() if name not in picked and len(each.ne) > 1}
        chosen_types = {name: picked[name].type if name in picked else kept[name] for name in weights
                        if name in picked or name in kept}  # fmt: skip
        return Proposal(
            chosen_types, 8 * n_bytes / self._big.n_weights, sum(each.cost for each in picked.values()),
            Mixed(self._small, whole).scores(made), mixture.quantize_command(self._big, chosen_types),
        )  # fmt: skip
