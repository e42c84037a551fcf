"""What the pages say is so: their commands run, and print what the pages show, but for times."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from kit.diffs import FLASH_OFF, PROMPT
from kit.models import Models
from kit.quantised import TEXT, write_pair
from kit.right_devices import by_int8, kernel
from tools import conformance

from ggml_backend_npu import Node, Tensor, default_backend
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.profiles.files import read
from ggml_backend_npu.profiles.generations import PROFILES
from ggml_backend_npu.profiles.rules import ProfileError
from ggml_backend_npu.registry.entry import op
from graph_runner.base.models import model_file
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.judging.rules import Rules
from graph_runner.trace import CaptureOptions, capture

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md"]
NOT_COMPARED = {
    "performance.md": "measurements",
    "add-an-op.md": "its steps change the package",
    "conformance.md": "test_conformance.py has its numbers",
}
FENCE = re.compile(r'^```(?P<language>\w*)(?: title="(?P<file>[^"]+)")?\n(?P<body>.*?)^```$', re.MULTILINE | re.DOTALL)
OURS = re.compile(r"^(?:GGML_NPU_\w+=\S+ )*ggml-npu .*")
MEASURED = re.compile(r"\b\d[\d.,]* ?(?:ms|us|s|tokens/s|GB/s|threads)\b|(?<=ggml )\d+\.\d+\.\d+")  # and a version
ANNOUNCED = ("ggml-npu: compiling kernels", "building ggml's own programs, once")


@dataclass(frozen=True)
class Command:
    """A line after $, and what the page shows that it prints."""

    line: str
    shown: str


@dataclass(frozen=True)
class Written:
    """A file that the reader writes."""

    name: str
    text: str


def steps(page: Path) -> Iterator[Command | Written]:
    """What a reader does who follows a page from its beginning."""
    for block in FENCE.finditer(page.read_text()):
        if block["file"]:
            yield Written(block["file"], block["body"])
        elif block["body"].startswith("$ "):
            for part in re.split(r"^\$ ", block["body"], flags=re.MULTILINE)[1:]:
                line, _, shown = part.partition("\n")
                yield Command(line, shown)


def unshown() -> Iterator[tuple[str, str]]:
    """Commands of ours whose output no page shows, without what stands beside them."""
    for page in PAGES:
        for block in FENCE.finditer(page.read_text()):
            if block["language"] in ("", "sh") and not block["body"].startswith("$ "):
                for line in filter(OURS.match, block["body"].splitlines()):
                    yield page.name, re.split(r"\s{3,}|\s+#", line.rstrip())[0]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH with the command ggml-npu of this tree."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "ggml-npu"
    script.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c 'import ggml_npu; ggml_npu.main()' \"$@\"\n")
    script.chmod(0o755)
    python = folder / "python"
    python.symlink_to(sys.executable) if sys.prefix == sys.base_prefix else python.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    return folder


def shell(line: str, folder: Path, commands: Path, **environment: str) -> tuple[int, str]:
    """Exit code and output of a command, both streams in one."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | environment
    env["PATH"] = f"{commands}{os.pathsep}{env['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip
    return done.returncode, "".join(x for x in done.stdout.splitlines(True) if not x.startswith(ANNOUNCED))


def assert_shown(shown: str, printed: str) -> None:
    """What a page shows is what was printed, but for times; ... stands for anything."""
    pattern = ""
    for line in MEASURED.sub("#", shown).splitlines():
        parts = (re.escape(part.rstrip()) if not part.strip() else re.escape(part) for part in line.split("..."))
        pattern += r"(?:.*\n)*?" if line == "..." else ".*".join(parts).rstrip() + r" *\n"
    assert re.fullmatch(pattern, MEASURED.sub("#", printed)), f"the page shows\n{shown}\nand it is\n{printed}"


def pages_with_steps() -> list[Path]:
    return [
        page for page in PAGES if page.name not in NOT_COMPARED and any(isinstance(s, Command) for s in steps(page))
    ]


@pytest.mark.daily(4)
@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with_steps(), ids=lambda page: page.stem)
def test_commands_print_what_the_page_shows(page: Path, commands: Path, tmp_path: Path) -> None:
    for step in steps(page):
        if isinstance(step, Written):
            (tmp_path / step.name).write_text(step.text)
        else:
            _, printed = shell(step.line, tmp_path, commands)
            assert_shown(step.shown, printed)


SNIPPETS = ("README.md", "docs/operators.md")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("page", SNIPPETS)
def test_snippets_of_python_run(page: str) -> None:
    found = [block["body"] for block in FENCE.finditer((ROOT / page).read_text()) if block["language"] == "python"]
    assert found
    with default_backend().ops.having():  # a snippet may replace a kernel
        for body in found:
            exec(compile(body, page, "exec"), {"__name__": "snippet"})


