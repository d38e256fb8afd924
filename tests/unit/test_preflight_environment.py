"""Checks of the surroundings: EC2's metadata service, interfaces, misleading variables, and GPUs
with their driver.
"""

from __future__ import annotations

import json
import re
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.preflight import failed_results
from ebbflow.infra.checks.gpu import has_kernels_for, may_have_gpus, try_gpus
from tests.support.checks import failed, passed, skipped
from tests.support.imds import INTERRUPTION_PATH, FakeMetadata

ROOT = Path(__file__).resolve().parents[2]
INSTANCE = {"/latest/meta-data/instance-id": "i-0123456789abcdef0"}
TAKEN = {**INSTANCE, INTERRUPTION_PATH: '{"action": "terminate"}'}
ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"


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
    ) -> None:
        """error: of the first kernel. init: of torch.cuda.init()."""
        fake = (
            "class version: cuda = {cuda!r}\n"
            "class cuda:\n"
            "    @staticmethod\n"
            "    def init():\n"
            "        if {init!r}: raise RuntimeError({init!r})\n"
            "    device_count = staticmethod(lambda: 1)\n"
            "    get_arch_list = staticmethod(lambda: {arches!r})\n"
            "    get_device_name = staticmethod(lambda index: 'NVIDIA A100')\n"
            "    get_device_capability = staticmethod(lambda index: {capability!r})\n"
            "class Sum:\n"
            "    def __add__(self, other): return self\n"
            "    def sum(self): return self\n"
            "    def item(self): return 4\n"
            "def ones(size, device):\n"
            "    if {error!r}: raise RuntimeError({error!r})\n"
            "    return Sum()\n"
            "__version__ = '2.13.0'\n"
        )
        text = fake.format(cuda=cuda, arches=arches, capability=capability, error=error, init=init)
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
            ("13.0", ["sm_80"]),
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
