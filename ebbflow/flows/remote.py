"""Metaflow's settings for AWS Batch and Kubernetes, and reasons to refuse a run.

Used before Metaflow is imported.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError
from ebbflow.core.store.s3 import aws_settings
from ebbflow.flows.command_line import CommandLine, option_values
from ebbflow.infra.aws.account import metaflow_setting

if TYPE_CHECKING:
    from ebbflow.core.preflight import Target

# Seconds for which the Batch job of a step around training may wait for capacity
# (`attempts/submission.py`).
RUNNABLE_VARIABLE = "EBBFLOW_RUNNABLE_SECONDS"
# Backend of `--with cloud` and `--with slurm`, for the tasks that the launcher starts.
CLOUD_VARIABLE = "EBBFLOW_CLOUD"

# Why an attempt has no placement. Its step then runs on the scheduler's machine and fails with this
# message.
UNPLACED_VARIABLE = "EBBFLOW_UNPLACED"

_BACKENDS: dict[str, Target] = {
    "batch": "batch",
    "cloud": "batch",
    "kubernetes": "kubernetes",
    "slurm": "slurm",
}


def in_container() -> bool:
    """Return whether this process is a task that Metaflow sent to another machine.

    A launcher that runs in a container does not count.
    """
    return os.environ.get("METAFLOW_RUNTIME_ENVIRONMENT", "local") != "local"


def requested_backend(words: Sequence[str], plan_for: str = "batch") -> Target | None:
    """Return the backend that --with names in a command line ("batch", "kubernetes" or "slurm"), or
    None for this machine.

    `plan_for` is the value of `cluster.plan_for`: the backend that `--with cloud` selects.
    """
    names = [value.partition(":")[0] for value in option_values(words, "--with")]
    backends = [name for name in names if name in _BACKENDS]
    if "local" in names or not backends:
        return None
    if backends[0] == "cloud" and plan_for == "kubernetes":
        return "kubernetes"
    return _BACKENDS[backends[0]]


def set_environment(config: RunConfig, backend: str) -> None:
    """Set Metaflow's environment variables for a run on the backend.

    Values in the configuration take precedence, then existing variables and Metaflow settings, then
    values derived from the store. On Slurm, Metaflow runs every step on this machine.
    """
    if backend == "slurm":
        os.environ[CLOUD_VARIABLE] = backend
        return
    batch = config.batch
    configured = {
        "METAFLOW_BATCH_JOB_QUEUE": batch.light_queue,
        "METAFLOW_BATCH_CONTAINER_IMAGE": batch.image,
        "METAFLOW_KUBERNETES_CONTAINER_IMAGE": batch.image,
        "METAFLOW_ECS_S3_ACCESS_IAM_ROLE": batch.job_role,
        "AWS_DEFAULT_REGION": batch.region,
        CLOUD_VARIABLE: backend,
        RUNNABLE_VARIABLE: f"{batch.runnable_minutes * 60:g}",
    }
    os.environ.update({name: value for name, value in configured.items() if value})
    follows = {
        "METAFLOW_DEFAULT_DATASTORE": "s3",
        "METAFLOW_DATASTORE_SYSROOT_S3": f"{config.store.rstrip('/')}/metaflow",
        "METAFLOW_S3_ENDPOINT_URL": aws_settings().endpoint,
        # Metaflow tries once, but AWS throttles accounts that start many jobs at once.
        "AWS_RETRY_MODE": "standard",
        "AWS_MAX_ATTEMPTS": "10",
        # Metaflow would leave a Job without pods behind
        "METAFLOW_KUBERNETES_JOB_TERMINATE_MODE": "delete",
    }
    if config.batch.tags:  # Metaflow sets no tags otherwise
        follows["METAFLOW_BATCH_EMIT_TAGS"] = "true"
    for name, value in follows.items():
        if value and not _is_set(name):
            os.environ[name] = value
    if backend == "batch" and not _is_set("METAFLOW_BATCH_JOB_QUEUE"):
        queue = light_queue(config)
        if queue:
            os.environ["METAFLOW_BATCH_JOB_QUEUE"] = queue


def light_queue(config: RunConfig) -> str | None:
    """Choose the queue for the steps before and after training if the user named none, and print
    the reason.

    The choice is among the configured queues. If no queues are configured, it is among the
    account's queues. Returns None if no queue is found, for example because Batch does not answer;
    preflight then reports the cause.
    """
    from ebbflow.infra.batch import batch_client, declared_queues, lightest_queue, training_queues

    queues = declared_queues(config.batch)
    if not queues or any(not queue.instance_types for queue in queues.values()):
        with contextlib.suppress(InfraError):  # then the configured queues are used
            queues = training_queues(config.batch, batch_client(config.batch.region))
    found = lightest_queue(queues)
    if found is None:
        return None
    name, why = found
    print(f"steps around training that are sent to AWS Batch go to queue {name}: {why}", flush=True)
    return name


def refusal_reason(config: RunConfig, backend: str | None, words: Sequence[str] = ()) -> str | None:
    """Return why the run cannot be sent to the backend and how to fix this, or None if it can be
    sent.

    `words` is the command line.
    """
    if backend not in (None, "slurm") and "://" not in config.store:
        return (
            f"--with {backend}: store {config.store} is a folder of this machine, which "
            "containers cannot read\n  fix: store: s3://bucket/prefix"
        )
    if backend == "batch" and not _names_role(config, words):
        return (
            "--with batch: no role for the containers, which Metaflow needs\n  fix: set "
            "batch.job_role or METAFLOW_ECS_S3_ACCESS_IAM_ROLE; `ebbflow deploy --env` writes "
            "one, `ebbflow adopt` finds an existing one"
        )
    if backend in ("batch", "kubernetes") and not _names_image(config, backend, words):
        return (
            f"--with {backend}: no container image, and Metaflow's own default (python) has no "
            f"torch\n  fix: set batch.image or METAFLOW_{backend.upper()}_CONTAINER_IMAGE; "
            "docs/aws.md has the script that builds and pushes one"
        )
    return None


def without_slurm(line: CommandLine) -> CommandLine:
    """Return the command line without `--with slurm`, because Metaflow runs all steps on this
    machine.

    The extension metaflow-slurm has a decorator of that name, which would send each step away.
    """
    if "slurm" not in option_values(line.argv, "--with"):
        return line
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("metaflow-slurm")
        print(
            f"--with slurm: Ebbflow's own, not the decorator of metaflow-slurm {version}",
            flush=True,
        )
    return line.without_backend("slurm")


def _is_set(name: str) -> bool:
    return bool(os.environ.get(name) or metaflow_setting(name))


def _names_role(config: RunConfig, words: Sequence[str]) -> bool:
    given = any("iam_role=" in value for value in option_values(words, "--with"))
    return given or bool(config.batch.job_role) or _is_set("METAFLOW_ECS_S3_ACCESS_IAM_ROLE")


def _names_image(config: RunConfig, backend: str, words: Sequence[str]) -> bool:
    """Return whether a container image is set in a place that Metaflow reads."""
    given = any("image=" in value for value in option_values(words, "--with"))
    settings = (f"METAFLOW_{backend.upper()}_CONTAINER_IMAGE", "METAFLOW_DEFAULT_CONTAINER_IMAGE")
    return given or bool(config.batch.image) or any(_is_set(name) for name in settings)
