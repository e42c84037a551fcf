"""What the sources promise: who imports whom, where ctypes stands, where an op stands, that everything public is
documented."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from tools import structure
from tools.structure import PACKAGES, ROOT

from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ops import OWN

MODULES = sorted(path.relative_to(ROOT) for path in structure.modules().values())


def parsed(module: Path) -> ast.Module:
    return structure.parsed(ROOT / module)


@cache
def imports(module: Path) -> tuple[str, ...]:
    """Full names of what a module imports, wherever in it the import stands."""
    return tuple(_imports(module))


def _imports(module: Path) -> Iterator[str]:
    for node in ast.walk(parsed(module)):
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
    assert {module.parts[0] for module in MODULES} == {*PACKAGES, "ggml_npu.py"}
    assert "quant/codec.py" in importers("numpy")
    assert "ggml_backend_npu/ir/graph.py" in importers("quant")


def test_one_module_groups_tensors_that_share_memory() -> None:
    """The loop keeps the furthest end so far; the class holds the tensors of a group."""
    sources = {module.as_posix(): (ROOT / module).read_text() for module in MODULES}
    loops = [name for name, text in sources.items() if re.search(r"\bends?(\[-1\])? = max\(ends?\b", text)]
    classes = [name for name, text in sources.items() if re.search(r"^class _?Group\b", text, re.MULTILINE)]
    assert loops == classes == ["ggml_backend_npu/ir/sharing.py"]


def test_packages_import_downwards_only() -> None:
    """graph_runner -> ggml_backend_npu -> quant"""
    assert not outside(importers("graph_runner"), "graph_runner/", "ggml_npu.py")
    assert not outside(importers("ggml_backend_npu"), "ggml_backend_npu/", "graph_runner/", "ggml_npu.py")


def test_rooms_import_downwards_only() -> None:
    """Late imports and type-only ones too."""
    assert [f"{each.importer}:{each.line} imports {each.imported}" for each in structure.upward()] == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert structure.circles() == []


def test_every_room_is_in_the_list_and_every_entry_is_a_room() -> None:
    rooms = {name for name in structure.modules() if name.count(".") <= 1 and not name.startswith("quant.")}
    assert rooms == {room for room in structure.ROOMS if room != "quant"} | {"quant"}


def test_every_room_has_a_readme() -> None:
    folders = [path.parent for room in structure.ROOMS if (path := structure.modules()[room]).stem == "__init__"]
    assert [str(folder) for folder in folders if not (folder / "README.md").exists()] == []


def test_the_way_of_a_graph_is_no_longer_than_the_page_says() -> None:
    command = [sys.executable, str(ROOT / "tests/tools/journey.py")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GGML_NPU_")}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert ended.returncode == 0, ended.stderr
    printed = ended.stdout
    page = (ROOT / "docs/architecture.md").read_text()
    now, most = (re.findall(r"(\d+)\s+stays,\s+(\d+)\s+of\s+them\s+returns", text) for text in (printed, page))
    assert len(now) == len(most) == 2
    for (stays, returns), (most_stays, most_returns) in zip(now, most, strict=True):
        assert int(stays) <= int(most_stays), printed
        assert int(returns) <= int(most_returns), printed


def test_few_modules_stand_at_the_root() -> None:
    assert len([*(ROOT / "ggml_backend_npu").glob("*.py")]) <= 6


def test_no_call_of_the_runner_takes_many_parameters() -> None:
    """What belongs together is one object. Commands have a parameter for each option."""
    found = structure.long_signatures("graph_runner", most=7)
    assert [each for each in found if not each.startswith("graph_runner.cli.")] == []


def test_backends_and_memory_are_what_their_types_say() -> None:
    """No override that a type checker must overlook; one place asks whether a backend is a device's."""
    texts = {module.as_posix(): (ROOT / module).read_text() for module in MODULES}
    rooms = tuple(f"ggml_backend_npu/{room}/" for room in ("backend", "device", "ir", "plugin"))
    assert [name for name, text in texts.items() if name.startswith(rooms) and "type: ignore" in text] == []
    asks = [name for name, text in texts.items() if ", DeviceBackend)" in text]
    assert asks == ["ggml_backend_npu/device/backend.py"]


