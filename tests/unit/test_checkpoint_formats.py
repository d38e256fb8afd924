"""A commit goes out as DCP, safetensors or a torch file and comes back with every bit; so does what
others wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ebbflow.core.store import Store
from ebbflow.training.checkpoint import Checkpointer, open_generation, reachable_commits
from ebbflow.training.checkpoint.commands import main as checkpoints
from ebbflow.training.checkpoint.file_formats import read_file, write_file
from ebbflow.training.checkpoint.portable_state import read_commit
from ebbflow.training.errors import CheckpointError, CommitMismatch, NoRoom

TARGETS = ("out", "out.safetensors", "out.pt")  # dcp, safetensors, torch


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Buffers, an odd dtype, a tied weight, two groups of settings."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 6, dtype=torch.bfloat16))
    model.register_buffer("count", torch.tensor(seed, dtype=torch.int64))
    model.tied = model[0]
    decayed = [model[0].weight, model[2].weight]
    rest = [model[0].bias, *model[1].parameters(), model[2].bias]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "lr": 0.1 + 0.2}, {"params": rest, "weight_decay": 0.0}]
    )
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def bits(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, tuple]:
    tensors = {f"m.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if optimizer:
            states = optimizer.state[parameter]
        else:
            states = {}
        tensors |= {f"o.{name}.{key}": tensor for key, tensor in states.items()}
    found = {}
    for name, tensor in tensors.items():
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found[name] = (tensor.dtype, tuple(tensor.shape), raw)
    if optimizer:
        groups = optimizer.param_groups
    else:
        groups = []
    found["settings"] = tuple(
        (g["lr"], tuple(g["betas"]), g["weight_decay"], len(g["params"])) for g in groups
    )
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One commit, of step 7."""
    store = Store.open(str(tmp_path_factory.mktemp("formats") / "jobs" / "job"))
    with Checkpointer(
        store.uri, generation=open_generation(store, run="r", attempt=0)
    ) as checkpointer:
        checkpointer.save(7, *build(1), {"cursor": 56, "seed": 3})
        checkpointer.wait()
    return store


def restored(store: Store, *, optimizer: bool = True) -> tuple[dict[str, tuple], dict]:
    model, made = build(2)
    with Checkpointer(
        store.uri, generation=open_generation(store, run="r", attempt=1)
    ) as checkpointer:
        found = checkpointer.restore(
            [reachable_commits(store)[0].key], model, made if optimizer else None
        )
    return bits(model, made if optimizer else None), {**found.extra, "step": found.step}


