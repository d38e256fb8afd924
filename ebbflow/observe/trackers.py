"""Trackers of experiments (W&B, MLflow, TensorBoard and JSON Lines) behind one interface.

A tracker is fed from the event log by one process (`ebbflow.observe`), never by a rank. So it
cannot slow training, and all attempts of a job are one run.
"""

# The libraries are optional, and TensorBoard's classes are made by protobuf when they are imported.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ebbflow.core.config.schema import TrackerConfig
from ebbflow.core.errors import InfraError, Outcome

_LONGEST_TEXT = 500  # characters of a setting; MLflow accepts 6,000
# Limits of one request
_MLFLOW_METRICS = 1000
_MLFLOW_PARAMETERS = 100


class TrackerError(InfraError):
    """Error: a tracker cannot be used, for example because its package is missing."""

    outcome = Outcome.CONFIG


class Point(NamedTuple):
    """The metrics of one training step."""

    step: int
    t_wall: float  # Unix time in seconds
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A job as trackers show it: as a single run, even if it has several attempts."""

    id: str  # the same in all attempts
    name: str
    report: str  # path or URI of the report
    folder: Path  # folder for trackers that write files
    settings: Mapping[str, str] = field(default_factory=dict)  # configuration by dotted key


class Tracker(Protocol):
    """A destination of metrics.

    Each method may block, and may raise any exception if the destination fails.
    """

    place: str  # where the user finds the run

    def open(self, sent: int, /) -> int:
        """Open the run at the destination, and return the last step that it has.

        `sent` is the last step that was sent to it, as far as is known.
        """
        ...

    def log(self, points: Sequence[Point]) -> None:
        """Write points, which are durable when this returns.

        Their steps increase and follow the last step.
        """
        ...

    def conclude(self, facts: Mapping[str, float | str]) -> None:
        """Write the job's totals and its outcome."""
        ...

    def close(self) -> None: ...


def make_tracker(config: TrackerConfig, run: TrackedRun) -> Tracker:
    """Create the tracker that a configuration describes.

    Raises TrackerError if its package or its secret is missing.
    """
    kind, package = _KINDS[config.type]
    try:
        return kind(config, run)
    except ImportError as error:
        fix = f"pip install {package}" + (
            " sqlalchemy alembic" if error.name in ("sqlalchemy", "alembic") else ""
        )
        raise TrackerError(f"{error.name or package} is not installed; fix: {fix}") from error


