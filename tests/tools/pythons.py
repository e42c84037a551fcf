"""The default tests on other Pythons.

    python tests/tools/pythons.py                  which Pythons are here
    python tests/tools/pythons.py 3.12 3.13        installs the checkout for each and runs its tests
    python tests/tools/pythons.py 3.13 -- -k norm  arguments after -- go to pytest

Each has a virtual environment in the user's cache directory. Exits with 1 where tests fail on one of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from quant.folders import cache_root

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
ROOT = Path(__file__).parents[2]


def interpreter(version: str) -> str:
    """The path of a Python, or "" where there is none."""
    command = [f"python{version}", "-c", "import sys; print(sys.executable)"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def environment(version: str) -> Path:
    """The Python of a virtual environment that has the checkout and what its tests need."""
    folder = cache_root() / "pythons" / version
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter(version), "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[test]"], check=True)
    return python


def main() -> int:
    """Runs the command."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    versions, for_pytest = arguments[:end], arguments[end + 1 :]
    missing = [version for version in versions if not interpreter(version)]
    if missing:
        print(f"no Python {missing[0]}; there are: {' '.join(filter(interpreter, VERSIONS))}", file=sys.stderr)
        return 2
    failed = []
    for version in versions:
        python = environment(version)
        print(f"Python {version}: {python}", flush=True)
        if subprocess.run([python, "-m", "pytest", *for_pytest], cwd=ROOT, check=False).returncode:
            failed.append(version)
    if not versions:
        print(" ".join(filter(interpreter, VERSIONS)))
    if failed:
        print(f"failed: {' '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
