"""Places that can be hurt, each against what it says of itself; and the bench that goes on after
what goes wrong.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos.fault import Aim
from benchmarks.chaos.kinds import FAULTS
from benchmarks.chaos.orders import Strike
from benchmarks.chaos.places import Shimmed
from benchmarks.chaos.places import place as place_module
from benchmarks.chaos.trial import Injection, Trial
from benchmarks.soak.faults import main as soak_faults
from benchmarks.training.survival import bare as bare_module
from benchmarks.training.survival.bare import bare_figures, bare_text
from benchmarks.training.survival.campaign import Campaign, Judged, Planned, run_job
from benchmarks.training.survival.judge import Finding
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.training.errors import CheckpointError, GangError
from ebbflow.training.launch.messages import GangOutcome

SYNC = (
    "import os, sys; file = open(sys.argv[1], 'wb'); file.write(b'x'); file.flush(); "
    "os.fsync(file.fileno())"
)


@pytest.mark.skipif(bool(Shimmed.missing()), reason=Shimmed.missing())
def test_the_shim_hurts_the_store_s_files_and_no_others(tmp_path: Path) -> None:
    with Shimmed(tmp_path / "place") as place:
        inside = Path(str(place.store)) / "file"
        outside = tmp_path / "file"

        def fails(path: Path) -> str:
            return subprocess.run(
                [sys.executable, "-c", SYNC, str(path)], capture_output=True, text=True
            ).stderr

        assert not fails(inside)
        for call in ("fsync", "write"):
            place.hurt(call, errno=errno.EIO)
            assert f"[Errno {errno.EIO}]" in fails(inside) and not fails(outside)
            place.heal()
            assert not fails(inside)


def test_two_nodes_hear_each_other_by_name_until_their_link_goes_down(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.two_nodes", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=PROJECT_ROOT)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    if "refused" in told:
        pytest.skip(told["refused"])
    assert told == {"host": "ebbflow-node-0", "before": "before", "silent": True, "after": "while"}
    assert told["host"] != socket.gethostname()


@pytest.mark.parametrize("kind", ["full-disk", "partition", "slow-fsync"])
def test_a_soak_makes_no_places_and_refuses_what_needs_one(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk would be this machine's."""
    with pytest.raises(SystemExit):
        soak_faults(["--kinds", f"rank-kill,{kind}"])
    assert f"{kind}: only `bench survival`" in capsys.readouterr().err


QUIET = GangOutcome(
    outcome=Outcome.COMPLETED, step=90, message="", weights_sha256="aa", generation=1
)


def planned(*kinds: str) -> Planned:
    return [(FAULTS[kind], Aim(node=1, rank=1, number=number)) for number, kind in enumerate(kinds)]


def campaign(
    tmp_path: Path, job: Callable[[Campaign, str, Planned], Judged], told: list[int]
) -> Campaign:
    config = RunConfig(store=str(tmp_path / "store"))
    keep = lambda one: told.append(len(one.findings))  # noqa: E731
    return Campaign(
        config=config, folder=tmp_path, per_job=2, tell=lambda line: None, keep=keep, job=job
    )


def taken(batch: Planned, *, left: int = 0, weights: str = "aa") -> Judged:
    """A job that takes all but the last `left` of its faults."""
    done = batch[: len(batch) - left]
    trial = Trial(
        injections=[Injection(fault=fault, aim=aim, strike=Strike.now()) for fault, aim in done],
        left=batch[len(done) :],
        outcome=replace(QUIET, weights_sha256=weights),
    )
    seconds = {"verdict_seconds": 1.0, "back_seconds": 2.0, "caught_up_seconds": 2.0}
    right = {
        "guilty": True,
        "place": True,
        "reason": True,
        "in_time": True,
        "false_kill": False,
        "overdue": False,
    }
    return trial, [
        Finding(kind=fault.kind, target="", step=1, said="", **seconds, **right)
        for fault, _ in done
    ]


