"""Fixes for Metaflow on AWS Batch without a metadata service.

They are applied to known releases, and to other releases whose patched parts have the shape that
the fixes need (`broken_contract`).

With local metadata, these releases have four faults:

- Metaflow makes the commands of the other nodes from node 0's by replacing the task's id wherever
  that string occurs (Netflix/metaflow#2564, #2574).
- A task in a container is missing from the metadata in that container, so its cards cannot be
  rendered.
- Node 0 waits for the other nodes by reading the metadata in its own container, where those nodes
  are missing.
- If a job left no metadata, the process that submitted it ends with an error about missing
  metadata. This hides why the job failed (Netflix/metaflow#2557).

With a metadata service, Metaflow itself is not changed, and two faults remain in every release.
First, the commands of the other nodes can still be wrong, because the first task ids of a new
service are short numbers, which occur in other places too. This module then corrects the command in
the request to AWS, and prints a message. Second, Metaflow relies on fields of an ended multi-node
job that AWS may set late. This module fills in missing fields; otherwise a gang that succeeded
would count as failed, and would be run and paid for again.
"""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

import functools
import importlib
import inspect
import itertools
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from ebbflow.core.preflight import Check, CheckFinding, PreflightContext, failed, passed, skipped
from ebbflow.flows.command_line import CommandLine
from ebbflow.flows.remote import in_container
from ebbflow.infra.aws.account import metaflow_setting
from ebbflow.infra.aws.answers import JobsAnswer, SubmitRequest

# Releases on which the fixed flow ran in a local Batch: `make metaflow-releases`.
KNOWN = ((2, 19, 0), (2, 19, 20), (2, 19, 39))
_NODE = "$AWS_BATCH_JOB_NODE_INDEX"
_MAPPERS_SECONDS = 600.0
_LOOK_SECONDS = 2.0
_PING_SECONDS = 4.0
_ADVICE = "avoid pressing Ctrl+C"

# Part of Metaflow that a fix replaces or calls: module, name in it, and parameters that it must have
_CONTRACTS = (
    (
        "metaflow.plugins.aws.batch.batch_decorator",
        "BatchDecorator._wait_for_mapper_tasks",
        ("self", "flow", "step_name"),
    ),
    (
        "metaflow.plugins.metadata_providers.local",
        "LocalMetadataProvider.register_task_id",
        ("self", "run_id", "step_name", "task_id"),
    ),
    (
        "metaflow.plugins.metadata_providers.local",
        "LocalMetadataProvider._ensure_meta",
        ("self", "obj_type", "run_id", "step_name", "task_id"),
    ),
    (
        "metaflow.datastore.flow_datastore",
        "FlowDataStore.get_task_datastore",
        ("self", "run_id", "step_name", "task_id", "attempt", "mode"),
    ),
    (
        "metaflow.plugins.aws.batch.batch_cli",
        "sync_local_metadata_from_datastore",
        ("metadata_local_dir", "task_ds"),
    ),
)

FIXES = ("#2564 command of other nodes", "#2557 reason of a failure", "end of other nodes", "cards")


def is_known_release(text: str | None = None) -> bool:
    """Return whether the fixes were tested with a Metaflow version (`text`; None means the
    installed one).
    """
    return tuple(int(part) for part in re.findall(r"\d+", text or version("metaflow"))[:3]) in KNOWN


def broken_contract() -> str:
    """Return which part of the installed Metaflow lacks the shape that the fixes need, or "" if
    none does.

    Works for any release, without running a flow.
    """
    for module_name, name, needed in _CONTRACTS:
        try:
            part: Any = importlib.import_module(module_name)
            for attribute in name.split("."):
                part = getattr(part, attribute)
            parameters = inspect.signature(part).parameters
        except (ImportError, AttributeError, TypeError, ValueError):
            return f"{module_name} has no {name}"
        lacking = [parameter for parameter in needed if parameter not in parameters]
        if lacking:
            return f"{module_name}: {name} has no parameter {', '.join(lacking)}"
    return ""


def needs_fixes(words: Sequence[str]) -> bool:
    """Return whether a Metaflow process with this command line uses local metadata and a release
    that the fixes suit.
    """
    return _stated_metadata(words) == "local" and (is_known_release() or not broken_contract())


def uses_local_metadata(words: Sequence[str]) -> bool:
    """Return whether a command of a flow uses local metadata, by its words or Metaflow's settings."""
    stated = _stated_metadata(words) or metaflow_setting("METAFLOW_DEFAULT_METADATA")
    return stated in ("", "local")


def fix_process_of_batch(line: CommandLine) -> None:
    """Apply the fixes that a process of Metaflow needs if it submits an attempt to AWS Batch, or is
    a task in a container.
    """
    if line.is_step_of("batch"):
        if needs_fixes(line.argv):
            fix_submitter()
        else:  # they change requests, and nothing of Metaflow
            fix_batch_requests()
    elif line.command == "step" and in_container() and needs_fixes(line.argv):
        fix_task()


