"""The command cache."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from graph_runner.base.console import Console, table


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete all of it; it is made again when needed.")] = False,
) -> None:
    """Show what is cached between runs: compiled kernels, the plugin, ggml's test programs, wrong nodes of diffs."""
    from quant.folders import FolderError, cache_root, kernels_root

    folders = set[Path]()
    with suppress(FolderError):
        folders.add(kernels_root())
        folders.add(cache_root())
    kinds = {
        "kernels-": "compiled kernels",
        "kernels-processors": "what LLVM says of processors",
        "plugin-": "the plugin",
        "programs-": "ggml's own test programs",
        "builds-": "other builds of ggml, for tests",
        "reproducers": "wrong nodes of diffs",
    }
    found = [path for folder in sorted(folders) if folder.is_dir() for path in sorted(folder.iterdir())]
    kept = {path: kind for path in found for begin, kind in kinds.items() if path.name.startswith(begin)}
    shown = table("what", "where")
    shown.add_column("MB", justify="right")
    for path, kind in kept.items():
        shown.add_row(kind, str(path), f"{_size(path) / 1e6:,.1f}")
        if clear:
            shutil.rmtree(path)
    console = Console()
    console.print(shown)
    console.print(f"{'deleted' if clear else 'kept'}: {len(kept)}", highlight=False)


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
