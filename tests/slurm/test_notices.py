"""Slurm's notices to the agents of a batch script: preemption with both settings, and time limit."""

from __future__ import annotations

from pathlib import Path

from ebbflow.core.config.schema import SlurmConfig
from ebbflow.infra.slurm.script import BatchScript, agent_lines
from tests.support.slurm_cluster import SlurmCluster, slurm_cluster

# In place of an agent: it leaves as an agent does. Each notice goes to a file of its own, so that it
# counts whatever srun reads of an agent's last output.
_AGENT = "trap 'touch {folder}/notice-$SLURM_NODEID; exit 75' TERM; echo ready; sleep 600 & wait"


def send(cluster: SlurmCluster, folder: Path, *options: str) -> tuple[str, Path]:
    """Submit a script with an agent per node, and wait until it runs; return job and output."""
    log = folder / "out.log"
    script = folder / "job.sh"
    own = ["--nodes=2", "--ntasks-per-node=1", "--no-requeue", f"--output={log}", *options]
    agent = ["bash", "-c", _AGENT.format(folder=folder)]
    script.write_text(BatchScript(options=own, lines=agent_lines(SlurmConfig(), agent)).render())
    job_id = cluster.ask("sbatch", "--parsable", str(script)).strip()
    cluster.wait_until(
        "agents", lambda: log.exists() and log.read_text().count("ready") == 2, timeout=60
    )
    return job_id, log


def check_left(cluster: SlurmCluster, job_id: str, log: Path, timeout: float) -> None:
    """Check that both agents got the notice, and that the job ended with their exit code."""
    cluster.wait_until("an end", lambda: cluster.state(job_id) == "FAILED", timeout)
    told = {path.name for path in log.parent.glob("notice-*")}
    assert told == {"notice-0", "notice-1"}, log.read_text()
    assert cluster.field(job_id, "ExitCode") == "75:0", log.read_text()


def test_a_preemption_reaches_all_agents(cluster: SlurmCluster, tmp_path: Path) -> None:
    job_id, log = send(cluster, tmp_path, "--partition=spot", "--signal=B:USR1@60")
    cluster.preempt()
    check_left(cluster, job_id, log, 15)


def test_where_slurm_sends_the_users_signal_at_a_preemption_it_reaches_all_agents(
    session_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The fixture only skips the test where Slurm is not installed."""
    with slurm_cluster(
        tmp_path / "own", controller_parameters="preempt_send_user_signal"
    ) as cluster:
        job_id, log = send(cluster, tmp_path, "--partition=spot", "--signal=B:USR1@60")
        cluster.preempt()
        check_left(cluster, job_id, log, 15)


def test_the_warning_before_the_time_limit_reaches_all_agents(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """It may come up to a minute early: at once, with a limit of a minute and a warning of 60 s."""
    options = ["--partition=short", "--time=1", "--signal=B:USR1@60"]
    job_id, log = send(cluster, tmp_path, *options)
    check_left(cluster, job_id, log, 70)
