"""Lines are found again: by place, around a step, on this machine and in the store that the job was
told of.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ebbflow.core.layout import job_prefix
from ebbflow.core.rank_logs import LogFilter, LogLine, filter_lines, read_logs, utc_text
from ebbflow.core.store import Store
from ebbflow.infra.__main__ import main
from tests.support.rank_logs import three_ranks

ROOT = Path(__file__).resolve().parents[2]


def test_lines_are_chosen_by_place_and_around_a_step(tmp_path: Path) -> None:
    three_ranks(tmp_path)
    lines = read_logs([tmp_path], []).lines
    assert len(lines) == 3 * (3 + 11) and [line.t for line in lines] == sorted(
        line.t for line in lines
    )
    assert {line.text for line in filter_lines(lines, LogFilter(rank=1, generation=1))} == {
        f"g1 r1 s{s}" for s in (10, 11, 12)
    }
    assert {line.rank for line in filter_lines(lines, LogFilter(node=1))} == {2}
    assert [line.text for line in filter_lines(lines, LogFilter(rank=0, lines=2))] == [
        "g2 r0 s19",
        "g2 r0 s20",
    ]
    near = [line.text for line in filter_lines(lines, LogFilter(rank=0, around_step=12, lines=1))]
    assert near == ["g1 r0 s11", "g1 r0 s12", "g2 r0 s11", "g2 r0 s12", "g2 r0 s13"]
    beyond = [line.text for line in filter_lines(lines, LogFilter(around_step=99, rank=2, lines=1))]
    assert beyond == ["g2 r2 s19", "g2 r2 s20"], "only the generation that came as near as any"


def command(runs: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "infra", "logs", *words],
        cwd=ROOT,
        env={
            "EBBFLOW_RUNS": str(runs),
            "PATH": "/usr/bin:/bin",
            "AWS_EC2_METADATA_DISABLED": "true",
            "HOME": str(runs),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_the_logs_command_finds_a_job_locally_and_in_the_given_store(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    three_ranks(runs / "demo")
    (runs / "latest").symlink_to("demo")
    store = Store.open(str(tmp_path / "store"))
    line = LogLine(
        t=utc_text(0),
        job="demo",
        generation=1,
        node=7,
        rank=9,
        step=3,
        phase=None,
        text="far",
        start=0,
        end=4,
    )
    store.sub(job_prefix("demo")).put(
        "logs/000001/7-9-000000.ab.jsonl", line.to_json().encode() + b"\n"
    )
    (runs / "demo" / "job.json").write_text(
        json.dumps({"schema": 1, "job": "demo", "store": store.uri})
    )
    far = "1970-01-01T00:00:00.000Z g1 n7 r9 step 3 | far"
    everything = command(runs, "latest")
    assert (
        everything.returncode == 0
        and everything.stdout.splitlines()[0] == far
        and not everything.stderr
    )
    assert len(everything.stdout.splitlines()) == 43
    last = command(
        runs,
        "demo",
        "--rank",
        "1",
        "--generation",
        "1",
        "--around",
        "step:12",
        "--lines",
        "1",
        "--json",
    )
    assert [json.loads(text)["text"] for text in last.stdout.splitlines()] == [
        "g1 r1 s11",
        "g1 r1 s12",
    ]
    elsewhere = command(tmp_path / "other", "demo", "--store", store.uri)
    assert elsewhere.stdout.splitlines() == [far] and not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_store_that_does_not_answer_leaves_what_this_machine_has(tmp_path: Path) -> None:
    three_ranks(tmp_path / "demo")
    (tmp_path / "demo" / "job.json").write_text(
        '{"schema": 1, "job": "demo", "store": "s3://bucket-without-credentials/x"}'
    )
    done = command(tmp_path, "demo", "--lines", "1")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    assert "shown is what this machine has, the job's store does not answer" in done.stderr
    nowhere = command(tmp_path, "other", "--store", "s3://bucket-without-credentials/x")
    assert (nowhere.returncode == 0, nowhere.stdout) == (
        False,
        "",
    ) and "credentials" in nowhere.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nobody"], 2, "no job 'nobody' to be found; looked at"),
        (
            ["demo", "--rank", "8"],
            1,
            "no line matches; job demo has 42 lines; generations 1, 2; nodes 0, 1; ranks 0",
        ),
        (["demo", "--around", "120"], 2, "'120' is not step:N, such as step:120"),
        (["demo", "--lines", "0"], 2, "'0' is not a number of lines"),
    ],
)
def test_the_logs_command_reports_a_missing_job_in_one_line(
    words: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    three_ranks(tmp_path / "demo")
    monkeypatch.setenv("EBBFLOW_RUNS", str(tmp_path))
    try:
        found = main(["logs", *words])
    except SystemExit as exit_:  # argparse's way
        found = exit_.code
    shown = capsys.readouterr()
    assert (found, shown.out) == (code, "") and said in shown.err
    assert not (tmp_path / "nobody").exists() and not (tmp_path / "jobs").exists(), (
        "looking made a folder"
    )
