"""The page in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import equilibria as eq
from equilibria.analysis.diagnosis import example_models

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
# headless, without any network access
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
LOOK = """<script>
addEventListener("load", () => {
  const images = [...document.images];
  const shown = image => image.naturalWidth > 300 && image.getBoundingClientRect().width > 200;
  const drawn = images.filter(image => image.complete && shown(image));
  const wide = document.documentElement.scrollWidth > innerWidth;
  document.body.dataset.seen = `${drawn.length} of ${images.length}${wide ? ", too wide" : ""}`;
});
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
@pytest.mark.parametrize("example", ["contractive", "not-contractive"])
def test_the_page_shows_its_plots(example: str, tmp_path: Path) -> None:
    page = eq.diagnose(*example_models.EXAMPLES[example]()).save(tmp_path)
    looked = tmp_path / "looked.html"
    looked.write_text(page.read_text().replace("</body>", f"{LOOK}</body>"))
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,900", "--dump-dom"]
    shown = subprocess.run([*command, looked.as_uri()], capture_output=True, text=True, timeout=600, check=True).stdout
    seen = re.search(r'data-seen="([^"]*)"', shown)
    assert seen is not None
    expected = page.read_text().count("<img")
    assert expected >= 4
    assert seen.group(1) == f"{expected} of {expected}"
