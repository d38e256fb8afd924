"""Table of the preflight checks of the configuration, this machine, the store and the AWS account."""

from ebbflow.infra.checks import batch, gpu, machine, store
from ebbflow.infra.checks import environment as env
from ebbflow.infra.kubernetes.checks import CHECKS as KUBERNETES_CHECKS
from ebbflow.infra.preflight import Check

_AWS_SECONDS = batch.ANSWER_SECONDS + 3.0  # boto3 is imported and its service descriptions are read as well

# Id, title, severity, tier, deadline in seconds, symptoms, function. The deadline matters for checks that can hang
# (name server, mounted disk, remote store); checks that only compute get one that a busy machine keeps.
CHECKS: list[Check] = [
    Check("configuration", "configuration is consistent", "error", "quick", 10.0, ("A05",), env.check_configuration),
    Check("derived", "nothing rounds to zero", "error", "quick", 10.0, ("A05", "A07"), machine.check_derived),
    Check(
        "interpreter", "Python, and what `python` means", "error", "quick", 10.0, ("A01", "A03"), env.check_interpreter
    ),
    Check("packages", "packages are installed", "error", "quick", 10.0, ("A01", "A02", "A03"), env.check_packages),
    Check("versions", "versions are tested ones", "warning", "quick", 10.0, ("A03",), env.check_versions),
    Check("imports", "a rank's imports work", "error", "full", 100.0, ("A01", "A03"), env.check_imports),
    Check("advice", "no misleading variable", "warning", "quick", 10.0, ("A15", "D01"), env.check_advice),
    Check(
        "debug-level", "no debugging level that crashes DDP", "error", "quick", 10.0, ("D12",), env.check_debug_level
    ),
    Check("signing-key", "key that signs commits is set", "error", "quick", 10.0, ("A05",), env.check_signing_key),
    Check("ports", "loopback accepts connections", "error", "quick", 5.0, ("A10", "A11"), env.check_ports),
    Check("interfaces", "named network interfaces exist", "error", "quick", 5.0, ("A14",), machine.check_interfaces),
    Check("host-name", "hostname resolves to this host", "warning", "quick", 2.0, ("A13",), env.check_host_name),
    Check("imds", "IMDSv2 reachable (spot notices)", "warning", "full", 3.0, ("A19", "I01"), machine.check_imds),
    Check("batch", "batch divides among the ranks", "error", "quick", 10.0, ("A06",), machine.check_batch),
    Check("elastic", "batch divides among fewer nodes too", "warning", "quick", 10.0, ("A06",), machine.check_elastic),
    Check("store-folder", "store can be created", "error", "quick", 5.0, ("A18", "H10"), store.check_store_folder),
    Check("records-folder", "runs/ can be written", "error", "quick", 5.0, ("A18", "H10"), store.check_records_folder),
    Check(
        "store-probe", "store works end to end", "error", "full", 15.0, ("A19", "H10", "H11"), store.check_store_probe
    ),
    Check(
        "store-multipart",
        "multipart uploads work",
        "warning",
        "full",
        15.0,
        ("A19", "H11"),
        store.check_store_multipart,
    ),
    Check("store-clock", "clock agrees with the store's", "warning", "full", 10.0, ("A19",), store.check_store_clock),
    Check("gpu", "driver, CUDA and GPUs match torch", "error", "full", 95.0, ("A04", "B01"), gpu.check_gpu),
    Check("shared-memory", "/dev/shm is large enough", "warning", "quick", 10.0, ("C09",), machine.check_shared_memory),
    Check(
        "locked-memory",
        "memory may be locked for RDMA",
        "warning",
        "quick",
        10.0,
        ("C10",),
        machine.check_locked_memory,
    ),
    Check("open-files", "open-file limit suffices", "error", "quick", 10.0, ("E08",), machine.check_open_files),
    Check("cores", "a core for each rank", "warning", "quick", 10.0, ("B09",), machine.check_cores),
    Check("memory", "gang fits this machine's memory", "error", "quick", 10.0, ("B10", "C01"), machine.check_memory),
    Check("aws-queues", "queues accept the job", "error", "full", 2 * _AWS_SECONDS, ("I04",), batch.check_batch_queues),
    Check(
        "aws-metaflow", "Metaflow uses AWS Batch", "warning", "full", 10.0, ("A18", "A19"), batch.check_batch_metaflow
    ),
    Check("aws-role", "containers have a role", "error", "full", _AWS_SECONDS, ("A19",), batch.check_batch_role),
    Check(
        "aws-rights", "role may use the store", "warning", "full", 2 * _AWS_SECONDS, ("A19",), batch.check_batch_rights
    ),
    Check(
        "aws-bucket", "bucket is set up well", "warning", "full", _AWS_SECONDS, ("A19", "H11"), batch.check_batch_bucket
    ),
    Check(
        "aws-image", "container image exists", "error", "full", _AWS_SECONDS, ("A01", "A18"), batch.check_batch_image
    ),
    Check("aws-clock", "clock agrees with AWS's", "error", "full", 10.0, ("A19",), batch.check_batch_clock),
    *KUBERNETES_CHECKS,
]
