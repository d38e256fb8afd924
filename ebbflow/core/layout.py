"""Keys of all objects in a store, and paths in the folder runs/ on this machine.

<store>/jobs/<job>/config.json
                   events/<generation>/<node>-<rank>-<segment>.jsonl
                   logs/<generation>/<node>-<rank>-<segment>.jsonl
                   generations/<generation>-<id>.json
                   data/<generation>-<id>/...         data of saves, one object per rank and step
                   index/<generation>-<id>/...        index of each of these objects
                   commits/<inverted step>/<inverted generation>/<sha256 of the manifest>.json
                   quarantine/<sha256>.json           the commit must never be restored again
                   tombstones/<sha256>.json           the commit is being deleted
                   pins/<sha256>.json                 the commit must never be deleted
                   verified/<sha256>.json             every byte of the commit was read and is intact
                   signatures/<sha256>.json           HMAC of the commit if the job signs commits; written first
                   overrides/<generation>-<rank>-<what>.json  instructions from guards for later starts of the gang
                   permits/<what>/<generation>.json           permissions that a user gave for a start
                   orders/<run>-<step>-<task>-<attempt>.json  instructions for an attempt on another machine
                   gangs/<run>-<attempt>-<start or end>.json  what node 0 of a gang tells the others, in flows of users
                   secrets/<run>-<attempt>    shared secret of a start's agents; deleted once all have joined
                   launchers/<number>.json    claims on the job, one per launcher; the highest number holds it
                   clock/<random>             written and deleted to read the store's clock
                   plan.json                  the newest plan with all pools
                   trackers.json              what was sent to trackers and notification channels so far
                   report.json  report.html
                   metrics.prom
<store>/_store/<id>.json                               the store's identity; see core/store/marker.py
<store>/tokens/<sha256>/...                            prepared data of the built-in language model
<store>/workloads/<module and name>/...                prepared data of a user's workload
<store>/scripts/<sha256>.tar                           folder of a user's script
<store>/experience/<day>-<job>.json                    job history: pools and throughput
<store>/shared-budgets/<sweep>/<number>.json           dollars that each trial of a sweep holds; the highest number counts
<store>/team/team.yaml                                 the team's budgets, if they are in the store
<store>/team/reservations/<number>.json                budgets that running jobs hold; the highest number counts
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ebbflow.core.errors import LayoutError

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Names that runs/<job> cannot have.
_TAKEN = frozenset(
    {
        "jobs",
        "tokens",
        "workloads",
        "scripts",
        "experience",
        "shared-budgets",
        "slurm-jobs",
        "latest",
    }
)
JOB_HISTORY_PREFIX = "experience/"
TEAM_FILE_KEY = "team/team.yaml"
RESERVATIONS_PREFIX = "team/reservations/"
LAUNCHERS_PREFIX = "launchers/"
# Events of the flow's processes, such as plans and prices, which belong to no generation
FLOW_EVENTS_PREFIX = "events/000000/"
MARKERS_PREFIX = "_store"  # no job has this name, since jobs' names begin with a letter or digit
PLAN_KEY = "plan.json"
TRACKED_KEY = "trackers.json"
# Tag for the lifecycle rule of infra/aws/template.yaml, which deletes tombstones of jobs that never
# run again.
TOMBSTONE_TAGS = {"ebbflow": "tombstone"}
_LONGEST_PLAIN_NAME = 80
_STEP_LIMIT = 10**12 - 1
_GENERATION_LIMIT = 10**6 - 1

NOTE = "job.json"
_FOLDERS_FILE = (
    "folders"  # in the user's state folder: one line for each folder of runs, newest last
)
_MOST_FOLDERS = 200
METAFLOW_FOLDER = ".metaflow"
_SLURM_LINKS = "slurm-jobs"  # links from the ids of Slurm jobs to the folders of their jobs


@dataclass(frozen=True)
class KnownJob:
    """A job and its store, as recorded on this machine in runs/<job>/job.json."""

    name: str  # name of the job
    store: str  # address of the store as in the configuration, with absolute paths
    marker: str = ""  # id of the store's marker; "" in records of older releases

    @property
    def uri(self) -> str:
        """Address of the job's part of the store: a folder, or s3://bucket/prefix/jobs/NAME."""
        return f"{self.store.rstrip('/')}/{job_prefix(self.name)}"

    def note(self) -> bytes:
        note = {"schema": 1, "job": self.name, "store": self.store, "marker": self.marker}
        return json.dumps(note, indent=1).encode()


