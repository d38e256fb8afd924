"""The device of each rank, with GPUs that are made up: no GPU is needed, and none was used."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ebbflow.core.config import RunConfig
from ebbflow.core.config.schema import SurvivalConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.preflight import CheckFinding
from ebbflow.flows.gang import ranks_of_local_gpus
from ebbflow.training.errors import DeviceUnavailable, GangError
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.devices import NodeGpuCheck, VisibleGpus, assign_gpus, detect_gpus
from ebbflow.training.launch.messages import GangSpec, describe_node, find_differences
from tests.support.gangs import endless_gang, run_ranks, with_settings
from tests.support.headline import start_nodes

# A rank that joins several gangs with the GPUs named on its command line, and prints its device in
# each.
_RANK = """
import json, os, sys
import torch
import ebbflow.training.gang
from ebbflow.training.launch.devices import VisibleGpus
torch.cuda.set_device = lambda device: None
ebbflow.training.gang.dist.init_process_group = lambda backend, **kwargs: print("backend", backend)
ebbflow.training.gang.open_wire = lambda *args, **kwargs: None
gangs = []
for number, gpus in enumerate(json.loads(sys.argv[1])):
    mine = tuple(gpus[int(os.environ["RANK"])])
    own = VisibleGpus(gpus=mine, models=(("A100", 8.0),) * len(mine))
    ebbflow.training.gang.detect_gpus = lambda choice, promised=0: own
    gangs.append(ebbflow.training.gang.connect(start_seconds=60, collective_seconds=60, generation=f"test-{number}"))
    print("device", gangs[-1].device, gangs[-1].device_note)
