"""Faults of whole runs, planted, and which command names each.

    python tests/tools/whole_faults.py                 all, and the device without a fault: a table
    python tests/tools/whole_faults.py --write         also writes the table into docs/record.md
    python tests/tools/whole_faults.py --only ID,ID    some of them

Exits with 1 if one is not as recorded in tests/kit/whole_faults.py, or the device without a fault is called wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":  # what tests share lies beside this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from kit.whole_faults import FAULTS, Looker, report, row

PAGE = Path(__file__).parents[2] / "docs" / "record.md"
BEGIN, END = "<!-- table of whole runs -->", "<!-- end of whole runs -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="ID,ID", help="some faults")
    parser.add_argument("--write", action="store_true", help="write their lines into docs/record.md")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else [fault.name for fault in FAULTS]
    rows, is_as_recorded = _rows(), True
    with TemporaryDirectory() as name:
        looker = Looker(Path(name))
        for fault in (each for each in FAULTS if each.name in wanted):
            seen = looker.look(fault)
            rows[fault.kind] = row(fault, seen)
            is_as_recorded &= seen.by == fault.by
            mark = "" if seen.by == fault.by else f"  NOT AS RECORDED: {fault.by}"
            how = f"found by {seen.found}, named by {seen.by}, {seen.seconds:.1f} s"
            print(f"{fault}: {how}: {seen.said}{mark}", flush=True)
        alarms = looker.is_right() if not options.only else []
    for command in alarms:
        print(f"a false alarm without a fault: {command}")
    lines = report([rows[fault.kind] for fault in FAULTS if fault.kind in rows])
    print(lines[0])
    if options.write:
        text = PAGE.read_text()
        before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        PAGE.write_text("\n".join([before, "", *lines, "", after]))
    return int(bool(alarms) or not is_as_recorded)


def _rows() -> dict[str, str]:
    """The lines that the page has, by fault."""
    text = PAGE.read_text()
    table = text[text.index(BEGIN) : text.index(END)].splitlines()
    return {line[2:].split(" | ")[0]: line for line in table if line.startswith("| ")}


if __name__ == "__main__":
    sys.exit(main())
