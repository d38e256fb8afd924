"""A headless browser that measures pages: which boxes are cut off at the width of a phone or of a laptop."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

# Run inside the page: boxes that hold more than they show, and cells that reach beyond the window.
_MEASURE = """
<script>addEventListener('load', () => setTimeout(() => {
  const cut = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) cut.push('page ' + document.documentElement.scrollWidth);
  for (const box of document.querySelectorAll('.wide, section, table'))
    if (box.scrollWidth > box.clientWidth + 1) cut.push((box.className || box.tagName) + ' ' + box.scrollWidth
      + ' > ' + box.clientWidth + ': ' + box.textContent.slice(0, 60));
  for (const cell of document.querySelectorAll('td, th, dd, h1, h2, p, li, pre'))
    if (cell.getBoundingClientRect().right > width + 1) cut.push('cell ' + cell.textContent.slice(0, 60));
  parent.postMessage({width, cut, cells: document.querySelectorAll('td').length}, '*');
}, WAIT));</script>
"""
_FRAME = """<!doctype html><body><iframe src="PAGE" style="width:WIDTHpx;height:30000px;border:0"></iframe><script>
addEventListener('message', (event) => {
  if (!event.data || event.data.cut === undefined) return;
  const found = document.createElement('pre'); found.id = 'found'; found.textContent = JSON.stringify(event.data);
  document.body.append(found);
});</script>"""
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic", "--window-size=1600,1200",
    "--enable-logging=stderr",
)  # fmt: skip


def dump(page: Path, folder: Path, *, budget_milliseconds: int = 40_000) -> str:
    """The page's document after its scripts have run, without a word on the console, which also names refused requests.

    Skips the test where chromium is not installed.
    """
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    done = subprocess.run(
        [browser, *_OPTIONS, f"--user-data-dir={folder}/profile", f"--virtual-time-budget={budget_milliseconds}",
         "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    return done.stdout


def cut_off(page: str, width: int, folder: Path, *, wait_milliseconds: int = 100) -> list[str]:
    """What a window of `width` pixels cuts off of a page that has tables. Fails when nothing could be measured."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = folder / "page.html"
    script = _MEASURE.replace("WAIT", str(wait_milliseconds))
    page = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page)  # it forbids scripts but the page's own
    head, body, rest = page.rpartition("</body>")
    measured.write_text(head + script + body + rest if body else page + script)
    frame = folder / "frame.html"
    frame.write_text(_FRAME.replace("PAGE", measured.as_uri()).replace("WIDTH", str(width)))
    shown = re.search(r'<pre id="found">(.*?)</pre>', dump(frame, folder), re.DOTALL)
    assert shown, "the page was not measured"
    found = json.loads(html.unescape(shown[1]))
    assert found["width"] == width and found["cells"] > 0, found
    return found["cut"]
