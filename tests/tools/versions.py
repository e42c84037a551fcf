"""The backend on other versions of llama-cpp-python, each with its ggml.

    python tests/tools/versions.py                    each of VERSIONS; writes the table of docs/versions.md
    python tests/tools/versions.py 0.3.24 0.3.35      these, in that table
    python tests/tools/versions.py --only diff,movers 0.3.24
    python tests/tools/versions.py --short 0.3.24     whether it registers, and a small diff; the table stays

A version has a virtual environment in the user's cache directory, with this checkout; building one takes some minutes.
Exits with 1 where a cell is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":  # what tests share, in place of what lies beside this file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tools.layouts import SUITE, VERSIONS, sources

from quant.folders import cache_root

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "versions.md"
MOVERS = "GET_ROWS,SET_ROWS,CPY,DUP,CONT"
_MARK = "<!-- table -->\n"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CASE = re.compile(r": (OK|FAIL|not supported)")

# tests that an older version cannot run, as pytest names them: from the version that can, what and why
OPS, DEVICE, RUNNER = "tests/test_ggml_backend_npu/ops", "tests/test_ggml_backend_npu", "tests/test_graph_runner"
_PROMISES = "its CPU does not compute all nodes that are measured"
_OF_ROWS_OF_F16 = (
    "test_repeats.py::test_a_graph_of_several_nodes",
    "test_repeats.py::test_a_later_node_that_fails",
    "test_repeats_counts.py::test_every_run_is_counted_once",
)
LACKING: tuple[tuple[str, str, str], ...] = (
    ("0.3.32", f"{OPS}/test_recurrent.py::test_gated_delta_net", "its states have other dimensions"),
    ("0.3.32", f"{OPS}/test_recurrent.py::test_a_model_says_what_it_says_on_the_cpu[mamba2-ops1]", "other tensors"),
    ("0.3.32", f"{OPS}/test_recurrent.py::test_a_model_says_what_it_says_on_the_cpu[qwen35-ops4]", "other states"),
    ("0.3.36", f"{OPS}/test_attention.py::test_flash_attention", "its CPU adds products of f16 up in f16"),
    ("0.3.35", f"{OPS}/test_matmul.py::test_columns_are_rounded_to_the_types_that_ggml_rounds_them_to", "no q2_0"),
    ("0.3.35", "tests/test_quant/test_codecs.py::test_types_measure_as_in_the_live_ggml", "no q2_0"),
    *(("0.3.35", f"{DEVICE}/{test}", "its SET_ROWS takes f32 alone") for test in _OF_ROWS_OF_F16),
    ("0.3.36", f"{OPS}/test_deepseek.py::test_hc_post", "streams are always mixed"),
    (
        "0.3.36",
        f"{DEVICE}/test_fusion_routing.py::test_ids_that_nobody_else_reads_and_weights_read_on",
        "another order of nodes",
    ),
    ("0.3.36", f"{DEVICE}/test_generations.py::test_every_profile_says_what_it_is_and_names_ops_of_ggml", "newer ops"),
    ("0.3.36", f"{RUNNER}/test_whole_graph.py", "llama.cpp's inputs have no names"),
    ("0.3.36", f"{RUNNER}/test_planted_faults.py", "llama.cpp's graphs have other nodes in their place"),
    (
        "0.3.36",
        f"{RUNNER}/test_promises.py::test_where_the_source_says_what_every_bit_is_bytes_are_promised",
        _PROMISES,
    ),
    ("0.3.36", f"{RUNNER}/test_promises.py::test_what_is_measured_is_not_nothing", _PROMISES),
    ("0.3.36", "tests/test_structure.py::test_what_is_known_of_ops_is_whole", "newer functions"),
)


class WrongError(Exception):
    """A cell that is not as it has to be: what there is to say of it."""


def numbers(version: str) -> tuple[int, ...]:
    """Of a version."""
    return tuple(map(int, version.split(".")))


class Environment:
    """A virtual environment with one version of llama-cpp-python and this checkout, made where it is not there."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.folder = cache_root() / "versions" / version
        self.python = self.folder / "bin" / "python"
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
            ccache = shutil.which("ccache")
            launchers = {f"CMAKE_{language}_COMPILER_LAUNCHER": ccache for language in ("C", "CXX")} if ccache else {}
            self._pip("install", f"llama-cpp-python=={version}", "--no-binary", "llama-cpp-python", **launchers)
        # it may have been made by another checkout, which needed other packages
        self._pip("install", "--editable", f"{ROOT}[test]", f"llama-cpp-python=={version}")

    def _pip(self, *arguments: str, **variables: str) -> None:
        command: list[str | Path] = [self.python, "-m", "pip", "--quiet", *arguments]
        subprocess.run(command, check=True, env={**os.environ, **variables})

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of the environment."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        left_out = ("PYTHONPATH", "LLAMA_CPP_LIB_PATH")
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        variables = {**kept, "PATH": path, "GGML_NO_BACKTRACE": "1", **variables}
        return subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace", cwd=ROOT)

    def printed(self, *command: str | Path) -> str:
        """What a command prints. Raises WrongError where it fails."""
        done = self.run(*command)
        if done.returncode:
            told = (done.stderr.strip() or done.stdout.strip() or str(done.returncode)).splitlines()
            raise WrongError(told[-1])
        return done.stdout

    def suite(self) -> Path:
        """This version's own test-backend-ops, with the ggml of its wheel."""
        program = self.folder / "test-backend-ops"
        if not program.exists():
            ggml = sources(self.version)
            libraries = Path(self.printed(self.python, "-c", "import llama_cpp; print(llama_cpp.__path__[0])").strip())
            libraries /= "lib"
            named = [f"-l:lib{name}.so.0" for name in ("ggml", "ggml-base", "ggml-cpu")]
            files: list[str | Path] = [f"-I{ggml / 'include'}", ggml.parent / SUITE, "-o", program]
            linked = [f"-L{libraries}", *named, f"-Wl,-rpath,{libraries}", "-lpthread"]
            subprocess.run(["c++", "-std=c++17", "-O1", "-w", *files, *linked], check=True)
        return program


