"""A result as one HTML file: no network, no libraries, and no data interpreted as markup."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from jinja2 import ChainableUndefined, Environment, PackageLoader
from markupsafe import Markup

from graph_runner.base.console import encodable

VERDICTS = ("exact", "rounding", "inherited", "amplified", "introduced", "failed")
"""Of a node, from harmless to worst."""

_FOR_SCRIPT = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&"})


def diff_html(data: dict[str, Any]) -> str:
    """Returns the page of a diff, from its JSON (`diff_report.diff_json`). Keys of it may be missing, except `nodes`.

    The page runs only its own script, since it tells the browser the script's digest, whatever a tensor's name holds.
    Its state (search, filters, chosen node) is in the address's fragment: "#q=blk.0&verdict=introduced,failed&node=12".
    """
    place = data.get("first_introduced")
    return page(
        "diff",
        styles=("diff.css", "chart.css"),
        scripts=("tools.js", "chart.js", "diff.js"),
        data=data,
        json=json_for_script(data),
        first=None if place is None else data["nodes"][place],
        verdicts=VERDICTS,
    )


def page(name: str, *, styles: Iterable[str], scripts: Iterable[str], **values: Any) -> str:
    """Returns the page of a template, NAME.html.j2, with styles and scripts. It runs no other script."""
    loader = PackageLoader("graph_runner.reports")
    templates = Environment(
        loader=loader, autoescape=True, undefined=ChainableUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    templates.filters |= {"number": _number, "quoted": _quoted, "fragment": _fragment, "ranges": _ranges}
    script, style = ("".join(loader.get_source(templates, each)[0] for each in files) for files in (scripts, styles))
    text = templates.get_template(f"{name}.html.j2").render(
        script=Markup(script),
        style=Markup(style),
        script_digest=_digest(script),
        style_digest=_digest(style),
        **values,
    )
    return encodable(text).encode(errors="replace").decode()  # a name may hold half a surrogate pair


def json_for_script(data: dict[str, Any]) -> Markup:
    """Returns JSON in which no HTML parser finds a tag: ASCII only, brackets and ampersands as escapes."""
    return Markup(json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_FOR_SCRIPT))


def _digest(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()


def _number(x: float | None) -> str:
    if x is None:
        return "not finite"
    return "0" if x == 0 else f"{x:.2e}"


def _ranges(numbers: list[int]) -> str:
    """Returns ascending numbers as text, with consecutive ones as a range: "0-25, 40"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _fragment(text: str) -> str:
    return quote(text, safe="", errors="replace")
