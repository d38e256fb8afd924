"""Names of everything in a job's store and in runs/ on this machine.

<store>/jobs/<job>/config.json
                   events/<generation>/<node>-<rank>-<segment>.jsonl
                   logs/<generation>/<node>-<rank>-<segment>.jsonl
                   generations/<generation>-<id>.json
                   data/<generation>-<id>/...   index/<generation>-<id>/...
                   commits/<inverted step>/<inverted generation>/<sha256 of the manifest>.json
                   quarantine/<sha256>.json   tombstones/<sha256>.json   never to be read again; being deleted
                   pins/<sha256>.json         verified/<sha256>.json     never to be deleted; every byte was read
                   signatures/<sha256>.json   HMAC of the commit, where the job signs; put before the commit
                   overrides/<generation>-<rank>-<what>.json  what guards have ordered for the starts to come
                   permits/<what>/<generation>.json           what a person has allowed a start to give up
                   orders/<run>-<step>-<task>-<attempt>.json  what an attempt is told that runs on another machine
                   secrets/<run>-<attempt>    by which a start's agents know each other; deleted after the roll-call
                   launchers/<number>.json    claims on the job, one for each launcher; the highest number holds it
                   clock/<random>             put to learn the store's time, and deleted at once
                   plan.json                  the newest plan with all pools
                   report.json  report.html  metrics.prom
<store>/tokens/<sha256>/...
<store>/workloads/<module and name>/...                what a workload of one's own prepares
<store>/experience/<day>-<job>.json                    what a job has shown of pools and speeds
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ebbflow.infra.errors import LayoutError

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# runs/<job> stands beside these on the launching machine.
_TAKEN = frozenset({"jobs", "tokens", "workloads", "experience", "latest"})
EXPERIENCE_PREFIX = "experience/"
LAUNCHERS_PREFIX = "launchers/"
PLAN_KEY = "plan.json"
# What the lifecycle rule of infra/aws/template.yaml knows tombstones by: jobs that never run again do not drop theirs.
TOMBSTONE_TAGS = {"ebbflow": "tombstone"}
_STEP_LIMIT = 10**12 - 1
_GENERATION_LIMIT = 10**6 - 1


def check_job_name(name: str) -> str:
    """The name itself. Raises LayoutError for one that cannot stand as a folder in every store."""
    if not _JOB_NAME.fullmatch(name) or name in _TAKEN:
        raise LayoutError(
            f"--job {name!r} cannot be a job's name\n"
            "  hint: letters, digits, '.', '_' and '-', at most 100, beginning with a letter or digit; not "
            + ", ".join(sorted(_TAKEN))
        )
    return name


def job_prefix(job: str) -> str:
    return f"jobs/{job}"


def tokens_prefix(fingerprint: str) -> str:
    return f"tokens/{fingerprint}"


def workload_prefix(workload: str) -> str:
    """workload: ``package.module:Name``. The colon is no letter of a portable file name."""
    return f"workloads/{workload.replace(':', '.')}"


def experience_key(day: str, job: str) -> str:
    """day: such as 20261121, so that keys sort by time."""
    return f"{EXPERIENCE_PREFIX}{day}-{job}.json"


def generation_name(generation: int, generation_id: str) -> str:
    """The name of one start of the gang, such as ``000002-9f3c01ab``."""
    return f"{generation:06d}-{generation_id}"


def generation_key(generation: int, generation_id: str) -> str:
    return f"generations/{generation_name(generation, generation_id)}.json"


def event_key(generation: int, node: int | str, rank: int | str, segment: str) -> str:
    """``rank`` is a number, or the name of a process that is no rank (``agent``, a flow step)."""
    return f"events/{generation:06d}/{node}-{rank}-{segment}.jsonl"


def log_key(generation: int, node: int, rank: int, segment: str) -> str:
    """Lines of one rank's output (`infra.rank_logs`), where the store is not the disk that the agent writes them to."""
    return f"logs/{generation:06d}/{node}-{rank}-{segment}.jsonl"


def override_key(generation: int, rank: int, what: str) -> str:
    """what: makes the record of one order different from that of any other of this rank."""
    return f"overrides/{generation:06d}-{rank}-{what}.json"


def permit_prefix(what: str) -> str:
    return f"permits/{what}"


def permit_key(what: str, generation: int) -> str:
    """what: such as ``from-scratch``. generation: the newest one that it holds for."""
    return f"{permit_prefix(what)}/{generation:06d}.json"


