"""Claims on a job: each launcher (`run`, `resume`, `supervise`, torchrun) writes one, so that the
job never runs twice at the same time.

A claim is the object launchers/<number>.json in the job's part of the store. A launcher creates it
only if no object with that number exists, so only one of two simultaneous launchers succeeds. The
launcher whose claim has the highest number holds the job. It renews the claim while it runs, and
marks it as released when it ends. Another launcher takes over by creating the next number; the
former launcher checks regularly for that number, and exits once it exists.

A claim that was not renewed for 60 s is stale, and the next launcher takes the job. If both
launchers are on the same machine, the former launcher's process decides instead: while it exists,
even stopped (Ctrl-Z), it holds the job; once it is gone, the job is free.
"""

import contextlib
import getpass
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Self, TypedDict

from ebbflow.core.errors import InfraError, JobIsRunning, ObjectNotFound, StoreError
from ebbflow.core.layout import LAUNCHERS_PREFIX, launcher_key
from ebbflow.core.process import process_stat, read_system_file
from ebbflow.core.store import Store
from ebbflow.core.store.objects import StoreClock

# Id of the claim of the supervisor that started this run of the flow; the run then makes no claim
# of its own.
CLAIM_VARIABLE = "EBBFLOW_LAUNCHER"
# Id of the claim that this launcher's child processes work under. It does not replace a claim.
RUN_CLAIM_VARIABLE = "EBBFLOW_RUN_CLAIM"
STALE_SECONDS = 60.0
HAND_OVER_SECONDS = 90.0  # a leaving launcher waits 60 s for the last save
# Puts and requests to a bucket are billed: 360 puts and 1,200 HEADs an hour cost $0.002.
_RENEW_SECONDS = {"folder": 2.0, "bucket": 10.0}
_LOOK_SECONDS = {"folder": 0.5, "bucket": 3.0}
_WATCH_SECONDS = 0.5
_UNREADABLE = ""  # id of a claim whose content is damaged
_LONGEST_READ = 200  # claims to try; if another launcher takes all of them, the store is faulty


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Content of a claim, which describes the launcher that wrote it."""

    number: int  # number of the claim
    id: str  # random id of the claim
    command: str  # the command of `ebbflow`, such as run
    host: str
    user: str
    pid: int  # process id of the launcher
    since_utc: float  # Unix time of the claim by the launcher's clock
    renewals: int = 0  # number of renewals so far
    released: bool = False  # whether the launcher has ended
    # Whether the claim only ends the run of the former launcher: no launcher goes on with the job
    stops_job: bool = False
    # boot_id, pid_namespace, started_ticks: these and `pid` identify the process, even if its pid
    # was reused
    boot_id: str = ""
    pid_namespace: str = ""
    started_ticks: int = 0

    def to_json(self) -> bytes:
        return json.dumps({"schema": 1, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Parse the content of a claim. Raises StoreError if the content is not a claim."""
        try:
            document = json.loads(content)
            return cls(
                **{
                    field.name: document[field.name]
                    for field in fields(cls)
                    if field.name in document
                }
            )
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"not a launcher's claim: {error!r}") from error

    @property
    def since(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_utc))

    def describe(self) -> str:
        """Describe the launcher's command, user, host and start.

        For example: "`run` of ann on host node-7 (pid 4711), since 2026-11-22 20:51:03 UTC".
        """
        if self.id == _UNREADABLE:
            return f"an unknown launcher, whose claim {launcher_key(self.number)} cannot be read"
        return (
            f"`{self.command}` of {self.user} on host {self.host} (pid {self.pid}), since "
            f"{self.since}"
        )

    @property
    def was_here(self) -> bool:
        return bool(self.boot_id) and (self.boot_id, self.pid_namespace) == _here()

    def is_process(self, pid: int) -> bool:
        """Return whether the launcher is the process `pid` of this machine.

        Two containers may share their host's name, and both have a process 1.
        """
        if self.boot_id:
            return self.was_here and self.pid == pid
        return (self.host, self.pid) == (socket.gethostname(), pid)

    @property
    def is_alive_here(self) -> bool:
        return self._state_here not in ("", "Z", "X")

    @property
    def is_stopped_here(self) -> bool:
        return self._state_here == "T"

    @property
    def _state_here(self) -> str:
        """The kernel's state letter of the launcher's process, such as T for stopped.

        The value is "" if the process has ended or is not on this machine.
        """
        if self.was_here:
            stat = process_stat(self.pid)
        else:
            stat = None
        if stat is not None and stat.started_ticks == self.started_ticks:
            return stat.state
        return ""


class RunningJob(TypedDict):
    """The launcher that is running a job, as JSON."""

    since_utc: float  # Unix time
    host: str
    user: str
    pid: int
    command: str
    heartbeat_age_seconds: float


