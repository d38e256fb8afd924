"""What Metaflow gets wrong on AWS Batch where it has no metadata service, mended for releases that are known.

With local metadata, in the releases named below:

- the command of the other nodes is made by replacing the task's id as a bare string, wherever it stands
  (Netflix/metaflow#2564, #2574);
- a task in a container is not in the metadata there, so that its cards cannot be rendered;
- node 0 waits for the others by asking the metadata of its own container, which know nothing of them;
- a job that left no metadata ends its submitter with that error, which hides the reason of its failure and its kind
  (Netflix/metaflow#2557).

With a metadata service nothing of Metaflow is changed. One of these it shares: a task's number is replaced wherever it
stands, and the first tasks of a new service have short ones. A command that this has spoilt is corrected in the request
to AWS, and said. Of a job of several nodes that has ended it takes for granted what AWS need not tell at once: where
it is not there yet, a gang that did its work would count as failed, and be started and paid for again.
"""

from __future__ import annotations

import functools
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

from ebbflow.infra.aws.account import metaflow_setting
from ebbflow.infra.checks.batch import skip_reason
from ebbflow.infra.preflight import Check, CheckFinding, PreflightContext

# On which the mended flow was run in a local Batch: `make metaflow-releases`.
KNOWN = ((2, 19, 0), (2, 19, 20), (2, 19, 39))
_NODE = "$AWS_BATCH_JOB_NODE_INDEX"
_MAPPERS_SECONDS = 600.0
_LOOK_SECONDS = 2.0
_PING_SECONDS = 4.0
_ADVICE = "avoid pressing Ctrl+C"

FIXES = ("#2564 command of other nodes", "#2557 reason of a failure", "end of other nodes", "cards")


def parse_release(text: str) -> tuple[int, ...]:
    """(2, 19, 39) of "2.19.39", whatever follows."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def is_known_release(text: str | None = None) -> bool:
    """None: of the Metaflow that is installed."""
    return parse_release(text or version("metaflow")) in KNOWN


def needs_fixes(words: Sequence[str]) -> bool:
    """Whether a process of Metaflow with this command line, which names its metadata, is one that is mended."""
    local = any(pair == ("--metadata", "local") for pair in itertools.pairwise(words)) or "--metadata=local" in words
    return local and is_known_release(version("metaflow"))


def check_metadata(context: PreflightContext) -> CheckFinding:
    """Without a metadata service Metaflow fails on AWS Batch in known ways: these are mended, or the run is refused."""
    if reason := skip_reason(context):
        return CheckFinding.skipped(reason)
    found, metadata = version("metaflow"), metaflow_setting("METAFLOW_DEFAULT_METADATA") or "local"
    if metadata == "service":
        return _asked_service(f"nothing of Metaflow {found} is changed")
    if metadata != "local":
        return CheckFinding.passed(f"metadata {metadata}: nothing of Metaflow {found} is changed")
    service = "set METAFLOW_DEFAULT_METADATA=service and METAFLOW_SERVICE_URL"
    if context.config.batch.metadata_fixes == "refuse":
        return CheckFinding.failed("metadata are local, and batch.metadata_fixes is refuse", service)
    if not is_known_release(found):
        known = ", ".join(".".join(map(str, one)) for one in KNOWN)
        return CheckFinding.failed(
            f"metadata are local, and what Metaflow {found} gets wrong then on AWS Batch is not known (known: {known})",
            f"{service}, or install a release that is known",
        )
    return CheckFinding.passed(
        f"metadata are local: {len(FIXES)} fixes for Metaflow {found} ({', '.join(FIXES)}); for demonstrations, "
        "a metadata service needs none"
    )


def _asked_service(follows: str) -> CheckFinding:
    """Metaflow asks five times within 15 s, and then shows a traceback."""
    url = metaflow_setting("METAFLOW_SERVICE_URL")
    if not url:
        return CheckFinding.skipped("METAFLOW_SERVICE_URL is not set; the check aws-metaflow says more")
    try:
        headers = json.loads(metaflow_setting("METAFLOW_SERVICE_HEADERS") or "{}")
        if key := metaflow_setting("METAFLOW_SERVICE_AUTH_KEY"):
            headers["x-api-key"] = key
        request = urllib.request.Request(f"{url.rstrip('/')}/ping", headers=headers)
        with urllib.request.urlopen(request, timeout=_PING_SECONDS) as answer:
            number = answer.headers.get("METADATA_SERVICE_VERSION", "of an unknown version")
    except (OSError, ValueError) as error:
        return CheckFinding.failed(
            f"no metadata service answers at {url}: {error}",
            "correct METAFLOW_SERVICE_URL, or start the service; METAFLOW_DEFAULT_METADATA=local does without",
        )
    return CheckFinding.passed(f"metadata service {number} at {url}: {follows}")


CHECKS = [
    Check(
        id="aws-metadata",
        title="Metaflow's metadata work on AWS Batch",
        severity="error",
        tier="full",
        deadline_seconds=5.0,
        symptoms=(),
        run=check_metadata,
    )
]


def drop_interrupt_advice() -> None:
    """In the launcher: leave out Metaflow's line that asks not to press Ctrl-C again, which a user here may do.

    A release without this private attribute keeps its line.
    """
    from metaflow.runtime import NativeRuntime

    begin = NativeRuntime.__init__

    def begin_without_advice(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        log = getattr(self, "_logger", None)
        if log is not None:
            self._logger = lambda text="", *more, **how: None if _ADVICE in str(text) else log(text, *more, **how)

    NativeRuntime.__init__ = begin_without_advice


def keep_terminal_from_tasks() -> None:
    """In the launcher: start each task in a process group of its own, which a terminal's Ctrl-C does not reach.

    The launcher hands it on as SIGTERM. A task that has only just started would else end in a traceback. A release
    without this private attribute starts them as before.
    """
    from metaflow import runtime

    class Apart:
        Popen = staticmethod(functools.partial(subprocess.Popen, process_group=0))

        def __getattr__(self, name: str) -> Any:
            return getattr(subprocess, name)

    if getattr(runtime, "subprocess", None) is subprocess:
        runtime.subprocess = Apart()


def fix_submitter() -> None:
    """In the process that submits a job and waits for it."""
    fix_batch_requests()
    _pass_over_missing_metadata()


def fix_batch_requests() -> None:
    """Where nothing of Metaflow is changed: from now on in what this process asks of AWS Batch, and is told by it."""
    from botocore import handlers

    handlers.BUILTIN_HANDLERS.append(("before-parameter-build.batch.SubmitJob", correct_node_commands))
    handlers.BUILTIN_HANDLERS.append(("after-call.batch.DescribeJobs", complete_gang_descriptions))


def fix_task() -> None:
    """In a container, where a task runs."""
    from metaflow.plugins.aws.batch.batch_decorator import BatchDecorator
    from metaflow.plugins.metadata_providers.local import LocalMetadataProvider

    register = LocalMetadataProvider.register_task_id

    def register_here_too(self: Any, run_id: str, step_name: str, task_id: str, *args: Any, **options: Any) -> Any:
        self._ensure_meta("task", run_id, step_name, task_id)
        return register(self, run_id, step_name, task_id, *args, **options)

    LocalMetadataProvider.register_task_id = register_here_too
    BatchDecorator._wait_for_mapper_tasks = _wait_for_mappers


def correct_node_commands(params: dict[str, Any], **_: Any) -> None:
    """The other nodes' command in a request to submit a job, made anew from that of node 0 where it is another one."""
    overrides = (params.get("nodeOverrides") or {}).get("nodePropertyOverrides") or []
    if len(overrides) < 2:
        return
    main = overrides[0]["containerOverrides"]["command"]
    command = [*main[:-1], node_command(main[-1])]
    for other in overrides[1:]:
        if other["containerOverrides"]["command"] != command:
            other["containerOverrides"]["command"] = command
            said = "Metaflow's command of the other nodes changed more than the task's id (#2564): corrected"
            print(f"batch: {said}", file=sys.stderr, flush=True)