def order_key(run: str, step: str, task: str, attempt: int) -> str:
    """What one try of one task of the flow is told (`ebbflow.flows.attempts.order`)."""
    return f"orders/{run}-{step}-{task}-{attempt}.json"


def secret_key(run: str, attempt: int) -> str:
    """By which the agents of one start know each other (`ebbflow.training.launch.transport`)."""
    return f"secrets/{run}-{attempt}"


def data_key(generation: str, step: int, rank: int) -> str:
    """``generation`` is a `generation_name`: its random id keeps two gangs from ever sharing a key."""
    return f"{data_prefix(generation, step)}{rank:05d}.bin"


def data_prefix(generation: str, step: int) -> str:
    return f"data/{generation}/{step:012d}/"


def index_prefix(generation: str, step: int) -> str:
    return f"index/{generation}/{step:012d}/"


def index_key(generation: str, step: int, rank: int) -> str:
    return f"{index_prefix(generation, step)}{rank:05d}.json"


def commit_prefix(step: int, generation: int) -> str:
    """Inverted numbers: a plain ascending listing begins with the newest step."""
    return f"commits/{_STEP_LIMIT - step:012d}/{_GENERATION_LIMIT - generation:06d}/"


def commit_key(step: int, generation: int, sha256: str) -> str:
    return f"{commit_prefix(step, generation)}{sha256}.json"


def parse_commit_key(key: str) -> tuple[int, int, str]:
    """(step, generation, sha256 of the manifest) of a commit key. Raises ValueError for any other key."""
    head, inverted_step, inverted_generation, name = key.split("/")
    if head != "commits" or not name.endswith(".json"):
        raise ValueError(f"not a commit key: {key}")
    return _STEP_LIMIT - int(inverted_step), _GENERATION_LIMIT - int(inverted_generation), name[: -len(".json")]


def quarantine_key(sha256: str) -> str:
    """Says why the commit with this manifest is never to be restored again."""
    return f"quarantine/{sha256}.json"


def tombstone_key(sha256: str) -> str:
    """Stands from before the first key of a commit is deleted until after the last is."""
    return f"tombstones/{sha256}.json"


def pin_key(sha256: str) -> str:
    """While it stands, the commit with this manifest is not deleted."""
    return f"pins/{sha256}.json"


def launcher_key(number: int) -> str:
    """One launcher's claim on the job (`ebbflow.infra.launchers`)."""
    return f"{LAUNCHERS_PREFIX}{number:06d}.json"


def clock_key(name: str) -> str:
    """An object that is put for its date alone."""
    return f"clock/{name}"


def signature_key(sha256: str) -> str:
    """The signature of the commit with this manifest (`ebbflow.training.checkpoint.signing`)."""
    return f"signatures/{sha256}.json"


def verified_key(sha256: str) -> str:
    """Says when every byte of the commit was last read and found sound."""
    return f"verified/{sha256}.json"


NOTE = "job.json"
METAFLOW_FOLDER = ".metaflow"


def runs_folder(project_root: Path) -> Path:
    """Reports and logs of this machine, and runs/latest. EBBFLOW_RUNS moves it; jobs lie where `store` says."""
    own = os.environ.get("EBBFLOW_RUNS")
    return Path(own).absolute() if own else records_root(project_root, "runs") / "runs"


def records_root(project_root: Path, name: str) -> Path:
    """The folder that has `name` (runs, .metaflow) in it: the project, or the user's state folder where the project
    cannot be written to. The same from any working directory, so that every command finds what another one left.
    """
    folder = project_root / name
    if os.access(folder if folder.exists() else project_root, os.W_OK | os.X_OK):
        return project_root.absolute()
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return (state / "ebbflow").absolute()


@dataclass(frozen=True)
class KnownJob:
    """What the note says. store: as in the configuration, paths absolute."""

    name: str
    store: str

    @property
    def uri(self) -> str:
        """The job's own folder, or s3://bucket/prefix/jobs/NAME."""
        return f"{self.store.rstrip('/')}/{job_prefix(self.name)}"

    def note(self) -> bytes:
        """The content of the note."""
        return json.dumps({"schema": 1, "job": self.name, "store": self.store}, indent=1).encode()


def known_job(folder: Path) -> KnownJob | None:
    """The job that a folder such as runs/latest stands for; None without a note that can be read."""
    try:
        note = json.loads((folder / NOTE).read_text())
        return KnownJob(str(note["job"]), str(note["store"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
