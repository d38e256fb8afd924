"""Sound logs of many shapes: none of them may have a root."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ebbflow.diagnose.evidence import Evidence
from ebbflow.diagnose.judging import judge
from ebbflow.diagnose.reading import LogText

# Lines of sound runs that have words of faults, written for this test
LINES = [
    "WARNING:root:Failed to load image Python extension: libjpeg.so.8",
    "UserWarning: os.fork() was called. os.fork() is incompatible with multithreaded code",
    "[W1128 10:00:01 ProcessGroupNCCL.cpp:4115] [PG ID 0 PG GUID 0 Rank 0]  using GPU 0 to perform barrier as devices used by this process are currently unknown. This can potentially cause a hang if this rank to GPU mapping is incorrect.",
    "node1:1:1 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
    "node1:1:1 [0] NCCL INFO Failed to open libibverbs.so[.1]",
    "/usr/lib/python3/site-packages/torch/utils/data/dataloader.py:557: UserWarning: This DataLoader will create 8 worker processes in total. Our suggested max number of worker in current system is 4",
    "FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated. Please use `torch.amp.autocast('cuda', args...)` instead.",
    "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...",
    "Some weights of BertForSequenceClassification were not initialized from the model checkpoint at bert-base-uncased and are newly initialized: ['classifier.bias']",
    "wandb: Tracking run with wandb version 0.16.0",
    "wandb: WARNING Config item 'lr' was locked by 'sweep' (ignored update).",
    "INFO:root:error_rate=0.013 timeout=600 retries=3 killed=0",
    "2026-01-01 INFO resume from checkpoint: none found, starting from scratch",
    "INFO checkpoint saved to /ckpt/step_100 (no errors)",
    "loss scale: 65536.0 overflow: False",
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded",
    "nan check enabled; will abort on NaN loss",
    "CUDA_LAUNCH_BLOCKING=0 NCCL_DEBUG=WARN TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
    "max_retries: 3, on_failure: restart, timeout_s: 1800",
    "GPU memory: 71.2 GiB of 79.1 GiB reserved, 0 OOMs, 0 retries",
    "Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN when one has already been registered",
    "TF-TRT Warning: Could not find TensorRT",
    "Could not load dynamic library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: cannot open shared object file: No such file or directory",
    "[2026-01-01 00:00:00,000] [INFO] [real_accelerator.py:191:get_accelerator] Setting ds_accelerator to cuda (auto detect)",
    " [WARNING]  async_io requires the dev libaio .so object and headers but these were not found.",
    " [WARNING]  using untested triton version (2.1.0), only 1.0.0 is known to be compatible",
    "Epoch 1 early stopping patience 3 (not triggered)",
    "validation finished: exact match 81.2, failed parses 12",
    "retrying request to s3 (attempt 1 of 5)... ok",
    "skipped 3 samples that are too long",
    "slurmstepd: info: task/cgroup: memory limit 64G",
    "Preemption handler installed for SIGTERM; on SIGUSR1 a checkpoint is written",
    "fault tolerance: enabled, will recover from node failures",
    "test_loss.py::test_nan_guard PASSED",
    "benchmark allreduce: algbw 11.2 busbw 21.0 errors 0",
    "INFO: no stragglers detected",
    "destroy_process_group() done",
    "Traceback handler registered (faulthandler)",
    "warmup: CUDA graphs captured 8, failed 0",
    "lr_scheduler.step() will be called after optimizer.step()",
    "Killed processes from the last run: none",
    "Using /dev/shm for shared memory, 64G available",
    "port 29500 is free",
    "NCCL version 2.21.5+cuda12.4",
    "nvidia-smi: 8 GPUs found, ECC errors: 0 volatile, 0 aggregate",
    "GPU temperature 61 C, throttle reasons: none",
    "checking disk: 1.2T free, No space left on device is unlikely",
    "Rank 3: heartbeat ok, last collective 0.2 s ago",
    "collective timeout set to 0:30:00",
    "timeout for barrier: 1800 s",
    "the watchdog will raise if a collective takes longer than 600 s",
    "gradient clipping at 1.0 prevents exploding gradients",
    "loss spike detector: no spikes in the last 1000 steps",
    "oom_score_adj set to -500",
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "Detected kernel version 5.4.0, which is below the recommended minimum of 5.5.0; this can cause the process to hang.",
    "The model weights are not tied. Please use the tie_weights method before using the infer_auto_device function.",
    "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.",
    "torch/nn/parallel/distributed.py: UserWarning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the forward pass.",
    "WARNING: eval_strategy is deprecated and will be removed",
    "/opt/conda/lib/python3.10/site-packages/torch/distributed/c10d_logger.py:79: FutureWarning: torch.distributed._all_gather_base is a private function and will be deprecated",
    "Downloading shards: 100%|##| 4/4 [00:10<00:00, 2.5s/it]",
    "retry_count=0 dropped_batches=0 corrupted_samples=0",
    "Resuming with a new world size is supported (8 -> 4)",
    "Skipping checkpoint validation: --no-verify was given",
    "s3: multipart upload completed, 0 retries",
    "spot price $1.02, interruption rate <5%",
    "budget: $12.10 of $50.00 spent, not exceeded",
    "Ignoring missing keys in state_dict: ['rotary.inv_freq'] (expected)",
    "tokenizer_config.json not found, using defaults",
    "prometheus: target up, 0 scrape errors",
    "process group destroyed cleanly",
    "Exit code: 0",
    "COMPLETED in 3:10:11, ExitCode 0:0",
    "exit status 0",
    "[rank0]: found 0 stragglers; median step 0.41 s",
    "SIGTERM received from the user's Ctrl-C handler test: passed",
    "KeyboardInterrupt handling: ok",
    "DataLoader: persistent_workers=True, pin_memory=True, timeout=120",
    "val loss improved from inf to 2.31",
    "best metric: -inf -> 0.71",
    "perplexity nan-safe mean 12.1",
    "warning: attention mask is None",
    "dead code elimination removed 12 nodes",
    "graph break count: 0, recompiles: 0",
    "torch.compile took 41 s (cache hit)",
    "memory leak check passed",
    "no zombie processes",
    "All ranks reached the barrier",
    "connection to tracker ok (latency 12 ms)",
    "InsufficientInstanceCapacity fallback list: g5, g6",
    "AccessDenied would be reported here",
    "cudaMallocAsync backend is not used",
]
STEPS: list[Callable[[int], str]] = [
    lambda step: f"step {step} loss {3 - step / 500:.3f} lr 2e-4",
    lambda step: f"Epoch 0: {step:3d}%|##| {step}/500 [00:10<00:10, 9.1it/s, loss=2.{900 - step}]",
    lambda step: f"{{'loss': 2.{900 - step}, 'grad_norm': 0.5{step % 9}, 'epoch': {step / 100}}}",
    lambda step: (
        f"iteration {step}/500 | elapsed time per iteration (ms): 512.3 | lm loss: 2.{900 - step}"
    ),
    lambda step: f"rank0: it={step} ok",
    lambda step: f"10:00:{step % 60:02d} trained on batch {step}",
]


def roots(lines: list[str]) -> list[str]:
    evidence = Evidence()
    evidence.read(LogText("log", number, line) for number, line in enumerate(lines, 1))
    findings = judge(evidence).findings
    return [f"{each.rule.id}: {each.evidence[0].text}" for each in findings if each.role == "root"]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:30])
def test_a_line_of_a_sound_run_names_no_root(line: str) -> None:
    assert roots(["step 1 of the run", line, "step 2 of the run"]) == []


@pytest.mark.slow
def test_no_sound_log_of_two_hundred_has_a_root() -> None:
    draw = random.Random(7)
    for number in range(200):
        lines = [STEPS[number % len(STEPS)](step) for step in range(draw.randint(5, 60))]
        for line in draw.sample(LINES, draw.randint(2, 12)):
            lines.insert(draw.randint(0, len(lines)), line)
        if draw.random() < 0.5:
            lines.append(draw.choice(["Training completed", "done", "saved the final model"]))
        assert roots(lines) == []
