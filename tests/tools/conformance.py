"""The table of docs/conformance.md: how many cases of each op test-backend-ops has, and how many pass.

    python tests/tools/conformance.py ROLL ...    runs the cases of these ops, and writes their rows
    python tests/tools/conformance.py             of all ops; it takes an hour or more

Exits with 1 where a case fails, and with 2 for an op that ggml does not have.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ggml.convert import computes
from ggml_backend_npu.plugin.embedding import check_package
from graph_runner.tools import suites
from graph_runner.tools.suites import Case, backend_ops

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
_HEAD = "| op | cases | CPU | NPU | passing |\n|---|--:|--:|--:|--:|\n"
_ROW = re.compile(r"\| ([A-Z0-9_]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|\n")


@dataclass(frozen=True)
class Counts:
    """Cases of an op: all, those that ggml's CPU supports, those that the NPU supports, and those of both that pass."""

    cases: int
    cpu: int
    npu: int
    passing: int

    @staticmethod
    def of(cases: list[Case]) -> Counts:
        by_cpu, by_npu = (sum(name not in case.refused_by for case in cases) for name in ("CPU", "NPU"))
        return Counts(len(cases), by_cpu, by_npu, sum(case.verdict == "passed" for case in cases))


def backend_ops_cases() -> dict[str, list[str]]:
    """The parameters of each case that test-backend-ops has, by op, whether or not it is computed."""
    command: list[str | Path] = [suites.build() / "test-backend-ops", "support", "-b", "CPU", "--output", "csv"]
    cases: dict[str, list[str]] = {}
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    for row in csv.DictReader(io.StringIO(listed)):
        cases.setdefault(row["op_name"], []).append(row["op_params"])
    return cases


def documented() -> dict[str, Counts]:
    """The table of docs/conformance.md."""
    rows = _ROW.findall(DOCUMENT.read_text())
    return {op: Counts(*(int(number.replace(",", "")) for number in numbers)) for op, *numbers in rows}


def every_op() -> set[str]:
    """What ggml has that computes anything, and what the suite names its cases by."""
    return {op for op in lib.ggml().op_names if computes(op)} | backend_ops_cases().keys()


def table(found: Mapping[str, Counts]) -> str:
    """These rows, as a table."""
    rows = (f"| {op} | {' | '.join(f'{n:,}' for n in vars(found[op]).values())} |\n" for op in sorted(found))
    return _HEAD + "".join(rows)


def with_rows(text: str, found: Mapping[str, Counts]) -> str:
    """The document with these rows in its table, in place of the ones of the same ops."""
    before, _, rest = text.partition(_HEAD)
    end = max(row.end() for row in _ROW.finditer(rest))
    return before + table({**documented(), **found}) + rest[end:]


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP")
    ops = sorted(parser.parse_args().ops or every_op())
    if unknown := [lib.ggml().has_no_op(op) for op in ops if op not in every_op()]:
        print(*unknown, sep="\n", file=sys.stderr)
        return 2
    check_package()
    suite = [op for op in ops if op in backend_ops_cases()]
    cases = backend_ops(suite, {"GGML_NPU_OPS": "all"}) if suite else []
    found = {op: Counts.of([case for case in cases if case.group == op]) for op in ops}
    DOCUMENT.write_text(with_rows(DOCUMENT.read_text(), found))
    print(table(found), end="")
    failed = [case.log for case in cases if case.verdict == "failed"]
    print(*failed, sep="\n", file=sys.stderr, end="\n" if failed else "")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