def register(at: Environment) -> str:
    """The device is there, and ggml's layout is one that is known."""
    code = "import ggml_backend_npu; g = ggml_backend_npu.register().ggml; print(g.version, len(g.ops), g.is_between)"
    version, n_ops, known = at.printed(at.python, "-c", code).split()
    return f"{n_ops} ops" if known == "True" else f"{n_ops} ops, {version} not known"


def _judged(at: Environment, ops: str | None, **options: str) -> str:
    plugin = at.printed("ggml-npu", "plugin").strip()
    chosen = ["-o", ops] if ops else []
    done = at.run(at.suite(), "test", "-b", "NPU", *chosen, GGML_BACKEND_PATH=plugin, **options)
    text = _COLOURS.sub("", done.stdout)
    if "Backend 1/2: NPU" not in text and "Backend 2/2: NPU" not in text:
        raise WrongError("no device NPU in test-backend-ops")
    found = Counter(_CASE.findall(text))
    told = f"{found['OK']:,} right, {found['not supported']:,} not taken"
    if done.returncode or found["FAIL"] or "ggml-npu: " in re.sub("ggml-npu: compiling.*", "", done.stderr):
        raise WrongError(f"{told}, {found['FAIL']:,} wrong (exit {done.returncode})")
    return told


def movers(at: Environment) -> str:
    """What that version's own test-backend-ops says of data movement; it loads the device as a plugin."""
    return _judged(at, MOVERS)


def all_ops(at: Environment) -> str:
    """What it says of every op."""
    return _judged(at, None, GGML_NPU_OPS="all", GGML_NPU_MATMUL="exact")


def diff_tiny(at: Environment) -> str:
    """The diff of the small random model."""
    return at.printed("ggml-npu", "diff", "tiny").strip().splitlines()[-1]


def diff_demo(at: Environment) -> str:
    """The diff of SmolLM2."""
    last = at.printed("ggml-npu", "diff", "demo").strip().splitlines()[-1]
    return last.removesuffix(", every byte equals ggml's CPU") + (", all bytes" if "every byte" in last else "")


def run_demo(at: Environment) -> str:
    """Text with all nodes on the NPU, which is to be that of this version's CPU."""
    npu = at.printed("ggml-npu", "run", "demo", "--all", "-n", "32")
    cpu = at.printed("ggml-npu", "run", "demo", "--device", "cpu", "--flash-attn", "on", "-n", "32")
    if npu != cpu:
        raise WrongError("the text is another one")
    return "same text"


def tests(at: Environment) -> str:
    """The default tests."""
    lacking = [test for since, test, _ in LACKING if numbers(at.version) < numbers(since)]
    left_out = [part for test in lacking for part in ("--deselect", test)]
    done = at.run(at.python, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "--tb=line", "-rf", *left_out)
    told = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "nothing"
    said = re.sub(r" in [\d.]+s.*", "", told)
    if done.returncode:
        print(*(line for line in done.stdout.splitlines() if line.startswith(("E  ", "FAILED"))), sep="\n")
        raise WrongError(said)
    return said


CELLS: dict[str, Callable[[Environment], str]] = {
    "register": register, "movers": movers, "all": all_ops, "diff": diff_demo, "run": run_demo, "tests": tests,
}  # fmt: skip
_COLUMNS = (
    *("llama-cpp-python", "ggml", "register", "movers, by the plugin", "all ops"),
    *("`diff demo`", "`run demo --all`", "tests", "day"),
)


def _rows(text: str) -> dict[str, list[str]]:
    """The rows of the table as it is, by version."""
    table = text.split(_MARK)[1]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if re.match(r"\| \d", line)]
    return {line[0]: line for line in lines}


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--only", default=",".join(CELLS))
    parser.add_argument("--short", action="store_true")
    chosen = parser.parse_args()
    cells = {"register": register, "diff": diff_tiny} if chosen.short else {n: CELLS[n] for n in chosen.only.split(",")}
    rows, wrong = _rows(TABLE.read_text()), 0
    for version in chosen.versions:
        at = Environment(version)
        ggml = at.printed(
            at.python, "-c", "from ggml_backend_npu.ggml import lib; print(lib.unchecked().version)"
        ).strip()
        row = rows.setdefault(version, [version, ggml, *[""] * len(CELLS), ""])
        for name, cell in cells.items():
            try:
                said = cell(at)
            except WrongError as error:
                said, wrong = f"**wrong**: {error}", wrong + 1
            print(f"{version} {name}: {said}", flush=True)
            row[2 + list(CELLS).index(name)] = said.replace("|", "/")
        row[1], row[-1] = ggml, datetime.date.today().isoformat()
        if not chosen.short:
            lines = [f"| {' | '.join(rows[key])} |" for key in sorted(rows, key=numbers)]
            table = "\n".join([f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", *lines])
            before, _, after = TABLE.read_text().split(_MARK)
            TABLE.write_text(f"{before}{_MARK}{table}\n{_MARK}{after}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
