"""A hook of MkDocs: the pages of the repository's root (README.md as the home page) and what they link to."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md"} | {name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}
LINKED = ("LICENSE", "CITATION.cff")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds them, with links that are right inside docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for name in LINKED:
        files.append(File.generated(config, name, content=(ROOT / name).read_bytes()))
    return files
