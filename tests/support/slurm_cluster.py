"""A real Slurm cluster on this machine: munged, slurmctld and two slurmd, all in one folder.

Debian's packages slurmctld, slurmd, slurm-client and munge have the programs. No service of the
machine is used or changed: key, socket, state and ports belong to the cluster alone. Slurm's daemons
need root, because slurmd starts processes as the submitting user.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ebbflow.core.process import process_stat
from tests.support.gangs import free_port

NODES = ("n1", "n2")
GRACE_SECONDS = 20
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
# Limit of waits; a training on a busy machine takes many times as long as on an idle one
_LONGEST_SECONDS = 300.0
_CONFIGURATION = """
ClusterName=ebbflow
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout={slurmd_seconds}
KillWait=10
MinJobAge=300
FirstJobId={first_job_id}
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
{controller}
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={n1_port} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={n2_port} CPUs=2 State=UNKNOWN
PartitionName=spot Nodes=n[1-2] PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_seconds} MaxTime=60 State=UP Default=YES
PartitionName=safe Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
PartitionName=short Nodes=n[1-2] PriorityTier=1 PreemptMode=OFF MaxTime=2 State=UP
PartitionName=closed Nodes=n[1-2] PriorityTier=1 PreemptMode=OFF State=DOWN
"""
Seen = TypeVar("Seen")


class SlurmCluster:
    """A running cluster.

    Attributes:
        folder: folder of configuration, logs and state.
        environment: variables with which a process reaches this cluster.
    """

    def __init__(
        self, folder: Path, *, controller_parameters: str = "", slurmd_seconds: int = 20
    ) -> None:
        """Start the cluster.

        Args:
            controller_parameters: value of SlurmctldParameters, such as preempt_send_user_signal.
            slurmd_seconds: time without an answer after which a node is DOWN.
        """
        self.folder = folder
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        self._configuration = folder / "slurm.conf"
        controller = f"SlurmctldParameters={controller_parameters}" if controller_parameters else ""
        self._configuration.write_text(
            _CONFIGURATION.format(
                folder=folder,
                controller_port=free_port(),
                n1_port=free_port(),
                n2_port=free_port(),
                controller=controller,
                slurmd_seconds=slurmd_seconds,
                grace_seconds=GRACE_SECONDS,
                # Ranks' ports follow from job ids, and other clusters run on this machine
                first_job_id=random.randrange(1, 9000),
            )
        )
        self.environment: Mapping[str, str] = {
            "SLURM_CONF": str(self._configuration),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), _path()]),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start_munge()
            self.start_controller()
            for node in NODES:
                self.start_node(node)
            self.await_nodes()
        except BaseException:
            self.stop()
            raise

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self._configuration))

    def start_node(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self._start(node, "slurmd", "-D", "-f", str(self._configuration), "-N", node)

    def await_nodes(self) -> None:
        """Wait until both nodes are idle."""

        def all_idle() -> bool:
            shown = self.ask("sinfo", "-h", "-p", "safe", "-N", "-o", "%T", check=False).split()
            return shown == ["idle"] * len(NODES)

        self.wait_until("idle nodes", all_idle)

    def ask(self, *words: str, check: bool = True) -> str:
        """Run a command of Slurm, and return its output."""
        done = subprocess.run(
            words, env=self.variables(), capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or done.returncode == 0, f"{words}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def variables(self) -> dict[str, str]:
        """Return this process's environment, with the variables of the cluster."""
        return {**os.environ, **self.environment}

    def state(self, job_id: str) -> str:
        """Return a job's state by `scontrol`, such as RUNNING; "" if Slurm does not know the job."""
        return self.field(job_id, "JobState")

    def field(self, job_id: str, name: str) -> str:
        shown = self.ask("scontrol", "show", "job", "-o", job_id, check=False).split()
        values = dict(word.split("=", 1) for word in shown if "=" in word)
        return values.get(name, "")

    def jobs(self) -> list[str]:
        """Return the ids of all jobs that wait or run."""
        return self.ask("squeue", "-h", "-o", "%i").split()

    def preempt(self, seconds: int = 3) -> str:
        """Submit a job to the partition `safe` that takes both nodes; return its id."""
        script = f"--wrap=sleep {seconds}"
        words = ("sbatch", "--parsable", "-p", "safe", "-N2", "--exclusive", "-o", "/dev/null")
        return self.ask(*words, script).strip()

    def kill(self, daemon: str) -> None:
        """Kill slurmctld or a node's slurmd with SIGKILL."""
        self._daemons[daemon].kill()
        self._daemons[daemon].wait()

    def kill_step(self, node: str) -> None:
        """Kill with SIGKILL the slurmstepd of a job's tasks on a node; its batch shell has another."""
        for pid in self._own_processes():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                stat = process_stat(pid)
                parent = 0 if stat is None else stat.parent
                name = Path(f"/proc/{parent}/cmdline").read_bytes()
                is_task = re.match(rb"slurmstepd: \[\d+\.\d+\]", name) is not None
                if is_task and f"SLURMD_NODENAME={node}".encode() in variables:
                    os.kill(parent, signal.SIGKILL)
                    return
        raise AssertionError(f"no step runs on {node}")

    def logs(self) -> str:
        texts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            texts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(texts)

    def wait_until(
        self, what: str, look: Callable[[], Seen], timeout: float = _LONGEST_SECONDS
    ) -> Seen:
        limit = time.monotonic() + timeout
        while True:
            seen = look()
            if seen:
                return seen
            assert time.monotonic() < limit, f"{what}: not within {timeout} s\n{self.logs()}"
            time.sleep(0.2)

    def cancel_all(self) -> None:
        """Kill every job, and wait until the nodes are idle again."""
        for job_id in self.jobs():
            self.ask("scancel", "--signal=KILL", "--full", job_id, check=False)
            self.ask("scancel", job_id, check=False)
        self.wait_until("an empty queue", lambda: not self.jobs())
        self.await_nodes()

    def stop(self) -> None:
        """End every process of the cluster, those of its jobs included."""
        for name in ("slurmctld", *NODES, "munged"):
            daemon = self._daemons.get(name)
            if daemon is not None:
                daemon.terminate()  # slurmctld has a child, which it ends
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
                daemon.kill()
                daemon.wait()
        limit = time.monotonic() + 20
        while time.monotonic() < limit:
            left = self._own_processes()
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _own_processes(self) -> list[int]:
        """Return the processes with this cluster's configuration in their environment: slurmstepd
        and the jobs.
        """
        mark = f"SLURM_CONF={self._configuration}".encode()
        pids = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0") and path.parent.name != str(os.getpid()):
                    pids.append(int(path.parent.name))
        return pids

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={self.folder}/munge.socket",
            f"--log-file={self.folder}/munged.log",
            f"--pid-file={self.folder}/munged.pid",
            f"--seed-file={self.folder}/munged.seed",
            "--num-threads=2",
        )
        self.wait_until("munge", (self.folder / "munge.socket").exists)

    def _start(self, name: str, *command: str) -> None:
        """Start a daemon, which dies with this process."""
        with open(self.folder / f"{name}.out.log", "ab") as output:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.variables(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def why_missing() -> str:
    """Return why no cluster can be started here, or "" if one can."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        packages = "slurmctld slurmd slurm-client munge"
        return f"{', '.join(absent)} not installed: apt-get install {packages}"
    if os.geteuid() != 0:
        return "slurmd needs root, to start processes as the submitting user"
    return ""


@contextmanager
def slurm_cluster(folder: Path, *, controller_parameters: str = "") -> Iterator[SlurmCluster]:
    """A cluster in `folder`, whose processes all end with the block."""
    cluster = SlurmCluster(folder, controller_parameters=controller_parameters)
    try:
        yield cluster
    finally:
        cluster.stop()


def _path() -> str:
    """Return PATH with the folders of daemons, which a user's PATH may lack."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