def test_faults_that_a_job_could_not_take_are_done_by_the_next(tmp_path: Path) -> None:
    jobs: list[list[str]] = []
    told: list[int] = []

    def job(_: Campaign, name: str, batch: Planned) -> Judged:
        jobs.append([fault.kind for fault, _ in batch])
        if name == "job-2":
            raise CheckpointError("the job's events cannot be read")
        return taken(batch, left=int(name == "job-1"))

    bench = campaign(tmp_path, job, told)
    bench.run(planned("rank-kill", "partition", "sleep", "exception", "full-disk", "full-disk"))
    assert jobs == [
        [],
        ["rank-kill", "sleep"],
        *[["sleep", "exception"]] * 2,
        ["partition"],
        *[["full-disk"]] * 2,
    ]
    assert sorted(found.kind for found in bench.findings) == sorted(
        ["rank-kill", "partition", "sleep", "exception", "full-disk", "full-disk"]
    )
    assert bench.wrong == [] and told == [1, 1, 3, 4, 5, 6], "figures are handed out after each job"


def test_a_fault_that_cannot_be_done_is_told_and_the_others_are_done(tmp_path: Path) -> None:
    def job(_: Campaign, name: str, batch: Planned) -> Judged:
        if batch and batch[0][0].kind == "sleep":
            return Trial(left=list(batch), errors=["nobody sleeps here"]), []
        return taken(batch, weights="bb" if name == "job-4" else "aa")

    bench = campaign(tmp_path, job, [])
    bench.run(planned("rank-kill", "rank-stop", "sleep", "exception", "busy-loop"))
    assert [found.kind for found in bench.findings] == [
        "rank-kill",
        "rank-stop",
        "exception",
        "busy-loop",
    ]
    assert "sleep was not done in 2 jobs: ['nobody sleeps here']" in bench.wrong[0]
    assert len(bench.wrong) == 2 and bench.wrong[1].startswith("job-4 ended with"), (
        "other weights are told"
    )


def test_a_tool_that_never_comes_back_costs_its_own_faults_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ip` stands still here, as in a kernel that is in trouble: no namespace is made, and none is
    taken away.
    """
    tool = tmp_path / "bin" / "ip"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexec sleep 3600\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.setattr(place_module, "TOOL_SECONDS", 0.2)

    def job(bench: Campaign, name: str, batch: Planned) -> Judged:
        if batch and batch[0][0].kind == "partition":
            return run_job(bench, name, batch)
        return taken(batch)

    bench = campaign(tmp_path, job, [])
    bench.run(planned("partition", "rank-kill"))
    assert [found.kind for found in bench.findings] == ["rank-kill"]
    [wrong] = bench.wrong
    assert wrong.startswith("partition was not done in 2 jobs: ") and "ip netns add" in wrong
    assert "not done within 0.2 s" in wrong


def test_a_case_that_torchrun_never_comes_to_is_told_and_the_others_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NeverSteps:
        def __init__(self, folder: Path, launch: str = "") -> None:
            self.processes: list[object] = []

        def await_steps(self, steps: int, seconds: float) -> None:
            raise GangError(f"bare torchrun took no {steps} steps within {seconds:g} s")

        def close(self) -> None:
            return None

    monkeypatch.setattr(bare_module, "BareScene", NeverSteps)
    figures = bare_figures([FAULTS["rank-kill"], FAULTS["sleep"]], tmp_path, cap_seconds=1.0)
    assert [case["kind"] for case in figures["cases"]] == ["rank-kill", "sleep"]
    assert "rank-kill          not done: bare torchrun took no 20 steps" in bare_text(figures)


def test_a_machine_that_takes_no_job_ends_the_bench(tmp_path: Path) -> None:
    def job(_: Campaign, name: str, batch: Planned) -> Judged:
        if not batch:
            return taken(batch)
        return (Trial(left=list(batch), errors=["no steady steps"]), [])

    bench = campaign(tmp_path, job, [])
    bench.run(planned(*["rank-kill"] * 500))
    assert (
        bench.jobs == 5
        and "faults were not done, since 5 jobs in a row took none" in bench.wrong[-1]
    )
