"""Read the rank, the nodes and the first node's address of a Slurm task from its environment.

Slurm describes a gang by SLURM_PROCID, SLURM_NTASKS and SLURM_JOB_NODELIST (srun(1), "OUTPUT
ENVIRONMENT VARIABLES"). torch's `init_process_group` and all that builds on torchrun read RANK,
WORLD_SIZE and MASTER_ADDR instead.
"""

from __future__ import annotations

import itertools
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ebbflow.core.errors import InfraError, Outcome

LOOPBACK = "127.0.0.1"
# Ports of the ranks' rendezvous: below the ephemeral ports of Linux (32768 and above), which any
# connection may occupy.
_FIRST_PORT = 15_000
_PORTS = 15_000
_STEPS_PER_JOB = 7  # steps of one job get neighbouring ports
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_ADDRESS_SECONDS = 10.0
_OWN_SCRIPTS = ("ebbflow", "train_flow.py", "supervise.py")
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


class SlurmEnvironmentError(InfraError, outcome=Outcome.CONFIG):
    """Error: Slurm's variables contradict each other, or are not understood."""


@dataclass(frozen=True, kw_only=True)
class SlurmTask:
    """The position of this process among the tasks of one `srun`: its rank and node."""

    job_id: str
    step_id: int
    rank: int
    world_size: int
    node: int  # number of this task's node within the step
    local_rank: int
    tasks_on_node: int
    nodes: tuple[str, ...]  # names of the step's nodes

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SlurmTask | None:
        """Read which task of `srun` this process is, or return None if it is none.

        The shell of a batch script is no task: it has a rank, but no step.

        Raises:
            SlurmEnvironmentError: Slurm's variables contradict each other.
        """
        step = environment.get("SLURM_STEP_ID", "")
        if not step.isdigit() or "SLURM_PROCID" not in environment:
            return None
        listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        nodes = tuple(parse_node_list(listed))
        node = _number(environment, "SLURM_NODEID")
        counts = parse_task_counts(
            environment.get("SLURM_STEP_TASKS_PER_NODE")
            or environment.get("SLURM_TASKS_PER_NODE", "")
        )
        if node >= len(nodes) or len(counts) != len(nodes):
            raise SlurmEnvironmentError(
                f"Slurm: node {node} of {len(nodes)} in {listed!r}, with tasks on {len(counts)} "
                "nodes; fix: start the script by srun in a job of its own"
            )
        return cls(
            job_id=environment.get("SLURM_JOB_ID", ""),
            step_id=int(step),
            rank=_number(environment, "SLURM_PROCID"),
            world_size=sum(counts),
            node=node,
            local_rank=_number(environment, "SLURM_LOCALID"),
            tasks_on_node=counts[node],
            nodes=nodes,
        )

    @property
    def port(self) -> int:
        """The port for the ranks' rendezvous, derived from the job and step so that all nodes agree
        on it.
        """
        digits = "".join(filter(str.isdigit, self.job_id))
        return _FIRST_PORT + (int(digits or "0") * _STEPS_PER_JOB + self.step_id) % _PORTS

    def torchrun_variables(self) -> dict[str, str]:
        """Return the variables that torchrun would have set for this task."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.tasks_on_node),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": first_address(self.nodes),
            "MASTER_PORT": str(self.port),
        }


def parse_node_list(text: str) -> list[str]:
    """Return the host names of a node list, such as `gpu[01-03,7]-ib,login`.

    Raises:
        SlurmEnvironmentError: the text is no node list.
    """
    names: list[str] = []
    for part in _split_outside_brackets(text):
        names += _expand(part, text)
    if not names:
        raise SlurmEnvironmentError(
            f"Slurm's node list {text!r} names no node; fix: start the script by srun"
        )
    return names


def parse_task_counts(text: str) -> list[int]:
    """Parse the number of tasks on each node: `4(x2),1` means 4, 4 and 1.

    Raises:
        SlurmEnvironmentError: the text is no list of counts.
    """
    counts: list[int] = []
    for part in text.split(","):
        matched = _REPEATED.fullmatch(part)
        if matched is None:
            raise SlurmEnvironmentError(
                f"Slurm's task counts {text!r}: {part!r} is no count such as 4 or 4(x2); fix: "
                "srun --ntasks-per-node=N"
            )
        counts += [int(matched[1])] * int(matched[2] or 1)
    return counts


def first_address(nodes: tuple[str, ...]) -> str:
    """Return an address at which all nodes can reach the first node.

    A job on one node uses the loopback interface. A node's name need not be a host name; Slurm
    itself then knows the address.
    """
    if len(nodes) == 1:
        return LOOPBACK
    first = nodes[0]
    try:
        socket.getaddrinfo(first, None)
    except OSError:
        return _address_by_slurm(first) or first
    return first


def adopt_slurm_environment(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables in the environment of a process that `srun` has started.

    Nothing changes if RANK, WORLD_SIZE or MASTER_ADDR is set, or if there is only one task.

    Raises:
        SlurmEnvironmentError: Slurm's variables contradict each other.
    """
    if any(name in environment for name in _TORCHRUN):
        return
    task = SlurmTask.from_environment(environment)
    if task is not None and task.world_size > 1:
        environment.update(task.torchrun_variables())


