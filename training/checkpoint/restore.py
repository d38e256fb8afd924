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

from infra.errors import InfraError, StoreAway
from infra.layout import quarantine_key
from infra.store import Store
from training.checkpoint.checksum import seal
from training.checkpoint.dcp_reader import CommitReader
from training.checkpoint.lineage import CommitRef
from training.checkpoint.manifest import VERSION
from training.checkpoint.reader import read_manifest
from training.checkpoint.rng import reseed_rng, restore_rng, rng_name
from training.checkpoint.state import apply_settings, prepare_for_loading
from training.errors import CheckpointError, CommitMismatch, CorruptCommit, MisplacedCommit

_VERDICT_BYTES = 1024
_SOUND, _CORRUPT, _MISPLACED, _MISMATCH, _ERROR = "sound", "corrupt", "misplaced", "mismatch", "error"
_AWAY = "away"  # the store, for one rank at least
# Before a commit is read again that the store would not give to all. A generation is not lost for it: three of them for
# the same reason would look like a crash loop.
_AGAIN_SECONDS = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A commit that was passed over since it is damaged. extra: what it carried, None when nobody can read it."""

    key: str
    reason: str
    extra: dict[str, Any] | None = None

    @property
    def step(self) -> int:
        return CommitRef.from_key(self.key).step


@dataclass(frozen=True, kw_only=True)
class RestoreSeconds:
    """Where the time of one rank's restore went. They add up to `Restored.seconds`.

    list: manifests, and what was tried in vain. download, verify, load: of the bytes, from the store, against their
    sums, into the memory of model and optimizer; these go on at once in several threads, and the time by the clock is
    divided in the proportion of the threads' seconds. agree: waiting for the other ranks' verdict.
    """

    list: float
    download: float
    verify: float
    load: float
    agree: float


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What was restored. The fields are the same on all ranks, but for bytes_read, seconds and split (this rank's).

    rng: "restored" bit for bit, or "reseeded from the commit" when it has none for this world size. rejected: newest
    first.
    """

    step: int
    extra: dict[str, Any]
    key: str
    rng: str
    world_size: int
    bytes_read: int
    seconds: float
    split: RestoreSeconds
    rejected: list[Rejected] = field(default_factory=list)


def restore_newest(
    store: Store, candidates: list[str], model: nn.Module, optimizer: Optimizer | None, rank: int, world_size: int
) -> Restored | None:
    """Try the candidates in order until all ranks have verified one; None when there are no candidates.

    Model and optimizer are filled in place; when an exception leaves this function they are not to be used.
    """
    began = time.monotonic()
    rejected: list[Rejected] = []
    for key in candidates:
        attempted, loaded, (kind, reason), agree = _patient_attempt(store, key, model, optimizer, rank, world_size)
        if kind in (_CORRUPT, _MISPLACED):
            rejected.append(Rejected(key=key, reason=reason, extra=_extra(store, key)))
            if rank == 0:
                _report(store, key, reason, quarantine=kind == _CORRUPT)
            continue
        if kind == _MISMATCH:
            raise CommitMismatch(f"{key}: {reason}")
        if kind in (_ERROR, _AWAY) or loaded is None:
            raise CheckpointError(f"{key} could not be read, which says nothing of the commit itself: {reason}")
        rng = _finish(loaded, key, model, optimizer, rank)
        if rejected and rank == 0:
            _report_loss(rejected, key)
        manifest, total = loaded.reader.manifest, time.monotonic() - began
        return Restored(
            step=manifest.save.step,
            extra=manifest.common["extra"],
            key=key,
            rng=rng,
            world_size=manifest.save.world_size,
            bytes_read=loaded.reader.figures.bytes,
            seconds=total,
            split=_split(loaded, before=attempted - began, agree=agree, total=total),
            rejected=rejected,
        )
    if rejected:
        reasons = "; ".join(f"{bad.key}: {bad.reason}" for bad in rejected)
        raise CheckpointError(f"{store.uri}: none of {len(rejected)} commits verifies: {reasons}")
    return None


@dataclass
class _Loaded:
    reader: CommitReader
    rng: dict[str, Tensor]
    manifest_seconds: float
    read_seconds: float