@pytest.fixture(params=TARGETS)
def exported(request: pytest.FixtureRequest, job: Store, tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / request.param
    assert checkpoints(["export", job.uri, str(target)]) == 0
    yield target


def test_out_and_in_again_changes_no_bit(job: Store, exported: Path, tmp_path: Path) -> None:
    new = Store.open(str(tmp_path / "jobs" / "new"))
    assert checkpoints(["import", str(exported), new.uri]) == 0
    state, extra = restored(new)
    assert state == bits(*build(1)) == restored(job)[0]
    assert (extra["step"], extra["cursor"], extra["seed"], extra["imported_from"]) == (
        7,
        56,
        3,
        exported.name,
    )
    assert checkpoints(["verify", new.uri]) == 0


def test_weights_alone_leave_the_optimizer_as_new(
    job: Store, exported: Path, tmp_path: Path
) -> None:
    new = Store.open(str(tmp_path / "jobs" / "new"))
    assert checkpoints(["import", str(exported), new.uri, "--weights-only"]) == 0
    assert restored(new, optimizer=False)[0] == bits(build(1)[0], None)
    model, _ = build(2)
    optimizer = torch.optim.SGD(model.parameters())
    with Checkpointer(new.uri, generation=open_generation(new, run="r", attempt=2)) as checkpointer:
        assert checkpointer.restore([reachable_commits(new)[0].key], model, optimizer).step == 7
    assert not optimizer.state


def test_torch_itself_takes_what_was_exported(job: Store, tmp_path: Path) -> None:
    """No code of ours is needed to leave."""
    wanted = bits(*build(1))
    for name in TARGETS:
        assert checkpoints(["export", job.uri, str(tmp_path / name)]) == 0
    model, optimizer = build(2)
    document = torch.load(tmp_path / "out.pt", weights_only=True)
    assert model.load_state_dict(document["model"], strict=False).missing_keys == [
        "tied.weight",
        "tied.bias",
    ]
    optimizer.load_state_dict(document["optimizer"])
    assert bits(model, optimizer) == wanted and document["extra"]["cursor"] == 56

    from safetensors.torch import load_file

    weights = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in document["model"].items())

    del model.tied
    other, others = build(3)
    del other.tied
    state, moments = get_state_dict(other, others)
    found = {"model": state, "optimizer": moments}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(
        other, others, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    assert bits(other, others) == bits(model, optimizer)


@pytest.mark.parametrize("container", ["plain", "module.", "state_dict", "model_state", "compiled"])
def test_state_dicts_of_others_are_taken_as_they_come(tmp_path: Path, container: str) -> None:
    model, _ = build(1)
    prefix = {"module.": "module.", "compiled": "_orig_mod."}.get(container, "")
    document = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    nested = container in ("state_dict", "model_state")
    torch.save({container: document, "epoch": 3} if nested else document, tmp_path / "theirs.pth")
    new = Store.open(str(tmp_path / "jobs" / "new"))
    assert checkpoints(["import", str(tmp_path / "theirs.pth"), new.uri]) == 0
    state, extra = restored(new, optimizer=False)
    assert state == bits(model, None) and extra["step"] == 0 and extra["cursor"] == 0


@pytest.mark.parametrize("by_name", [True, False])
def test_an_optimizer_without_names_is_matched_or_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture, by_name: bool
) -> None:
    """Numbers alone say nothing of two groups; a guess would be wrong silently."""
    model, optimizer = build(1)
    document = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for stored, group in zip(
        document["optimizer"]["param_groups"], optimizer.param_groups, strict=True
    ):
        if by_name:
            stored["param_names"] = [names[id(parameter)] for parameter in group["params"]]
    torch.save(document, tmp_path / "theirs.pt")
    new = Store.open(str(tmp_path / "jobs" / "new"))
    assert checkpoints(["import", str(tmp_path / "theirs.pt"), new.uri]) == (0 if by_name else 1)
    if by_name:
        assert restored(new)[0] == bits(model, optimizer)
    else:
        assert "hint: --weights-only" in capfd.readouterr().err and reachable_commits(new) == []


def test_one_group_needs_no_names_though_there_are_buffers(tmp_path: Path) -> None:
    model, _ = build(1)
    del model.tied, model.count
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "theirs.pt"
    )
    content = read_file(tmp_path / "theirs.pt")
    for name, parameter in model.named_parameters():
        assert torch.equal(content.moments[name]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_a_full_disk_is_called_so(job: Store) -> None:
    """torch says "unexpected pos 704 vs 662"."""
    content = read_commit(job, reachable_commits(job)[0].key)
    with pytest.raises(NoRoom, match=r"the disk is full .*unexpected pos .*hint: free space"):
        write_file(content, Path("/dev/full"), "torch")


def test_nothing_is_overwritten_and_no_started_job_is_imported_into(
    job: Store, tmp_path: Path
) -> None:
    (tmp_path / "here.pt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        write_file(read_commit(job, reachable_commits(job)[0].key), tmp_path / "here.pt", "torch")
    assert (tmp_path / "here.pt").read_text() == "mine"
    assert checkpoints(["export", job.uri, str(tmp_path / "a.pt")]) == 0
    assert checkpoints(["import", str(tmp_path / "a.pt"), job.uri]) == 1
    assert (
        checkpoints(["import", str(tmp_path / "nowhere.pt"), str(tmp_path / "jobs" / "other")]) == 1
    )
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match=r"text\.pt: cannot be read as torch"):
        read_file(tmp_path / "text.pt")


def test_another_model_is_a_mismatch_and_not_a_silent_start(job: Store, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "theirs.pt")
    new = Store.open(str(tmp_path / "jobs" / "new"))
    assert checkpoints(["import", str(tmp_path / "theirs.pt"), new.uri]) == 0
    with pytest.raises(CommitMismatch, match=r"only in the commit: \['model.weight'\]"):
        restored(new)


def test_checkpoint_show_lists_the_contents_of_a_commit(
    job: Store, capfd: pytest.CaptureFixture
) -> None:
    assert checkpoints(["show", job.uri, "--commit", "7", "--json"]) == 0
    about = json.loads(capfd.readouterr().out)
    assert (about["step"], about["world_size"], about["random_states_at"]) == (7, 1, 1)
    assert about["extra"]["seed"] == 3 and about["loads_at"].startswith("any number of ranks")
    assert set(about["bytes_by_kind"]) == {"model", "optimizer", "rng"}
    assert checkpoints(["show", job.uri, "--commit", "8"]) == 1