@dataclass(frozen=True)
class RunningLauncher:
    """The launcher that holds a job, and the time since it last renewed its claim."""

    launcher: Launcher  # content of its claim
    heartbeat_age_seconds: float  # time since its last renewal by the store's clock

    def to_json(self) -> RunningJob:
        return {
            "since_utc": self.launcher.since_utc,
            "host": self.launcher.host,
            "user": self.launcher.user,
            "pid": self.launcher.pid,
            "command": self.launcher.command,
            "heartbeat_age_seconds": round(self.heartbeat_age_seconds, 1),
        }


@dataclass(frozen=True, kw_only=True)
class StoppedRun:
    """A run that `ebbflow stop` has asked to end, and whether its launcher has exited."""

    launcher: Launcher  # content of its claim
    has_left: bool  # whether the launcher has saved and exited within the time to wait


class Claim:
    """This process's claim on a job, which is already written to the store.

    A thread renews it until `release`.

    Args:
        on_fenced: called in that thread when another launcher has taken over the job.
    """

    def __init__(self, job_store: Store, launcher: Launcher, on_fenced: Callable[[], None]) -> None:
        self.launcher = launcher
        self.fenced_by: Launcher | None = None  # the launcher that has taken the job over
        self._store = job_store
        self._on_fenced = on_fenced
        self._ended = threading.Event()
        if job_store.local_path("") is None:
            kind = "bucket"
        else:
            kind = "folder"
        self._renew_seconds = _RENEW_SECONDS[kind]
        self._look_seconds = _LOOK_SECONDS[kind]
        self._writing = threading.Lock()
        self._releasing = False
        self._thread = threading.Thread(target=self._keep, name="launcher-claim", daemon=True)
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        """Whether `ebbflow stop` has ended this run.

        In contrast to a take-over, no other launcher then continues the job.
        """
        return self.fenced_by is not None and self.fenced_by.stops_job

    @property
    def is_taken_over(self) -> bool:
        """Whether another launcher has taken over the job, and continues it."""
        return self.fenced_by is not None and not self.fenced_by.stops_job

    def describe_loss(self) -> str:
        """Render why this launcher has lost the job, or "" while it holds the job."""
        if self.fenced_by is None:
            return ""
        if self.fenced_by.stops_job:
            return f"job stopped by {self.fenced_by.describe()}"
        return f"job taken over by {self.fenced_by.describe()}"

    def successor(self) -> Launcher | None:
        """Return the launcher that has taken over the job, or None while this launcher holds it.

        Raises StoreError.

        The method reads the store. Call it after a pause (stopped process, network outage), before
        you change anything that a successor may own.
        """
        if self.fenced_by is None:
            self.fenced_by = self._successor()
        return self.fenced_by

    def release(self) -> None:
        """Mark the claim as released, so that the next launcher does not wait until it is stale.

        Never raises.

        A second call returns at once. Otherwise a signal handler that interrupts the first call
        would wait for a lock that its own thread holds.
        """
        if self._releasing:
            return
        self._releasing = True
        self._ended.set()
        with contextlib.suppress(StoreError):
            self._put(replace(self.launcher, released=True))

    def _keep(self) -> None:
        # The first renewal is early: it detects a launcher that wrote the same number at the same
        # moment.
        renewed = time.monotonic() - self._renew_seconds
        while not self._ended.wait(self._look_seconds):
            try:
                other = self._successor()
                if other is not None:
                    self.fenced_by = other
                    self._on_fenced()
                    return
                if time.monotonic() - renewed >= self._renew_seconds:
                    self._renew()
                    renewed = time.monotonic()
            except InfraError:
                continue  # store unavailable: the claim becomes stale until it can be renewed

    def _successor(self) -> Launcher | None:
        if self._store.head(launcher_key(self.launcher.number + 1)) is None:
            return None
        newest = _newest(self._store)
        if newest is None:
            return None
        return newest[0]

    def _renew(self) -> None:
        """Renew the claim, or give up the job if the claim's number is also used by another
        launcher.

        Such a duplicate arises if the store ignores the condition that `create` must not overwrite
        an object.
        """
        written = _read(self._store, self.launcher.number)
        if written is not None and written.id not in (_UNREADABLE, self.launcher.id):
            self.fenced_by = written
            self._ended.set()
            self._on_fenced()
            return
        self.launcher = replace(self.launcher, renewals=self.launcher.renewals + 1)
        with self._writing:
            if not self._ended.is_set():
                self._store.put(launcher_key(self.launcher.number), self.launcher.to_json())

    def _put(self, launcher: Launcher) -> None:
        with self._writing:
            written = _read(self._store, launcher.number)
            if written is None or written.id in (_UNREADABLE, launcher.id):
                self._store.put(launcher_key(launcher.number), launcher.to_json())