@pytest.mark.usefixtures("backend")
def test_the_default_of_a_capture_is_what_the_page_says(model: Models, tmp_path: Path) -> None:
    """Of what a run without --all takes, and of the other nodes that there are kernels for."""
    text = " ".join((ROOT / "docs" / "traces.md").read_text().split())
    assert "The default is every node that the NPU has a kernel for and its profile takes" in text
    found = capture(model("llama"), "abc", tmp_path / "t.gguf", CaptureOptions(steps=0))
    taken = {op for op in found.ops if default_backend().offers(op)}
    assert taken
    assert taken < set(found.ops)


@pytest.mark.usefixtures("backend")
def test_a_node_is_judged_as_the_page_says(model: Models) -> None:
    """Isolated wherever the device has a kernel; mirrored only where its own run read other bytes."""
    page = (ROOT / "docs" / "diff.md").read_text()
    assert "twice, from" not in page
    result = diff(model("llama"), "abc", DiffOptions(steps=0))
    assert all(node.isolated is not None for node in result.nodes)
    mirrored = [node for node in result.nodes if node.mirrored is not None]
    assert all(node.on == "NPU" for node in mirrored)
    assert len(mirrored) < len(result.nodes)


def block_of(page: str, file: str) -> str:
    """The content of a file that a page shows."""
    found = [block["body"] for block in FENCE.finditer((ROOT / page).read_text()) if block["file"] == file]
    return found[0]


def test_the_tolerances_that_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(block_of("docs/diff.md", "tolerances.toml"))
    rules = Rules(tmp_path / "own.toml")
    assert [rules.bound("MUL_MAT", type) for type in ("f16", "q8_0")] == [1e-6, 1e-4]
    assert rules.bound("SOFT_MAX", "f32") == 1e-8
    assert rules.bound("CONT", "f32") == 0


@pytest.mark.slow
@pytest.mark.daily(2)
@pytest.mark.parametrize("tolerances", [None, "gpu", "cuda.toml"])
def test_products_rounded_as_the_page_says_are_right_by_its_table(
    model: Models, tmp_path: Path, tolerances: str | None
) -> None:
    """As ggml-cuda's did on an NVIDIA H100."""
    (tmp_path / "cuda.toml").write_text(block_of("docs/found.md", "cuda.toml"))
    rules = Rules(tmp_path / tolerances if tolerances == "cuda.toml" else tolerances)
    with default_backend().ops.having(kernel("MUL_MAT", by_int8)):
        result = diff(model("llama-q4_0"), PROMPT, DiffOptions(steps=1, settings=FLASH_OFF, rules=rules))
    assert bool(result) == (tolerances == "cuda.toml"), (result.wrong[:1], result.ending)


def test_bases_and_clocks_are_as_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "profiles.md").read_text()
    rows = re.findall(r"^\| (`.+`) \|", page[: page.index("## Coverage")], re.MULTILINE)
    assert [name for row in rows for name in re.findall("`(.+?)`", row)] == [*PROFILES]
    bases = {*PROFILES} - {"full"}
    assert "`base` is a profile of the first table but `full`" in page
    file = tmp_path / "own.toml"
    for name in PROFILES:
        file.write_text(f'base = "{name}"')
        if name in bases:
            read(file)
        else:
            with pytest.raises(ProfileError, match="unknown base"):
                read(file)
    assert "`[clock]`, and the CPU beside it, `[host]`: it needs both or neither" in page
    file.write_text("[clock]\nmemory = 1e9")
    with pytest.raises(ProfileError, match=r"needs \[host\] beside it"):
        read(file)


def test_a_type_of_a_source_that_may_be_left_out_is_as_the_page_says() -> None:
    """The combination is of the sources that are there; what is beyond it may be of any type."""
    assert "`types` has no name for it" in (ROOT / "docs" / "first-kernel.md").read_text()

    @op("SOFT_MAX", types=[("f32", "f32")])
    def soft_max(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None) -> None:
        raise AssertionError

    x, mask = Tensor.of(np.zeros((4, 4), np.float32)), Tensor.of(np.zeros((4, 4), np.float16))
    for sources in ((x,), (x, mask), (x, None, x), (x, mask, x)):
        assert soft_max.refusal(Node("SOFT_MAX", x, sources)) is None
    assert soft_max.refusal(Node("SOFT_MAX", x, (mask,))) is not None


def test_the_vendors_page_says_what_a_swiglu_is_and_what_is_compared() -> None:
    page = " ".join((ROOT / "docs" / "vendor.md").read_text().split())
    assert "A SWIGLU may have one source" in page
    assert "compares it as it compared the class" not in page
    assert OWN["SWIGLU"].n_required == 1
    assert "A backend in C++ is compared by the same diff" in page


