"""What the sources promise: who imports whom, where ctypes stands, that everything public is documented."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("quant", "ggml_backend_npu", "graph_runner")
MODULES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def imports(module: Path) -> frozenset[str]:
    """Full names of what a module imports, wherever in it the import stands."""
    return frozenset(_imports(module))


def _imports(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.parent.parts
            base = ".".join(parents[: len(parents) + 1 - node.level]) if node.level else ""
            prefix = ".".join(part for part in (base, node.module or "") if part)
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def importers(package: str) -> set[str]:
    """Modules that import a package or a part of it."""
    return {
        module.as_posix() for module in MODULES if any(f"{name}.".startswith(f"{package}.") for name in imports(module))
    }


def outside(modules: set[str], *allowed: str) -> set[str]:
    return {module for module in modules if not module.startswith(allowed)}


def test_the_sources_are_found() -> None:
    assert {module.parts[0] for module in MODULES} == {*PACKAGES}
    assert "quant/codec.py" in importers("numpy")
    assert "ggml_backend_npu/ir.py" in importers("quant")


def test_packages_import_downwards_only() -> None:
    """graph_runner -> ggml_backend_npu -> quant"""
    assert not outside(importers("graph_runner"), "graph_runner/")
    assert not outside(importers("ggml_backend_npu"), "ggml_backend_npu/", "graph_runner/")


def test_llama_cpp_is_imported_where_ggml_is_found_and_where_models_run() -> None:
    assert not outside(importers("llama_cpp"), "ggml_backend_npu/abi/", "graph_runner/")


@pytest.mark.parametrize("module", ["ctypes", "_ctypes", "cffi"])
def test_ctypes_stands_in_the_abi_and_in_the_session_only(module: str) -> None:
    assert not outside(importers(module), "ggml_backend_npu/abi/", "graph_runner/session.py")


def undocumented(module: Path) -> Iterator[str]:
    """Public functions and classes of a module that have no docstring; a class of nothing but fields needs none."""
    for node in ast.parse((ROOT / module).read_text()).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        fields_only = all(isinstance(statement, ast.Assign | ast.AnnAssign) for statement in node.body)
        if not fields_only and not ast.get_docstring(node):
            yield f"{module.as_posix()}:{node.lineno} {node.name}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_everything_public_is_documented(module: Path) -> None:
    text = (ROOT / module).read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{module}: no docstring"
    assert not [*undocumented(module)]
