"""`@ebbflow` in users' own flows: killed, retried and resumed, with equal weights and with dollars."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from ebbflow.flows.own_flow.trained_model import NoCommit
from tests.support.own_flow import SOURCES, OwnFlow

pytestmark = pytest.mark.flow
SLOW = "0.1"  # seconds for each step, so that a test can interrupt


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hash of the weights with which the flow of `single.py` ends if nothing disturbs it."""
    flow = OwnFlow(tmp_path_factory.mktemp("undisturbed"), "single")
    model = flow.model(flow.succeed("run"))
    assert model.interruptions == 0
    assert model.weights_sha256
    return model.weights_sha256


def test_a_killed_step_is_retried_from_its_last_commit_and_a_second_run_starts_anew(
    tmp_path: Path, weights: str
) -> None:
    flow = OwnFlow(tmp_path, "single")
    launcher = flow.start("run", STEP_SECONDS=SLOW)
    flow.await_commit(8)
    flow.kill_task(launcher, "train")
    first = flow.finish(launcher)
    assert first.exit_code == 0, first.output
    model = flow.model(first)
    assert (model.outcome, model.steps, model.interruptions) == ("completed", 24, 1)
    assert model.weights_sha256 == weights
    assert model.usd > 0
    assert model.price_kind == "simulated"
    assert model.report["redone_steps"] < 16
    assert model.uri
    assert Path(model.uri).is_file()
    [[total]] = flow.artifacts(first, "end", "total")
    assert total != 0

    second = flow.succeed("run")
    other = flow.model(second)
    assert other.job != model.job
    assert (other.steps, other.interruptions) == (24, 0)
    assert other.weights_sha256 == weights
    assert flow.jobs == sorted([model.job, other.job])
    listed = flow.listed_jobs()
    assert listed.keys() == {model.job, other.job}
    assert float(listed[model.job]["simulated_usd"]) == pytest.approx(model.usd, abs=1e-6)
    assert listed[model.job]["state"] == "done"


def test_resume_continues_the_job_of_the_first_run_also_through_a_second_resume(
    tmp_path: Path, weights: str
) -> None:
    flow = OwnFlow(tmp_path, "single", STEP_SECONDS=SLOW)
    for words, step in ((("run",), 4), (("resume",), 12)):
        launcher = flow.start(*words)
        flow.await_commit(step)
        flow.kill_launcher(launcher)
    done = flow.succeed("resume")
    model = flow.model(done)
    assert len(flow.jobs) == 1
    assert done.pathspec.rpartition("/")[2] not in model.job
    assert (model.steps, model.interruptions) == (24, 2)
    assert model.weights_sha256 == weights


def test_a_loop_in_the_step_and_a_configured_job_run_in_branches_and_the_loop_survives_a_kill(
    tmp_path: Path,
) -> None:
    flow = OwnFlow(tmp_path, "branches")
    clean = flow.artifacts(flow.succeed("run"), "join", "models")[0][0]
    assert (clean["loop"].steps, clean["loop"].interruptions) == (24, 0)
    assert clean["loop"].price_kind.startswith("recorded usd_per_node_hour")
    assert clean["loop"].usd > 0
    assert (clean["job"].steps, clean["job"].outcome) == (8, "completed")
    assert clean["job"].best is not None

    launcher = flow.start("run", "--step-seconds", "0.1")
    flow.await_commit(8, job="-loop")
    flow.kill_task(launcher, "loop")
    done = flow.finish(launcher)
    assert done.exit_code == 0, done.output
    killed = flow.artifacts(done, "join", "models")[0][0]
    assert killed["loop"].weights_sha256 == clean["loop"].weights_sha256
    assert (killed["loop"].steps, killed["loop"].interruptions) == (24, 1)
    assert len({killed["loop"].job, killed["job"].job, clean["loop"].job, clean["job"].job}) == 4
    [[names]] = flow.artifacts(done, "end", "names")
    assert names == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_a_gang_replaces_a_killed_rank_within_the_attempt_and_a_lost_node_by_a_retry(
    tmp_path: Path,
) -> None:
    flow = OwnFlow(tmp_path, "gang")
    clean = flow.artifacts(flow.succeed("run"), "join", "models")[0][0]
    assert clean[0] == clean[1]
    assert (clean[0].steps, clean[0].interruptions) == (24, 0)

    launcher = flow.start("run", STEP_SECONDS=SLOW)
    flow.await_commit(4)
    flow.kill_rank(1)
    flow.await_commit(12)
    flow.kill_task(launcher, "train", node=1)
    done = flow.finish(launcher)
    assert done.exit_code == 0, done.output
    models = flow.artifacts(done, "join", "models")[0][0]
    assert models[0] == models[1]
    killed = models[0]
    assert killed.job != clean[0].job
    assert (killed.steps, killed.interruptions) == (24, 2)
    assert killed.weights_sha256 == clean[0].weights_sha256
    # Both nodes are paid for: $36 per hour are $0.01 per second
    seconds = killed.report["paid_rank_seconds"]
    assert killed.usd == pytest.approx(seconds / 100, rel=0.01)
    assert {lane["node"] for lane in killed.report["charts"]["lanes"]} == {0, 1}