def _patient_attempt(
    store: Store, key: str, model: nn.Module, optimizer: Optimizer | None, rank: int, world_size: int
) -> tuple[float, _Loaded | None, tuple[str, str], float]:
    """(time.monotonic() at which the last try began, what it loaded, the verdict of all ranks, seconds that took)."""
    for pause in (*_AGAIN_SECONDS, None):
        attempted = time.monotonic()
        loaded, own = _attempt(store, key, model, optimizer, rank, world_size)
        judged = time.monotonic()
        verdict = _agree(own, rank, world_size)
        if verdict[0] != _AWAY or pause is None:
            break
        time.sleep(pause)  # on all ranks alike
    return attempted, loaded, verdict, time.monotonic() - judged


def _attempt(
    store: Store, key: str, model: nn.Module, optimizer: Optimizer | None, rank: int, world_size: int
) -> tuple[_Loaded | None, tuple[str, str]]:
    """Load this rank's part. Every exception becomes a verdict: a rank that left would hold up the others."""
    try:
        began = time.monotonic()
        reader = CommitReader(store, key)
        manifest_seconds = time.monotonic() - began
        targets = prepare_for_loading(reader.manifest, model, optimizer)
        rng = {}
        if reader.manifest.save.world_size == world_size:
            for name, entry in reader.manifest.tensors.items():
                if name.startswith(rng_name(rank)):
                    rng[name] = torch.empty(entry.shape, dtype=torch.uint8)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({**targets, **rng}, reader.read_metadata(), True)
        plan = planner.finish_plan(planner.create_local_plan())
        began = time.monotonic()
        reader.read_data(plan, planner).wait()
        return _Loaded(reader, rng, manifest_seconds, time.monotonic() - began), (_SOUND, "")
    except MisplacedCommit as error:
        return None, (_MISPLACED, str(error))
    except CorruptCommit as error:
        return None, (_CORRUPT, str(error))
    except CommitMismatch as error:
        return None, (_MISMATCH, str(error))
    except StoreAway as error:
        return None, (_AWAY, str(error))
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
    order = (_ERROR, _AWAY, _MISMATCH, _MISPLACED, _CORRUPT, _SOUND)
    return min(verdicts, key=lambda v: order.index(v[0]))


def _report(store: Store, key: str, reason: str, *, quarantine: bool) -> None:
    """Loudly, before the put that may fail. A misplaced manifest is sound elsewhere, and a quarantine goes by hash."""
    where = quarantine_key(CommitRef.from_key(key).sha256)
    print(
        f"checkpoint: ERROR: {store.uri}/{key} is damaged and will not be used: {reason}\n"
        f"checkpoint: {f'to be quarantined in {where}; ' if quarantine else ''}going back to the commit before it",
        file=sys.stderr,
        flush=True,
    )
    if not quarantine:
        return
    try:
        store.put(where, seal({"version": VERSION, "key": key, "reason": reason, "t_wall": time.time()}))
    except InfraError as error:  # the other ranks go on to the next commit, and so must this one
        print(f"checkpoint: WARNING: {where} could not be written: {error}", file=sys.stderr, flush=True)


def _extra(store: Store, key: str) -> dict[str, Any] | None:
    """What a damaged commit carried, to tell what is lost with it; its manifest is often sound."""
    try:
        return read_manifest(store, key).common["extra"]
    except (CheckpointError, InfraError, KeyError):
        return None


def _report_loss(rejected: list[Rejected], key: str) -> None:
    lost, left = rejected[0].step, CommitRef.from_key(key).step
    print(
        f"checkpoint: {lost - left} committed steps are lost: from {lost} back to {left}", file=sys.stderr, flush=True
    )


def _finish(loaded: _Loaded, key: str, model: nn.Module, optimizer: Optimizer | None, rank: int) -> str:
    """Settings and random states; returns what became of the latter."""
    settings = loaded.reader.manifest.common["optimizer"]
    if optimizer is not None and settings is not None:
        apply_settings(settings, model, optimizer)
    if loaded.rng:
        restore_rng(rank, loaded.rng)
        return "restored"
    reseed_rng(CommitRef.from_key(key).sha256, rank)
    return "reseeded from the commit"


def _split(loaded: _Loaded, *, before: float, agree: float, total: float) -> RestoreSeconds:
    """before: seconds until this commit was tried. What is neither listing, download, verifying nor waiting is load."""
    figures = loaded.reader.figures
    threads = figures.download_seconds + figures.verify_seconds + figures.place_seconds
    share = loaded.read_seconds / threads if threads else 0.0
    listing = before + loaded.manifest_seconds
    download, verify = share * figures.download_seconds, share * figures.verify_seconds
    load = total - listing - download - verify - agree
    return RestoreSeconds(list=listing, download=download, verify=verify, load=load, agree=agree)