"""


def visible(*gpus: str, promised: int = 0, trouble: str = "") -> VisibleGpus:
    models = (("A100", 8.0),) * len(gpus)
    return VisibleGpus(gpus=gpus, promised=promised, trouble=trouble, models=models)


def test_two_local_nodes_take_two_gpus() -> None:
    """Both have local rank 0, and both took cuda:0 before, which NCCL refuses."""
    assert assign_gpus([visible("a", "b"), visible("a", "b")], "auto").indices == (0, 1)


def test_each_rank_takes_a_gpu_of_its_own_wherever_it_runs() -> None:
    two_machines = [visible("a", "b"), visible("a", "b"), visible("c", "d"), visible("c", "d")]
    assert assign_gpus(two_machines, "auto").indices == (0, 1, 0, 1)
    one_each = [visible("a"), visible("b"), visible("c")]  # srun --gpus-per-task=1
    assert assign_gpus(one_each, "cuda").indices == (0, 0, 0)
    hidden_apart = [visible("a", "b"), visible("b", "c")]  # CUDA_VISIBLE_DEVICES=0,1 and =1,2
    assert assign_gpus(hidden_apart, "auto").indices == (0, 0)


def test_too_few_gpus_are_left_unused_and_named() -> None:
    assigned = assign_gpus([visible("a"), visible("a")], "auto")
    assert assigned.indices is None
    assert assigned.note.startswith(
        "2 ranks and 1 GPUs: no GPU is left for rank 1; all ranks train on the CPU"
    )
    assert assign_gpus([visible(), visible()], "auto") == assign_gpus([visible("a")], "cpu")
    for choice, promised in (("cuda", 0), ("auto", 1)):
        with pytest.raises(
            DeviceUnavailable, match="2 ranks and 1 GPUs: no GPU is left for rank 1; fix: "
        ):
            assign_gpus([visible("a", promised=promised), visible("a", promised=promised)], choice)
    with pytest.raises(DeviceUnavailable, match="2 ranks and 0 GPUs"):
        assign_gpus([visible(), visible()], "cuda")


def test_one_rank_without_cuda_refuses_for_all_of_them() -> None:
    with pytest.raises(
        DeviceUnavailable, match=r"rank 1 cannot use a GPU: driver too old; fix: .*device to cpu"
    ):
        assign_gpus([visible("a"), visible(trouble="driver too old")], "auto")
    assert DeviceUnavailable.outcome is Outcome.CONFIG and not DeviceUnavailable.curable


def test_a_machine_with_gpus_and_without_cuda_is_not_a_cpu_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def broken() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12020)")

    monkeypatch.setattr(torch.cuda, "init", broken)
    assert detect_gpus("auto") == VisibleGpus()
    said = "The NVIDIA driver on your system is too old (found version 12020)"
    assert detect_gpus("auto", promised=8) == VisibleGpus(trouble=said, promised=8)
    assert detect_gpus("cuda").trouble == said
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/nvidia0"])
    assert detect_gpus("auto").trouble == said
    assert detect_gpus("cpu") == VisibleGpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect_gpus("auto") == VisibleGpus(), "hidden on purpose"
    assert "hides all GPUs" in detect_gpus("auto", promised=8).trouble


def test_working_gpus_are_known_by_their_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "b1d6-00"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A10G")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 6))
    seen = detect_gpus("auto")
    assert (seen.gpus, seen.models) == (("b1d6-00",), (("NVIDIA A10G", 8.6),))
    monkeypatch.delattr(Properties, "uuid")  # torch before 2.6
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert detect_gpus("auto").gpus[0].endswith("/3")


def test_ranks_agree_over_the_store(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    gangs = [[["a", "b"], ["a", "b"]], [["a"], ["a"]]]
    for rank, text in enumerate(run_ranks(2, [str(script), json.dumps(gangs)])):
        backends_and_devices = [
            line for line in text.splitlines() if line.startswith(("backend", "device"))
        ]
        assert backends_and_devices[:3] == ["backend nccl", f"device cuda:{rank} ", "backend gloo"]
        assert backends_and_devices[3].startswith(
            "device cpu 2 ranks and 1 GPUs: no GPU is left for rank 1"
        )


def test_a_node_without_its_gpus_ends_the_job_as_refused(tmp_path: Path) -> None:
    """Its agent finds it before a rank is started; it is neither a lost node nor worth another
    attempt.
    """
    spec = endless_gang(tmp_path, survival={"standby": False})
    gang = LocalGang(
        spec,
        tmp_path / "gang",
        tmp_path / "output.log",
        alter=lambda own: replace(own, promised_gpus=8) if own.node == 1 else own,
    )
    with pytest.raises(GangError) as refused:
        gang.wait(120)
    assert (
        "DeviceUnavailable: CUDA_VISIBLE_DEVICES='' hides all GPUs, and this node was chosen"
        in str(refused.value)
    )
    assert "set cluster.device to cpu" in str(refused.value)
    assert refused.value.outcome is Outcome.CONFIG and not refused.value.curable
    assert not list((tmp_path / "logs").rglob("rank-1.log")), "no rank was started there"


def test_a_node_with_another_torch_is_named_before_a_rank_starts(tmp_path: Path) -> None:
    spec = endless_gang(tmp_path, survival={"standby": False})
    begun = time.monotonic()
    with pytest.raises(GangError) as refused:
        start_nodes(spec, "other_torch", 1, tmp_path).wait(120)
    assert "rank 1: NodesDiffer: node 1 differs from node 0 in torch 2.12.1 (node 0: 2." in str(
        refused.value
    )
    assert (
        "fix: start all nodes from one image" in str(refused.value)
        and time.monotonic() - begun < 60
    )
    assert refused.value.outcome is Outcome.CONFIG and not refused.value.curable


def test_nodes_are_compared_by_versions_and_by_the_settings_of_a_step(tmp_path: Path) -> None:
    config = RunConfig(
        training={"seed": 1, "batch_size": 8}, store="a", survival={"notice_file": "a"}
    )
    spec = GangSpec(
        job="job",
        run="run",
        attempt=0,
        node=1,
        nodes=2,
        processes_per_node=1,
        main_address="127.0.0.1",
        config=config,
        store_uri="a",
        prepared={},
        log_folder="a",
    )
    own = describe_node(spec)
    assert own["versions"]["torch"].startswith("2.") and find_differences(spec, own) == ([], False)
    assert find_differences(spec, {}) == ([], False), "node 0 runs an older version"
    for versions, fatal in (
        ({"numpy": "2.4.9"}, False),
        ({"python": "3.11.0"}, True),
        ({"NVIDIA driver": "1"}, False),
    ):
        texts, found = find_differences(spec, {"versions": own["versions"] | versions})
        assert found is fatal and f"(node 0: {next(iter(versions.values()))})" in texts[0]
    moved = replace(
        spec, config=config.model_copy(update={"store": "b", "survival": SurvivalConfig()})
    )
    assert find_differences(moved, own) == ([], False)
    other = with_settings(spec, training={"seed": 2})
    assert find_differences(other, own) == (["training.seed 2 (node 0: 1)"], True)


def test_the_check_of_a_node_is_made_beside_the_agent_and_only_where_gpus_are_likely() -> None:
    asked = threading.Event()

    def check(promised: int) -> tuple[CheckFinding, int]:
        asked.wait(60)
        return CheckFinding.failed(f"{promised} GPUs, none works", "mend them"), 0

    assert NodeGpuCheck("auto", promised=0, ranks=1, check=check).done, (
        "nothing says that there is one"
    )
    assert NodeGpuCheck("cpu", promised=8, ranks=1, check=check).done
    wanted = NodeGpuCheck("cuda", promised=0, ranks=1, check=check)
    assert not wanted.done
    slow = NodeGpuCheck("auto", promised=8, ranks=1, check=check)
    assert not slow.done and slow.refusal is None
    asked.set()
    wanted._thread.join(60)
    slow._thread.join(60)
    assert str(slow.refusal) == "8 GPUs, none works; fix: mend them, or set cluster.device to cpu"


@pytest.mark.parametrize(("gpus", "ranks", "needing"), [(8, 1, 1), (8, 4, 4), (2, 4, 2)])
def test_a_node_needs_shared_memory_for_its_ranks_with_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, needing: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "ebbflow.training.launch.devices.describe_shared_memory_shortage",
        lambda number: asked.append(number) or "",
    )
    found = CheckFinding.passed(f"{gpus} GPUs work"), gpus
    checked = NodeGpuCheck("auto", promised=8, ranks=ranks, check=lambda promised: found)
    checked._thread.join(60)
    assert needing in asked  # checks of other tests may end meanwhile


def test_a_node_without_gpu_files_trains_on_its_cpu_whatever_tools_its_image_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    files: list[str] = []
    monkeypatch.setattr("glob.glob", lambda pattern: files)
    assert NodeGpuCheck("auto", promised=0, ranks=1).done
    files.append("/dev/nvidia0")
    checked = NodeGpuCheck("auto", promised=0, ranks=1)
    assert checked._thread is not None
    checked._thread.join(60)
    assert "nvidia-smi ended with 9" in str(checked.refusal)


def test_auto_makes_one_local_rank_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        "glob.glob", lambda pattern: [f"/dev/nvidia{number}" for number in range(8)]
    )
    config = RunConfig(training={"batch_size": 24})
    assert ranks_of_local_gpus(config, nodes=2) == 4
    assert ranks_of_local_gpus(config, nodes=1) == 8
    assert ranks_of_local_gpus(RunConfig(training={"batch_size": 6}), nodes=1) == 6
    assert ranks_of_local_gpus(RunConfig(cluster={"device": "cpu"}), nodes=1) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert ranks_of_local_gpus(config, nodes=1) == 2
    assert ranks_of_local_gpus(config, nodes=4) is None