@pytest.mark.long
def test_each_trial_of_a_nested_foreach_is_a_job_and_a_killed_one_continues(
    tmp_path: Path,
) -> None:
    flow = OwnFlow(tmp_path, "trials", STEP_SECONDS=SLOW)
    launcher = flow.start("run", "--max-workers", "2")
    flow.await_commit(4, job="-train-1-1")
    flow.kill_launcher(launcher)
    done = flow.succeed("resume", "--max-workers", "2")
    models = flow.artifacts(done, "best", "models")[0][0]
    trials = [models[rate][steps] for rate in (0.02, 0.002) for steps in (8, 12)]
    assert [trial.steps for trial in trials] == [8, 12, 8, 12]
    assert [trial.job.partition("-train-")[2] for trial in trials] == ["0-0", "0-1", "1-0", "1-1"]
    assert len({trial.weights_sha256 for trial in trials}) == 4
    assert len(flow.jobs) == 4
    assert trials[3].interruptions == 1
    assert min(trial.usd for trial in trials) > 0


def test_trials_share_a_budget_and_an_interrupted_one_continues_within_its_part(
    tmp_path: Path,
) -> None:
    flow = OwnFlow(tmp_path, "sweep", STEP_SECONDS=SLOW)
    launcher = flow.start("run", "--max-workers", "1")
    flow.await_commit(4, job="-train-0")
    flow.kill_launcher(launcher)
    done = flow.succeed("resume", "--max-workers", "2")
    [[ranking]] = flow.artifacts(done, "choose", "ranking")
    [first, *others] = ranking.trials
    assert (first.model.outcome, first.model.steps, first.model.interruptions) == (
        "completed",
        24,
        1,
    )
    assert [(trial.model.outcome, trial.model.steps) for trial in others] == [("budget", 0)] * 2
    assert 0 < first.model.usd == ranking.usd <= 10.2
    assert "of $10.2000 are left to it" in done.output
    assert "3 trials, $" in done.output
    assert "<h1>3 trials" in flow.cards("choose")["ranking"]


def test_a_config_an_environment_and_two_trainings_in_one_step_with_live_cards(
    tmp_path: Path,
) -> None:
    flow = OwnFlow(tmp_path, "configured", STEP_SECONDS="1.5", EBBFLOW_LIVE_PAGE="1")
    launcher = flow.start("run")
    assert flow.await_card("train").keys() == {"training"}
    assert not flow.has_report, "the card is live"
    done = flow.finish(launcher)
    assert done.exit_code == 0, done.output
    [[model, plain]] = flow.artifacts(done, "train", "model", "plain")
    assert model.steps == 16
    assert model.job.endswith("-tuned")
    assert plain.job == f"{model.job}-call2"
    assert (plain.commit, plain.uri, plain.outcome) == (None, None, "completed")
    with pytest.raises(NoCommit, match="nothing was saved; fix: "):
        plain.state_dict()
    assert (tmp_path / "written.txt").read_text() == "--depth=3"
    listed = flow.listed_jobs()
    assert float(listed[model.job]["limit_usd"]) == 25
    pages = flow.cards("train")
    assert pages.keys() == {"training", "training2"}
    assert model.job in pages["training"]
    assert "completed" in pages["training"]


def test_a_step_that_repeats_itself_has_a_job_per_round_and_a_complete_one_is_not_trained_again(
    tmp_path: Path,
) -> None:
    flow = OwnFlow(tmp_path, "repeated")
    failed = flow.run("run")
    assert failed.exit_code == 1
    assert "fails after its training" in failed.output
    commits = sorted(tmp_path.glob(".metaflow/ebbflow/jobs/*/commits/*/*/*"))
    (tmp_path / "fixed").touch()
    done = flow.succeed("resume")
    assert "is complete at step 8: its result is returned, nothing is trained; " in done.output
    assert sorted(tmp_path.glob(".metaflow/ebbflow/jobs/*/commits/*/*/*")) == commits
    [[models]] = flow.artifacts(done, "end", "models")
    assert [model.job[-2:] for model in models] == ["-0", "-1"]
    assert models[0].weights_sha256 == models[1].weights_sha256


@pytest.mark.long
def test_gangs_in_a_foreach_with_the_loop_in_the_step(tmp_path: Path) -> None:
    flow = OwnFlow(tmp_path, "gangs")
    done = flow.succeed("run", "--max-workers", "1")
    [[nodes]] = flow.artifacts(done, "collect", "nodes")
    assert [(rate, size) for rate, _, size in nodes] == [(0.1, 2), (0.1, 2), (0.01, 2), (0.01, 2)]
    models = [model for _, model, _ in nodes]
    assert models[0] == models[1]
    assert models[2] == models[3]
    assert len({model.job for model in models}) == 2
    assert {model.steps for model in models} == {8}
    lanes = models[0].report["charts"]["lanes"]
    assert {lane["node"] for lane in lanes} == {0, 1}