def test_llama_cpp_which_is_an_extra_is_imported_in_one_place() -> None:
    assert importers("llama_cpp") == {"ggml_backend_npu/ggml/llama.py"}


@pytest.mark.parametrize("module", ["ctypes", "_ctypes", "cffi"])
def test_ctypes_stands_in_the_abi_and_in_the_session_only(module: str) -> None:
    assert not outside(
        importers(module),
        "ggml_backend_npu/ggml/",
        "ggml_backend_npu/plugin/",
        "graph_runner/run/batch.py",
        "graph_runner/run/model.py",
        "graph_runner/run/session.py",
        "quant/kernels/objects.py",
    )


def names_of_ops(module: Path) -> Iterator[tuple[ast.expr, list[str]]]:
    """What names ops: an expression of a module, and those among the strings that are it or stand in it."""
    for node in ast.walk(parsed(module)):
        parts: Sequence[ast.expr | None]
        match node:
            case ast.Constant():
                parts = [node]
            case ast.Dict():
                parts = node.keys
            case ast.Tuple() | ast.List() | ast.Set():
                parts = node.elts
            case _:
                continue
        values = (part.value for part in parts if isinstance(part, ast.Constant))
        yield node, [value for value in values if isinstance(value, str) and value in OWN]


def test_an_op_stands_in_one_file() -> None:
    files = defaultdict(set)
    for module in MODULES:
        if module.is_relative_to("ggml_backend_npu/ops"):
            for _, names in names_of_ops(module):
                for name in names:
                    files[name].add(module.name)
    assert {name: found for name, found in files.items() if len(found) != 1} == {}
    assert not OWN.keys() - {*files}


def test_no_table_of_ops_stands_elsewhere() -> None:
    """But for what is measured, what other devices take, what an older ggml aborts on, and what llama.cpp asks for."""
    others = {f"ggml_backend_npu/{name}.py" for name in ("profiles/generations", "ggml/aborts", "plugin/plugin")}
    tables = [
        f"{module}:{node.lineno} {names}"
        for module in MODULES
        if not module.as_posix().startswith(("ggml_backend_npu/ops/", "graph_runner/bench/"))
        and module.as_posix() not in others
        for node, names in names_of_ops(module)
        if len(names) > 1
    ]
    assert tables == []


def test_what_is_known_of_ops_is_whole() -> None:
    """Whatever rounds has an exact value and nodes to measure it on; ggml has the functions that are to make nodes."""
    assert [name for name, op in OWN.items() if op.bound and not (op.has_formula and op.makes)] == []
    assert [name for op in OWN.values() for name in op.functions if not hasattr(lib.ggml().library, name)] == []


