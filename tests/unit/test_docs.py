"""Pages of the documentation agree with the code."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from ebbflow.command import COMMANDS
from ebbflow.core.config.load import load_config
from ebbflow.core.config.problems import ConfigError
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import LedgerClass
from ebbflow.flows.run_help import SECTIONS
from ebbflow.training.rehearse import KINDS

ROOT = Path(__file__).resolve()
while not (ROOT / "setup.cfg").is_file():
    ROOT = ROOT.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
FOLDERS = ("flows", "training", "cost", "infra", "benchmarks", "tests", "configs", "examples")
# Lower it after a cut, and never raise it: `python docs/words.py` lists the pages by their words.
MOST_WORDS = 45_000
MOST_WORDS_OF_BENCHMARKS = 4_000
TEXTS = {".py", ".yaml", ".yml", ".json", ".cfg", ".toml", ".md"}


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def rows(text: str) -> list[list[str]]:
    """The cells of each row of all tables, without backticks."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = []
    for line in lines:
        cells.append([cell.strip().strip("`") for cell in line.split("|")[1:-1]])
    return cells


def test_every_page_that_is_named_exists():
    files = []
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    files += [*ROOT.glob("*.md"), *PAGES, ROOT / "Makefile"]
    missing = set()
    for path in files:
        for name in re.findall(
            r"\bdocs/[a-z0-9_/-]+\.(?:md|py)\b", path.read_text(encoding="utf-8", errors="replace")
        ):
            if not (ROOT / name).is_file():
                missing.add(f"{path.relative_to(ROOT)}: {name}")
    assert not missing, sorted(missing)


def test_every_file_that_a_page_names_exists():
    tests = {path.name for path in (ROOT / "tests").rglob("*.py")}
    missing = set()
    for path in [*PAGES, *ROOT.glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*)`", text):
            inside = f"ebbflow/{name.rstrip('/')}"  # the folders at the top are links into it
            if not any(ROOT.glob(name.rstrip("/"))) and not any(ROOT.glob(inside)):
                missing.add(f"{path.name}: {name}")
        for name in re.findall(r"`((?:test|soak)_\w+\.py)\b", text):
            if name not in tests:
                missing.add(f"{path.name}: {name}")
    assert not missing, sorted(missing)


def test_links_from_the_readme_and_its_neighbours_lead_somewhere():
    for text_page in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)\s#]+)", text_page.read_text(encoding="utf-8")):
            assert "://" in target or (text_page.parent / target).exists(), (
                f"{text_page.name}: {target}"
            )


def tool(name: str) -> ModuleType:
    """A program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_and_exit_codes_in_manifests_are_those_of_the_code() -> None:
    generate = tool("generate")
    for name, render in generate.PAGES.items():
        assert page(name) == render(), "fix: python docs/generate.py"
    for path in generate.MANIFESTS:
        assert path.read_text() == generate.manifest(path.read_text()), "python docs/generate.py"


def test_hand_written_pages_have_at_most_so_many_words() -> None:
    counted = tool("words").words_by_page()
    assert not set(tool("generate").PAGES) & {Path(name).name for name in counted}
    assert counted["docs/benchmarks.md"] <= MOST_WORDS_OF_BENCHMARKS
    assert sum(counted.values()) <= MOST_WORDS, counted


def test_every_configuration_on_a_page_is_accepted(tmp_path: Path) -> None:
    refused = {}
    checked = 0
    for path in [ROOT / "README.md", *PAGES]:
        for number, text in enumerate(blocks(path, "yaml")):
            if set(yaml.safe_load(text) or {}) <= set(RunConfig.model_fields):
                file = tmp_path / f"{path.stem}-{number}.yaml"
                file.write_text(text)
                try:
                    load_config(file, project_root=tmp_path)
                except ConfigError as error:
                    refused[file.name] = str(error)
                checked += 1
    assert not refused
    assert checked >= 20


def test_commands_and_targets_of_the_first_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    options = {key.split()[0] for part in SECTIONS.values() for key in part}
    for path in [ROOT / "README.md", ROOT / "docs" / "start.md", ROOT / "docs" / "questions.md"]:
        lines = [line for text in blocks(path, "console") for line in text.splitlines()]
        for program, name, rest in re.findall(
            r"\$ (ebbflow|make) (\S+)([^#\n]*)", "\n".join(lines)
        ):
            assert name in (targets if program == "make" else {*COMMANDS, "--help"}), name
            if name == "run":
                assert set(re.findall(r"--[a-z-]+", rest)) <= options, rest


@pytest.mark.parametrize("name", ["supervisor.yaml", "cronjob.yaml"])
def test_a_manifest_starts_no_supervisor_again_whose_job_has_ended(name: str):
    document = yaml.safe_load((ROOT / "ebbflow" / "infra" / "kubernetes" / name).read_text())
    spec = document["spec"].get("jobTemplate", document)["spec"]
    rules = [
        rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    ]
    assert [rule["operator"] for rule in rules] == ["In"]
    ends = {outcome.exit_code for outcome in Outcome}
    assert ends - set(rules[0]["values"]) == {0, 1, 75}


def test_the_tables_of_exit_codes_classes_and_faults_are_complete():
    codes = {cells[1]: cells[0] for cells in rows(page("exit-codes.md"))}
    assert {str(outcome): str(outcome.exit_code) for outcome in Outcome}.items() <= codes.items()
    assert {str(kind).replace("_", " ") for kind in LedgerClass} <= {
        cells[0] for cells in rows(page("bill.md"))
    }
    assert set(KINDS) <= {cells[0] for cells in rows(page("faults.md"))}
