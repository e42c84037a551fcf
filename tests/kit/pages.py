"""HTML pages as a parser sees them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;\u2028\u2029\udc80"
"""A text that is an attack wherever it becomes markup."""


class Page(HTMLParser):
    """A page's tags, with attributes, and the text in each script element."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> Any:
        """The JSON that its script reads."""
        return json.loads(self.scripts[0])


def assert_alone(page: Page) -> None:
    """Asserts that a page names nothing that lies elsewhere, and runs nothing but its own script."""
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not [attributes for _, attributes in page.tags if "src" in attributes or "style" in attributes]
    assert all((attributes["href"] or "").startswith("#") for tag, attributes in page.tags if tag == "a")
    assert not [tag for tag, _ in page.tags if tag == "link"]
