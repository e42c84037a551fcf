"""What a comparison of two quantisations found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graph_runner.base.settings import Settings
from graph_runner.quantdiff.scores import Mean, Scores
from graph_runner.quantdiff.weights import WeightError


@dataclass(frozen=True)
class Cost:
    """What tensors cost that the small model has quantised: the big model's are put back, the others stay.

    bytes     by which the model grows
    gain      by how much the mean KL divergence falls, in nats, with its error
    """

    bytes: int
    gain: Mean

    @property
    def per_mib(self) -> float:
        """Nats by which the KL divergence falls for each MiB by which the model grows; 0 if it does not grow."""
        return self.gain.value / (self.bytes / 2**20) if self.bytes > 0 else 0.0


@dataclass(frozen=True)
class Tensor:
    """A tensor that the two models have in different bytes.

    layer, kind    its place in the model: None and output.weight, or 3 and attn_q.weight
    type_big, type_small  ggml types
    error          of its weights alone
    cost           None if it was not measured
    """

    name: str
    layer: int | None
    kind: str
    type_big: str
    type_small: str
    n_weights: int
    error: WeightError
    cost: Cost | None = None


@dataclass(frozen=True)
class Row:
    """A tensor as a row of a table: `pandas.DataFrame(result.table)`. What was not measured is NaN; `gain` and its
    error are in nats, `per_mib` in nats for each MiB."""

    name: str
    layer: int
    kind: str
    type_big: str
    type_small: str
    n_weights: int
    bytes: int
    gain: float
    gain_error: float
    per_mib: float
    nmse: float
    worst_block: float
    outliers: int


@dataclass(frozen=True)
class Proposal:
    """A type for each tensor, for a size that was asked for.

    types      by the tensor's name
    bpw        bits per weight of the whole model
    predicted  the KL divergence that the choice counted with, on the text of the tensors' costs
    scores     of the model so made, measured on the whole text
    command    of llama-quantize, which makes it
    """

    types: Mapping[str, str]
    bpw: float
    predicted: float
    scores: Scores
    command: str


@dataclass(frozen=True)
class Quantisation:
    """A small model beside the big one that it was quantised from.

    scores     of the small model's file on the whole text
    n_tokens   tokens of the text in chunks, of which the second half of each chunk is scored
    n_put_back the same for the runs in which tensors are put back
    tensors    in the file's order
    layers, kinds  what all tensors of a layer, or of a kind in all layers, cost together
    """

    big: Path
    small: Path
    bytes_big: int
    bytes_small: int
    bpw_big: float
    bpw_small: float
    settings: Settings
    n_tokens: int
    n_put_back: int
    scores: Scores
    tensors: Sequence[Tensor]
    layers: Mapping[int, Cost]
    kinds: Mapping[str, Cost]
    proposal: Proposal | None = None

    @property
    def by_cost(self) -> list[Tensor]:
        """The tensors whose cost is known, those first for which the KL divergence falls most for each byte."""
        known = [each for each in self.tensors if each.cost is not None]
        return sorted(known, key=lambda each: each.cost.per_mib if each.cost else 0.0, reverse=True)

    @property
    def table(self) -> list[Row]:
        """The tensors, in the file's order."""
        return [_row(each) for each in self.tensors]


def _row(of: Tensor) -> Row:
    nan, cost = float("nan"), of.cost
    gain, error, per_mib = (nan,) * 3 if cost is None else (cost.gain.value, cost.gain.error, cost.per_mib)
    return Row(
        of.name, -1 if of.layer is None else of.layer, of.kind, of.type_big, of.type_small, of.n_weights,
        0 if cost is None else cost.bytes, gain, error, per_mib, of.error.nmse, of.error.worst, of.error.outliers,
    )  # fmt: skip