def check_metadata(context: PreflightContext) -> CheckFinding:
    """Check that Metaflow's metadata provider works on AWS Batch.

    Without a metadata service, known faults of Metaflow break runs on AWS Batch. Ebbflow fixes them
    or refuses the run.
    """
    # Not at module level, since every task imports this
    from ebbflow.infra.checks.batch import skip_reason

    if reason := skip_reason(context):
        return skipped(reason)
    found = version("metaflow")
    metadata = metaflow_setting("METAFLOW_DEFAULT_METADATA") or "local"
    if metadata == "service":
        return _asked_service(f"Metaflow {found} is unchanged")
    if metadata != "local":
        return passed(f"metadata {metadata}: Metaflow {found} is unchanged")
    service = "set METAFLOW_DEFAULT_METADATA=service and METAFLOW_SERVICE_URL"
    if context.config.batch.metadata_fixes == "refuse":
        return failed("metadata are local and batch.metadata_fixes is refuse", service)
    return _judge_release(found, service)


def drop_interrupt_advice() -> None:
    """Suppress Metaflow's advice against Ctrl-C, which is safe with Ebbflow.

    Call this in the launcher.

    Has no effect on a Metaflow release without the private attribute that this changes.
    """
    from metaflow.runtime import NativeRuntime

    begin = NativeRuntime.__init__

    def begin_without_advice(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        log = getattr(self, "_logger", None)
        if log is not None:
            self._logger = lambda text="", *more, **how: (
                None if _ADVICE in str(text) else log(text, *more, **how)
            )

    NativeRuntime.__init__ = begin_without_advice


def keep_terminal_from_tasks() -> None:
    """Start each task in its own process group, so that a terminal's Ctrl-C does not reach it.

    Call this in the launcher. Ctrl-C would end a starting task with a traceback. On Ctrl-C, the
    launcher sends SIGTERM to the tasks. Has no effect on a Metaflow release without the private
    attribute that this changes.
    """
    from metaflow import runtime

    class Apart:
        Popen = staticmethod(functools.partial(subprocess.Popen, process_group=0))

        def __getattr__(self, name: str) -> Any:
            return getattr(subprocess, name)

    if getattr(runtime, "subprocess", None) is subprocess:
        runtime.subprocess = Apart()


def fix_submitter() -> None:
    from metaflow.plugins.aws.batch import batch_cli

    fix_batch_requests()
    pass_over_missing_metadata(batch_cli)


def fix_batch_requests() -> None:
    """Correct this process's requests to AWS Batch, and the responses, with botocore hooks.

    Metaflow is not changed.
    """
    from botocore import handlers

    handlers.BUILTIN_HANDLERS.append(
        ("before-parameter-build.batch.SubmitJob", correct_node_commands)
    )
    handlers.BUILTIN_HANDLERS.append(("after-call.batch.DescribeJobs", complete_gang_descriptions))


def fix_task() -> None:
    from metaflow.plugins.aws.batch.batch_decorator import BatchDecorator
    from metaflow.plugins.metadata_providers.local import LocalMetadataProvider

    register = LocalMetadataProvider.register_task_id

    def register_here_too(
        self: Any, run_id: str, step_name: str, task_id: str, *args: Any, **options: Any
    ) -> Any:
        self._ensure_meta("task", run_id, step_name, task_id)
        return register(self, run_id, step_name, task_id, *args, **options)

    LocalMetadataProvider.register_task_id = register_here_too
    BatchDecorator._wait_for_mapper_tasks = _wait_for_mappers


def correct_node_commands(params: SubmitRequest, **_: object) -> None:
    """Correct the commands of nodes other than node 0 in a SubmitJob request, if Metaflow derived
    them wrongly.
    """
    overrides = (params.get("nodeOverrides") or {}).get("nodePropertyOverrides") or []
    if len(overrides) < 2:
        return
    main = overrides[0]["containerOverrides"].get("command", [])
    command = [*main[:-1], node_command(main[-1])]
    for other in overrides[1:]:
        if other["containerOverrides"].get("command") != command:
            other["containerOverrides"]["command"] = command
            message = (
                "corrected Metaflow's command of the other nodes, which changed more than the "
                "task's id (#2564)"
            )
            print(f"batch: {message}", file=sys.stderr, flush=True)


def complete_gang_descriptions(parsed: JobsAnswer, **_: object) -> None:
    """Fill in the fields of multi-node jobs that Metaflow reads but AWS has not set."""
    for job in parsed.get("jobs") or []:
        if job.get("nodeProperties"):
            job["attempts"] = job.get("attempts") or [{"container": {}}]
            job.setdefault("statusReason", None)


def node_command(main: str) -> str:
    """Return the shell command for all nodes except node 0, derived from node 0's command.

    The command is the same for all of these nodes. The shell on each node inserts the node's index.
    """
    found = re.search(r"--task-id (\S+)", main)
    if found is None:
        return main
    task = found.group(1)
    own = f"{task.replace('control-', '')}-node-{_NODE}"
    command = re.sub(
        rf"(--task-id ){re.escape(task)}(?=\s)", lambda match: match.group(1) + own, main
    )
    # The log's name: MF_PATHSPEC=flow/run/step/task.
    command = re.sub(
        rf"(MF_PATHSPEC=[^\s/]+/[^\s/]+/[^\s/]+/){re.escape(task)}(?=\s)",
        lambda match: match.group(1) + own,
        command,
    )
    command = command.replace("ubf_control", "ubf_task")
    return re.sub(r"(--split-index )\d+", lambda match: match.group(1) + _NODE, command)


def pass_over_missing_metadata(cli: Any) -> None:
    """Make the submitting process accept that a task has left no metadata, instead of ending with
    an error.

    `cli` is Metaflow's module for `batch step` or `kubernetes step`.
    """
    from metaflow.datastore.exceptions import DataException
    from metaflow.datastore.flow_datastore import FlowDataStore

    find = FlowDataStore.get_task_datastore
    sync = cli.sync_local_metadata_from_datastore

    def lenient(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return find(self, *args, **options)
        except DataException:
            if options.get("mode", "r") != "r":
                raise
            return None

    def sync_what_there_is(folder: str, datastore: Any) -> None:
        if datastore is not None:
            sync(folder, datastore)

    FlowDataStore.get_task_datastore = lenient
    cli.sync_local_metadata_from_datastore = sync_what_there_is


def _stated_metadata(words: Sequence[str]) -> str:
    """Return the metadata provider on a command line of Metaflow, or ""."""
    for word, following in itertools.pairwise([*words, ""]):
        if word == "--metadata":
            return following
        if word.startswith("--metadata="):
            return word.partition("=")[2]
    return ""


def _asked_service(follows: str) -> CheckFinding:
    """Ask the metadata service for its version, and return the answer as the finding of a preflight
    check.

    Metaflow itself would retry for 15 s and print a traceback. If the service answers, the finding
    ends with the text `follows`.
    """
    url = metaflow_setting("METAFLOW_SERVICE_URL")
    if not url:
        return skipped("METAFLOW_SERVICE_URL is not set; see the check aws-metaflow")
    try:
        headers = json.loads(metaflow_setting("METAFLOW_SERVICE_HEADERS") or "{}")
        if key := metaflow_setting("METAFLOW_SERVICE_AUTH_KEY"):
            headers["x-api-key"] = key
        request = urllib.request.Request(f"{url.rstrip('/')}/ping", headers=headers)
        with urllib.request.urlopen(request, timeout=_PING_SECONDS) as answer:
            number = answer.headers.get("METADATA_SERVICE_VERSION", "of an unknown version")
    except (OSError, ValueError) as error:
        return failed(
            f"the metadata service at {url} does not answer: {error}",
            "correct METAFLOW_SERVICE_URL, start the service, or set "
            "METAFLOW_DEFAULT_METADATA=local",
        )
    return passed(f"metadata service {number} at {url}: {follows}")


CHECKS = [
    Check(
        "aws-metadata",
        "Metaflow's metadata work on AWS Batch",
        "error",
        "full",
        5.0,
        symptoms=("A18",),
        run=check_metadata,
    )
]


def _judge_release(found: str, service: str) -> CheckFinding:
    """Return the preflight finding about a Metaflow release that is used with local metadata.

    `service` is the advice for a release that the fixes do not suit.
    """
    known = ", ".join(".".join(map(str, release)) for release in KNOWN)
    if not is_known_release(found):
        broken = broken_contract()
        if broken:
            return failed(
                f"metadata are local, and the fixes do not suit Metaflow {found} on AWS Batch: "
                f"{broken}",
                f"{service}, or install a known release ({known})",
            )
        return passed(
            f"metadata are local: Metaflow {found} was never tried, and has all that the "
            f"{len(FIXES)} fixes need (tried: {known})"
        )
    return passed(
        f"metadata are local: {len(FIXES)} fixes for Metaflow {found} ({', '.join(FIXES)}); "
        "meant for demonstrations, a metadata service needs no fixes"
    )


def _wait_for_mappers(self: Any, flow: Any, _step_name: str) -> None:
    """Make node 0 wait until the other nodes' results are in the datastore, because the Batch job
    ends with node 0.
    """
    from metaflow import current

    waiting = [path.split("/") for path in flow._control_mapper_tasks[1:]]
    limit = time.monotonic() + _MAPPERS_SECONDS
    while waiting and time.monotonic() < limit:
        waiting = [
            path for path in waiting if not _is_done(self.flow_datastore, path, current.retry_count)
        ]
        if waiting:
            time.sleep(_LOOK_SECONDS)
    if waiting:
        missing = ", ".join("/".join(path) for path in waiting)
        raise TimeoutError(
            f"the other nodes did not finish within {_MAPPERS_SECONDS:g} s: {missing}"
        )


def _is_done(datastore: Any, path: list[str], attempt: int) -> bool:
    """Return whether a task has succeeded in this attempt.

    Success in an earlier attempt does not count.
    """
    from metaflow.datastore.exceptions import DataException

    try:
        datastore.get_task_datastore(*path, attempt=attempt)
    except DataException:
        return False
    return True
