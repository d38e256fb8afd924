"""A commit goes out as DCP, safetensors or a torch file and comes back with every bit; so does what
others wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ebbflow.core.store import Store
from ebbflow.training.checkpoint import Checkpointer, open_generation, reachable_commits
from ebbflow.training.checkpoint.commands import main as checkpoints
from ebbflow.training.checkpoint.file_formats import read_file, write_file
from ebbflow.training.checkpoint.portable_state import read_commit
from ebbflow.training.errors import CheckpointError, CommitMismatch, NoRoom, TrainingError

TARGETS = ("out", "out.safetensors", "out.pt")  # dcp, safetensors, torch
WEIGHTS = {"a.weight": torch.arange(12.0).reshape(4, 3).t(), "b.weight": torch.ones(2)}
TEXTS = {
    "pointer": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "page": "<!DOCTYPE html><html>403</html>",
    "empty": "",
}
WRONG_INDEXES = {
    "parts, elsewhere": dict.fromkeys(WEIGHTS, "../elsewhere.safetensors"),
    "parts, numbers": dict.fromkeys(WEIGHTS, 1),
}
WRAPPERS = "_forward_module._orig_mod."


class Touch:
    """A pickled object whose unpickling writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


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


def write_foreign(kind: str, folder: Path) -> Path:
    """Write a checkpoint as another program writes it, or as a copy of it arrives."""
    documents = {
        "before torch 1.6": WEIGHTS,
        "views": WEIGHTS | {"b.weight": torch.ones(90)[3:5]},
        "wrapped": {f"{WRAPPERS}{name}": tensor for name, tensor in WEIGHTS.items()},
        "argparse": {"model": WEIGHTS, "args": argparse.Namespace(lr=1)},
        "argparse before torch 1.6": {"model": WEIGHTS, "args": argparse.Namespace(lr=1)},
        "whole module": nn.Linear(2, 2),
        "sparse": WEIGHTS | {"b.weight": torch.ones(2).to_sparse()},
        "meta": WEIGHTS | {"b.weight": torch.ones(2, device="meta")},
    }
    path = folder / "model.pt"
    if kind in documents:
        is_archive = "before torch 1.6" not in kind
        torch.save(documents[kind], path, _use_new_zipfile_serialization=is_archive)
    elif kind == "torchscript":
        torch.jit.script(nn.Linear(2, 2)).save(str(path))
    elif kind == "plain pickle":
        path.write_bytes(pickle.dumps({"args": argparse.Namespace(lr=1)}, protocol=2))
    elif kind in TEXTS:
        path.write_text(TEXTS[kind])
    elif kind.startswith("dcp"):
        write_dcp_folder(kind, folder)
        return folder
    else:
        write_model_folder(kind, folder)
        return folder
    return path


def write_model_folder(kind: str, folder: Path) -> None:
    """Write a folder of Hugging Face or DeepSpeed."""
    plain = {name: tensor.contiguous() for name, tensor in WEIGHTS.items()}
    parts = {}
    for number, name in enumerate(plain, start=1):
        parts[name] = f"model-0000{number}-of-00002.safetensors"
    if kind == "two copies":
        save_file(plain, folder / "model.safetensors")
        save_file(plain, folder / "consolidated.safetensors")
    elif kind == "another head":
        save_file({"a.weight": plain["a.weight"]}, folder / "model.safetensors")
        save_file({"b.weight": plain["b.weight"]}, folder / "head.safetensors")
    elif kind == "an index left over":
        save_file(plain, folder / "model.safetensors")
        left = dict.fromkeys([*plain, "tied.weight"], "pytorch_model-00001-of-00001.bin")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": left}))
    elif kind == "bin parts":
        for name, part in parts.items():
            torch.save(
                {name: plain[name]}, folder / f"pytorch_{part.replace('safetensors', 'bin')}"
            )
    elif kind == "deepspeed":
        (folder / "global_step1").mkdir()
        (folder / "global_step1/mp_rank_00_model_states.pt").touch()
    else:
        for name, part in parts.items():
            save_file({name: plain[name]}, folder / part)
        if "no index" not in kind:
            raw = json.dumps({"weight_map": WRONG_INDEXES.get(kind, parts)})
            (folder / "model.safetensors.index.json").write_text(raw)
        if "key missing" in kind:
            save_file({"c": torch.ones(1)}, folder / parts["b.weight"])
        if "file missing" in kind:
            (folder / parts["b.weight"]).unlink()


def write_dcp_folder(kind: str, folder: Path) -> None:
    """Write a folder of torch's distributed checkpointing."""
    entry = argparse.Namespace(lr=1) if kind == "dcp, argparse" else 3
    dcp.save({"model": WEIGHTS, "entry": entry}, checkpoint_id=folder, no_dist=True)
    metadata = folder / ".metadata"
    content = pickle.loads(metadata.read_bytes())
    if kind == "dcp, code":
        content.planner_data["x"] = Touch(folder / "ran")
    if kind == "dcp, outside":
        for info in content.storage_data.values():
            info.relative_path = "../elsewhere"
    metadata.write_bytes(pickle.dumps(content))
    for data in folder.glob("*.distcp"):
        if kind == "dcp, file missing":
            data.unlink()
        if kind == "dcp, truncated":
            data.write_bytes(data.read_bytes()[:-200])


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


