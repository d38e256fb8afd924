"""The common parts of all lines of `ebbflow bench gpu`: sizes, results and configurations."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbflow.core.config.schema import ModelConfig, RunConfig

if TYPE_CHECKING:
    from ebbflow.training.gang import Gang

EXPECTED = "as expected"
LOW = "below"
HIGH = "above"
WRONG = "WRONG"
NO_RANGE = "no range"
NOT_RUN = "not run"
_NEVER = 10**9
MODELS = {
    "tiny": ModelConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        sequence_length=32,
        vocab_size=256,
        tied_embeddings=True,
    ),
    "18M": ModelConfig(
        hidden_size=512, num_layers=6, num_heads=8, sequence_length=1024, vocab_size=256
    ),
    "124M": ModelConfig(
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        sequence_length=1024,
        vocab_size=50304,
        tied_embeddings=True,
    ),
    "1.3B": ModelConfig(
        hidden_size=2048,
        num_layers=24,
        num_heads=16,
        sequence_length=2048,
        vocab_size=50304,
        tied_embeddings=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    what: str  # what is measured
    measured: str
    expected: str = ""
    source: str = ""  # where the expected range comes from
    verdict: str = NO_RANGE
    figures: dict[str, Any] = field(default_factory=dict)  # the numbers, for --json

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured. Times are of a GPU; nothing but "tiny" is meant for a CPU."""

    name: str
    models: tuple[str, ...]  # of the speed lines; the first one is compared with a bare loop
    job_model: str  # of the jobs that are interrupted
    job_steps: int
    steps: int  # of a lap of the speed lines
    rounds: int
    hang_seconds: float  # survival.hang_floor_seconds
    save_steps: int  # steps between two saves
    copy_bytes: int  # of a copy between host and device
    text_bytes: int


SIZES = {
    "tiny": Size(
        name="tiny",
        models=("tiny",),
        job_model="tiny",
        job_steps=12,
        steps=4,
        rounds=1,
        hang_seconds=3.0,
        save_steps=4,
        copy_bytes=2**24,
        text_bytes=60_000,
    ),
    "quick": Size(
        name="quick",
        models=("124M",),
        job_model="18M",
        job_steps=60,
        steps=10,
        rounds=2,
        hang_seconds=5.0,
        save_steps=20,
        copy_bytes=2**28,
        text_bytes=8_000_000,
    ),
    "full": Size(
        name="full",
        models=("124M", "1.3B"),
        job_model="124M",
        job_steps=120,
        steps=20,
        rounds=5,
        hang_seconds=10.0,
        save_steps=20,
        copy_bytes=2**30,
        text_bytes=16_000_000,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One run of the command, as a measuring process knows it."""

    size: Size
    folder: Path  # of the whole run, removed at its end
    prepared: dict[str, Any]  # the token shards of all jobs
    device: dict[str, Any]  # `benchmarks.gpu.device.describe_device`

    @property
    def on_gpu(self) -> bool:
        return self.device["type"] == "cuda"

    @property
    def ranks(self) -> int:
        """The ranks of a job: one per GPU, at most eight; on a CPU two."""
        if self.on_gpu:
            return min(8, self.device["count"])
        return 2

    @cached_property
    def gang(self) -> Gang:
        """This process alone, in a process group of its own: NCCL's on a GPU, as under an agent."""
        from ebbflow.training.gang import connect

        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as a worker has it
        choice = self.device["type"]
        return connect(
            start_seconds=60.0, collective_seconds=120.0, generation="bench", device_choice=choice
        )

    def config(
        self, model: str, *, ranks: int = 1, samples: int = 4, **sections: dict[str, Any]
    ) -> RunConfig:
        """Return a job's configuration: a constant rate, mixed precision on a GPU, no evaluation
        before the end.

        samples: of each rank and step. sections: further keys of sections of the configuration.
        """
        values: dict[str, dict[str, Any]] = {
            "model": MODELS[model].model_dump(),
            "training": {
                "batch_size": samples * ranks,
                "max_steps": _NEVER,
                "evaluation_interval_steps": _NEVER,
                "scheduler": {"type": "constant", "warmup_steps": 0},
            },
            "data": {"path": str(self.folder / "text"), "held_out_samples": ranks},
            "fsdp": {
                "use_mixed_precision": self.on_gpu,
                "param_dtype": self.device.get("dtype", "bfloat16"),
            },
            "cluster": {"nodes": 1, "processes_per_node": ranks, "device": self.device["type"]},
            "checkpoint": {"interval_steps": _NEVER},
        }
        for name, changed in sections.items():
            values[name] = {**values.get(name, {}), **changed}
        return RunConfig.model_validate({"store": str(self.folder / "store"), **values})

    def remember(self, **figures: float) -> None:
        """Keep figures for later lines, which may be measured in other processes."""
        path = self.folder / "known.json"
        path.write_text(json.dumps(self.recall() | figures))

    def recall(self) -> dict[str, float]:
        path = self.folder / "known.json"
        if path.exists():
            return json.loads(path.read_text())
        return {}


def judge(value: float, low: float | None, high: float | None) -> str:
    """Return the verdict of a value whose expected range is `low` to `high`; None: no limit on that
    side.
    """
    if low is None and high is None:
        return NO_RANGE
    if low is not None and value < low:
        return LOW
    if high is not None and value > high:
        return HIGH
    return EXPECTED


def verdict(right: bool) -> str:
    if right:
        return EXPECTED
    return WRONG


def lines_of(size: Size) -> list[str]:
    """Return the names of the lines in the order of the table."""
    speeds = []
    for model in size.models:
        speeds += [f"{model}-eager", f"{model}-compiled", f"{model}-recomputed"]
    others = ["ratio", "waits", "save", "resume", "strict", "hang", "memory", "collectives"]
    return ["matmul", "copies", *speeds, *others]