# what a process has one of, whoever asks for it; everything else belongs to an object that is handed down
OF_THE_PROCESS = {
    "quant/codec.py _CODECS": "codecs, which class statements add when they are imported",
    "quant/kernels/jit.py _told": "who is told that numba compiles: the process has one compiler",
    "quant/kernels/objects.py _Said": "that kernels cannot be kept is said once",
    "quant/kernels/processor.py _lanes": "what kernels are compiled for: as wide sums as those of the process's ggml",
    "quant/kernels/memory.py _free": "memory of large results that nobody holds any more, as an allocator has it",
    "ggml_backend_npu/registry/calls.py _watchers": "who is told of each call of a user's code",
    "ggml_backend_npu/ggml/fenced.py _free": "fenced memory that nobody holds any more",
    "ggml_backend_npu/ggml/fenced.py _Room": "how much that is",
    "ggml_backend_npu/ggml/lib.py _given": "which ggml the process was told to take",
    "ggml_backend_npu/plugin/registration.py PLUGINS": "the backends that its ggml has",
    "graph_runner/base/endings.py _open": "what is undone when the process ends",
    "graph_runner/process/start.py _ahead": "the process that was started for the command before that was imported",
    "graph_runner/base/endings.py _commands": "whether a command is what the process is for",
    "graph_runner/run/llama_log.py _lines": "llama.cpp has one log",
}
# the same, kept by `@cache`: functions that return what changes
KEPT = {
    "quant/longtail.py _found": "who finds a ggml, by what is installed",
    "quant/products.py product": "the C function of a type of rows",
    "quant/kernels/words.py fields_of": "of a record's class, which does not change",
    "quant/kernels/objects.py linker": "of the process's environment, as it was when a kernel was compiled first",
    "quant/kernels/processor.py _host": "the processor of this machine",
    "quant/kernels/threads.py _pool": "the threads of the process, where ggml has none",
    "graph_runner/cli/command.py parameters_of": "of a command's function, which does not change",
    "ggml_backend_npu/registry/params.py _layout": "of a record's class, which does not change",
    "ggml_backend_npu/ggml/codecs.py bound": "what the CPU backend of the process's ggml computes",
    "ggml_backend_npu/ggml/codecs.py of_files": "of the ggml of the process",
    "ggml_backend_npu/ggml/blas.py _library": "the BLAS of the process",
    "ggml_backend_npu/ggml/lib.py ggml": "the ggml of the process",
    "ggml_backend_npu/ops/kernels/tiles.py _table": "of a function, which does not change",
    "ggml_backend_npu/default.py default_backends": "what `op` adds to and `register` registers",
    "ggml_backend_npu/device/backend.py of": "the backend of a device",
    "ggml_backend_npu/device/backend.py backends_of": "those of a file of devices, which is run once",
    "graph_runner/judging/promises.py _probes": "of the ops, which do not change",
    "graph_runner/diff/contents.py _read_by": "of nodes, which do not change",
    "graph_runner/judging/compare.py _equal": "of numbers",
    "graph_runner/diff/own.py _overwritten": "of nodes, which do not change",
}
FIXED = {"bool", "int", "str", "Path", "Part", "CFunction | None"}  # types of results that cannot change
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


