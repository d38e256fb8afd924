"""The promise of an attached script is derived from the script: what it keeps besides the job's
state is saved, found, or harmless.

All scripts of a test run in one process, each once whole and once left in the middle and resumed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.events import OUTCOME, read_events
from ebbflow.core.store import Store
from tests.support.script_shapes import BEGIN, EXACT, NOT_EXACT

pytestmark = pytest.mark.timeout(700)  # sixty runs in one process, on a busy machine
ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / "tests" / "support" / "scripts" / "look_at_scripts.py"
LEFT_AT = 13


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Each script's results: whole, and left and resumed."""
    folder = tmp_path_factory.mktemp("scripts")
    sources = {**EXACT, **{name: source for name, (source, _) in NOT_EXACT.items()}}
    words = []
    for name, source in sources.items():
        path = folder / f"{name}.py"
        path.write_text(source)
        words += [str(path), f"{path}:{LEFT_AT}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["EBBFLOW_RUNS"] = str(folder / "runs")
    done = subprocess.run(
        [sys.executable, str(HARNESS), str(folder / "store"), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            found.setdefault(result["script"], []).append(result)
    return found


@pytest.mark.parametrize("name", EXACT)
def test_what_is_saved_or_harmless_is_promised_and_equal(
    results: dict[str, list[dict[str, Any]]], name: str
) -> None:
    (whole, resumed) = results[name]
    steps = 15 if name == "trainer_with_early_stopping" else 21
    assert whole["printed"].startswith(f"final {steps} ")
    assert resumed["printed"] == whole["printed"]
    for result in (whole, resumed):
        assert result["promise"]["level"] == "bit for bit", result["promise"]
        assert result["promise"]["reasons"] == []


@pytest.mark.parametrize("name", NOT_EXACT)
def test_what_changes_and_is_not_saved_is_named_with_the_fix(
    results: dict[str, list[dict[str, Any]]], name: str
) -> None:
    (whole, resumed) = results[name]
    variable = NOT_EXACT[name][1]
    for result in (whole, resumed):
        assert result["promise"]["level"] == "not exact", result["promise"]
        said = " ".join(result["promise"]["reasons"])
        assert f"`{variable}` ({name}.py:" in said and "changes and is not saved; fix: " in said


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("for epoch in job.epochs(3):\n    model(x)\n", "no step was counted in epoch 0"),
        ("for a in job.batches(iter([x]), epochs=2): train_on(a, a[:, :1])\n", "can be read once"),
        (
            "for epoch in job.epochs(2, zip(x, x)):\n    pass\n",
            "2 epochs of a zip, which can be read once",
        ),
        (
            "for epoch in job.epochs(2):\n"
            "    for a in job.batches([x] * 3): train_on(a, a[:, :1])\n"
            "    for a in job.batches([x] * 9): train_on(a, a[:, :1])\n",
            "train.py:22: job.batches after batches of another loader in epoch 0",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused_with_the_fix(
    tmp_path: Path, body: str, words: str
) -> None:
    done, outcomes = run_attached(tmp_path, body)
    assert done.returncode not in (0, 75), done.stdout
    (line,) = [line for line in done.stderr.splitlines() if words in line]
    assert "; fix: " in line and "Traceback" not in done.stderr
    found = [outcome["outcome"] for outcome in outcomes]
    assert found in ([], ["config"]), "none if no loop had begun"


@pytest.mark.parametrize(
    ("leave", "outcome"),
    [
        ("sys.exit(3)", "failed"),
        ("stop()", "failed"),
        ("sys.exit(0)", "completed"),
        ("break", "completed"),
    ],
)
def test_a_script_that_exits_in_its_loop_has_failed_unless_its_code_is_0(
    tmp_path: Path, leave: str, outcome: str
) -> None:
    body = (
        "import sys\n"
        "def stop():\n"
        "    try: raise SystemExit('bad data')\n"
        "    finally: pass\n"
        "for step in job.steps(9):\n"
        "    train_on(x, x[:, :1])\n"
        f"    if step == 4: {leave}\n"
    )
    done, outcomes = run_attached(tmp_path, body)
    (ending,) = outcomes
    assert ending["outcome"] == outcome, done.stdout + done.stderr
    assert (done.returncode == 0) == (outcome == "completed")
    if outcome == "failed":
        assert ending["message"].startswith("train.py:26: SystemExit: the program called sys.exit(")


def run_attached(
    folder: Path, body: str
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run a script with `body` after `attach`; return the process and its job's outcomes."""
    script = folder / "train.py"
    script.write_text(BEGIN + "job = ebbflow.attach(model, opt)\n" + body)
    store = folder / "store"
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "EBBFLOW__STORE": str(store)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    events = read_events(Store.open(f"{store}/jobs/train"))
    return done, [event.data for event in events if event.name == OUTCOME]


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ebbflow", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "EBBFLOW_RUNS": str(folder / "runs")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_script_that_does_not_attach_is_watched_and_billed_and_accused_of_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("import time; time.sleep(1); print('trained')\n")
    refused = command(tmp_path, "run", "train.py", "--set", "cluster.nodes=2")
    assert refused.returncode == 2 and "fix: ebbflow run train.py --nodes 2" in refused.stderr
    done = command(tmp_path, "run", "train.py", "--set", f"store={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[1] == (
        "ebbflow: train.py does not call ebbflow.attach: watched and billed, nothing is saved"
    )
    assert "trained" in said
    report = json.loads(command(tmp_path, "report", "train", "--json").stdout)
    assert report["outcome"] == "completed" and report["actual"]["goodput"] is None
    classes = {line["class"]: line["rank_seconds"] for line in report["ledger"]}
    assert classes["script"] >= 1.0
    assert classes.get("unattributed", 0.0) < 0.5
    text = command(tmp_path, "report", "train").stdout
    for word in ("DAMAGED", "interrupted", "bit for bit", "diagnosis"):
        assert word not in text
    assert " done " in command(tmp_path, "jobs").stdout
