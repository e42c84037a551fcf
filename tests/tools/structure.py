"""What the sources look like as a house: rooms in their order, imports that go up, circles of files, long signatures,
lines of code.

    python tests/tools/structure.py        prints the numbers
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("quant", "ggml_backend_npu", "graph_runner")

# from the top down: imports, late and type-only ones too, go down this list alone
ROOMS = (
    "ggml_npu",
    "graph_runner.__main__",
    "graph_runner.cli",
    "graph_runner",
    "graph_runner.bench",
    "graph_runner.process",
    "graph_runner.reports",
    "graph_runner.tools",
    "graph_runner.timeline",
    "graph_runner.record",
    "graph_runner.bisect",
    "graph_runner.quantdiff",
    "graph_runner.diff",
    "graph_runner.diagnosis",
    "graph_runner.trace",
    "graph_runner.elsewhere",
    "graph_runner.hazards",
    "graph_runner.judging",
    "graph_runner.run",
    "graph_runner.base",
    "ggml_backend_npu.__main__",
    "ggml_backend_npu.documents",
    "ggml_backend_npu",
    "ggml_backend_npu.default",
    "ggml_backend_npu.plugin",
    "ggml_backend_npu.device",
    "ggml_backend_npu.backend",
    "ggml_backend_npu.profiles",
    "ggml_backend_npu.ops",
    "ggml_backend_npu.registry",
    "ggml_backend_npu.ggml",
    "ggml_backend_npu.ir",
    "ggml_backend_npu.user_texts",
    "ggml_backend_npu.names",
    "quant",
)


class Import(NamedTuple):
    """A module that another one imports, wherever in it the import stands."""

    importer: str
    imported: str
    line: int


def modules() -> dict[str, Path]:
    """Every module of the packages, by its name."""
    found = {}
    for path in [ROOT / "ggml_npu.py", *(p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py")))]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def imports() -> list[Import]:
    """Every import of one of our modules by another. A name that a package hands on counts as an import of the
    package."""
    known = modules()
    return [Import(name, *each) for name, path in known.items() for each in _imported(path, known) if each[0] != name]


def _imported(path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name:
                yield name, node.lineno


def room(module: str) -> int:
    """The place in ROOMS of the room that a module lies in."""
    return max((len(each), place) for place, each in enumerate(ROOMS) if f"{module}.".startswith(f"{each}."))[1]


def upward() -> list[Import]:
    """Imports of a room above."""
    return [each for each in imports() if room(each.imported) < room(each.importer)]


def circles() -> list[list[str]]:
    """Files that import each other, directly or by way of others."""
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for each in imports():
        graph[each.importer].add(each.imported)
    order: dict[str, int] = {}
    least: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = least[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
                least[name] = min(least[name], least[other])
            elif other in stack:
                least[name] = min(least[name], order[other])
        if least[name] == order[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in order:
            visit(name)
    return found


def long_signatures(package: str, most: int = 7) -> list[str]:
    """Functions and constructors with more than `most` parameters, self not counted; the generated constructors of
    dataclasses are none."""
    return [
        f"{name}:{node.lineno} {node.name} {n}"
        for name, path in modules().items()
        if name.startswith(package)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef)
        for n in [len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - _has_self(node)]
        if n > most
    ]


def _has_self(node: ast.FunctionDef) -> bool:
    return bool(node.args.args) and node.args.args[0].arg in ("self", "cls")


def code_lines(path: Path) -> int:
    """Lines of a file that hold code: no docstring, no comment, not blank."""
    text = path.read_text()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in skipped
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> None:
    """Prints the numbers."""
    print(f"imports between files: {len(imports())}")
    print(f"imports that go up the list of rooms: {len(upward())}")
    for each in upward():
        print(f"  {each.importer}:{each.line} imports {each.imported}")
    print(f"circles of files: {len(circles())}")
    for circle in circles():
        print(f"  {len(circle)} files: {' '.join(circle)}")
    at_root = sorted(path.name for path in (ROOT / "ggml_backend_npu").glob("*.py"))
    print(f"modules at the root of ggml_backend_npu: {len(at_root)}: {' '.join(at_root)}")
    for signature in long_signatures("graph_runner"):
        print(f"  more than 7 parameters: {signature}")
    for name in (*PACKAGES, "tests"):
        files = sorted((ROOT / name).rglob("*.py"))
        print(f"{name}: {len(files)} files, {sum(map(code_lines, files))} lines of code")
    sizes = sorted(((path.read_text().count("\n"), name) for name, path in modules().items()), reverse=True)
    print("largest files: " + ", ".join(f"{name} {n}" for n, name in sizes[:8]))


if __name__ == "__main__":
    main()
