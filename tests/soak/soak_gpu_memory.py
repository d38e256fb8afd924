"""The planned memory of the GPU configurations against torch's own accounting, on eight ranks that
talk to nobody.

Nothing is allocated: a model of 7 billion parameters is trained for two steps on fake tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from ebbflow.cost.plan.throughput import memory_fit, micro_batch
from ebbflow.training.engine import parallel as spread
from ebbflow.training.gang import Gang
from ebbflow.training.weights.load import materialise
from ebbflow.training.workload import Cursor
from ebbflow.training.workload_loader import make_workload
from ebbflow.tryout.trial import try_workload
from tests.support.gpu_configs import load_gpu_config, prepared_context

_RANKS = 8


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "name", ["policy-optimization-gpu", "policy-optimization-ddp", "point-clouds-gpu"]
)
def test_the_plan_has_room_for_the_peak(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    monkeypatch.setattr("ebbflow.tryout.trial.LARGEST_TRIED_BYTES", 0)
    # The tracker has one device
    words = ["workload_options.adam_offload=false"] if name.endswith("ddp") else []
    config = load_gpu_config(name, tmp_path, *words)
    context = prepared_context(config)
    shape = try_workload(config, context).shape
    assert shape is not None
    fit = memory_fit(config, _RANKS, shape, ranks_per_node=_RANKS)
    workload: Any = make_workload(config, context)
    model = workload.model()
    samples = micro_batch(config, _RANKS)
    assert samples is not None
    units = list(workload.units(model))
    if name.startswith("point"):
        batch = workload.next_batch(model, Cursor(0, samples))
    else:
        batch = None
    gang = Gang(rank=0, world_size=_RANKS, ranks_per_node=_RANKS)
    sharded = config.parallel.mode != "ddp"
    if sharded:
        mesh = spread.make_mesh(gang, shard=_RANKS)
    mixed = not sharded and config.fsdp.mixes_precision
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("ignore")
        materialise(model, "cpu")
        spread.recompute_units(units, config.parallel.recompute)
        if sharded:
            spread.shard_model(model, units, config.fsdp, mesh, keep_gathered=False)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        if sharded:
            tracker: Any = FSDPMemTracker(model, optimizer)
            tracker.track_inputs(())
        else:
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
        if batch is None:
            batch = workload._blank(samples)
        with tracker:
            for _ in range(2):
                for _ in range(2):
                    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                        loss = workload.loss(model, batch).sum
                    loss.backward()
                    del loss
                    tracker.reset_mod_stats()
                optimizer.step()
                optimizer.zero_grad()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    tracked = next(size for kind, size in peak.items() if str(kind).rpartition(".")[2] == "Total")
    step = fit.total - shape.other_bytes
    print(
        f"{name}: planned {fit.render()}; tracked {tracked / 2**30:.2f} GiB + "
        f"{shape.other_bytes / 2**30:.2f} GiB"
    )
    assert 1.0 <= step / tracked <= 1.3, (step / tracked, fit.render(), peak)