def check_job_name(name: str) -> str:
    """Return a job's name unchanged.

    Raises LayoutError if some store could not use it as a folder name.
    """
    if not _JOB_NAME.fullmatch(name) or name in _TAKEN:
        raise LayoutError(
            f"--job {name!r} cannot be a job's name\n  hint: letters, digits, '.', '_' and '-', "
            "at most 100, beginning with a letter or digit; not " + ", ".join(sorted(_TAKEN))
        )
    return name


def job_of_script(name: str | None, script: str) -> str:
    """Return the job's name: `name` if given, else EBBFLOW_JOB, else a name made from the script's
    file.

    Raises LayoutError if the given name cannot be a job's name.
    """
    if script not in ("", "-c"):
        stem = re.sub(r"^\W+", "", plain_name(Path(script).stem))
    else:
        stem = ""
    return check_job_name(name or os.environ.get("EBBFLOW_JOB") or stem or "job")


def plain_name(text: str) -> str:
    """Convert any text to a valid job name.

    If this replaces characters, append a hash to keep names distinct.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:_LONGEST_PLAIN_NAME]
    if plain == text:
        return plain
    return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def marker_key(marker: str) -> str:
    return f"{MARKERS_PREFIX}/{marker}.json"


def marker_id(key: str) -> str:
    """Extract the id of a store's marker (`core/store/marker.py`) from its key."""
    return key.rpartition("/")[2].removesuffix(".json")


def job_prefix(job: str) -> str:
    return f"jobs/{job}"


def tokens_prefix(fingerprint: str) -> str:
    return f"tokens/{fingerprint}"


def script_key(sha256: str) -> str:
    return f"scripts/{sha256}.tar"


def compile_cache_key(sha256: str) -> str:
    return f"compile-cache/{sha256}"


def workload_prefix(workload: str) -> str:
    """Return the key prefix of a workload's prepared data, for a name like ``package.module:Name``.

    A dot replaces the colon, because some file systems allow no colon in file names.
    """
    return f"workloads/{workload.replace(':', '.')}"


def job_history_key(day: str, job: str) -> str:
    """Return the key of a job's history.

    Args:
        day: date such as 20261121, which makes keys sort by time.
    """
    return f"{JOB_HISTORY_PREFIX}{day}-{job}.json"


def generation_name(generation: int, generation_id: str) -> str:
    """Return the name that keys use for one generation (start of all ranks), such as
    ``000002-9f3c01ab``.
    """
    return f"{generation:06d}-{generation_id}"


def generation_key(generation: int, generation_id: str) -> str:
    return f"generations/{generation_name(generation, generation_id)}.json"


def event_key(generation: int, node: int | str, rank: int | str, segment: str) -> str:
    """Return the key of one segment of the event log.

    Args:
        generation: 0 before the gang's first start.
        rank: number of the rank, or the name of another process, such as ``agent`` or a step of the
            flow.
        segment: the segment's number, and a random text that is unique to the process.
    """
    return f"events/{generation:06d}/{node}-{rank}-{segment}.jsonl"


def log_key(generation: int, node: int, rank: int, segment: str) -> str:
    return f"logs/{generation:06d}/{node}-{rank}-{segment}.jsonl"


def override_key(generation: int, rank: int, what: str) -> str:
    return f"overrides/{generation:06d}-{rank}-{what}.json"


def permit_prefix(what: str) -> str:
    return f"permits/{what}"


def permit_key(what: str, generation: int) -> str:
    """Return the key of a user's permission, such as ``from-scratch``, valid up to `generation`."""
    return f"{permit_prefix(what)}/{generation:06d}.json"


