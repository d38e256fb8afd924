"""Table of NCCL's error messages, with the cause and the fix of each.

torch's exception names only a class, such as ncclSystemError; the words after "Last error:" name
the cause. They are those of NCCL's sources (WARN lines of 2.18 to 2.28 and of aws-ofi-nccl).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_GENERIC = ("A16", "D01", "D06", "D13", "D19")


@dataclass(frozen=True)
class NcclCause:
    """A pattern for error messages of NCCL, and the failure that they report."""

    words: str  # regular expression over the last error, in lower case
    symptom: str  # rule of `ebbflow diagnose`
    cause: str  # of a rule that has several, else ""
    fix: str
    # Whether this process failed for a reason on its own machine, whatever its peers do
    is_local: bool = True
    # Whether each start on the same machines meets it again; others may pass, such as a /dev/shm
    # that another process has filled, or be a mere warning before the error
    recurs: bool = False
    instead_of: Sequence[str] = _GENERIC  # symptoms that say less of the same lines
    kind: str = ""  # kind and weight of the symptom, if they are not those of its rule
    weight: float = 0.0


# The first row whose words are found counts.
NCCL_CAUSES = (
    NcclCause(
        r"no space left on device|/dev/shm|shared memory segment|posix_fallocate",
        "C09",
        "NCCL's shared memory does not fit into /dev/shm, 64 MiB by default in a container",
        "docker run --shm-size=16g (or --ipc=host); batch.shared_memory_mib: 16384; an emptyDir of "
        "medium Memory on /dev/shm in Kubernetes",
    ),
    NcclCause(
        r"no socket interface found|no usable (?:socket )?interface",
        "A14",
        "NCCL_SOCKET_IFNAME leaves no interface, or this container has none but loopback",
        "ip -br addr; unset NCCL_SOCKET_IFNAME, or name the interface of the route to the master",
        recurs=True,
    ),
    NcclCause(
        r"socket_ifname.{0,80}(?:no matching|not found|no such)|neither af_inet",
        "A14",
        "NCCL_SOCKET_IFNAME names an interface that this machine does not have",
        "ip -br addr; unset NCCL_SOCKET_IFNAME, or name the interface of the route to the master",
        recurs=True,
    ),
    NcclCause(
        r"ibv_\w+.{0,60}cannot allocate memory",
        "A29",
        "the limit of locked memory is too small for the buffers that InfiniBand registers",
        "ulimit -l unlimited on every node and in the container (docker run --ulimit memlock=-1; "
        "LimitMEMLOCK=infinity for the daemon of Slurm)",
        recurs=True,
    ),
    NcclCause(
        r"net/ib.{0,80}(?:error 12|status=12)|(?:error 12|status=12).{0,40}net/ib",
        "D17",
        "packets over InfiniBand were retried until NCCL gave up",
        "ibstat and the switch's counters; NCCL_IB_TIMEOUT=23 NCCL_IB_RETRY_CNT=7",
        is_local=False,
        kind="effect",
        weight=0.65,
    ),
    NcclCause(
        r"net/ib.{0,40}got completion",
        "A29",
        "a transfer over InfiniBand failed",
        "the number after status or error names it: 4 the memory of a GPU (load nvidia_peermem; "
        "NCCL_NET_GDR_LEVEL=0 to try without it), 5 an earlier error, 9 to 11 the peer, 13 packets "
        "that were lost; ibstat on both machines",
        is_local=False,
    ),
    NcclCause(
        r"net/ib|ibv_\w+ failed|call to ibv_",
        "A29",
        "InfiniBand cannot be used",
        "ibstat; show_gids; NCCL_IB_HCA and NCCL_IB_GID_INDEX of the fabric; NCCL_IB_DISABLE=1 to "
        "try without it",
        is_local=False,
    ),
    NcclCause(
        r"net/ofi.{0,120}completed with error|unresponsive receiver",
        "A28",
        "a peer does not answer over EFA: its process or machine has ended, or a security group is "
        "between",
        "the rank that ended first; a security group that allows all traffic from and to itself",
        is_local=False,
    ),
    NcclCause(
        r"net/ofi|fi_(?:getinfo|fabric|domain|endpoint)|libfabric",
        "A28",
        "the EFA plugin does not reach its devices",
        "fi_info -p efa in the container; batch.efa_interfaces; an image with aws-ofi-nccl; "
        "ulimit -l unlimited",
    ),
    NcclCause(
        r"too many open files",
        "E08",
        "the limit of open files is too small for NCCL's sockets",
        "ulimit -n 65536 on every node and in the container",
    ),
    NcclCause(
        r"duplicate gpu detected|invalid device ordinal",
        "A09",
        "two ranks have the same GPU",
        "one rank per GPU: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), and "
        "cluster.processes_per_node at most the GPUs of a node",
        recurs=True,
    ),
    NcclCause(
        r"out of memory|cudaerrormemoryallocation",
        "C01",
        "NCCL's buffers no longer fit beside the model",
        "training.gradient_accumulation_steps: its value × 2, or NCCL_BUFFSIZE=1048576",
    ),
    NcclCause(
        r"driver version is insufficient|no kernel image|ptx.{0,30}unsupported",
        "A04",
        "the driver is older than the CUDA of NCCL's wheel",
        "upgrade the driver, or install torch for an older CUDA",
        recurs=True,
    ),
    NcclCause(
        r"system not yet initialized|cuda (?:failure|error) 802",
        "A04",
        "NVIDIA Fabric Manager does not run",
        "systemctl start nvidia-fabricmanager, of the driver's version",
    ),
    NcclCause(
        r"nvls|multicast",
        "B08",
        "NVLink SHARP cannot be set up on this machine",
        "NCCL_NVLS_ENABLE=0; restart nvidia-fabricmanager",
    ),
    NcclCause(
        r"peer access is not supported|p2p.{0,40}(?:not supported|failed)|cuipc|cudaipc",
        "B08",
        "two GPUs cannot reach each other's memory",
        "NCCL_P2P_DISABLE=1; disable ACS on bare metal; share the IPC and PID namespaces of containers",
    ),
    NcclCause(
        r"mismatched nccl version|version mismatch",
        "A03",
        "ranks have different releases of NCCL",
        'python -c "import torch; print(torch.cuda.nccl.version())" on all nodes; one image for all',
        recurs=True,
    ),
    NcclCause(
        r"invalid config \w+ attribute",
        "A03",
        "a rank has loaded another NCCL than the one that torch was built for",
        'python -c "import torch; print(torch.cuda.nccl.version())"; unset LD_LIBRARY_PATH and '
        "LD_PRELOAD; reinstall torch with its own NCCL",
        recurs=True,
    ),
    NcclCause(
        r"message truncated",
        "D04",
        "ranks call collectives of different sizes",
        "the collectives of the ranks must have equal shapes; ebbflow diagnose with the logs of all "
        "ranks",
        is_local=False,
    ),
    NcclCause(
        r"address already in use",
        "A10",
        "another process has NCCL's port",
        "end what is left of an earlier job on this machine: ss -ltnp",
    ),
    NcclCause(
        r"name or service not known|getaddrinfo|temporary failure in name resolution",
        "A13",
        "",
        "getent hosts of the name on this node; NCCL_COMM_ID and MASTER_ADDR as an IP address",
    ),
    NcclCause(
        r"real path of /sys|/sys/class|busid|topology|topo_file|nvml",
        "A16",
        "NCCL cannot read the machine's topology",
        "mount /sys into the container, give it all GPUs of NVIDIA_VISIBLE_DEVICES, unset "
        "NCCL_TOPO_FILE",
    ),
    NcclCause(
        r"permission denied|operation not permitted",
        "A16",
        "the container may not use a device or system call that NCCL needs",
        "docker run --device=/dev/infiniband --cap-add=IPC_LOCK, or a pod's securityContext",
    ),
    NcclCause(
        r"closed by remote|reset by peer|broken pipe|remote process exit",
        "D06",
        "",
        "the rank that ended first names the cause",
        is_local=False,
        instead_of=("A16", "D01"),
    ),
    NcclCause(
        r"connection refused|no route to host|network is unreachable|timed out|timeout|"
        r"connect to .{0,80}(?:failed|returned)",
        "A11",
        "a rank's socket cannot be reached: its process has ended, or a firewall is between",
        "security groups must allow all traffic between the nodes; NCCL_SOCKET_IFNAME of the "
        "interface that the other nodes reach; nc -vz HOST PORT",
        is_local=False,
        instead_of=("A16", "D01"),
    ),
)
_LAST_ERROR = re.compile(r"last error:?\s*\n?(.+)", re.IGNORECASE | re.DOTALL)
_IS_NCCL = re.compile(
    r"\bnccl ?(?:error|system|internal|remote|unhandledcuda|invalid)|\bnccl warn", re.I
)


def find_nccl_cause(last_error: str) -> NcclCause | None:
    """Find the table's entry for NCCL's last error; None if the message is unknown."""
    text = last_error.lower()
    return next((row for row in NCCL_CAUSES if re.search(row.words, text)), None)


def find_message_cause(message: str) -> NcclCause | None:
    """Find the table's entry for the NCCL error in the message of a torch exception.

    Return None if it is another exception, or its NCCL message is unknown.
    """
    if not _IS_NCCL.search(message):
        return None
    last = _LAST_ERROR.search(message)
    if last is None:
        return None
    return find_nccl_cause(last[1])
