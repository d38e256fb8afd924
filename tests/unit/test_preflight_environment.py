"""Checks of the surroundings: EC2's metadata service, interfaces, misleading variables, and GPUs
with their driver.
"""

from __future__ import annotations

import json
import re
import socket
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.footprint import HostGang
from ebbflow.core.preflight import PreflightContext, Target, failed_results
from ebbflow.infra.checks.gpu import (
    check_gpu,
    has_kernels_for,
    list_visible_gpus,
    may_have_gpus,
    try_gpus,
)
from ebbflow.infra.checks.machine import describe_shared_memory_shortage
from tests.support.checks import failed, passed, skipped
from tests.support.imds import INTERRUPTION_PATH, FakeMetadata

ROOT = Path(__file__).resolve().parents[2]
INSTANCE = {"/latest/meta-data/instance-id": "i-0123456789abcdef0"}
TAKEN = {**INSTANCE, INTERRUPTION_PATH: '{"action": "terminate"}'}
ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
T4 = ("Tesla T4", (7, 5), 15)
A100 = ("NVIDIA A100", (8, 0), 40)
# 1.3 billion parameters: 16 bytes of each are parameters, gradients and AdamW's moments
LARGE = {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "vocab_size": 50304}
LARGE["sequence_length"] = 1024
TWO = {"nodes": 1, "processes_per_node": 2}
LISTED = """
case "$1" in
-L) echo 'GPU 0: NVIDIA A100 (UUID: GPU-5d5ba0d6-d33d)'
    echo '  MIG 1g.5gb Device 0: (UUID: MIG-c6d4f1ef-42e4)'
    echo 'GPU 1: NVIDIA A100 (UUID: GPU-77aa0000-1111)';;
*) echo '570.86.15, NVIDIA A100'; echo '570.86.15, NVIDIA A100';;
esac
"""


