"""The documentation site builds without a warning, and the workload that it shows is a real one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    options = ["-q", "-n", "-W", "--keep-going"]
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(site)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    built_pages = list(site.glob("**/*.html"))
    assert len(built_pages) > len(list(DOCS.glob("*.md")))  # and the search page
    assert re.search(
        r"<title>Ebbflow \d+\.\d+\.\d+", (site / "index.html").read_text(encoding="utf-8")
    )
    index = (site / "searchindex.js").read_text(encoding="utf-8").casefold()
    for words in (
        "nccl timeout",
        "cuda out of memory",
        "spot interruption",
        "which gpu is cheapest",
    ):
        assert words in index, f"the site's search does not find {words!r}"
    missing = (site / "404.html").read_text(encoding="utf-8")
    assert all(f'href="{page}.html"' in missing for page in ("start", "questions", "commands"))
    assert "theme-toggle" in missing
    assert 'content="width=device-width' in missing
    address = r"(?:https?:)?//"
    for built_page in built_pages:
        html = built_page.read_text(encoding="utf-8")
        assert not re.findall(rf'<(?:script|img|iframe)[^>]+src="{address}[^"]+"', html), (
            built_page.name
        )
        assert not re.findall(
            rf'<link[^>]+rel="(?:stylesheet|preconnect|icon)"[^>]+href="{address}', html
        )
    for sheet in site.glob("**/*.css"):
        found = re.findall(
            rf"(?:@import|url\()\s*[\"']?{address}", sheet.read_text(encoding="utf-8")
        )
        assert not found, sheet.name


def test_the_skeleton_of_a_workload_passes_its_examination(tmp_path: Path) -> None:
    page = (DOCS / "your-model.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_model.py").write_text(
        next(block for block in blocks if "class MyWorkload" in block)
    )
    settings = next(block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    (tmp_path / "my.yaml").write_text(settings)
    words = [sys.executable, "-m", "ebbflow", "examine", str(tmp_path / "my.yaml")]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    run = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "MyWorkload" in run.stdout
