"""The museum: faults that ggml and llama.cpp had, rebuilt, and what a diff makes of each.

    python tests/tools/museum.py                  all exhibits, each with its fault and without: a table
    python tests/tools/museum.py --write          also writes the table into docs/record.md
    python tests/tools/museum.py --only ID,ID     some of them; `--only ''` lists their names

Exits with 1 if one is not as recorded in tests/museum, or a command without the fault is not right.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":  # what tests share lies beside this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from kit.damage import Commands
from kit.museum import SECONDS, Exhibit, Museum, Seen, exhibits, report

PAGE = Path(__file__).parents[2] / "docs" / "record.md"
BEGIN, END = "<!-- table of the museum -->", "<!-- end of the table -->"


def visited(chosen: list[Exhibit]) -> list[tuple[Exhibit, Seen, str]]:
    """What the command makes of exhibits, with the fault and without. Each is printed when it is known."""
    rows = []
    with TemporaryDirectory() as name, Commands(Path(name), seconds=SECONDS) as command:
        museum = Museum(command, Path(name))
        for shown in chosen:
            seen, alarm = museum.visit(shown), museum.alarm(shown)
            rows.append((shown, seen, alarm))
            mark = "" if seen.outcome == shown.outcome and not alarm else "  NOT AS RECORDED"
            print(f"{shown}: {seen.outcome}, {seen.seconds:.1f} s: {seen.said}{mark}", flush=True)
            if alarm:
                print(f"    a false alarm without the fault: {alarm}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="ID,ID", help="some exhibits")
    parser.add_argument("--write", action="store_true", help="write the table into docs/record.md")
    options = parser.parse_args()
    shown = exhibits()
    chosen = options.only.split(",") if options.only is not None else [*shown]
    unknown = [name for name in chosen if name not in shown]
    if unknown:
        print(f"--only {unknown[0]!r}: must be one of {' '.join(shown)}", file=sys.stderr)
        return 2
    rows = visited([shown[name] for name in chosen])
    lines = [*report(rows)]
    print("\n".join(lines[:2]))
    if options.write and options.only is None:
        text = PAGE.read_text()
        before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        PAGE.write_text("\n".join([before, "", *lines, "", after]))
    return int(any(seen.outcome != each.outcome or alarm for each, seen, alarm in rows))


if __name__ == "__main__":
    sys.exit(main())
