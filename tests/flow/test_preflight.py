"""The preflight mechanism: side by side, each within its deadline, nothing hides, and the command
tells by its exit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config import RunConfig
from ebbflow.core.preflight import (
    Check,
    CheckFinding,
    CheckResult,
    PreflightContext,
    failed_results,
    render_results,
    run_checks,
)

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = PreflightContext(config=RunConfig(), project_root=ROOT)


def check(name: str, run: Callable[[PreflightContext], CheckFinding], **changes: Any) -> Check:
    fields = {"severity": "error", "tier": "quick", "deadline_seconds": 20.0, "symptoms": ("A05",)}
    return Check(id=name, title=f"the {name} check", run=run, **(fields | changes))


def passes(context: PreflightContext) -> CheckFinding:
    return CheckFinding.passed("all is well")


def fails(context: PreflightContext) -> CheckFinding:
    return CheckFinding.failed("it is not there\nnor there", "put it there\nor there")


def preflight(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "infra", "preflight", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def test_checks_run_side_by_side_and_answer_in_their_order() -> None:
    meeting = threading.Barrier(4)

    def meets(context: PreflightContext) -> CheckFinding:
        meeting.wait(timeout=15)  # broken unless all four are under way at once
        return CheckFinding.passed("met the others")

    results = run_checks([check(name, meets) for name in "dbca"], CONTEXT)
    assert [(result.id, result.status) for result in results] == [
        (name, "passed") for name in "dbca"
    ]


def test_a_hanging_check_is_reported_and_delays_no_other() -> None:
    release = threading.Event()

    def hangs(context: PreflightContext) -> CheckFinding:
        release.wait()
        return CheckFinding.passed("too late")

    hung, other = run_checks(
        [check("hung", hangs, deadline_seconds=0.2), check("other", passes)], CONTEXT
    )
    release.set()
    assert (hung.status, hung.detail) == ("failed", "did not answer within 0.2 s")
    assert hung.fix
    assert other.status == "passed"


def test_a_check_that_computes_on_a_busy_machine_is_waited_for_within_bounds() -> None:
    def computes(context: PreflightContext, seconds: float) -> CheckFinding:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
        return CheckFinding.passed("computed")

    slow, endless = run_checks(
        [
            check("slow", partial(computes, seconds=0.6), deadline_seconds=0.1),
            check("endless", partial(computes, seconds=4.0), deadline_seconds=0.1),
        ],
        CONTEXT,
    )
    assert (slow.status, slow.detail) == ("passed", "computed")
    assert endless.status == "failed"
    assert endless.detail.startswith("still computes after 1.2 s, at a load of ")


def test_checks_that_hang_do_not_add_up_and_are_told_from_one_that_computes() -> None:
    release = threading.Event()

    def hangs(context: PreflightContext) -> CheckFinding:
        release.wait()
        return CheckFinding.passed("too late")

    def computes(context: PreflightContext) -> CheckFinding:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            sum(range(1000))
        return CheckFinding.passed("computed")

    hung = [check(f"hung-{number}", hangs, deadline_seconds=0.3) for number in range(8)]
    began = time.monotonic()
    first, *others = run_checks([check("slow", computes, deadline_seconds=0.2), *hung], CONTEXT)
    took = time.monotonic() - began
    release.set()
    assert first.status == "passed"
    assert {result.detail for result in others} == {"did not answer within 0.3 s"}
    assert took < 6.0


def test_a_check_that_hangs_keeps_no_process_from_ending() -> None:
    code = (
        "import time; from tests.flow.test_preflight import *\nresults = "
        "run_checks([check('hung', lambda c: time.sleep(3600), deadline_seconds=0.1)], CONTEXT)\n"
        "print(results[0].status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "failed\n"), done.stderr


@pytest.mark.parametrize("error", [ValueError("no such thing"), SystemExit(0), KeyboardInterrupt()])
def test_a_check_that_raises_fails_with_the_place(error: BaseException) -> None:
    def raises(context: PreflightContext) -> CheckFinding:
        raise error

    broken, other = run_checks([check("broken", raises), check("other", passes)], CONTEXT)
    assert broken.status == "failed"
    assert (
        f"the check itself raised {type(error).__name__}: {str(error) or 'no text'}"
        in broken.detail
    )
    assert "test_preflight.py:" in broken.fix
    assert other.status == "passed"


def test_only_errors_block_and_the_text_shows_each_with_its_fix() -> None:
    checks = [
        check("good", passes),
        check("bad", fails),
        check("risky", fails, severity="warning"),
        check("elsewhere", lambda _: CheckFinding.skipped("there is no such device")),
    ]
    results = run_checks(checks, CONTEXT)
    assert [result.id for result in failed_results(results)] == ["bad"]
    assert render_results(results) == (
        "ok    good       all is well\n"
        "FAIL  bad        it is not there\n"
        "                 nor there\n"
        "                 fix: put it there\n"
        "                      or there\n"
        "warn  risky      it is not there\n"
        "                 nor there\n"
        "                 fix: put it there\n"
        "                      or there\n"
        "skip  elsewhere  skipped, because there is no such device\n"
        "preflight: 1 passed, 1 failed, 1 warned, 1 skipped"
    )


def test_results_are_plain_data() -> None:
    results = run_checks([check("bad", fails, symptoms=("A05", "A06"))], CONTEXT)
    document = json.loads(json.dumps([result.to_json() for result in results]))
    assert document[0]["symptoms"] == ["A05", "A06"]
    assert [CheckResult.from_json(data) for data in document] == results


def test_the_quick_tier_can_run_alone_and_ids_are_unique() -> None:
    checks = [check("slow", passes, tier="full"), check("fast", passes)]
    assert [result.id for result in run_checks(checks, CONTEXT, quick_only=True)] == ["fast"]
    with pytest.raises(ValueError, match="share an id"):
        run_checks([check("one", passes), check("one", passes)], CONTEXT)


def test_the_command_passes_the_default_job_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = preflight("--set", "store=store/of/mine", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert (done.returncode, document["exit_code"], document["outcome"]) == (0, 0, None), (
        done.stdout + done.stderr
    )
    statuses = {result["id"]: result["status"] for result in document["results"]}
    assert not {"failed"} & set(statuses.values())
    assert statuses["store-probe"] == statuses["imports"] == statuses["dataset"] == "passed"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "id_of_check"),
    [
        ("cost.budget_usd=0.0001", "budget-deadline"),
        ("cost.deadline_hours=0.0001", "budget-deadline"),
        ("data.path=nowhere", "dataset"),
        ("cluster.instance_types=[abacus]", "planned-memory"),
        ("store=/dev/null/store", "store-folder"),
    ],
)
def test_the_command_exits_3_with_the_fix_when_a_check_stops_the_job(
    tmp_path: Path, override: str, id_of_check: str
) -> None:
    done = preflight("--quick", "--set", "store=store", "--set", override, cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    at = next(
        number for number, line in enumerate(lines) if line.startswith(f"FAIL  {id_of_check} ")
    )
    assert "fix: " in lines[at + 1]
    assert list(tmp_path.iterdir()) == []


def test_the_command_exits_2_for_a_configuration_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("model:\n  hidden_size: 770\n  num_heads: 12\n")
    done = preflight("bad.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "bad.yaml:2:16: model.hidden_size must be divisible by model.num_heads: 770 = 12 × 64"
    )
    done = preflight("bad.yaml", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert (done.returncode, document["exit_code"], document["outcome"]) == (2, 2, "config")
    assert document["problems"][0]["place"]["column"] == 16
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


def test_the_quick_tier_imports_nothing_heavy() -> None:
    code = (
        "import sys, ebbflow.infra.__main__ as command; command.main(['preflight', '--quick'])\n"
        "print([name for name in ('torch', 'pandas', 'metaflow', 'boto3') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