@pytest.mark.parametrize(
    "kind",
    [
        "before torch 1.6",
        "views",
        "wrapped",
        "parts",
        "parts, no index",
        "two copies",
        "bin parts",
        "an index left over",
    ],
)
def test_a_foreign_checkpoint_is_read(tmp_path: Path, kind: str) -> None:
    weights = read_file(write_foreign(kind, tmp_path)).weights
    assert set(weights) == set(WEIGHTS)
    assert all(torch.equal(weights[name], WEIGHTS[name]) for name in WEIGHTS)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("whole module", r"needs torch\.nn\.modules\.linear\.Linear; hint: --allow-pickle"),
        ("plain pickle", r"argparse\.Namespace.*; torch\.save did not write it"),
        ("another head", r"head\.safetensors: has tensors that model\.safetensors .* b\.weight"),
        ("parts, elsewhere", r"'\.\./elsewhere\.safetensors' is no file name"),
        ("parts, numbers", "1 is no file name"),
        ("torchscript", "TorchScript archive"),
        ("sparse", r"'b\.weight' is torch\.sparse_coo"),
        ("meta", r"'b\.weight' has no values"),
        ("pointer", "Git LFS pointer.*git lfs pull"),
        ("page", "a web page"),
        ("empty", "is empty"),
        ("parts, key missing", r"lack 1 of 2 tensors: b\.weight"),
        ("parts, file missing", r"1 of its 2 files are missing: model-00002"),
        ("parts, file missing, no index", "1 of 2 parts are missing, the first is part 2"),
        ("deepspeed", r"zero_to_fp32\.py"),
        ("dcp, code", r"needs \w+\.system; hint: --allow-pickle"),
        ("dcp, outside", r"\.\./elsewhere, outside of the folder"),
        ("dcp, file missing", "1 of its 1 files are missing"),
        ("dcp, truncated", "cannot be read as dcp"),
    ],
)
def test_a_foreign_checkpoint_is_refused_with_its_reason(
    tmp_path: Path, kind: str, message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        read_file(write_foreign(kind, tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
    ],
)
@pytest.mark.parametrize("slots", [True, False])
def test_metadata_set_no_attribute_of_a_class_or_function(
    tmp_path: Path, module: str, name: str, slots: bool
) -> None:
    """A pickle's BUILD sets attributes of whatever lies on its stack."""
    path = write_foreign("dcp", tmp_path)
    state = {"left_by_a_pickle": None}
    build = pickle.dumps((None, state) if slots else state, protocol=2)[2:-1] + pickle.BUILD
    code = pickle.GLOBAL + f"{module}\n{name}\n".encode() + build + pickle.STOP
    (path / ".metadata").write_bytes(pickle.PROTO + b"\x02" + code)
    target = getattr(importlib.import_module(module), name)
    with pytest.raises(CheckpointError, match=r"sets attributes of \w+; hint: --allow-pickle"):
        read_file(path)
    assert not hasattr(target, "left_by_a_pickle")


def test_a_path_in_metadata_is_read(tmp_path: Path) -> None:
    path = write_foreign("dcp", tmp_path)
    content = pickle.loads((path / ".metadata").read_bytes())
    content.storage_meta.checkpoint_id = Path("/theirs/checkpoint")
    (path / ".metadata").write_bytes(pickle.dumps(content))
    assert set(read_file(path).weights) == set(WEIGHTS)


@pytest.mark.parametrize("kind", ["argparse", "argparse before torch 1.6", "dcp, argparse"])
def test_a_pickled_object_needs_allow_pickle(
    tmp_path: Path, capfd: pytest.CaptureFixture, kind: str
) -> None:
    (tmp_path / "theirs").mkdir()
    path = str(write_foreign(kind, tmp_path / "theirs"))
    assert checkpoints(["import", path, str(tmp_path / "jobs/new")]) == 1
    message = capfd.readouterr().err
    assert "argparse.Namespace" in message and "--allow-pickle runs the code" in message
    assert checkpoints(["import", path, str(tmp_path / "jobs/new"), "--allow-pickle"]) == 0


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_a_damaged_file_is_refused_or_read(tmp_path_factory: Any, kind: str) -> None:
    """Whatever is cut off or changed in it: no other exception, and no code is run."""
    folder = tmp_path_factory.mktemp("damaged")
    if kind == "dcp":
        dcp.save({"model": WEIGHTS, "step": 3}, checkpoint_id=folder, no_dist=True)
        source = folder
        damaged = folder / ".metadata"
    elif kind == "torch":
        source = damaged = folder / "model.pt"
        torch.save(WEIGHTS, source)
    else:
        source = damaged = folder / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in WEIGHTS.items()}, source)
    raw = damaged.read_bytes()

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, len(raw) - 1), st.integers(1, 255), st.booleans())
    def damage(place: int, change: int, cut: bool) -> None:
        if cut:
            damaged.write_bytes(raw[:place])
        else:
            damaged.write_bytes(raw[:place] + bytes([raw[place] ^ change]) + raw[place + 1 :])
        with contextlib.suppress(TrainingError):
            read_file(source)
            assert not cut

    damage()


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
