"""The command ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graph_runner.base.console import Console, table
from graph_runner.base.errors import BadInputError
from graph_runner.cli.common import stdout, use_kernels
from graph_runner.cli.options import JsonFile, Kernels
from graph_runner.cli.outputs import json_text, write

if TYPE_CHECKING:
    from ggml_backend_npu.registry.entry import Op

_WIDEST = 100  # columns of a table
_KINDS = {"i": "i32", "f": "f32"}
Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[OP]...", help="Ops to describe: sources, parameters, combinations of types.", show_default=False
    ),
]


def ops(names: Names = None, json_file: JsonFile = None, kernels: Kernels = None) -> None:
    """List the ops that the backend supports, and the types of each source; or describe those that are named."""
    from ggml_backend_npu import default_backend
    from ggml_backend_npu.ggml.lib import ggml

    use_kernels(kernels)
    backend = default_backend()
    known = {name: backend.ops.get(name) for name in backend.op_names}
    chosen = [name.upper() for name in names or sorted(known)]
    for name in chosen:
        if name not in known:
            raise BadInputError(f"no kernel for {name}" if name in ggml().op_names else ggml().has_no_op(name))
    if json_file is not None:
        signatures = {name: _signatures(known[name]) for name in chosen}
        data = {
            name: [{"sources": sources, "outputs": outputs} for sources, outputs in found]
            for name, found in signatures.items()
        }
        write("--json", json_file, json_text({"schema": "ggml-npu ops 1", "ops": data}))
    console = stdout(json_file)
    if names:
        for name in chosen:
            _describe(name, known[name], console)
    else:
        _list({name: known[name] for name in chosen}, console)


def _list(known: dict[str, Op | None], console: Console) -> None:
    shown = table("op", "types of each source", "output", padding=(0, 2, 0, 0), width=min(console.width, _WIDEST))
    for name, op in known.items():
        sources, outputs = _united(op)
        shown.add_row(name, " + ".join(sources), outputs)
    console.print(shown)


def _signatures(op: Op | None) -> list[tuple[str, str]]:
    """Returns the types that an op takes: any, if a `Device` computes it."""
    return [("any", "any")] if op is None else op.signatures()


def _united(op: Op | None) -> tuple[list[str], str]:
    """Returns the types that each source has in any combination, and those of the output; "same" is an output of the
    first source's type."""
    if op is None or op.types is None:
        return ["any"], "any"
    _, *sources = (sorted(set(place)) for place in zip(*op.types, strict=True))
    outputs = {"same" if types[:1] == types[1:] else types[0] for types in op.types}
    return [" ".join(types) for types in sources] or ["none"], " ".join(sorted(outputs))


def _describe(name: str, op: Op | None, console: Console) -> None:
    from ggml_backend_npu.ops import OWN

    lines = {"": name}
    if op is not None:
        optional = op.sources[op.n_required :]
        sources = [
            f"src{i} {each}{' (may be left out)' if each in optional else ''}" for i, each in enumerate(op.sources)
        ]
        params = [] if op.params is None else zip(op.params.names(), op.params.kinds(), strict=True)
        words = [f"{each} ({_KINDS[kind]})" for each, kind in params]
        lines |= {
            "sources": ", ".join(sources) or "none",
            "parameters": ", ".join(words) or ("bytes" if op.wants_params else "none"),
            "taken": "always" if op.default or op is not OWN.get(op.name) else "with --all",
        }
    for title, text in lines.items():
        console.print(f"{title}: {text}" if title else text, highlight=False, markup=False, soft_wrap=True)
    shown = table("sources", "output", padding=(0, 2, 0, 0), width=min(console.width, _WIDEST))
    for types, outputs in _signatures(op):
        shown.add_row(types, outputs)
    console.print(shown)
    console.print()