def running_launcher(job_store: Store) -> RunningLauncher | None:
    """Return the launcher that holds the job, or None if the job is not running. Raises StoreError.

    A launcher on this machine holds the job while its process exists. A launcher on another machine
    holds it while its last renewal is at most 60 s old by the store's clock.
    """
    newest = _newest(job_store)
    if newest is None or newest[0].released:
        return None
    launcher, modified = newest
    is_alive_here = launcher.is_alive_here
    if launcher.was_here and not is_alive_here:
        return None
    # A read-only store cannot tell its time: use this machine's clock.
    now = StoreClock().now(job_store, newest=time.time())
    age = max(0.0, now - modified)
    if is_alive_here or age <= STALE_SECONDS:
        return RunningLauncher(launcher, age)
    return None


def claim_job(
    job_store: Store,
    job: str,
    command: str,
    *,
    take_over: bool = False,
    on_fenced: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: print(text, flush=True),
) -> Claim:
    """Claim the job for this process, and return the claim. The caller releases it at the end.

    If a launcher on another machine renewed its claim within the last 60 s, it may still be
    running. This function then waits. It raises JobIsRunning if that launcher renews its claim
    again, and takes the job if the claim becomes stale.

    Args:
        command: the command of `ebbflow`, shown to other launchers.
        take_over: take the job from a running launcher, and wait at most 90 s until it has saved
            and exited.
        on_fenced: called in a separate thread when another launcher takes over the job.
        say: prints a progress message.

    Raises:
        JobIsRunning: another launcher runs the job.
        StoreError: the store failed.
    """
    for _ in range(_LONGEST_READ):
        newest = _newest(job_store)
        if newest is None:
            holder = None
        else:
            holder = _living(job_store, job, *newest, watch=not take_over, say=say)
        if holder is not None and not take_over:
            if holder.is_stopped_here:
                stopped = f"; it is stopped, kill -CONT {holder.pid} continues it"
            else:
                stopped = ""
            raise JobIsRunning(
                f"job {job} is running: {holder.describe()}{stopped}; to end that run and go on "
                "here, add --take-over"
            )
        number = 1 if newest is None else newest[0].number + 1
        launcher = _new_launcher(number, command)
        if not job_store.create(launcher_key(launcher.number), launcher.to_json()):
            continue  # another launcher was faster: check its claim
        claim = Claim(job_store, launcher, on_fenced)
        if holder is not None:
            _wait_for_former(job_store, job, holder, say)
        return claim
    raise StoreError(
        f"{job_store.uri}/{LAUNCHERS_PREFIX}: no number was free in {_LONGEST_READ} tries"
    )


def stop_job(job_store: Store, job: str, *, say: Callable[[str], None]) -> StoppedRun | None:
    """Ask the launcher that holds the job to save and end, and wait at most 90 s until it has.

    Args:
        say: prints a progress message.

    Returns:
        The run that was stopped, or None if no launcher runs the job.

    Raises:
        StoreError: the store failed.
    """
    for _ in range(_LONGEST_READ):
        newest = _newest(job_store)
        if newest is None:
            return None
        holder = _living(job_store, job, *newest, watch=True, say=say)
        if holder is None:
            return None
        launcher = replace(_new_launcher(holder.number + 1, "stop"), stops_job=True)
        if not job_store.create(launcher_key(launcher.number), launcher.to_json()):
            continue  # another launcher was faster: check its claim
        say(
            f"job {job}: stopping {holder.describe()}; waiting up to {HAND_OVER_SECONDS:.0f} s for "
            "its last save"
        )
        claim = Claim(job_store, launcher, on_fenced=lambda: None)
        try:
            return StoppedRun(launcher=holder, has_left=_wait_for_leaving(job_store, holder))
        finally:
            claim.release()
    raise StoreError(
        f"{job_store.uri}/{LAUNCHERS_PREFIX}: no number was free in {_LONGEST_READ} tries"
    )


def check_inherited_claim(job_store: Store, job: str, claim_id: str) -> None:
    """Raise JobIsRunning if the job's newest claim is not the one inherited from the parent
    process.
    """
    newest = _newest(job_store)
    # A live launcher renews a damaged claim
    if newest is not None and newest[0].id not in (_UNREADABLE, claim_id):
        raise JobIsRunning(f"job {job} was taken over: {newest[0].describe()}")


def check_run_claim(job_store: Store, job: str) -> None:
    """Raise JobIsRunning if another launcher has taken the job from this process's launcher.

    A launcher that `ebbflow stop` has ended still writes its report. Raises StoreError.
    """
    claim_id = os.environ.get(RUN_CLAIM_VARIABLE)
    if not claim_id:
        return
    newest = _newest(job_store)
    if newest is not None and not newest[0].stops_job:
        check_inherited_claim(job_store, job, claim_id)


