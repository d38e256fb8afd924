"""Which lines are evidence: episodes of a job, sound logs, and sentences that only speak about a
fault.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from ebbflow.core.errors import Outcome
from ebbflow.core.events import NOTICE
from ebbflow.core.rank_logs import LogLine
from ebbflow.diagnose.evidence import Evidence
from ebbflow.diagnose.job import diagnose_job
from ebbflow.diagnose.judging import Diagnosis, diagnose_files, judge
from ebbflow.diagnose.matching import is_no_evidence
from ebbflow.diagnose.reading import LogText
from ebbflow.infra.__main__ import main
from tests.support.timelines import GangLog, event

BANNER = "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default"
OOM = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
FULL = "OSError: [Errno 28] No space left on device: '/scratch/step_200.pt'"
SPOT = "EC2 spot interruption notice: action terminate at 2026-11-28T10:02:00Z"
REFUSED = (
    "An error occurred (InsufficientInstanceCapacity) when calling the RunInstances operation: "
    "We currently do not have sufficient p4d.24xlarge capacity"
)
EXITED = "torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank: 0"


def steps(first: int, last: int) -> list[str]:
    return [f"step {step} loss {3 - step / 1000:.4f}" for step in range(first, last)]


def diagnose(lines: list[str]) -> Diagnosis:
    evidence = Evidence()
    evidence.read(LogText("log", number, line) for number, line in enumerate(lines, 1))
    return judge(evidence)


def roles(diagnosis: Diagnosis) -> dict[str, str]:
    return {finding.rule.id: finding.role for finding in diagnosis.findings}


@pytest.mark.parametrize(
    "again",
    [
        [BANNER],
        ["[default] Worker group FAILED. 2/3 attempts left; will restart worker group"],
        ["srun: Job 991 has been requeued"],
        ["Resuming from checkpoint step 40"],
        ["[17/train/2 (pid 99)] Task is starting."],
    ],
)
def test_only_the_last_episode_of_a_log_is_judged(again: list[str]) -> None:
    first = ["[17/train/2 (pid 31)] Task is starting.", *steps(0, 60), OOM, EXITED]
    found = roles(diagnose([*first, *again, *steps(40, 70), FULL]))
    assert found["H10"] == "root"
    assert found.get("C01") in (None, "history")


def test_a_step_counter_that_falls_back_begins_no_episode_alone() -> None:
    epochs = [*steps(0, 40), "epoch 2", *steps(0, 2)]
    lines = [*steps(0, 40), FULL, "epoch 2", "step 0 loading"]
    assert roles(diagnose(lines))["H10"] == "root"
    assert diagnose([*epochs, FULL]).findings[0].rule.id == "H10"


def test_the_banner_of_another_node_begins_no_episode() -> None:
    lines = ["ModuleNotFoundError: No module named 'flash_attn'", BANNER, "node 1 is ready"]
    assert roles(diagnose(lines))["A01"] == "root"


def test_an_episode_that_shows_nothing_leaves_the_failure_before_it() -> None:
    assert roles(diagnose([*steps(0, 20), OOM, EXITED, BANNER]))["C01"] == "root"


@pytest.mark.parametrize("told", [SPOT, REFUSED])
def test_a_notice_that_training_survived_is_no_root_beside_another_failure(told: str) -> None:
    assert roles(diagnose([*steps(0, 20), told, *steps(20, 40), OOM]))["C01"] == "root"
    assert "root" not in roles(diagnose([told, *steps(0, 40), "Training completed"])).values()
    assert "root" in roles(diagnose([*steps(0, 20), told])).values()


def test_the_last_folder_of_attempts_is_judged(tmp_path: Path) -> None:
    for folder, line in (("attempt_0", OOM), ("attempt_1", FULL)):
        (tmp_path / folder / "0").mkdir(parents=True)
        (tmp_path / folder / "0" / "stderr.log").write_text(line)
    found = roles(diagnose_files(sorted(tmp_path.rglob("*.log"))))
    assert found == {"H10": "root", "C01": "history"}


@pytest.mark.parametrize(
    "line",
    [
        "metrics: node 0 at http://host:9462/metrics (metrics.port 9461 is taken)",
        "INFO: on CUDA out of memory the batch is halved",
        "INFO: will retry if No space left on device",
        "the agent watches for CUDA out of memory and restarts the rank",
        "checked: no CUDA out of memory so far",
        "on_oom: retry after 'CUDA out of memory'",
        "  --retry-on TEXT   for example 'No space left on device'",
        "TrainingArguments(on_error='CUDA out of memory', lr=0.1)",
        "UserWarning: Failed to load image Python extension: libjpeg.so.8 cannot open shared object",
        "WARNING: could not load dynamic library libnvinfer.so.7",
        "root: a GPU is out of memory  [C01, memory, confidence 90%]",
        "  fix: lower the micro-batch: CUDA out of memory",
    ],
)
def test_a_line_that_only_speaks_about_a_fault_is_no_evidence(line: str) -> None:
    diagnosis = diagnose([line, "epoch 1 done"])
    assert not diagnosis.findings, diagnosis.findings


@pytest.mark.parametrize(
    ("line", "symptom"),
    [
        ("Exception raised when CUDA error: an illegal memory access was encountered", "K01"),
        ("ImportError: libcudart.so.11.0: cannot open shared object file", "A26"),
        ("training failed on CUDA out of memory", "C01"),
        ("[rank1]: OSError: [Errno 28] No space left on device", "H10"),
        ("ERROR: not enough room: No space left on device", "H10"),
    ],
)
def test_a_line_that_tells_of_a_fault_is_evidence(line: str, symptom: str) -> None:
    assert symptom in roles(diagnose([line]))


def test_help_texts_raise_no_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [get_args_parser().format_help()]
    for name in ("diagnose", "explain", "bundle", "preflight"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        texts.append(capsys.readouterr().out)
    for text in texts:
        diagnosis = diagnose(text.splitlines())
        assert not any(finding.role == "root" for finding in diagnosis.findings), text


def test_a_job_of_ours_that_ended_well_has_no_root() -> None:
    gang = GangLog(1, 1.0, [[0], [1]])
    gang.steps(1, 30, useful_step=0.1)
    gang.ended(Outcome.COMPLETED, 9.0)
    texts = ["metrics: port 9461: OSError: [Errno 98] Address already in use", OOM, FULL]
    lines = []
    for at, text in enumerate(texts):
        stamp = f"2026-11-28T10:00:{at:02d}.000Z"
        record = LogLine(
            t=stamp,
            job="j",
            generation=1,
            node=0,
            rank=0,
            step=3,
            phase=None,
            text=text,
            start=at,
            end=at,
        )
        lines.append(record)
    outcome = event("outcome", 9.5, outcome=Outcome.COMPLETED, step=30)
    assert not diagnose_job([*gang.events, outcome], lines).findings
    assert diagnose_job(gang.events, lines).findings
    notice = event(NOTICE, 2.0, generation=1, source="imds", action="terminate", does="leave")
    survived = roles(diagnose_job([*gang.events, notice, outcome], lines))
    assert survived == {"I01": "history"}


def test_settings_and_messages_of_ours_are_no_evidence() -> None:
    assert is_no_evidence("step 26/100 · 26% · loss 2.9833 · 5,113 tok/s · ETA 0:30")
    assert not is_no_evidence(
        "ebbflow.training.errors.CheckpointError: 2 saves in a row have failed"
    )


@pytest.mark.parametrize("seed", ["0", "1"])
@pytest.mark.slow
def test_the_answers_do_not_depend_on_the_seed_of_hashes(seed: str) -> None:
    """The golden answers are written as `tests/support/diagnosis_answers.py` says."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.support.diagnosis_answers"]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    golden = json.loads((root / "tests/golden/diagnosis.json").read_text(encoding="utf-8"))
    assert json.loads(done.stdout) == golden
