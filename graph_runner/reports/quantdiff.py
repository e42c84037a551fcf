"""Two quantisations of one model, as text, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from graph_runner.base.console import Console, table
from graph_runner.quantdiff.mixture import costliest
from graph_runner.quantdiff.weights import BINS
from graph_runner.reports.html import json_for_script, page

if TYPE_CHECKING:
    from graph_runner.quantdiff.result import Cost, Quantisation
    from graph_runner.quantdiff.scores import Mean, Scores

QUANTDIFF_SCHEMA = "ggml-npu quantdiff 1"
_MOST = 10  # tensors that are printed, by what they cost for their bytes
_FEW = 5  # and those that cost most, whatever their size
_MIB = 2**20


def print_quantdiff(result: Quantisation, console: Console) -> None:
    """Prints what is measured of the small model, what kinds, layers and tensors cost, and the types chosen."""
    _print_lines(console, _heading(result))
    _print_scores(result, console)
    costs = [(kind, cost) for kind, cost in result.kinds.items()]
    _print_costs("kind", sorted(costs, key=lambda pair: -pair[1].per_mib), console)
    _print_costs("layer", ((str(layer), cost) for layer, cost in result.layers.items()), console)
    _print_lines(console, _costliest(result))
    _print_tensors(result, console)
    if result.proposal is not None:
        _print_lines(console, [result.proposal.command])
    _print_lines(console, [verdict(result)], style="bold")


def verdict(result: Quantisation) -> str:
    """Returns the comparison in a line."""
    kl, best = result.scores.kl, result.by_cost[:1]
    line = f"KL divergence {_pm(kl)} nats at {result.bpw_small:.2f} bits per weight"
    if best and best[0].cost is not None:
        line += f"; {best[0].name} costs most for its bytes"
    if result.proposal is not None:
        line += f"; with the types chosen {_pm(result.proposal.scores.kl)} at {result.proposal.bpw:.2f}"
    return line


def _heading(result: Quantisation) -> list[str]:
    n, chunk = result.n_tokens, result.settings.n_ctx
    return [
        f"{result.big}: {result.bytes_big / 1e6:,.1f} MB, {result.bpw_big:.2f} bits per weight",
        f"{result.small}: {result.bytes_small / 1e6:,.1f} MB, {result.bpw_small:.2f} bits per weight",
        f"text of {n:,} tokens in chunks of {chunk:,}, {len(result.scores.kls):,} tokens scored; "
        f"tensors put back on {result.n_put_back:,} tokens",
    ]


def _measures(scores: Scores) -> list[tuple[str, Mean, str]]:
    return [
        ("KL divergence", scores.kl, "nats"),
        ("same top token", scores.same_top, ""),
        ("perplexity", scores.perplexity, ""),
        ("perplexity of the big model", scores.perplexity_base, ""),
        ("perplexity / the big model's", scores.ratio, ""),
    ]


def _print_scores(result: Quantisation, console: Console) -> None:
    shown = table("")
    columns = {"small model": result.scores} | (
        {"types chosen": result.proposal.scores} if result.proposal is not None else {}
    )
    for name in columns:
        shown.add_column(name, justify="right")
    for rows in zip(*map(_measures, columns.values()), strict=True):
        shown.add_row(rows[0][0], *(f"{_pm(value)} {unit}".rstrip() for _, value, unit in rows))
    console.print(shown)


def _print_costs(what: str, costs: Iterable[tuple[str, Cost]], console: Console) -> None:
    shown = table(what)
    for column in ("MiB more", "KL falls by", "+-", "for each MiB"):
        shown.add_column(column, justify="right")
    for name, cost in costs:
        shown.add_row(escape(name), *_cost_cells(cost))
    if shown.row_count:
        console.print(shown)


def _cost_cells(cost: Cost | None) -> list[str]:
    if cost is None:
        return ["", "", "", ""]
    gain = cost.gain
    return [f"{cost.bytes / _MIB:.2f}", f"{gain.value:.6f}", f"{gain.error:.6f}", f"{cost.per_mib:.6f}"]


def _costliest(result: Quantisation) -> list[str]:
    """The tensors that cost most, whatever their size, and what they take more together; none if no cost is known."""
    most = costliest(result, _FEW)
    mib = sum(each.cost.bytes for each in most if each.cost is not None) / _MIB
    return [f"cost most, {mib:.2f} MiB more together: {', '.join(each.name for each in most)}"] if most else []


def _print_tensors(result: Quantisation, console: Console) -> None:
    by_error = sorted(result.tensors, key=lambda each: -each.error.squared)
    listed = result.by_cost[:_MOST] or by_error[:_MOST]
    shown = table("tensor", "type")
    for column in ("MiB more", "KL falls by", "+-", "for each MiB", "NMSE", "worst block", "outliers"):
        shown.add_column(column, justify="right")
    for each in listed:
        numbers = (f"{each.error.nmse:.2e}", f"{each.error.worst:.2e}", f"{each.error.outliers:,}")
        shown.add_row(escape(each.name), each.type_small, *_cost_cells(each.cost), *numbers)
    console.print(shown)
    if len(result.tensors) > len(listed):
        console.print(f"... and {len(result.tensors) - len(listed):,} more tensors", highlight=False)


def _print_lines(console: Console, lines: Iterable[str], **keywords: Any) -> None:
    for line in lines:
        for each in line.splitlines():
            console.print(each, highlight=False, markup=False, soft_wrap=True, **keywords)


def _pm(of: Mean) -> str:
    return f"{of.value:.6f} +- {of.error:.6f}"


def quantdiff_json(result: Quantisation) -> dict[str, Any]:
    """Returns the comparison as data for JSON."""
    settings, proposal = result.settings, result.proposal
    return {
        "schema": QUANTDIFF_SCHEMA,
        "verdict": verdict(result),
        "big": {"model": str(result.big), "bytes": result.bytes_big, "bpw": result.bpw_big},
        "small": {"model": str(result.small), "bytes": result.bytes_small, "bpw": result.bpw_small},
        "chunk": settings.n_ctx,
        "threads": settings.threads,
        "flash_attention": settings.flash_attention,
        "cache_type_k": settings.cache_type_k,
        "cache_type_v": settings.cache_type_v,
        "n_tokens": result.n_tokens,
        "n_put_back": result.n_put_back,
        "scores": _scores_json(result.scores),
        "kinds": _costs_json("kind", result.kinds),
        "layers": _costs_json("layer", result.layers),
        "bins": [float(each) for each in BINS],
        "tensors": [
            {
                "name": each.name,
                "layer": each.layer,
                "kind": each.kind,
                "type_big": each.type_big,
                "type_small": each.type_small,
                "n_weights": each.n_weights,
                "error": asdict(each.error),
                "cost": None if each.cost is None else _cost_json(each.cost),
            }
            for each in result.tensors
        ],
        "most": [each.name for each in costliest(result, _FEW)],
        "proposal": None
        if proposal is None
        else {
            "bpw": proposal.bpw,
            "predicted": proposal.predicted,
            "scores": _scores_json(proposal.scores),
            "types": dict(proposal.types),
            "command": proposal.command,
        },
    }


def _scores_json(scores: Scores) -> dict[str, Any]:
    names = ("kl", "same_top", "perplexity", "perplexity_base", "ratio")
    return {"n": len(scores.kls)} | {name: asdict(getattr(scores, name)) for name in names}


def _costs_json(what: str, costs: Mapping[Any, Cost]) -> list[dict[str, Any]]:
    return [{what: name} | _cost_json(cost) for name, cost in costs.items()]


def _cost_json(cost: Cost) -> dict[str, Any]:
    return {"bytes": cost.bytes, "gain": asdict(cost.gain), "per_mib": cost.per_mib}


def quantdiff_html(data: dict[str, Any]) -> str:
    """Returns the page of a comparison, from its JSON: tensors as a heat map of layers and kinds, the blocks of the
    chosen tensor as a histogram, and all tensors as a table. The page's state is in the address's fragment."""
    return page(
        "quantdiff",
        styles=("diff.css", "quantdiff.css"),
        scripts=("tools.js", "quantdiff.js"),
        data=data,
        json=json_for_script(data),
    )
