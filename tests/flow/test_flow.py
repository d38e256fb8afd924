"""The flow as its users meet it: the default job, its report in every rendering, its refusals and
exit codes.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbflow.cost.report.figure_text import format_key_figures
from ebbflow.cost.report.render_text import render
from ebbflow.cost.report.report import RunReport
from tests.support.browser import cut_off, dump
from tests.support.exposition import values
from tests.support.flow import ROOT, FlowRun, FlowRunner

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]  # several runs, on a busy machine

FIXED_FIELDS = {
    "schema",
    "job",
    "outcome",
    "exit_code",
    "interruptions",
    "failures",
    "redone_steps",
    "weights_sha256",
    "loss_curve",
    "ledger",
    "total_usd",
    "paid_rank_seconds",
    "savings_usd",
    "plan",
    "actual",
    "events",
    "configuration",
}

LIVE: list[str] = []  # verdicts of the live page while the default job ran

_CLIENT = """
import json
import ebbflow
ebbflow.use_records()
from metaflow import Flow, namespace
from metaflow.cards import get_cards

run = Flow("TrainFlow").latest_run
cards = {step: [card.get() for card in get_cards(run[step].task, follow_resumed=False)] for step in ("start", "report")}
data = run.data
assert Flow("TrainFlow").latest_successful_run.id == run.id
assert [one.id for one in Flow("TrainFlow").runs("kind:default")] == [run.id] and not [*Flow("TrainFlow").runs("x")]
frames = {name: getattr(data, name).to_dict("split") for name in ("loss_frame", "ledger_frame", "throughput_frame")}
print(json.dumps({"type": type(data.run_report).__name__, "report": data.run_report.to_json(), "frames": frames,
                  "tags": sorted(run.tags), "cards": cards}, default=float))
