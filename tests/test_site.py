"""The documentation as a site: it builds without a warning, and no link in it leads nowhere."""

from __future__ import annotations

import os
import re
import shutil
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

ZENSICAL = os.environ.get("ZENSICAL") or shutil.which("zensical")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
# for a machine without a screen, and with no words to anybody outside
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


class _Page(HTMLParser):
    """The links of a page, and its anchors."""

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("docs").resolve() / "site"
    _run("docs/site_pages.py")
    _run("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site))
    return site


def _run(*words: str) -> None:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_lead_somewhere(site: Path) -> None:
    assert sum(1 for _ in site.rglob("*.html")) > 15
    assert list(_broken(site)) == []


def test_pages_have_captions_reports_and_the_api_by_room(site: Path) -> None:
    report = (site / "results" / "digits" / "report" / "index.html").read_text()
    assert "<figcaption>" in report
    assert "<figcaption>" in (site / "index.html").read_text() and "Version " in (site / "index.html").read_text()
    assert 'id="equilibria.Anderson"' in (site / "api" / "solvers" / "index.html").read_text()
    assert "styles/site.css" in report and (site / "styles" / "site.css").exists()


LOOK = """<script>
addEventListener("load", () => {
  const seen = image => image.complete && image.naturalWidth > 10 && image.getBoundingClientRect().width > 10;
  const missing = [...document.images].filter(image => !seen(image)).map(image => image.src);
  document.body.dataset.seen = `${document.documentElement.scrollWidth > innerWidth ? "too wide " : "fits "}${missing}`;
});
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
def test_pages_are_readable_on_a_phone(site: Path, tmp_path: Path) -> None:
    """At the width of a phone no page is wider than the screen, and every picture loads."""
    wrong = {}
    for page in sorted(path for path in site.rglob("index.html")):
        page.write_text(page.read_text().replace("</body>", f"{LOOK}</body>"))
        own = ["--window-size=400,900", f"--user-data-dir={tmp_path}", "--dump-dom", page.as_uri()]
        shown = subprocess.run([str(BROWSER), *FLAGS, *own], capture_output=True, text=True, timeout=600, check=True).stdout
        seen = re.findall(r'data-seen="([^"]*)"', shown)
        if seen != ["fits "]:
            wrong[page.parent.name] = seen
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.skipif(ZENSICAL is None, reason="Zensical is not installed; `make test-zensical` does that")
def test_zensical_builds_the_same_pages(site: Path, tmp_path: Path) -> None:
    """Zensical is the successor of Material for MkDocs and builds from the same pages and settings."""
    shutil.copytree(ROOT / "build" / "pages", tmp_path / "build" / "pages")  # it follows no links out of its folder
    for name in ("docs", "equilibria"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    done = subprocess.run([str(ZENSICAL), "build", "--strict"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages, others = ({path.relative_to(root) for path in root.rglob("index.html")} for root in (site, tmp_path / "site"))
    assert pages == others
    assert 'id="equilibria.Anderson"' in (tmp_path / "site" / "api" / "solvers" / "index.html").read_text()
    assert "<figcaption>" in (tmp_path / "site" / "results" / "digits" / "report" / "index.html").read_text()
    assert "styles/site.css" in (tmp_path / "site" / "index.html").read_text()
