"""All injections of one bench, job after job.

A fault that a job could not take is tried in the next one. A job that fails is reported and not
repeated for ever. The findings so far are handed out after each job.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.fault import Aim, Fault
from benchmarks.chaos.trial import Trial, run_trial
from benchmarks.training.survival.job import make_scene
from benchmarks.training.survival.judge import Finding, judge
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError
from ebbflow.core.events import read_events
from ebbflow.training.errors import TrainingError
from ebbflow.training.launch.messages import GangOutcome

Planned = list[tuple[Fault, Aim]]
Judged = tuple[Trial, list[Finding]]
_TRIES = 2  # jobs in which a fault is tried first of all
_BARREN_JOBS = 5  # in a row: then it is not the faults that cannot be done
_TAIL_LINES = 20


@dataclass
class Campaign:
    """config: of every job. folder: for all that they leave behind. per_job: the most faults of one
    job.

    tell: takes lines. keep: is called after each job. job: runs one, by name; without faults it is
    the quiet one. wrong: jobs that did not end as the quiet one, and faults that were not done.
    """

    config: RunConfig
    folder: Path
    per_job: int
    tell: Callable[[str], None]
    keep: Callable[[Campaign], None]
    job: Callable[[Campaign, str, Planned], Judged] = field(default_factory=lambda: run_job)
    findings: list[Finding] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    jobs: int = 0

    def run(self, plan: Planned) -> None:
        """Raises TrainingError where not even a quiet job comes to its end."""
        quiet = self._quiet()
        left = list(plan)
        tried = 0
        barren = 0
        while left:
            trial = self._job(left[: self.per_job], quiet)
            left = trial.left + left[self.per_job :]
            if trial.injections:
                tried = 0
                barren = 0
            else:
                tried += 1
                barren += 1
            if barren >= _BARREN_JOBS:
                self.wrong.append(
                    f"{len(left)} faults were not done, since {barren} jobs in a row took none"
                )
                left = []
            elif tried >= _TRIES and left:
                fault, _ = left.pop(0)
                tried = 0
                self.wrong.append(
                    f"{fault.kind} was not done in {_TRIES} jobs: {trial.errors[-1:]}"
                )
            self.keep(self)

    def _quiet(self) -> GangOutcome:
        trial, _ = self.job(self, "quiet", [])
        if trial.outcome is None:
            raise TrainingError(f"the quiet job did not come to its end: {trial.errors[-1:]}")
        self.tell(f"quiet job: step {trial.outcome.step}, weights {trial.outcome.weights_sha256}")
        return trial.outcome

    def _job(self, batch: Planned, quiet: GangOutcome) -> Trial:
        self.jobs += 1
        name = f"job-{self.jobs}"
        try:
            trial, found = self.job(self, name, batch)
        except (InfraError, TrainingError, OSError) as error:
            trial = Trial(left=list(batch), errors=[f"{type(error).__name__}: {error}"])
            found = []
        for finding in found:
            times = f"{_short(finding.verdict_seconds)} {_short(finding.back_seconds)}"
            self.tell(f"  {finding.kind:18} {times} {finding.said}")
        for error in trial.errors:
            self.tell(f"  ended: {(error.splitlines() or [''])[0][:200]}")
        self.findings += found
        self._compare(name, trial, quiet)
        return trial

    def _compare(self, job: str, trial: Trial, quiet: GangOutcome) -> None:
        """A job that took no fault and has no outcome is no evidence of anything."""
        ended = trial.outcome
        before = len(self.wrong)
        if ended is not None and (ended.step, ended.weights_sha256) != (
            quiet.step,
            quiet.weights_sha256,
        ):
            self.wrong.append(f"{job} ended with {ended}")
        elif ended is None and trial.injections:
            self.wrong.append(f"{job} did not come to its end: {trial.errors[-1:]}")
        if len(self.wrong) > before:
            self.tell(_tail(self.folder / job / "output.log"))
        for rest in (self.folder / job, Path(self.config.store) / "jobs" / job):
            shutil.rmtree(rest, ignore_errors=True)


def run_job(campaign: Campaign, name: str, batch: Planned) -> Judged:
    """Run one job under the faults of its batch, and judge each of them by the job's events."""
    scene = make_scene(campaign.config, campaign.folder, name)
    trial = run_trial(scene, batch, campaign.tell)
    return trial, judge(trial, read_events(scene.store))


def _short(seconds: float | None) -> str:
    if seconds is None:
        return "    –"
    return f"{seconds:5.1f}"


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError as error:
        return f"  no output: {error}"
    return "\n".join(f"  | {line[:200]}" for line in lines)