"""


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> tuple[FlowRunner, FlowRun]:
    """The laptop job as it is shipped, run by Metaflow's Runner in a folder that has none of its
    records.
    """
    runner = FlowRunner(tmp_path_factory.mktemp("default"), environment={"EBBFLOW_LIVE_PAGE": "1"})
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    live = runner.runs / "latest/live.html"
    options = {
        "config": str(ROOT / "ebbflow/configs" / "laptop.yaml"),
        "set": f"store={runner.runs}",
        "tags": ["kind:default"],
    }
    process = runner.start_runner("run", cwd=elsewhere, **options)
    while process.poll() is None:
        time.sleep(0.5)
        if live.is_file():
            shown = live.read_text()
            LIVE.append(re.sub(r"<[^>]*>", "", re.findall(r'class="verdict">(.*?)</p>', shown)[0]))
    run = runner.finish(process, 300)
    assert not list(elsewhere.iterdir()), "cards lie with the records, not where the run was typed"
    assert run.exit_code == 0, run.output
    return runner, run


def test_the_default_job_learns_commits_and_completes(default: tuple[FlowRunner, FlowRun]) -> None:
    report = default[1].report
    assert set(report) >= FIXED_FIELDS
    assert (report["outcome"], report["exit_code"], report["interruptions"]) == ("completed", 0, 0)
    assert report["actual"]["commits"] >= 3
    assert report["actual"]["held_out_loss"] <= 0.85 * report["actual"]["unigram_entropy_nats"]
    assert re.fullmatch(r"[0-9a-f]{64}", report["weights_sha256"])
    assert [step for step, _ in report["loss_curve"]] == list(
        range(1, len(report["loss_curve"]) + 1)
    )


def test_the_ledger_of_the_default_job_adds_up(default: tuple[FlowRunner, FlowRun]) -> None:
    report = default[1].report
    lines = report["ledger"]
    assert round(sum(line["usd"] for line in lines), 6) == report["total_usd"] > 0
    assert sum(line["rank_seconds"] for line in lines) == pytest.approx(
        report["paid_rank_seconds"], abs=1e-3
    )
    unattributed = sum(line["rank_seconds"] for line in lines if line["class"] == "unattributed")
    assert unattributed <= 0.01 * report["paid_rank_seconds"]
    assert all(line["kind"] for line in lines)
    assert report["events"]["damage"] == [], (
        "every event fits its declared types, and every log was closed"
    )


def test_metrics_and_logs_of_the_default_job_are_beside_its_report(
    default: tuple[FlowRunner, FlowRun],
) -> None:
    runner, run = default
    page = (run.folder / "metrics.prom").read_bytes()
    assert values(page, "ebbflow_job_step") == [len(run.report["loss_curve"])]
    assert sum(values(page, "ebbflow_job_usd_total")) == pytest.approx(run.report["total_usd"])
    command = [sys.executable, "-m", "infra", "logs", "latest", "--rank", "0"]
    environment = dict(os.environ, EBBFLOW_RUNS=str(runner.runs))
    logs = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert re.search(r"Z g1 n0 r0 step \d+ \| step 1/", logs.stdout), logs.stderr


def test_the_report_shows_the_source_of_each_setting(default: tuple[FlowRunner, FlowRun]) -> None:
    rows = {row["key"]: row for row in default[1].report["configuration"]}
    assert rows["store"] == {"key": "store", "value": str(default[0].runs), "source": "--set"}
    assert re.fullmatch(r".*laptop\.yaml:\d+", rows["model.hidden_size"]["source"])
    assert rows["training.weight_decay"] == {
        "key": "training.weight_decay",
        "value": 0.1,
        "source": "default",
    }


def test_every_rendering_shows_the_same_figures(default: tuple[FlowRunner, FlowRun]) -> None:
    runner, run = default
    report = RunReport.from_json(run.report)
    figures = format_key_figures(report)
    terminal = render(report)
    page = (run.folder / "report.html").read_text()
    card = runner.run("card", "get", "report", "--id", "report")
    assert card.exit_code == 0, card.output
    assert len(figures) >= 8
    assert "default-src 'none'" in card.output, "the card is the page itself"
    for name, figure in figures.items():
        assert figure in terminal, f"{name} is missing on the terminal"
        assert figure in page, f"{name} is missing in report.html"
        assert figure in html.unescape(card.output), f"{name} is missing in the card"
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page), (
        "report.html makes network requests"
    )


def test_the_live_page_moves_while_the_job_runs_and_ends_as_the_report(
    default: tuple[FlowRunner, FlowRun],
) -> None:
    runner, run = default
    verdicts = [re.match(r"Running: (\d+) of \d+ steps", verdict) for verdict in LIVE]
    steps = [int(verdict[1]) for verdict in verdicts if verdict]
    assert len(set(steps)) >= 2 and steps == sorted(steps), LIVE
    assert (run.folder / "live.html").read_bytes() == (run.folder / "report.html").read_bytes()
    assert re.search(r"^ *live page: .*runs/latest/live.html$", run.output, re.MULTILINE)
    card = runner.run("card", "get", "start", "--id", "live")
    assert card.exit_code == 0 and "Completed in" in card.output


def test_the_card_is_not_blank_in_a_browser(
    default: tuple[FlowRunner, FlowRun], tmp_path: Path
) -> None:
    """One NaN in its data leaves a card blank while its task reports success: only a browser can
    tell.
    """
    runner, run = default
    page = tmp_path / "card.html"
    assert runner.run("card", "get", "report", str(page), "--id", "report").exit_code == 0
    shown = dump(page, tmp_path)
    body = html.unescape(re.sub(r"<script.*?</script>", "", shown, flags=re.DOTALL))
    for name, figure in format_key_figures(RunReport.from_json(run.report)).items():
        assert figure in body, f"{name} is missing on the card's page"
    assert not cut_off(page.read_text(), 390, tmp_path / "phone")


def test_the_terminal_shows_each_phase_of_the_job(default: tuple[FlowRunner, FlowRun]) -> None:
    """The steps in order, one line per 10 s of training, and the closing block; Metaflow's log is
    beside the report.
    """
    output = default[1].output
    report = default[1].report
    done = re.findall(r"^✓ (\w+) [\d.]+ s", output, re.MULTILINE)
    assert done == ["start", "preflight", "plan", "prepare", "train", "report"]
    progress = re.findall(r"^  [\d,]+/240 \d+% · loss .* tokens/s · .*ETA", output, re.MULTILINE)
    assert 2 <= len(progress) <= 3 + report["actual"]["wall_hours"] * 360
    assert sum(-(-len(line) // 80) for line in output.splitlines()) <= 56 + 2 * len(progress), (
        output
    )
    assert "\x1b" not in output and "\r" not in output
    assert 4 <= len(output[output.rindex("\n✓ ") :].strip().splitlines()) <= 15
    log = (default[1].folder / "metaflow.log").read_text()
    starts = [
        log.index(f"/{step}/")
        for step in ["preflight", "plan", "prepare", "train", "join", "report", "end"]
    ]
    assert starts == sorted(starts) and "capacity plan" in log
    logs = [path.read_text() for path in default[1].folder.glob("logs/*/rank-0.log")]
    assert "WorkerServer.cpp" in "".join(logs) and ".cpp:" not in output, (
        "native notes stay in the raw log"
    )


def read_elsewhere(default: tuple[FlowRunner, FlowRun], folder: Path, *command: str) -> str:
    """Run a program in another folder, with a user whose name no variable tells."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("USER", "USERNAME", "LOGNAME")
    }
    environment |= {
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(default[0].folder),
        "EBBFLOW_RUNS": str(default[0].runs),
    }
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_metaflows_client_finds_reports_and_frames_from_any_folder(
    default: tuple[FlowRunner, FlowRun], tmp_path: Path
) -> None:
    seen = json.loads(read_elsewhere(default, tmp_path, "-c", _CLIENT))
    report = default[1].report
    assert (seen["type"], seen["report"]) == ("RunReport", report)
    assert {"kind:default", "project:ebbflow"} <= set(seen["tags"])
    page = (default[1].folder / "report.html").read_text()
    assert seen["cards"]["start"] == [page], "the live page has become the report"
    [card] = seen["cards"]["report"]
    assert "default-src 'none'" in card
    steps = seen["frames"]["throughput_frame"]
    assert steps["columns"][:3] == ["step", "seconds", "tokens_per_second"]
    rows = [dict(zip(steps["columns"], row, strict=True)) for row in steps["data"]]
    assert (
        [[row["step"], row["loss"]] for row in rows]
        == seen["frames"]["loss_frame"]["data"]
        == report["loss_curve"]
    )
    assert all(row["usd"] > 0 and row["generation"] == 1 and row["kept"] for row in rows)
    assert max(row["learning_rate"] for row in rows) == report["actual"]["learning_rate"]
    assert (
        sum(row["usd"] for row in rows)
        < report["total_usd"]
        == pytest.approx(sum(row[2] for row in seen["frames"]["ledger_frame"]["data"]))
    )
    assert all(row["gradient_norm"] > 0 and 0 < row["seconds"] < 60 for row in rows)