def complete_gang_descriptions(parsed: dict[str, Any], **_: Any) -> None:
    """In what AWS tells of jobs: what Metaflow reads of one of several nodes is there, and says nothing."""
    for job in parsed.get("jobs") or []:
        if job.get("nodeProperties"):
            job["attempts"] = job.get("attempts") or [{"container": {}}]
            job.setdefault("statusReason", None)


def node_command(main: str) -> str:
    """Of a node that is not node 0, whose index the shell there knows. main: the shell command of node 0."""
    found = re.search(r"--task-id (\S+)", main)
    if found is None:
        return main
    task = found.group(1)
    own = f"{task.replace('control-', '')}-node-{_NODE}"
    command = re.sub(rf"(--task-id ){re.escape(task)}(?=\s)", lambda match: match.group(1) + own, main)
    # The log's name: MF_PATHSPEC=flow/run/step/task.
    command = re.sub(
        rf"(MF_PATHSPEC=[^\s/]+/[^\s/]+/[^\s/]+/){re.escape(task)}(?=\s)", lambda match: match.group(1) + own, command
    )
    command = command.replace("ubf_control", "ubf_task")
    return re.sub(r"(--split-index )\d+", lambda match: match.group(1) + _NODE, command)


def _pass_over_missing_metadata() -> None:
    from metaflow.datastore.exceptions import DataException
    from metaflow.datastore.flow_datastore import FlowDataStore
    from metaflow.plugins.aws.batch import batch_cli

    find, sync = FlowDataStore.get_task_datastore, batch_cli.sync_local_metadata_from_datastore

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
    batch_cli.sync_local_metadata_from_datastore = sync_what_there_is


def _wait_for_mappers(self: Any, flow: Any, step_name: str) -> None:
    """Node 0's end is the end of the job: first the others must have put their results, which the datastore knows."""
    from metaflow import current

    waiting = [path.split("/") for path in flow._control_mapper_tasks[1:]]
    limit = time.monotonic() + _MAPPERS_SECONDS
    while waiting and time.monotonic() < limit:
        waiting = [path for path in waiting if not _is_done(self.flow_datastore, path, current.retry_count)]
        if waiting:
            time.sleep(_LOOK_SECONDS)
    if waiting:
        missing = ", ".join("/".join(path) for path in waiting)
        raise TimeoutError(f"the other nodes did not finish within {_MAPPERS_SECONDS:g} s: {missing}")


def _is_done(datastore: Any, path: list[str], attempt: int) -> bool:
    """Of this attempt: an earlier one may have ended well on the other node alone."""
    from metaflow.datastore.exceptions import DataException

    try:
        datastore.get_task_datastore(*path, attempt=attempt)
    except DataException:
        return False
    return True