class FakeGpu:
    """A machine with a driver and a torch that say what they are told to: what a driver really does
    is not shown.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tools = folder / "tools"
        self.project = folder / "project"
        self.tools.mkdir()
        (self.project / "torch").mkdir(parents=True)

    def driver(self, script: str) -> None:
        tool = self.tools / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)

    def torch(
        self,
        cuda: str | None,
        arches: list[str],
        capability: tuple[int, int] = (8, 0),
        error: str = "",
        init: str = "",
        gpus: tuple[tuple[str, tuple[int, int], int], ...] = (),
    ) -> None:
        """error: of the first kernel. init: of torch.cuda.init(). gpus: name, capability and GiB of
        each, instead of an A100.
        """
        seen = gpus or (("NVIDIA A100", capability, 40),)
        fake = (
            "class version: cuda = {cuda!r}\n"
            "class cuda:\n"
            "    @staticmethod\n"
            "    def init():\n"
            "        if {init!r}: raise RuntimeError({init!r})\n"
            "    device_count = staticmethod(lambda: {count})\n"
            "    get_arch_list = staticmethod(lambda: {arches!r})\n"
            "    get_device_name = staticmethod(lambda index: {seen!r}[index][0])\n"
            "    get_device_capability = staticmethod(lambda index: {seen!r}[index][1])\n"
            "    @staticmethod\n"
            "    def get_device_properties(index):\n"
            "        class Properties: total_memory = {seen!r}[index][2] * 2**30\n"
            "        return Properties\n"
            "class Sum:\n"
            "    def __add__(self, other): return self\n"
            "    def sum(self): return self\n"
            "    def item(self): return 4\n"
            "def ones(size, device):\n"
            "    if {error!r}: raise RuntimeError({error!r})\n"
            "    return Sum()\n"
            "__version__ = '2.13.0'\n"
        )
        text = fake.format(
            cuda=cuda, arches=arches, seen=seen, count=len(seen), error=error, init=init
        )
        (self.project / "torch" / "__init__.py").write_text(text)


@pytest.mark.parametrize(
    ("behaviour", "detail", "fix"),
    [
        ({"version_1": True}, "IMDSv1 answers requests without a token", "--http-tokens req"),
        (
            {"hop_limit": True},
            "its answer may not leave the host",
            "--http-put-response-hop-limit 2",
        ),
        ({"token_status": 403}, "turned off (403)", "--http-endpoint enabled"),
        ({"token_status": 404}, "gives no token: status 404", ENDPOINT),
        (
            {"answers": TAKEN},
            "has a spot interruption notice",
            "another instance",
        ),
    ],
)
def test_a_metadata_service_that_will_not_do(
    monkeypatch: pytest.MonkeyPatch, behaviour: dict[str, Any], detail: str, fix: str
) -> None:
    with FakeMetadata(INSTANCE) as service:
        for name, value in behaviour.items():
            setattr(service, name, value)
        monkeypatch.setenv(ENDPOINT, service.address)
        result = failed("imds")
    assert detail in result.detail
    assert fix in result.fix
    assert not failed_results([result])


def test_a_metadata_service_that_is_well_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeMetadata(INSTANCE) as service:
        monkeypatch.setenv(ENDPOINT, service.address)
        assert passed("imds").detail.startswith(
            "i-0123456789abcdef0: IMDSv2 works, IMDSv1 is refused (401)"
        )
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        assert "AWS_EC2_METADATA_DISABLED" in skipped("imds").detail
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    assert "spot notices would not arrive" in failed("imds").detail  # it is closed by now


def test_interfaces_that_are_named_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "docker0")])
    assert "none is named" in passed("interfaces").detail
    for variable, value, good in (
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "lo,eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),  # gloo takes names, NCCL takes prefixes
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo,eth", False),
        ("NCCL_SOCKET_IFNAME", "ens5", False),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            if good:
                assert f"{variable}={value}" in passed("interfaces").detail
            else:
                result = failed("interfaces")
                assert (
                    f"{variable}={value} names no interface of this machine (docker0, eth0, lo)"
                    in result.detail
                )
                assert failed_results([result])


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("NCCL_TIMEOUT", "1800", "cluster.step_deadline_seconds"),
        ("TORCH_DIST_TIMEOUT", "60", "cluster.step_deadline_seconds"),
        ("NCCL_BACKEND", "gloo", "unset it"),
        ("NCCL_TOPOLOGY_FILE", "/x.xml", "NCCL_TOPO_FILE"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "INFO"),
        ("CUDA_LAUNCH_BLOCKING", "1", "unset it"),
        ("EBBFLOW_MODEL__NUM_LAYERS", "3", "EBBFLOW__MODEL__NUM_LAYERS"),
        ("EBBFLOW_RUN", "/tmp", "EBBFLOW_RUNS"),
        ("EBBFLOW_STORE", "s3://b", "EBBFLOW__STORE"),
    ],
)
def test_advice_on_variables(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    passed("advice")
    monkeypatch.setenv(variable, value)
    result = failed("advice")
    assert variable in result.detail
    assert says in result.fix
    assert not failed_results([result])


def test_environment_variables_that_are_read_get_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Among them what the launcher sets for the processes below it, in which preflight runs."""
    code = [
        path.read_text()
        for path in (ROOT / "ebbflow").rglob("*")
        if path.suffix in (".py", ".c", ".yaml") and path.name != "advice.py"
    ]
    names = set()
    for text in code:
        names |= set(re.findall(r"\bEBBFLOW_[A-Z]+(?:_[A-Z]+)*\b(?!_)", text))
    assert {
        "EBBFLOW_RUNS",
        "EBBFLOW_RUNNABLE_SECONDS",
        "EBBFLOW_SUBMIT",
        "EBBFLOW_ZONE_ID",
    } <= names
    for name in names:
        monkeypatch.setenv(name, "1")
    passed("advice")


def test_a_debugging_level_that_crashes_ddp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "detail")
    passed("debug-level", parallel={"mode": "fsdp2"})
    assert failed_results([failed("debug-level", parallel={"mode": "ddp"})])
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    passed("debug-level", parallel={"mode": "ddp"})


def test_advice_looks_at_values_and_at_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ebbflow.infra.checks.gpu.RDMA_DEVICES", tmp_path)
    for variable, value in {
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
        "CUDA_LAUNCH_BLOCKING": "0",
        "NCCL_IB_DISABLE": "1",  # says what is so where there is no such device
        "EBBFLOW_RUNS": "/tmp/runs",
        "EBBFLOW__MODEL__NUM_LAYERS": "3",
    }.items():
        monkeypatch.setenv(variable, value)
    passed("advice")
    (tmp_path / "mlx5_0").mkdir()
    assert "InfiniBand and EFA off" in failed("advice").detail