def test_the_notebook_of_a_report_runs(default: tuple[FlowRunner, FlowRun], tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("matplotlib")
    notebook = tmp_path / "report.ipynb"
    execute = "import nbformat, nbclient, sys; book = nbformat.read(sys.argv[1], 4); "
    execute += (
        "nbclient.NotebookClient(book, timeout=120).execute(); nbformat.write(book, sys.argv[2])"
    )
    read_elsewhere(
        default, tmp_path, "-c", execute, str(ROOT / "examples" / "report.ipynb"), str(notebook)
    )
    outputs = []
    for cell in json.loads(notebook.read_text())["cells"]:
        outputs.extend(cell.get("outputs", []))
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert any(f"{default[1].report['total_usd']:.4f}" in json.dumps(output) for output in outputs)


def test_a_local_run_that_continues_a_job_ends_at_a_non_finite_loss(tmp_path: Path) -> None:
    """--with local takes remote decorators off again; a job's name is continued, with its own model
    only, and ends with the exit code of its last run. The terminal knows ASCII alone, and no step
    nor the report minds.
    """
    runner = FlowRunner(tmp_path, environment={"PYTHONIOENCODING": "ascii"})
    name = ["--job", "mine"]
    few = {"cluster__nodes": 1, "checkpoint__interval_steps": 4}
    options = runner.options(training__max_steps=8, **few)
    recorded = ["--set", f"cost.prices={ROOT}/tests/prices/synthetic.json"]
    recorded += ["--set", "cost.regions=[us-east-1, us-east-2]"]
    run = runner.run("run", *options, *recorded, "--with", "batch", "--with", "local", *name)
    assert run.exit_code == 0, run.output
    chosen = run.report["plan"]["chosen"]
    assert (chosen["zone"], chosen["quoted_usd_per_hour"]) == ("use2-az1", "0.298800"), (
        "the step plan asks cost.prices"
    )
    log = (run.folder / "metaflow.log").read_text()
    assert "recorded in synthetic.json (us-east-1, us-east-2 2026-09-21 08:00 UTC" in log
    assert run.folder.name == "mine" and run.report["job"] == "mine"

    before = (run.folder / "report.json").read_bytes(), (run.folder / "config.json").read_bytes()
    other = runner.run("run", *options, "--set", "model.hidden_size=96", *name)
    assert other.exit_code == 2 and "model:" in other.output and "hint:" in other.output
    elsewhere = runner.run("run", *options, "--set", f"store={tmp_path}/other", *name)
    assert elsewhere.exit_code == 2 and f"not in {tmp_path}/other" in elsewhere.output
    assert before == (
        (run.folder / "report.json").read_bytes(),
        (run.folder / "config.json").read_bytes(),
    )

    settings = json.loads((run.folder / "config.json").read_text())
    del settings["config"]["workload_options"], settings["config"]["data"]["tokenizer"]
    # As a version that did not know these keys left it
    (run.folder / "config.json").write_text(json.dumps(settings))
    diverging = {"training__learning_rate": 1e30, "training__gradient_clip_norm": "null"}
    longer = runner.run("run", *runner.options(training__max_steps=12, **few, **diverging), *name)
    assert longer.exit_code == 7, longer.output
    assert longer.report["outcome"] == "non_finite" and "rank" in longer.output
    assert [step for step, _ in longer.report["loss_curve"]] == list(
        range(1, len(longer.report["loss_curve"]) + 1)
    )
    assert 8 < len(longer.report["loss_curve"]) < 12 and longer.report["interruptions"] == 0


def test_a_store_that_fails_between_the_checks_and_the_training(tmp_path: Path) -> None:
    """It takes neither token shards nor a report: told in one line, and the report is on this
    machine all the same.
    """
    store = tmp_path / "store"
    (store / "jobs" / "mine" / "report.json").mkdir(parents=True)
    (store / "tokens").write_text("a file where a folder should be")
    runner = FlowRunner(tmp_path, store=str(store))
    run = runner.run("run", *runner.options(), "--job", "mine")
    assert run.exit_code == 1 and run.report["outcome"] == "failed", run.output
    assert str(store / "tokens") in run.report["events"]["message"]
    assert "Traceback" not in run.output
    assert f"the report is on this machine only: put {store}/jobs/mine/report.json: " in run.output
    assert {"report.html", "metrics.prom"} <= {path.name for path in run.folder.iterdir()}


def test_importing_the_flow_file_is_light_and_without_side_effects(tmp_path: Path) -> None:
    """Every task and every card refresh does it."""
    names = ("torch", "pandas", "boto3", "ebbflow.cost", "ebbflow.infra.checks")
    heavy = f"sorted(m for m in {names} if m in sys.modules)"
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import ebbflow.flows.train_flow; "
        f"print({heavy})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
    assert not list(tmp_path.iterdir())