def is_own_program(words: Sequence[str]) -> bool:
    """Return whether the command line `words` starts a program of Ebbflow rather than a rank.

    Such programs are `python -m ebbflow…`, the command `ebbflow`, and its flows.
    """
    if "-m" in words[:-1]:
        module = words[words.index("-m") + 1]
        return module.partition(".")[0] == "ebbflow"
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    return PurePath(script).name in _OWN_SCRIPTS


def stop_signals(environment: Mapping[str, str]) -> tuple[signal.Signals, ...]:
    """Return the signals that ask a process to save and leave.

    Under Slurm, SIGUSR1 is one of them: `--signal=USR1@S` sends it S seconds before the time limit,
    and sites with `preempt_send_user_signal` send it at a preemption. Its default action would kill
    the process.
    """
    if "SLURM_JOB_ID" in environment:
        return (signal.SIGTERM, signal.SIGUSR1)
    return (signal.SIGTERM,)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise SlurmEnvironmentError(
            f"Slurm: {name} is {text!r}, not a number; fix: start the script by srun"
        )
    return int(text)


def _split_outside_brackets(text: str) -> Iterator[str]:
    part = ""
    depth = 0
    for character in text:
        if character == "," and depth == 0:
            yield part
            part = ""
            continue
        depth += {"[": 1, "]": -1}.get(character, 0)
        part += character
    if part:
        yield part


def _expand(part: str, whole: str) -> list[str]:
    """Expand one part of a node list, which may have several pairs of brackets, to host names."""
    pieces = re.split(r"\[([^\[\]]*)\]", part)
    choices: list[list[str]] = []
    for position, piece in enumerate(pieces):
        if position % 2:
            choices.append(_expand_ranges(piece, whole))
        elif "[" in piece or "]" in piece:
            raise _no_node_list(whole, piece)
        else:
            choices.append([piece])
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _expand_ranges(ranges: str, whole: str) -> list[str]:
    """Expand ranges such as `01-03,7` to numbers, with their leading zeros."""
    numbers: list[str] = []
    for part in ranges.split(","):
        matched = _RANGE.fullmatch(part)
        if matched is None:
            raise _no_node_list(whole, part)
        first = matched[1]
        last = int(matched[2] or first)
        if last < int(first):
            raise _no_node_list(whole, part)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), last + 1)]
    return numbers


def _no_node_list(text: str, part: str) -> SlurmEnvironmentError:
    return SlurmEnvironmentError(
        f"Slurm's node list {text!r} cannot be read at {part!r}; fix: set MASTER_ADDR, "
        "MASTER_PORT, RANK and WORLD_SIZE yourself"
    )


def _address_by_slurm(node: str) -> str:
    """Return a node's address from `scontrol`, or "" if Slurm does not answer."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "node", "-o", node],
            capture_output=True,
            text=True,
            timeout=_ADDRESS_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    if found is None:
        return ""
    return found[1]