def claim_of_parent() -> str | None:
    """Return the id of the supervisor's claim, under which this process runs.

    Return None if this process needs its own claim.
    """
    return os.environ.get(CLAIM_VARIABLE) or None


def _living(
    job_store: Store,
    job: str,
    launcher: Launcher,
    modified: float,
    *,
    watch: bool,
    say: Callable[[str], None],
) -> Launcher | None:
    """Return the launcher that currently holds the job, if it is still alive.

    Return None if it is dead, or if its claim was released or is stale.

    Args:
        modified: Unix time of the claim's last write, by the store's clock.
        watch: if necessary, wait for a renewal to find out whether the launcher is still running.
    """
    if launcher.released or (launcher.was_here and not launcher.is_alive_here):
        return None
    if launcher.is_alive_here:
        return launcher
    age = max(0.0, StoreClock().now(job_store, newest=modified) - modified)
    if age > STALE_SECONDS:
        return None
    if not watch:
        return launcher
    seconds = STALE_SECONDS - age
    say(
        f"job {job}: claimed by {launcher.describe()}; waiting up to {seconds:.0f} s for a sign of "
        "life"
    )
    return _wait_for_renewal(job_store, launcher, seconds)


def _wait_for_renewal(job_store: Store, launcher: Launcher, seconds: float) -> Launcher | None:
    """Wait until the claim is renewed or taken over, and return the launcher that then holds the
    job.

    Return None if the claim is released or `seconds` pass.
    """
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        time.sleep(_WATCH_SECONDS)
        newest = _newest(job_store)
        if newest is None or newest[0].released:
            return None
        if (newest[0].id, newest[0].renewals) != (launcher.id, launcher.renewals):
            return newest[0]
    return None


def _wait_for_former(
    job_store: Store, job: str, former: Launcher, say: Callable[[str], None]
) -> None:
    say(
        f"job {job}: taking over from {former.describe()}; waiting up to {HAND_OVER_SECONDS:.0f} "
        "s for its last save"
    )
    if not _wait_for_leaving(job_store, former):
        say(
            f"job {job}: {former.describe()} did not leave within {HAND_OVER_SECONDS:.0f} s; going "
            "on from the last commit"
        )


def _wait_for_leaving(job_store: Store, former: Launcher) -> bool:
    """Wait up to HAND_OVER_SECONDS until the launcher has released its claim or its process is
    gone.

    Return whether that has happened.
    """
    limit = time.monotonic() + HAND_OVER_SECONDS
    while time.monotonic() < limit:
        written = _read(job_store, former.number)
        if written is None or written.released or (former.was_here and not former.is_alive_here):
            return True
        time.sleep(_WATCH_SECONDS)
    return False


def _newest(job_store: Store) -> tuple[Launcher, float] | None:
    """Return the claim with the highest number, and the Unix time at which it was last written.

    The time is by the store's clock. Return None if there is no claim.
    """
    listed = job_store.list(LAUNCHERS_PREFIX)
    for meta in reversed(listed):
        name = meta.key.rpartition("/")[2].removesuffix(".json")
        if not name.isdigit():
            continue
        launcher = _read(job_store, int(name))
        if launcher is not None:
            return launcher, meta.modified
    return None


def _read(job_store: Store, number: int) -> Launcher | None:
    """Return the claim with this number, or None if it does not exist. Raises StoreError.

    An unreadable claim is returned as the claim of an unknown launcher. Such a claim holds the job
    until it is stale.
    """
    try:
        content = job_store.get(launcher_key(number))
    except ObjectNotFound:
        return None
    try:
        return replace(Launcher.from_json(content), number=number)
    except StoreError:
        unknown = "unknown"
        return Launcher(
            number=number,
            id=_UNREADABLE,
            command=unknown,
            host=unknown,
            user=unknown,
            pid=0,
            since_utc=0.0,
        )


def _here() -> tuple[str, str]:
    """Return this machine's boot id and this process's PID namespace, each "" if unknown."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return read_system_file("/proc/sys/kernel/random/boot_id"), namespace


def _new_launcher(number: int, command: str) -> Launcher:
    stat = process_stat(os.getpid())
    (boot_id, namespace) = _here()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        user = str(os.getuid())
    return Launcher(
        number=number,
        id=secrets.token_hex(8),
        command=command,
        host=socket.gethostname(),
        user=user,
        pid=os.getpid(),
        since_utc=time.time(),
        boot_id=boot_id,
        pid_namespace=namespace,
        started_ticks=0 if stat is None else stat.started_ticks,
    )