class _JsonLines:
    def __init__(self, config: TrackerConfig, run: TrackedRun) -> None:
        self._run = run
        self._path = Path(config.folder or run.folder) / "metrics.jsonl"
        self.place = str(self._path)

    def open(self, _sent: int) -> int:
        """Cut the file at its first damaged line, if there is one.

        If a process was killed while writing, this is the last line.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        last = 0
        end = 0
        with open(self._path, "ab+") as file:
            file.seek(0)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                for line in file:
                    step = int(json.loads(line)["step"])
                    if not line.endswith(b"\n"):
                        break
                    last = step
                    end = end + len(line)
            file.truncate(end)
        return last

    def log(self, points: Sequence[Point]) -> None:
        lines = [
            json.dumps({"step": point.step, "time": round(point.t_wall, 3), **point.values})
            for point in points
        ]
        with open(self._path, "a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def conclude(self, facts: Mapping[str, float | str]) -> None:
        known = {
            "run": self._run.id,
            "report": self._run.report,
            **facts,
            "settings": self._run.settings,
        }
        self._path.with_name("run.json").write_text(json.dumps(known, indent=1) + "\n")

    def close(self) -> None:
        """Do nothing, since the file is closed after each write."""


class _TensorBoard:
    def __init__(self, config: TrackerConfig, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.place = str(
            Path(config.folder) / run.id if config.folder else run.folder / "tensorboard"
        )
        self._run = run
        self._make = EventFileWriter

    def open(self, sent: int) -> int:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer = self._make(self.place)
        self._last = sent
        # Readers drop what an earlier file has from this step on.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=sent + 1, session_log=start))
        return sent

    def log(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            values = [
                Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            self._writer.add_event(
                Event(wall_time=point.t_wall, step=point.step, summary=Summary(value=values))
            )
            self._last = point.step
        self._writer.flush()

    def conclude(self, facts: Mapping[str, float | str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        text = "\n".join(
            f"- {name}: {value}" for name, value in {"report": self._run.report, **facts}.items()
        )
        value = Summary.Value(
            tag="ebbflow/report",
            metadata=create_summary_metadata("ebbflow/report", "totals of the job"),
            tensor=make_tensor_proto([text.encode()]),
        )
        self._writer.add_event(
            Event(wall_time=time.time(), step=self._last, summary=Summary(value=[value]))
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _MLflow:
    def __init__(self, config: TrackerConfig, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the sender retries
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        if token := _secret(config):
            os.environ["MLFLOW_TRACKING_TOKEN"] = token
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(config.url)
        self._run = run
        self._project = config.project
        self.place = config.url or os.environ.get("MLFLOW_TRACKING_URI") or "MLflow"

    def open(self, _sent: int) -> int:
        from mlflow.entities import Param

        client = self._client
        experiment = client.get_experiment_by_name(self._project)
        if experiment is None:
            number = client.create_experiment(self._project)
        else:
            number = experiment.experiment_id
        found = client.search_runs(
            [number], filter_string=f"tags.`ebbflow.run` = '{self._run.id}'", max_results=1
        )
        if found:
            self._id = found[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return int(found[0].data.tags.get("ebbflow.last_step", 0))
        tags = {"ebbflow.run": self._run.id, "ebbflow.report": self._run.report}
        self._id = client.create_run(number, tags=tags, run_name=self._run.name).info.run_id
        settings = [
            Param(key, str(value)[:_LONGEST_TEXT]) for key, value in self._run.settings.items()
        ]
        for first in range(0, len(settings), _MLFLOW_PARAMETERS):
            client.log_batch(self._id, params=settings[first : first + _MLFLOW_PARAMETERS])
        return 0

    def log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric, RunTag

        batch: list[Any] = []
        for number, point in enumerate(points, start=1):
            batch += [
                Metric(name, value, int(1000 * point.t_wall), point.step)
                for name, value in point.values.items()
            ]
            if number < len(points):
                following = len(points[number].values)
            else:
                following = _MLFLOW_METRICS
            if len(batch) + following > _MLFLOW_METRICS:
                tag = RunTag("ebbflow.last_step", str(point.step))
                self._client.log_batch(self._id, metrics=batch, tags=[tag])
                batch = []

    def conclude(self, facts: Mapping[str, float | str]) -> None:
        for name, value in facts.items():
            self._client.set_tag(self._id, name.replace("/", "."), str(value))
        if outcome := facts.get("ebbflow/outcome"):
            status = {"completed": "FINISHED", "interrupted": "KILLED"}.get(str(outcome), "FAILED")
            self._client.set_terminated(self._id, status)

    def close(self) -> None:
        """Do nothing, since each request is complete by itself."""


class _WandB:
    def __init__(self, config: TrackerConfig, run: TrackedRun) -> None:
        import wandb

        self._run = run
        self._config = config
        given: dict[str, Any] = {"api_key": _secret(config), "base_url": config.url}
        self._settings = wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            init_timeout=30,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            program="ebbflow",
            host="ebbflow",
            **{name: value for name, value in given.items() if value},
        )
        self.place = "W&B"

    def open(self, sent: int) -> int:
        import wandb

        if self._config.folder:
            folder = Path(self._config.folder)
        else:
            folder = self._run.folder
        folder.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb.init(
            project=self._config.project,
            id=self._run.id,
            name=self._run.name,
            resume="allow",
            dir=folder,
            notes=f"report: {self._run.report}",
            settings=self._settings,
        )
        self._wandb.config.update(dict(self._run.settings), allow_val_change=True)
        # `wandb sync` sends those that are not sent, oldest first
        attempts = Path(self._wandb.dir).parents[1]
        self.place = self._wandb.url or f"offline; send it with: wandb sync {attempts}"
        return max(sent, self._wandb.step - 1)

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._wandb.log(point.values, step=point.step, commit=True)

    def conclude(self, facts: Mapping[str, float | str]) -> None:
        self._wandb.summary.update({"ebbflow/report": self._run.report, **facts})

    def close(self) -> None:
        self._wandb.finish()


_KINDS = {
    "jsonl": (_JsonLines, ""),
    "tensorboard": (_TensorBoard, "tensorboard"),
    "mlflow": (_MLflow, "mlflow"),
    "wandb": (_WandB, "wandb"),
}


def _secret(config: TrackerConfig) -> str | None:
    """Return the secret in the environment variable that `key_env` names, or None without
    `key_env`.

    Raises TrackerError if the variable is not set.
    """
    if config.key_env is None:
        return None
    if not os.environ.get(config.key_env):
        raise TrackerError(f"the environment variable {config.key_env} (key_env) is not set")
    return os.environ[config.key_env]
