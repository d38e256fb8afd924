"""The documentation site builds without a warning, and the pages that code and texts name exist."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve()
while not (ROOT / "setup.cfg").is_file():
    ROOT = ROOT.parent
FOLDERS = ("flows", "training", "cost", "infra", "benchmarks", "tests", "configs", "examples")
TEXTS = {".py", ".yaml", ".yml", ".json", ".cfg", ".toml", ".md"}


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", str(ROOT / "docs"), str(site)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    pages = list(site.glob("**/*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("**/*.md")))  # and the search page
    address = r"(?:https?:)?//"
    for page in pages:
        html = page.read_text(encoding="utf-8")
        assert not re.findall(rf'<(?:script|img|iframe)[^>]+src="{address}[^"]+"', html), page.name
        assert not re.findall(rf'<link[^>]+rel="(?:stylesheet|preconnect|icon)"[^>]+href="{address}', html), page.name
    for sheet in site.glob("**/*.css"):
        found = re.findall(rf"(?:@import|url\()\s*[\"']?{address}", sheet.read_text(encoding="utf-8"))
        assert not found, sheet.name


def test_every_page_that_is_named_exists():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    files += [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), ROOT / "Makefile"]
    missing = set()
    for path in files:
        for name in re.findall(r"\bdocs/[a-z0-9_/-]+\.(?:md|py)\b", path.read_text(encoding="utf-8", errors="replace")):
            if not (ROOT / name).is_file():
                missing.add(f"{path.relative_to(ROOT)}: {name}")
    assert not missing, sorted(missing)


def test_links_from_the_readme_and_its_neighbours_lead_somewhere():
    for page in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
