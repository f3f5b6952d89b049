"""The documentation as a site: it builds without a warning, and no link in it leads nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")


class _Page(HTMLParser):
    """What a page links to, and the places in it that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def _broken(site: Path) -> Iterator[str]:
    files = [path for path in site.rglob("*.html") if path.name != "404.html"]  # its links begin at a server's root
    pages = {path: _Page(path.read_text()) for path in files}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            here = not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].anchors
            if not target.exists() or not here:
                yield f"{path.relative_to(site)}: {link}"


def test_the_site_builds_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    site = tmp_path.resolve() / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    build = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert build.returncode == 0, build.stdout + build.stderr
    assert sum(1 for _ in site.rglob("*.html")) > 15
    assert list(_broken(site)) == []