class Changed(ast.NodeVisitor):
    """Finds names of a module's own level, its own ones and those of our other modules, that its functions change: by
    `global`, by a key, an attribute or a method that changes. What statements of the module itself do is over when it
    has been imported."""

    def __init__(self, tree: ast.Module) -> None:
        self.names: set[str] = set()
        self._of_module = {name for node in tree.body for name in self._bound(node)}
        self._locals: list[set[str]] = []
        self.visit(tree)

    @staticmethod
    def _bound(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            ours = (node.module or "").startswith(PACKAGES)
            yield from (alias.asname or alias.name for alias in node.names if ours)
        elif not isinstance(node, ast.Import):
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self._locals.append(arguments | stored)
        self.generic_visit(node)
        self._locals.pop()

    def visit_Global(self, node: ast.Global) -> None:
        self.names.update(node.names)

    def _change(self, target: ast.AST) -> None:
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        if not isinstance(target, ast.Name) or not self._locals or target.id not in self._of_module:
            return
        if not any(target.id in names for names in self._locals):
            self.names.add(target.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._change(node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._change(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            self._change(node.func.value)
        self.generic_visit(node)


def test_nothing_of_a_module_changes_but_what_a_process_has_one_of() -> None:
    found = {f"{module.as_posix()} {name}" for module in MODULES for name in Changed(parsed(module)).names}
    assert sorted(found - OF_THE_PROCESS.keys()) == []
    assert sorted(OF_THE_PROCESS.keys() - found) == []


def test_what_is_kept_by_cache_is_fixed_or_listed() -> None:
    kept = {
        f"{module.as_posix()} {node.name}"
        for module in MODULES
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or ast.Constant(None)) not in FIXED
        for decorator in node.decorator_list
        if ast.unparse(decorator).partition("(")[0].rpartition(".")[2] in ("cache", "lru_cache")
    }
    assert sorted(kept ^ KEPT.keys()) == []


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        ("x = 1\ndef f():\n    global x\n    x = 2", {"x"}),
        ("X = []\ndef f():\n    X.append(1)", {"X"}),
        ("X: dict[str, int] = {}\ndef f():\n    X['a'] = 1", {"X"}),
        ("class X:\n    n = 0\ndef f():\n    X.n += 1", {"X"}),
        ("from quant import a\ndef f():\n    a.b.c = 1", {"a"}),
        ("import os\ndef f():\n    os.environ['a'] = 'b'", set()),
        ("X = {}\ndef f():\n    del X[0]", {"X"}),
        ("X = [1]\nX.append(2)\ndef f(X):\n    X.append(3)\ndef g():\n    X = []\n    X.append(4)", set()),
        ("X = [1]\ndef f():\n    return X[0]", set()),
    ],
)
def test_what_changes_is_seen(code: str, changed: set[str]) -> None:
    assert Changed(ast.parse(code)).names == changed


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


# modules that no test file bears the name of: other tests run them. The list only gets shorter
WITHOUT_TESTS = {
    "ggml_backend_npu": "default user_texts",
    "ggml_backend_npu/backend": "backend kernel_files options plan",
    "ggml_backend_npu/device": "backend checked checked_queue faults files queue_trial sim",
    "ggml_backend_npu/documents": "rwkv status",
    "ggml_backend_npu/documents/aclnn": "moves operands",
    "ggml_backend_npu/documents/rbln": "arguments",
    "ggml_backend_npu/ggml": (
        "blas codecs convert crash doctor elf endings fenced graph_read guard lib libm modes numerics probes "
        "structs target"
    ),
    "ggml_backend_npu/ggml/layouts": "api_3 ggml_0_13 ggml_0_20 ggml_0_25 layout",
    "ggml_backend_npu/ir": "buffer graph packed",
    "ggml_backend_npu/ops": (
        "delta_net depthwise glu gradients im2col losses mamba optimisers outer rwkv sums transposed "
        "triangles undefined upscale"
    ),
    "ggml_backend_npu/ops/kernels": (
        "cells cells_fast cells_in_halves cells_many cells_turned elements exponentials functions groups hadamard "
        "products sides tiles windows"
    ),
    "ggml_backend_npu/plugin": "buffers build capture contexts embedding handed queues rows transfers",
    "ggml_backend_npu/profiles": "files rules",
    "ggml_backend_npu/registry": "cases checks entry exact mistakes probes shapes",
    "graph_runner/base": "endings errors files models python settings tiny",
    "graph_runner/bench": "calls codecs measure memcpy models movers nodes operators ops plot report run splits",
    "graph_runner/bisect": "flakiness result",
    "graph_runner/cli": "app cache capture codes command common doctor failures ops options plugin replay runs_on test",
    "graph_runner/diagnosis": "altered case numbers places words written",
    "graph_runner/diff": (
        "alone erring explaining judge kinds leaves lockstep logits result run side state together turns walks"
    ),
    "graph_runner/judging": "footprints mistakes results spans",
    "graph_runner/process": "bisecting child flaking jobs",
    "graph_runner/reports": "diff_report explorer next_steps nodes replaced replay report",
    "graph_runner/run": "llama_log model observing placement sampling session token_graph",
    "graph_runner/tools": "battery examination prediction",
    "graph_runner/trace": "capturing format reading replaying taken writing",
    "quant": "blocks codec conversions errors rows runs scalars",
    "quant/kernels": "cache compiler jit llvm matrices orders record_types records vectors words",
}


def has_tests(module: Path) -> bool:
    """Whether a test file of the module's package bears its name, or the names of its folder and it; a topic may
    follow: test_diff.py, test_diff_caches.py, test_kernels_memory.py."""
    folder = ROOT / "tests" / f"test_{module.parts[0]}"
    names = (module.stem, f"{module.parent.name}_{module.stem}")
    found = [path.stem.removeprefix("test_") for path in folder.rglob("test_*.py")]
    return any(f"{each}_".startswith(f"{name}_") for name in names for each in found)


def test_a_module_has_a_test_file_of_its_name_or_is_listed() -> None:
    modules = {module.with_suffix("").as_posix() for module in MODULES if "/" in module.as_posix()}
    without = {name for name in modules if not Path(name).name.startswith("__") and not has_tests(Path(name))}
    listed = {f"{folder}/{name}" for folder, names in WITHOUT_TESTS.items() for name in names.split()}
    assert sorted(without - listed) == [], "new: a test file bears the name of the module that it is about"
    assert sorted(listed - without) == [], "no longer without tests, or gone"