def test_machine_code_runs_on_its_own_generation_and_portable_code_on_later_ones() -> None:
    wheel = ["sm_75", "sm_80", "sm_86", "sm_90a", "compute_90"]
    runs = {
        capability: has_kernels_for(capability, wheel)
        for capability in (70, 75, 80, 87, 89, 90, 100)
    }
    assert runs == {70: False, 75: True, 80: True, 87: True, 89: True, 90: True, 100: True}
    assert not has_kernels_for(100, ["sm_90a", "sm_90"])
    assert not has_kernels_for(91, ["sm_90a"])


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    machine = FakeGpu(tmp_path)
    monkeypatch.setenv("PATH", f"{machine.tools}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(machine.project))
    machine.driver("echo '570.86.15, NVIDIA A100'")
    machine.torch("12.8", ["sm_80", "sm_90"])
    return machine


def test_a_driver_new_enough_for_torch_passes(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = passed("gpu", gpu.project)
    assert (
        "driver 570.86.15 (NVIDIA A100), torch 2.13.0 for CUDA 12.8: an addition on each of 1 GPUs"
        in result.detail
    )
    skipped("gpu", gpu.project, cluster={"device": "cpu"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    skipped("gpu", gpu.project)
    assert "hides all GPUs" in failed("gpu", gpu.project, cluster={"device": "cuda"}).detail


def test_a_machine_without_a_driver_skips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    assert skipped("gpu").detail == "skipped, because there is no NVIDIA driver here"


@pytest.mark.parametrize(
    ("driver", "torch", "says"),
    [
        (
            "echo '570.86.15, NVIDIA A100'",
            ("13.0", ["sm_80"], (8, 0), "", "The NVIDIA driver on your system is too old"),
            "needs driver 580 or newer: 570 < 580",
        ),
        (
            "echo '570.86.15, NVIDIA A100'",
            (None, []),
            "built without CUDA: ranks would train on the CPU",
        ),
        ("echo '570.86.15, Tesla V100'", ("12.8", ["sm_75"], (7, 0)), "no kernel image: GPU 0"),
        (
            "echo '570.86.15, NVIDIA A100'",
            ("12.8", ["sm_80"], (8, 0), "CUDA error: uncorrectable ECC"),
            "ECC",
        ),
        (
            "echo '580.95.05, NVIDIA H100'",
            ("13.0", ["sm_90"], (9, 0), "", "Error 802: system not yet initialized"),
            "CUDA 13.0: Error 802: system not yet initialized",
        ),
        (
            "echo 'No devices were found'",
            ("12.8", ["sm_80"]),
            "nvidia-smi lists no GPU: No devices were found",
        ),
        (
            "echo 'NVIDIA-SMI has failed' >&2; exit 9",
            ("12.8", ["sm_80"]),
            "ended with 9: NVIDIA-SMI has failed",
        ),
    ],
)
def test_a_driver_that_does_not(gpu: FakeGpu, driver: str, torch: tuple, says: str) -> None:
    gpu.driver(driver)
    gpu.torch(*torch)
    result = failed("gpu", gpu.project)
    assert says in result.detail
    assert failed_results([result])


def test_an_older_driver_with_cuda_compat_is_accepted_if_the_gpus_compute(gpu: FakeGpu) -> None:
    gpu.driver("echo '570.86.15, NVIDIA A100'")
    gpu.torch("13.0", ["sm_80"])
    found = passed("gpu", gpu.project, cluster={"nodes": 1, "processes_per_node": 1})
    assert "driver 570.86.15" in found.detail and "CUDA 13.0: an addition" in found.detail


def test_an_older_driver_keeps_the_words_of_torch_and_their_fix(gpu: FakeGpu) -> None:
    gpu.driver("echo '570.86.15, NVIDIA H100'")
    gpu.torch("13.0", ["sm_90"], (9, 0), "", "Error 802: system not yet initialized")
    found = failed("gpu", gpu.project)
    assert "570 < 580; Error 802: system not yet initialized" in found.detail
    assert "nvidia-fabricmanager" in found.fix


def test_more_ranks_than_gpus(gpu: FakeGpu) -> None:
    result = failed("gpu", gpu.project, cluster={"processes_per_node": 2, "device": "cuda"})
    assert "2 × 2 = 4 ranks on 1 GPUs" in result.detail
    json.dumps(result.to_json())
    assert (
        "all ranks train on the CPU"
        in passed("gpu", gpu.project, cluster={"processes_per_node": 2}).detail
    )


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("Error 802: system not yet initialized", "nvidia-fabricmanager"),
        ("The NVIDIA driver on your system is too old (found version 12020)", "upgrade the driver"),
        (
            "Error 803: system has unsupported display driver / cuda driver combination",
            "cuda-compat",
        ),
        ("Error 804: forward compatibility was attempted on non supported HW", "cuda-compat"),
        ("Error 34: CUDA driver is a stub library", "stubs of CUDA out of LD_LIBRARY_PATH"),
        ("CUDA unknown error - this may be due to", "nvidia-modprobe -u"),
        ("No CUDA GPUs are available", "whether the container was given its GPUs"),
    ],
)
def test_a_gpu_that_does_not_work_is_refused_with_the_words_of_torch(
    gpu: FakeGpu, said: str, fix: str
) -> None:
    gpu.torch("12.8", ["sm_80"], init=said)
    result = failed("gpu", gpu.project)
    assert said in result.detail
    assert fix in result.fix and "set cluster.device to cpu" in result.fix


def test_a_gpu_with_too_little_memory_for_one_sample_is_refused_with_a_key(gpu: FakeGpu) -> None:
    gpu.torch("12.8", ["sm_75"], gpus=(T4, T4))
    result = failed("gpu", gpu.project, model=LARGE, cluster=TWO, parallel={"mode": "ddp"})
    assert re.search(
        r"^Tesla T4 has 15\.0 GiB of memory; the model with one sample needs 2\d\.\d GiB on each "
        r"of 2 ranks \(estimated\)$",
        result.detail,
    )
    assert re.fullmatch(
        r"set parallel\.mode to fsdp2( and parallel\.recompute to full)?, which needs 1[0-4]\.\d GiB",
        result.fix,
    )
    passed("gpu", gpu.project, model=LARGE, cluster=TWO, parallel={"mode": "fsdp2"})
    passed("gpu", gpu.project, cluster=TWO)
    huge = LARGE | {"num_layers": 96}
    assert failed("gpu", gpu.project, model=huge, cluster=TWO).fix.startswith(
        "GPUs with more memory"
    )


def test_a_card_without_bfloat16_is_refused_where_it_is_asked_for(gpu: FakeGpu) -> None:
    gpu.torch("12.8", ["sm_75", "sm_80"], gpus=(A100, T4))
    asked = {"use_mixed_precision": True, "param_dtype": "bfloat16"}
    result = failed("gpu", gpu.project, fsdp=asked, cluster=TWO)
    assert result.detail == "Tesla T4 has capability 7.5; bfloat16 needs 8.0"
    assert result.fix == "set fsdp.param_dtype to auto or float16"
    one = {"nodes": 1, "processes_per_node": 1}
    passed("gpu", gpu.project, fsdp=asked, cluster=one)
    passed("gpu", gpu.project, fsdp=asked | {"use_mixed_precision": False}, cluster=TWO)


def test_a_mixed_set_of_cards_is_named_with_what_it_costs(gpu: FakeGpu) -> None:
    gpu.torch("12.8", ["sm_75", "sm_80"], gpus=(A100, T4))
    found = passed("gpu", gpu.project, cluster=TWO).detail.splitlines()[-1]
    assert found.startswith(
        "the 2 ranks have 2 kinds of GPU (1 × NVIDIA A100, 1 × Tesla T4): each step waits"
    )
    alone = {"nodes": 1, "processes_per_node": 1}
    assert "kinds" not in passed("gpu", gpu.project, cluster=alone).detail


@pytest.mark.parametrize(
    ("named", "seen", "says", "fix"),
    [
        ("0,2", 1, "2 is none of this machine's 2 GPUs", "name 0 to 1, or ids of nvidia-smi -L"),
        ("GPU-9", 0, "GPU-9 is none", "GPU-5d5ba0d6-d33d, MIG-c6d4f1ef-42e4, GPU-77aa0000-1111"),
        ("GPU-5d5,GPU-9", 1, "all names after it: 1 of 2 are left", "GPU-77aa0000-1111"),
        ("MIG-c6d4f1ef-42e4,MIG-c6d4f1ef-42e5", 1, "names 2 MIG devices", "nvidia-smi -mig 0"),
        ("MIG-0", 0, "MIG-0 is none of this machine's 2 GPUs", "MIG-c6d4f1ef-42e4"),
    ],
)
def test_a_wrong_name_in_cuda_visible_devices_is_named(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, named: str, seen: int, says: str, fix: str
) -> None:
    gpu.driver(LISTED)
    if seen:
        gpu.torch("12.8", ["sm_80"])
    else:
        gpu.torch("12.8", ["sm_80"], init="No CUDA GPUs are available")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    result = failed("gpu", gpu.project)
    assert result.detail.startswith(f"CUDA_VISIBLE_DEVICES={named}")
    assert says in result.detail and fix in result.fix


@pytest.mark.parametrize("named", ["1", "GPU-5d5ba0d6-d33d", "GPU-77", "MIG-c6d4f1ef-42e4"])
def test_one_gpu_or_mig_device_can_be_named_by_its_id(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    gpu.driver(LISTED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    passed("gpu", gpu.project, cluster={"nodes": 1, "processes_per_node": 1})
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    assert list_visible_gpus() == [named]


@pytest.mark.parametrize(
    ("named", "visible"),
    [("0,1,2", ["0", "1"]), ("3,0", []), ("MIG-a,MIG-b", ["MIG-a"]), ("GPU-a,1", ["GPU-a", "1"])],
)
def test_gpus_are_counted_as_cuda_does(
    monkeypatch: pytest.MonkeyPatch, named: str, visible: list[str]
) -> None:
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert list_visible_gpus() == visible


def test_a_node_that_was_chosen_for_its_gpus_compares_them_with_the_job(gpu: FakeGpu) -> None:
    gpu.torch("12.8", ["sm_75"], gpus=(T4, T4))
    config = RunConfig.model_validate(
        {"fsdp": {"use_mixed_precision": True, "param_dtype": "bfloat16"}}
    )
    gang = HostGang(nodes=4, processes_per_node=2)
    finding, gpus = try_gpus(2, config, gang)
    assert (finding.status, gpus) == ("failed", 2) and "bfloat16 needs 8.0" in finding.detail
    assert try_gpus(0, config, gang)[0].status == "passed", "ranks may train on its CPU"
    assert try_gpus(2)[0].status == "passed"


@pytest.mark.parametrize("sections", [{}, {"model": LARGE, "parallel": {"mode": "ddp"}}])
def test_a_node_whose_gpus_do_not_work_says_so_whatever_the_job_needs(
    gpu: FakeGpu, sections: dict[str, Any]
) -> None:
    """The mixture of cards was a passed check, and the memory of the smaller one the failure."""
    gpu.torch("12.8", ["sm_80"], gpus=(A100, T4))
    config = RunConfig.model_validate(sections)
    finding, _ = try_gpus(2, config, HostGang(nodes=1, processes_per_node=2))
    assert finding.status == "failed" and "sm_75" in finding.detail
    assert finding == try_gpus(2)[0]


@pytest.mark.parametrize(
    ("target", "plan_for", "store", "backend"),
    [
        ("local", "kubernetes", "s3://bucket", None),
        ("local", "slurm", "runs", None),
        ("slurm", "slurm", "runs", "slurm"),
        ("batch", "batch", "s3://bucket", "batch"),
        (None, "slurm", "runs", "slurm"),
        (None, "batch", "s3://bucket", "batch"),
        (None, "kubernetes", "s3://bucket", "kubernetes"),
        (None, "kubernetes", "runs", None),  # pods cannot read a folder
        (None, "local", "s3://bucket", None),
    ],
)
def test_the_launching_machines_gpus_are_compared_with_jobs_that_train_on_them(
    gpu: FakeGpu, target: Target | None, plan_for: str, store: str, backend: str | None
) -> None:
    """A login node's GPU was too small for a job that Slurm would have run elsewhere."""
    gpu.torch("12.8", ["sm_75"], gpus=(T4, T4))
    config = RunConfig.model_validate(
        {
            "model": LARGE,
            "parallel": {"mode": "ddp"},
            "cluster": TWO | {"plan_for": plan_for, "device": "cuda"},
            "store": store,
        }
    )
    context = PreflightContext(config=config, project_root=gpu.project, target=target)
    finding = check_gpu(context)
    if backend is None:
        assert finding.status == "failed" and "15.0 GiB of memory" in finding.detail
    else:
        assert finding.detail.startswith(f"skipped, because ranks run on {backend}: ")


def test_little_shared_memory_is_told_before_several_ranks_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container's default is 64 MiB."""
    room = SimpleNamespace(f_bavail=64, f_frsize=2**20)
    monkeypatch.setattr("os.statvfs", lambda path: room)
    monkeypatch.setattr("ebbflow.infra.checks.machine._SHARED_MEMORY", Path("/"))
    said = describe_shared_memory_shortage(2)
    assert said.startswith("/: 64.0 MiB free for 2 ranks, 1.0 GiB advised for NCCL's segments")
    assert "--shm-size=1g" in said
    assert describe_shared_memory_shortage(1) == ""
    room.f_bavail = 1024
    assert describe_shared_memory_shortage(2) == ""


def test_a_node_that_was_chosen_for_its_gpus_and_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    finding, gpus = try_gpus(promised=8)
    assert finding.status == "failed" and gpus == 0
    assert (
        "no nvidia-smi here, and this node was chosen for its GPUs (8 per node)" in finding.detail
    )
    assert "--gpus all" in str(finding.fix)
    assert may_have_gpus(promised=8) and may_have_gpus(wanted=True) and not may_have_gpus()


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        ENDPOINT,
        "AWS_EC2_METADATA_DISABLED",
        "CUDA_VISIBLE_DEVICES",
        "TORCH_DISTRIBUTED_DEBUG",
    ):
        monkeypatch.delenv(name, raising=False)