@pytest.fixture(scope="module")
def reader(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands of the pages name."""
    folder = tmp_path_factory.mktemp("reader")
    with model_file("tiny") as file:
        shutil.copy(file, folder / "model.gguf")
    big, small = write_pair(folder)
    shutil.copy(big, folder / "f16.gguf")
    shutil.copy(small, folder / "q4_0.gguf")
    (folder / "text.txt").write_text(TEXT * 4)
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copy(ROOT / "examples" / "my_kernels.py", folder)
    for page in PAGES:
        for step in steps(page):
            if isinstance(step, Written):
                (folder / step.name).write_text(step.text)
    for line in ("capture model.gguf -o trace.gguf", "record model.gguf -o a.gguf"):
        code, printed = shell(f"ggml-npu {line}", folder, commands)
        assert code == 0, printed
    shutil.copy(folder / "a.gguf", folder / "b.gguf")
    return folder


# libraries of backends: test_devices.py builds some, and runs the commands with them; other builds of ggml and other
# Pythons: test_builds.py does; what bench best and bench depth run takes minutes to compile
PLACEHOLDERS = re.compile(
    r"\bFILE\b|\bFOLDER\b|=PATH\b|\bOP\b|roll\.py|--ops ROLL|\bbench (all|best|depth)\b|\blibggml-"
)


@pytest.mark.daily(7)
@pytest.mark.slow
@pytest.mark.parametrize("line", sorted({line for _, line in unshown() if not PLACEHOLDERS.search(line)}))
def test_commands_run(line: str, commands: Path, reader: Path, tmp_path: Path) -> None:
    line = re.sub(r"\b(demo|MODEL)\b", "tiny", line)
    if "bench" in line:
        line += " --rounds 1 --model tiny"
    own_cache = {"XDG_CACHE_HOME": str(tmp_path)} if "--clear" in line else {}
    code, printed = shell(line, reader, commands, **own_cache)
    assert code == 0, printed


def test_links_lead_to_files() -> None:
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_what_stands_in_the_way_of_a_platform_is_where_the_page_says() -> None:
    """Each word of the first column is in a file of the second, and each file has one of the words."""
    _, _, page = (ROOT / "docs/portability.md").read_text().partition("## What stands in the way")
    rows = re.findall(r"^\| (`.*?) \| (`.*?) \|", page, re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        words, names = (re.findall("`([^`]+)`", column) for column in row)
        files = {name: (ROOT / name).read_text() for name in names}
        assert [word for word in words if not any(word in text for text in files.values())] == []
        assert [name for name, text in files.items() if not any(word in text for word in words)] == []


def test_every_variable_is_in_the_table() -> None:
    from ggml_backend_npu.backend.options import _CHECKS, _READ_ELSEWHERE

    text = (ROOT / "README.md").read_text()
    known = {f"GGML_NPU_{name.upper()}" for name in (*_CHECKS, *_READ_ELSEWHERE)}
    assert set(re.findall(r"^\|[^|]*\| `(GGML_NPU_\w+)` \|", text, re.MULTILINE)) == known


def test_every_profile_is_in_the_table() -> None:
    text = (ROOT / "docs" / "profiles.md").read_text()
    rows = re.findall(r"^\| (`[a-z0-9-]+`(?:, `[a-z0-9-]+`)*) \|.*\|.*\|$", text, re.MULTILINE)
    assert re.findall(r"`(.+?)`", " ".join(rows)) == [*PROFILES]
    assert f"must be one of {', '.join(PROFILES)}, or FILE.toml" in text


@pytest.mark.conformance
def test_every_op_of_ggml_is_documented() -> None:
    assert conformance.documented().keys() == conformance.every_op(), "tests/tools/conformance.py OP writes a row"


def test_rows_of_ops_are_written_as_they_stand() -> None:
    text = conformance.DOCUMENT.read_text()
    assert conformance.with_rows(text, conformance.documented()) == text


IMPORT = re.compile(r"^from ((?:ggml_backend_npu|graph_runner|quant)\b[\w.]*) import (\w+(?:, \w+)*)$", re.MULTILINE)
IMPORTS = sorted(
    {
        (page.name, module, name)
        for page in PAGES
        for module, names in IMPORT.findall(page.read_text())
        for name in names.split(", ")
    }
)


@pytest.mark.parametrize(("page", "module", "name"), IMPORTS)
def test_what_a_page_imports_is_there(page: str, module: str, name: str) -> None:
    assert hasattr(import_module(module), name) or find_spec(f"{module}.{name}") is not None
