"""Movers and codecs as bars, in GB/s on the float side, with memcpy as their upper bound."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from graph_runner.base.errors import BenchError
from graph_runner.bench.measure import GGML, GGML_CPU, OURS, Measurement, count, groups
from graph_runner.bench.run import WITH_BANDWIDTH, BenchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's colours, and a grey: told apart by the colour blind too
_COLOURS = {OURS: "#0072B2", GGML_CPU: "#E69F00", GGML: "#56B4E9", "gguf-py": "#BBBBBB"}
_ROOFS = ("--", ":")
_SUFFIXES = (".png", ".svg", ".pdf")

_BETWEEN_CASES, _HEADING = 0.7, 2.2  # in heights of a bar
_BAR, _WIDTH, _ABOVE, _BELOW = 0.12, 10.0, 0.95, 0.5  # inches
_DPI = 160


def check_plot(file: str) -> None:
    """Raises BenchError if a plot cannot be made: for an unknown suffix, or without matplotlib."""
    if Path(file).suffix not in _SUFFIXES:
        raise BenchError(f"plot {file!r}: must end with one of {' '.join(_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise BenchError(f"plot {file!r} needs matplotlib: pip install 'ggml-backend-npu[plot]'")


def draw(result: BenchResult, file: str) -> bytes:
    """Returns the file content of a plot of everything that has a bandwidth, in the format of the file's suffix."""
    content = io.BytesIO()
    figure_of(result).savefig(content, format=Path(file).suffix.removeprefix("."))
    return content.getvalue()


def figure_of(result: BenchResult) -> Figure:
    """Returns the plot as a matplotlib figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(dpi=_DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    n_bars = _draw_bars(axes, [found for name in WITH_BANDWIDTH for found in result.measurements.get(name, [])])
    _draw_roofs(axes, result.measurements.get("memcpy", []))
    height = n_bars * _BAR + _ABOVE + _BELOW
    figure.set_size_inches(_WIDTH, height)
    figure.subplots_adjust(left=0.19, right=0.97, top=1 - _ABOVE / height, bottom=_BELOW / height)

    header = result.header
    title = f"ggml-npu bench on {header.machine}, {count(header.cores, 'core')}, {count(header.threads, 'thread')}"
    figure.text(0.02, 1 - 0.3 / height, title, fontsize=11.5, fontweight="bold")
    versions = f"ggml {header.ggml}, numpy {header.numpy}, numba {header.numba}, Python {header.python}"
    figure.text(0.02, 1 - 0.5 / height, f"{versions}; medians of {count(header.rounds, 'round')}", color="#555555")
    figure.legend(
        handles=[*axes.containers, *axes.lines],
        loc="upper left", bbox_to_anchor=(0.01, 1 - 0.55 / height), ncols=6, frameon=False,
    )  # fmt: skip
    return figure


def _draw_bars(axes: Axes, measurements: Sequence[Measurement]) -> float:
    """Draws a bar for each side of each measurement, groups under their headings; returns the total height, in bars."""
    y = 0.0
    ticks: list[tuple[float, str]] = []
    bars: dict[str, list[tuple[float, float]]] = {}
    for group, cases in groups(measurements).items():
        y += _HEADING
        axes.annotate(
            group, (0, y - 0.5), (-3.5, 0), ("axes fraction", "data"), "offset points",
            ha="right", va="baseline", fontweight="bold", annotation_clip=False,
        )  # fmt: skip
        for case in cases:
            sides = [None, *case.others]
            ticks.append((y + len(sides) / 2, case.what.removeprefix(f"{group} ")))
            _label(axes, case, y + 0.5)
            for side in sides:
                bars.setdefault(side or OURS, []).append((y + 0.5, case.bandwidth(side) / 1e9))
                y += 1
            y += _BETWEEN_CASES
    for name, places in bars.items():
        ys, widths = zip(*places, strict=True)
        axes.barh(ys, widths, height=1.0, color=_COLOURS[name], label=name)
    axes.set_ylim(y, 0)
    axes.set_xlim(0, 1.15 * max(width for places in bars.values() for _, width in places))
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.xaxis.grid(True, color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("GB/s on the float side; behind a bar of ours: how many times as fast as the other it is")
    return y


def _label(axes: Axes, case: Measurement, y: float) -> None:
    """Writes next to our bar how many times as fast as the others it is, over any line there."""
    from matplotlib.patheffects import withStroke

    ratios = [f"{case.ratio(other):.2f}x" for other in case.others]
    if len(ratios) > 1:
        ratios = [f"{ratio} {other}" for ratio, other in zip(ratios, case.others, strict=True)]
    axes.annotate(
        "   ".join(ratios), (case.bandwidth() / 1e9, y), (4, 0), textcoords="offset points",
        va="center_baseline", fontsize=7.5, path_effects=[withStroke(linewidth=2, foreground="white")],
    )  # fmt: skip


def _draw_roofs(axes: Axes, roofs: Sequence[Measurement]) -> None:
    for roof, style in zip(roofs, _ROOFS, strict=False):
        bandwidth = roof.bandwidth() / 1e9
        axes.axvline(bandwidth, color="#333333", linestyle=style, linewidth=1, label=f"memcpy, {roof.what}")
        axes.set_xlim(0, max(axes.get_xlim()[1], 1.02 * bandwidth))
