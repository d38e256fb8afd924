"""Restoring: the newest candidate that verifies on every rank; the others are quarantined and loudly reported."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.optim import Optimizer

from infra.errors import InfraError
from infra.layout import quarantine_key
from infra.store import Store
from training.checkpoint.checksum import seal
from training.checkpoint.dcp_reader import CommitReader
from training.checkpoint.lineage import CommitRef
from training.checkpoint.manifest import VERSION
from training.checkpoint.rng import reseed_rng, restore_rng, rng_name
from training.checkpoint.state import apply_settings, prepare_for_loading
from training.errors import CheckpointError, CommitMismatch, CorruptCommit, MisplacedCommit

_VERDICT_BYTES = 1024
_SOUND, _CORRUPT, _MISPLACED, _MISMATCH, _ERROR = "sound", "corrupt", "misplaced", "mismatch", "error"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What was restored. The fields are the same on all ranks, but for bytes_read and seconds (this rank's).

    rng: "restored" bit for bit, or "reseeded from the commit" when the world size differs. rejected: (key, reason).
    """

    step: int
    extra: dict[str, Any]
    key: str
    rng: str
    world_size: int
    bytes_read: int
    seconds: float
    rejected: list[tuple[str, str]] = field(default_factory=list)


def restore_newest(
    store: Store, candidates: list[str], model: nn.Module, optimizer: Optimizer | None, rank: int, world_size: int
) -> Restored | None:
    """Try the candidates in order until all ranks have verified one; None when there are no candidates.

    Model and optimizer are filled in place; when an exception leaves this function they are not to be used.
    """
    began = time.monotonic()
    rejected: list[tuple[str, str]] = []
    for key in candidates:
        loaded, verdict = _attempt(store, key, model, optimizer, rank, world_size)
        kind, reason = _agree(verdict, rank, world_size)
        if kind in (_CORRUPT, _MISPLACED):
            rejected.append((key, reason))
            if rank == 0:
                _report(store, key, reason, quarantine=kind == _CORRUPT)
            continue
        if kind == _MISMATCH:
            raise CommitMismatch(f"{key}: {reason}")
        if kind == _ERROR or loaded is None:
            raise CheckpointError(f"{key} could not be read, which says nothing of the commit itself: {reason}")
        return _finish(loaded, key, model, optimizer, rank, world_size, rejected, began)
    if rejected:
        reasons = "; ".join(f"{key}: {reason}" for key, reason in rejected)
        raise CheckpointError(f"{store.uri}: none of {len(rejected)} commits verifies: {reasons}")
    return None


@dataclass
class _Loaded:
    reader: CommitReader
    rng: dict[str, Tensor]


def _attempt(
    store: Store, key: str, model: nn.Module, optimizer: Optimizer | None, rank: int, world_size: int
) -> tuple[_Loaded | None, tuple[str, str]]:
    """Load this rank's part. Every exception becomes a verdict: a rank that left would hold up the others."""
    try:
        reader = CommitReader(store, key)
        targets = prepare_for_loading(reader.manifest, model, optimizer)
        rng = {}
        if reader.manifest.save.world_size == world_size:
            for name, entry in reader.manifest.tensors.items():
                if name.startswith(rng_name(rank)):
                    rng[name] = torch.empty(entry.shape, dtype=torch.uint8)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({**targets, **rng}, reader.read_metadata(), True)
        plan = planner.finish_plan(planner.create_local_plan())
        reader.read_data(plan, planner).wait()
        return _Loaded(reader, rng), (_SOUND, "")
    except MisplacedCommit as error:
        return None, (_MISPLACED, str(error))
    except CorruptCommit as error:
        return None, (_CORRUPT, str(error))
    except CommitMismatch as error:
        return None, (_MISMATCH, str(error))
    except (CheckpointError, InfraError) as error:
        return None, (_ERROR, str(error))
    except Exception as error:
        return None, (_ERROR, repr(error))


def _agree(verdict: tuple[str, str], rank: int, world_size: int) -> tuple[str, str]:
    """The worst verdict of all ranks, with who gave it: the same answer everywhere. One small all-gather."""
    if not (dist.is_available() and dist.is_initialized()) or world_size == 1:
        return verdict
    text = "\n".join(verdict).encode()[:_VERDICT_BYTES]
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.zeros(_VERDICT_BYTES, dtype=torch.uint8, device=device)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    verdicts = []
    for number, row in enumerate(gathered):
        kind, _, reason = bytes(row.cpu().numpy()).rstrip(b"\0").decode(errors="replace").partition("\n")
        verdicts.append((kind, f"rank {number}: {reason}"))
    # An error says nothing of the commit, so it must not be outvoted into a quarantine; nor a mismatch.
    order = (_ERROR, _MISMATCH, _MISPLACED, _CORRUPT, _SOUND)
    return min(verdicts, key=lambda v: order.index(v[0]))


def _report(store: Store, key: str, reason: str, *, quarantine: bool) -> None:
    """Loudly, before the put that may fail. A misplaced manifest is sound elsewhere, and a quarantine goes by hash."""
    where = quarantine_key(CommitRef.from_key(key).sha256)
    print(
        f"checkpoint: ERROR: {store.uri}/{key} is damaged and will not be used: {reason}\n"
        f"checkpoint: {f'quarantined in {where}; ' if quarantine else ''}going back to the commit before it",
        file=sys.stderr,
        flush=True,
    )
    if quarantine:
        store.put(where, seal({"version": VERSION, "key": key, "reason": reason, "t_wall": time.time()}))


def _finish(
    loaded: _Loaded,
    key: str,
    model: nn.Module,
    optimizer: Optimizer | None,
    rank: int,
    world_size: int,
    rejected: list[tuple[str, str]],
    began: float,
) -> Restored:
    manifest = loaded.reader.manifest
    settings = manifest.common["optimizer"]
    if optimizer is not None and settings is not None:
        apply_settings(settings, model, optimizer)
    if manifest.save.world_size == world_size:
        restore_rng(rank, loaded.rng)
        rng = "restored"
    else:
        reseed_rng(CommitRef.from_key(key).sha256, rank)
        rng = "reseeded from the commit"
    return Restored(
        step=manifest.save.step,
        extra=manifest.common["extra"],
        key=key,
        rng=rng,
        world_size=manifest.save.world_size,
        bytes_read=loaded.reader.bytes_read,
        seconds=time.monotonic() - began,
        rejected=rejected,
    )
