"""Draws what `ggml-npu bench depth` measured, with the limits of the machine.

    ggml-npu bench depth --model MODEL --json FILE.json
    python docs/depth.py FILE.json MODEL READ FLOATS BYTES OUT.png

READ is how many GB/s all cores together read from memory, FLOATS and BYTES how many billion multiplications and
additions a second they do of float32 and of bytes. A token that is generated reads all weights and the cache; a token
of a prompt multiplies all weights, as bytes, and is multiplied with the cache, as float32.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

_WHAT = re.compile(r"(prompt of \d+|\d+ tokens)(?: after ([\d,]+))?, flash attention (on|off)")
_OURS, _THEIRS, _LIMIT = "#0072B2", "#E69F00", "#333333"

Curves = dict[str, dict[str, dict[int, float]]]  # tokens/s by what was measured, side and depth


@dataclass(frozen=True)
class Work:
    """What a token of a model takes.

    weights  bytes of all matrices, and multiplications of a prompt's token with them: all but its last one are not
             multiplied with the output's
    cell     bytes of a cell of a cache of float16, and multiplications of a token with it
    """

    weights: tuple[float, float]
    cell: tuple[float, float]

    @staticmethod
    def of(model: str) -> Work:
        """Reads it from a GGUF file."""
        reader = GGUFReader(model)
        matrices = {tensor.name: tensor for tensor in reader.tensors if len(tensor.shape) > 1}
        embeddings = matrices.pop("token_embd.weight")
        output = matrices.pop("output.weight", embeddings)
        arch = reader.fields["general.architecture"].contents()

        def number(name: str, default: int = 0) -> int:
            field = reader.fields.get(f"{arch}.{name}")
            return default if field is None else int(field.contents())

        heads, layers = number("attention.head_count"), number("block_count")
        size = number("attention.key_length", number("embedding_length") // heads)
        return Work(
            (
                sum(tensor.n_bytes for tensor in (*matrices.values(), output)),
                sum(tensor.n_elements for tensor in matrices.values()),
            ),
            (2 * 2 * layers * number("attention.head_count_kv") * size, 2 * layers * heads * size),
        )

    def generated(self, depth: float, read: float) -> float:
        """The most tokens/s after `depth` tokens, if `read` bytes a second are read."""
        return read / (self.weights[0] + depth * self.cell[0])

    def of_prompt(self, depth: float, floats: float, of_bytes: float) -> float:
        """The most tokens/s of a prompt after `depth` tokens, with so many operations a second."""
        return 1 / (2 * self.weights[1] / of_bytes + 2 * depth * self.cell[1] / floats)


def curves(measurements: list[dict[str, Any]]) -> Curves:
    """What was measured with a cache of float16: ours with flash attention, llama.cpp's better setting."""
    found: Curves = defaultdict(lambda: defaultdict(dict))
    for each in measurements:
        if (match := _WHAT.fullmatch(each["what"])) is not None and match[3] == "on":
            depth = int((match[2] or "0").replace(",", ""))
            found[match[1]]["ggml-npu"][depth] = each["median"]
            found[match[1]]["llama.cpp's best"][depth] = each["others"]["llama.cpp"]["median"]
    return found


def figure_of(measured: Curves, work: Work, read: float, floats: float, of_bytes: float) -> Figure:
    """The picture: tokens/s by depth, of each thing that was measured."""
    figure = Figure(figsize=(10, 4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (what, sides) in zip(figure.subplots(1, len(measured)), measured.items(), strict=True):
        n = int(re.findall(r"\d+", what)[0])
        for (side, values), colour in zip(sides.items(), (_OURS, _THEIRS), strict=True):
            depths = sorted(values)
            axes.plot(depths, [values[depth] for depth in depths], "o-", color=colour, label=side)
        places = [depth * max(values) / 100 for depth in range(101)]
        if what.startswith("prompt"):
            most = [work.of_prompt(depth + n / 2, floats, of_bytes) for depth in places]
            label = f"limit: {floats / 1e9:,.0f} GFLOP/s, {of_bytes / 1e9:,.0f} of bytes"
        else:
            most = [work.generated(depth + n / 2, read) for depth in places]
            label = f"limit: {read / 1e9:,.0f} GB/s of memory"
        axes.plot(places, most, "--", color=_LIMIT, linewidth=1, label=label)
        axes.set(title=what, xlabel="tokens before", ylabel="tokens/s", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#E5E5E5", linewidth=0.8)
        axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    if len(sys.argv) != 7:
        sys.exit(__doc__)
    file, model, *limits, out = sys.argv[1:]
    read, floats, of_bytes = (float(limit) * 1e9 for limit in limits)
    measured = curves(json.loads(Path(file).read_text())["measurements"])
    figure_of(measured, Work.of(model), read, floats, of_bytes).savefig(out)