def order_key(run: str, step: str, task: str, attempt: int) -> str:
    return f"orders/{run}-{step}-{task}-{attempt}.json"


def gang_key(run: str, attempt: int, what: str) -> str:
    return f"gangs/{run}-{attempt}-{what}.json"


def secret_key(run: str, attempt: int) -> str:
    return f"secrets/{run}-{attempt}"


def data_key(generation: str, step: int, rank: int) -> str:
    """Return the key of the data that one rank writes in one save.

    The key is unique if `generation` is from `generation_name`.
    """
    return f"{data_prefix(generation, step)}{rank:05d}.bin"


def data_prefix(generation: str, step: int) -> str:
    return f"data/{generation}/{step:012d}/"


def index_prefix(generation: str, step: int) -> str:
    return f"index/{generation}/{step:012d}/"


def index_key(generation: str, step: int, rank: int) -> str:
    return f"{index_prefix(generation, step)}{rank:05d}.json"


def commit_prefix(step: int, generation: int) -> str:
    """Return the key prefix of all commits of a step in a generation.

    Its numbers count down, so that newer commits are listed first.
    """
    return f"commits/{_STEP_LIMIT - step:012d}/{_GENERATION_LIMIT - generation:06d}/"


def commit_key(step: int, generation: int, sha256: str) -> str:
    return f"{commit_prefix(step, generation)}{sha256}.json"


def parse_commit_key(key: str) -> tuple[int, int, str]:
    """Split a commit's key into (step, generation, sha256 of the manifest).

    Raises ValueError for other keys.
    """
    head, inverted_step, inverted_generation, name = key.split("/")
    if head != "commits" or not name.endswith(".json"):
        raise ValueError(f"not a commit key: {key}")
    return (
        _STEP_LIMIT - int(inverted_step),
        _GENERATION_LIMIT - int(inverted_generation),
        name[: -len(".json")],
    )


def shared_budget_prefix(sweep: str) -> str:
    return f"shared-budgets/{sweep}"


def shared_budget_key(sweep: str, number: int) -> str:
    return f"{shared_budget_prefix(sweep)}/{number:06d}.json"


def parse_shared_budget_key(key: str) -> int:
    """Extract the number of a shared budget's record from its key. Raises ValueError for other
    keys.
    """
    return int(key.rpartition("/")[2].removesuffix(".json"))


def launcher_key(number: int) -> str:
    return f"{LAUNCHERS_PREFIX}{number:06d}.json"


def reservations_key(number: int) -> str:
    return f"{RESERVATIONS_PREFIX}{number:08d}.json"


def clock_key(name: str) -> str:
    return f"clock/{name}"


def runs_folder(project_root: Path) -> Path:
    """Return the folder for reports and logs on this machine.

    It is EBBFLOW_RUNS or, if that is not set, runs/ in `records_root`.
    """
    own = os.environ.get("EBBFLOW_RUNS")
    if own:
        return Path(own).absolute()
    return records_root(project_root, "runs") / "runs"


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a local file so that a reader sees either the old or the complete new content."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(content)
    fresh.replace(path)


def records_root(project_root: Path, name: str) -> Path:
    """Return the folder that contains `name`, which is `runs` or `.metaflow`.

    It is the project's folder or, if that is read-only, the user's state folder.
    """
    folder = project_root / name
    if os.access(folder if folder.exists() else project_root, os.W_OK | os.X_OK):
        return project_root.absolute()
    return _state_folder()


def list_other_runs_folders(project_root: Path) -> list[Path]:
    """List the runs/ folders of other projects on this machine, newest first.

    The list is empty if EBBFLOW_RUNS chooses the folder.
    """
    if os.environ.get("EBBFLOW_RUNS"):
        return []
    here = runs_folder(project_root)
    folders = [Path(line) for line in _read_folders()]
    return [folder for folder in reversed(folders) if folder != here and folder.is_dir()]


