"""The words of the five guides, and wordings that foreign logs have for the same failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.diagnose.evidence import Evidence
from ebbflow.diagnose.judging import diagnose_files, judge
from ebbflow.diagnose.reading import LogText

MESSAGES = [
    ("RuntimeError: CUDA out of memory. Tried to allocate X GB.", "C01"),
    ("RuntimeError: NCCL error: unhandled system error", "A16"),
    ("NCCL error: initialization failed", "A16"),
    ("RuntimeError: Error(s) in loading state_dict", "H04"),
    ("KeyError: 'module.layer.weight'", "H04"),
    ("ModuleNotFoundError: No module named 'src'", "A01"),
    ("  - model.hidden_size must be divisible by model.num_heads", "A05"),
    ("Configuration errors:", "A05"),
    ("NaN losses", "F01"),
    ("NCCL timeout: 1800000 ms", "D01"),
    ("nvidia-smi: command not found", "B01"),
    ("NCCL Error: unhandled cuda error", "D13"),
    ("RuntimeError: Expected all tensors to be on the same device", "D14"),
    ("OSError: [Errno 28] No space left on device", "H10"),
    (
        "torch.distributed.DistBackendError: NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp",
        "A16",
    ),
    (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one",
        "D07",
    ),
    ("DataLoader worker (pid XXXX) is killed by signal: Aborted", "E01"),
    (
        "[Rank N] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=XXXXX, OpType=ALLREDUCE, ...)",
        "D01",
    ),
    ("STEP COUNT DIVERGENCE! Counts: [100, 99]", "D03"),
    ("RuntimeError: Mismatch: [100, 99]", "D03"),
    ("RuntimeError: CUDA out of memory. Tried to allocate X GiB", "C01"),
    ("KeyError: 'model_state_dict'", "H03"),
    ("ModuleNotFoundError: No module named 'lightrft'", "A01"),
    ("RuntimeError: CUDA error: no kernel image is available for execution", "A04"),
    ("ERROR: Failed building wheel for vllm", "A02"),
    ("RuntimeError: CUDA out of memory", "C01"),
    ("torch.cuda.OutOfMemoryError", "C01"),
    ("Failed to allocate memory for KV cache", "C07"),
    ("RuntimeError: NCCL timeout", "D01"),
    ("[E ProcessGroupNCCL.cpp] Caught collective operation timeout", "D01"),
    ("Initializing process group", "A15"),
    ("Initializing distributed training", "A15"),
    ("Engine already sleeping", "F10"),
    ("OSError: Disk quota exceeded", "H11"),
    ("RuntimeError: Cannot save checkpoint", "H19"),
    ("num_rollouts_per_episodes = 0", "A07"),
    ("Failed to initialize vLLM", "C08"),
    ("NaN loss", "F01"),
    ("NCCL timeout", "D01"),
    ("torch.cuda.is_available() returned False: False", "B01"),
    ("found that the gradients became infinite or NaN", "F01"),
    ("loss became infinite or NaN", "F01"),
    ("@batch requires --datastore=s3", "N10"),
    ("Step *train* requires --datastore=s3", "N10"),
    ("JobQueue arn:aws:batch:eu-west-1:1:job-queue/train not found", "N07"),
    ("JobQueue train-queue not found.", "N07"),
    ("Budget exceeded: $12.4", "I05"),
    ("checkpoint corruption error: shard_3.pt", "H01"),
    ("wandb: ERROR api_key not configured (no-tty)", "A20"),
    ("S3 upload timeout", "H07"),
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "B06"),
    ("NVRM: Xid (PCI:0000:3b:00): 63, pid=1, Row remapper", "B04"),
    ('Unexpected key(s) in state_dict: "module.a"', "H04"),
    ("nan loss detected at step 12", "F01"),
    ("EADDRINUSE: Address already in use", "A10"),
]


def root_of(*lines: str) -> str | None:
    evidence = Evidence()
    evidence.read(LogText("log", number, line) for number, line in enumerate(lines, 1))
    findings = judge(evidence).findings
    return next((finding.rule.id for finding in findings if finding.role == "root"), None)


@pytest.mark.parametrize(("message", "symptom"), MESSAGES, ids=lambda value: str(value)[:40])
def test_a_message_of_the_guides_has_its_symptom(message: str, symptom: str) -> None:
    assert root_of(message) == symptom
    assert root_of("epoch 1 begins", f"[rank2]: {message}") == symptom


@pytest.mark.parametrize(
    "line",
    [
        "Initializing process group",
        "2026-11-28 10:00:00 INFO Initializing distributed: GLOBAL_RANK: 3, MEMBER: 4/8",
        "waiting for other ranks",
    ],
)
def test_a_normal_line_counts_only_as_the_last_one_of_a_silent_rank(
    line: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text(f"loading the data\n{line}\n\n")
    root = diagnose_files([log]).findings[0]
    assert (root.rule.id, root.role, root.confidence) == ("A15", "root", 0.5)
    log.write_text(f"{line}\nthe model has 12 layers\n")
    assert not diagnose_files([log]).findings
    log.write_text(f"{line}\nstep 1\n" + "OSError: [Errno 28] No space left on device\n" + line)
    assert diagnose_files([log]).findings[0].rule.id == "H10"


@pytest.mark.parametrize(
    "line",
    [
        "INFO: NCCL timeout is set to 1800 s",
        "nccl_timeout: 1800",
        "node1:812:901 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",
        "engine is awake, weights are updated",
    ],
)
def test_a_line_of_a_sound_log_names_no_root(line: str) -> None:
    assert root_of(line, "step 1 done") is None
