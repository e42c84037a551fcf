"""Records what commands print in a terminal, as SVG.

python docs/pictures.py                     the picture of README.md
python docs/pictures.py FOLDER [MODEL]      run, diff, coverage and bench, at 80 and 120 columns, light and dark
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
from rich.text import Text

COMMANDS = {
    "run": "run {model} -n 16",
    "diff": "diff {model} -n 1",
    "coverage": "coverage {model}",
    "bench": "bench calls --rounds 1",
}
WIDTHS = (80, 120)
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": MONOKAI}

_MOVES = re.compile(r"(\x1b\[\?25[lh]|\x1b\[\d*A|\x1b\[2K|\r\n|\r|\n)")


def recorded(arguments: str, width: int) -> list[str]:
    """The lines that the command leaves in a terminal, with their colours, as escape sequences."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"COLUMNS": str(width), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        code = "import ggml_npu; ggml_npu.main()"
        os.execv(sys.executable, [sys.executable, "-c", code, *arguments.split()])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, width, 0, 0))
    data = b""
    while True:
        try:
            read = os.read(terminal, 1 << 16)
        except OSError:  # the command has ended
            break
        if not read:
            break
        data += read
    os.close(terminal)
    os.waitpid(child, 0)
    return _left(data.decode())


def _left(text: str) -> list[str]:
    """What progress bars leave, which move up and erase lines."""
    lines, at = [""], 0
    for part in _MOVES.split(text):
        if part in ("\n", "\r\n"):
            at += 1
            lines += [""] if at == len(lines) else []
        elif part == "\x1b[2K":
            lines[at] = ""
        elif part.endswith("A") and part.startswith("\x1b["):
            at = max(0, at - int(part[2:-1] or 1))
        elif part != "\r" and not part.startswith("\x1b[?25"):
            lines[at] += part
    return lines[: len(lines) - (not lines[-1])]


def drawn(arguments: str, lines: list[str], width: int, theme: str = "dark") -> str:
    """An SVG of a terminal with the lines of a command."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True, color_system="truecolor")
        for line in lines:
            console.print(Text.from_ansi(line), highlight=False)
    return console.export_svg(title=f"ggml-npu {arguments}", theme=THEMES[theme])


def main(arguments: list[str]) -> None:
    if not arguments:
        Path(__file__).with_name("diff-demo.svg").write_text(drawn("diff demo", recorded("diff demo", 96), 96))
        return
    folder, model = Path(arguments[0]), arguments[1] if len(arguments) > 1 else "demo"
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in COMMANDS.items():
        line = command.format(model=model)
        for width in WIDTHS:
            lines = recorded(line, width)
            for theme in THEMES:
                (folder / f"{name}-{width}-{theme}.svg").write_text(drawn(line, lines, width, theme))


if __name__ == "__main__":
    main(sys.argv[1:])