def find_local_folder(project_root: Path, job: str) -> Path:
    """Return the local folder of a job: runs/<job> of this project, or of another one that has the
    job.

    Args:
        job: the job's name, or the id of one of its Slurm jobs.
    """
    here = runs_folder(project_root) / job
    if here.exists():
        return here
    linked = runs_folder(project_root) / _SLURM_LINKS / job
    if job.isdigit() and linked.exists():
        return linked.resolve()
    for folder in list_other_runs_folders(project_root):
        if known_job(folder / job) is not None:
            return folder / job
    return here


def find_records(project_root: Path) -> Path:
    """Return the folder whose .metaflow has the records of runs.

    It is this project's folder or, if that has no records, the newest other project's folder that
    has.
    """
    here = records_root(project_root, METAFLOW_FOLDER)
    if not (here / METAFLOW_FOLDER).is_dir():
        for folder in list_other_runs_folders(project_root):
            if (folder.parent / METAFLOW_FOLDER).is_dir():
                return folder.parent
    return here


def known_job(folder: Path) -> KnownJob | None:
    """Read the job that is recorded in a folder such as runs/latest.

    Return None if its job.json is missing or unreadable.
    """
    try:
        note = json.loads((folder / NOTE).read_text())
        return KnownJob(str(note["job"]), str(note["store"]), str(note.get("marker") or ""))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def make_local_folder(runs: Path, job: str, store: str) -> Path:
    """Create the folder <runs>/<job> on this machine if it is missing, and return it.

    If the store is the folder of runs itself, <runs>/<job> is a symbolic link to the job's data in
    the store.
    """
    folder = runs / job
    in_store = runs / job_prefix(job)
    if store == str(runs):
        in_store.mkdir(parents=True, exist_ok=True)
        _link(folder, in_store.relative_to(runs))
    else:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def remember_job(runs: Path, job: KnownJob) -> Path:
    """Record a job's store in the folder <runs>/<job>, let <runs>/latest point to it, and return
    it.

    Commands on this machine then find the job by its name, or the newest job if no name is given.
    """
    folder = make_local_folder(runs, job.name, job.store)
    before = known_job(folder)
    if not job.marker and before is not None and before.uri == job.uri:
        job = replace(job, marker=before.marker)  # the store did not answer in time
    write_atomically(folder / NOTE, job.note())
    _link(runs / "latest", Path(job.name))
    _remember_folder(runs)
    return folder


def link_slurm_job(folder: Path, slurm_id: str) -> None:
    """Link a Slurm job's id to the job's folder, so that local commands find the job by this id.

    Args:
        folder: the job's folder, <runs>/<job>.
    """
    links = folder.parent / _SLURM_LINKS
    links.mkdir(parents=True, exist_ok=True)
    _link(links / slurm_id, Path("..") / folder.name)


def _state_folder() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return (state / "ebbflow").absolute()


def _read_folders() -> list[str]:
    try:
        return (_state_folder() / _FOLDERS_FILE).read_text().splitlines()
    except (OSError, ValueError):
        return []


def _remember_folder(runs: Path) -> None:
    """Add a runs/ folder to this machine's list, as the newest."""
    if os.environ.get("EBBFLOW_RUNS"):
        return
    known = _read_folders()
    here = str(runs.absolute())
    if known[-1:] == [here]:
        return
    folders = [*(folder for folder in known if folder != here), here][-_MOST_FOLDERS:]
    with contextlib.suppress(OSError):  # a machine without a home only lacks the common list
        _state_folder().mkdir(parents=True, exist_ok=True)
        write_atomically(_state_folder() / _FOLDERS_FILE, "\n".join(folders).encode() + b"\n")


def _key_of_commit(folder: str) -> Callable[[str], str]:
    return lambda sha256: f"{folder}/{sha256}.json"


# Keys of objects about the commit whose manifest has this sha256.
quarantine_key = _key_of_commit("quarantine")
tombstone_key = _key_of_commit("tombstones")
pin_key, signature_key, verified_key = map(_key_of_commit, ("pins", "signatures", "verified"))


def _link(link: Path, target: Path) -> None:
    """Create or replace a symbolic link atomically. If `link` is a folder, change nothing."""
    if link.is_symlink() and link.readlink() == target:
        return
    if link.exists() and not link.is_symlink():
        return  # keep the folder of an earlier job with another store
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