def test_a_failed_training_fails_its_step_with_the_reason_and_catch_lets_the_flow_go_on(
    tmp_path: Path,
) -> None:
    flow = OwnFlow(tmp_path, "failing")
    done = flow.succeed("run")
    [[[expensive, broken]]] = flow.artifacts(done, "join", "failures")
    assert re.search(r"budget: .* of \$0\.0500|budget: .*\$0\.05", expensive), expensive
    assert "IndexError" in broken
    states = {name.partition("-")[2]: job["state"] for name, job in flow.listed_jobs().items()}
    assert sorted(states.values()) == ["budget", "crash_loop"]


def test_a_loop_in_the_step_stops_at_its_budget_and_is_not_retried(tmp_path: Path) -> None:
    flow = OwnFlow(tmp_path, "limited")
    done = flow.run("run")
    assert done.exit_code == 1
    assert done.output.count("Task is starting.") == 2
    assert "This failed task will not be retried." in done.output
    assert "not watched" not in done.output, "the step watches its budget"
    [job] = flow.listed_jobs().values()
    assert job["state"] == "budget"
    stopped = re.search(r"budget: \$([0-9.]+) spent of \$4\.0000", done.output)
    assert stopped and 2 < float(stopped[1]) <= 4, done.output
    assert "budget" in flow.cards("train")["training"]


@pytest.mark.long
def test_a_step_with_resources_and_a_time_limit_survives_a_kill(
    tmp_path: Path, weights: str
) -> None:
    flow = OwnFlow(tmp_path, "decorated", STEP_SECONDS=SLOW)
    launcher = flow.start("run")
    flow.await_commit(8)
    flow.kill_task(launcher, "train")
    done = flow.finish(launcher)
    assert done.exit_code == 0, done.output
    model = flow.model(done)
    assert (model.steps, model.interruptions, model.weights_sha256) == (24, 1, weights)
    assert flow.artifacts(done, "end", "size") == [[146]]


def test_a_flow_of_a_notebooks_cell_trains_and_its_model_is_loaded_in_the_next_cell(
    tmp_path: Path, weights: str
) -> None:
    flow = OwnFlow(tmp_path, "single")
    cell = flow.file.read_text().partition("if __name__")[0]
    # Metaflow runs the class of the cell that makes the runner
    [printed] = flow.notebook(
        f"{cell}\nfrom metaflow import NBRunner\nrun = NBRunner(SingleFlow, base_dir='.').nbrun()",
        "model = run['train'].task.data.model\nprint(model.weights_sha256, len(model.state_dict()))",
    )
    assert printed.split() == [weights, "4"]


def test_an_environment_without_ebbflow_trains_with_what_the_code_package_brings(
    tmp_path: Path, weights: str
) -> None:
    """As Metaflow runs a step locally with --environment=pypi: its interpreter has the packages
    that the step names, and ours, and PYTHONPATH leads into the unpacked code package.
    """
    flow = OwnFlow(tmp_path / "project", "single")
    flow.succeed("package", "save", "code.tgz")
    package = tmp_path / "package"
    with tarfile.open(flow.folder / "code.tgz") as archive:
        archive.extractall(package, filter="data")
    python = make_environment_without_ebbflow(tmp_path / "environment")
    code = package / ".mf_code"
    environment = flow.environment | {
        "PYTHONPATH": str(code),
        "METAFLOW_EXTRACTED_ROOT": str(package),
    }
    done = subprocess.run(
        [python, "single.py", "run"],
        cwd=package,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [manifest] = package.glob(".metaflow/ebbflow/jobs/*/report.json")
    assert json.loads(manifest.read_text())["weights_sha256"] == weights


def make_environment_without_ebbflow(folder: Path) -> Path:
    """Make a virtual environment with this one's packages but ebbflow; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = folder / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "ebbflow" not in path.name:
            (packages / path.name).symlink_to(path)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


@pytest.mark.parametrize("name", sorted(path.stem for path in SOURCES.glob("*.py")))
def test_a_flow_changes_at_most_four_lines_for_each_step_that_trains(name: str) -> None:
    source = (SOURCES / f"{name}.py").read_text()
    lines = [line for line in source.splitlines() if re.search(r"\bebbflow\b", line)]
    steps = sum(line.strip().startswith("@ebbflow") for line in lines)
    assert steps == 0 or len(lines) <= 4 * steps, lines


def test_runner_and_a_notebook_in_another_folder_use_the_flow_and_its_model(
    tmp_path: Path, weights: str
) -> None:
    flow = OwnFlow(tmp_path / "project", "single")
    code = (
        "from metaflow import Runner\n"
        "with Runner('single.py').run(lr=0.02) as running:\n"
        "    assert running.status == 'successful', running.stderr\n"
        "    model = running.run['train'].task.data.model\n"
        "import os; os.chdir('..')\n"
        "path = model.export('safetensors', 'model.safetensors')\n"
        "from safetensors.torch import load_file\n"
        "print(model.weights_sha256, len(load_file(path)), model.run_report.outcome)\n"
    )
    output = flow.python(code)
    assert output.splitlines()[-1] == f"{weights} 4 completed"
