"""A job starts from weights of a file: the same in every mode, by slices, or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ebbflow.core.config.schema import ModelConfig, RunConfig, TrainingConfig
from ebbflow.core.events import read_events
from ebbflow.core.store import Store
from ebbflow.training.errors import WorkloadError
from ebbflow.training.weights.files import describe_files
from ebbflow.training.weights.load import load_weights, weights_sha256
from ebbflow.workloads.language.language_model import CausalLM
from tests.support.alone import run_alone
from tests.support.gangs import run_ranks
from tests.support.weights_rank import text_loss

# A width that four ranks do not share evenly: some hold a row less than others.
MODEL = ModelConfig(hidden_size=18, num_layers=2, num_heads=2, sequence_length=10, vocab_size=30)

LLAMA = ModelConfig(
    architecture="llama",
    hidden_size=18,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_size=4,
    sequence_length=10,
    vocab_size=30,
    tied_embeddings=True,
    qkv_bias=True,
    qk_norm=True,
)


@pytest.fixture
def source() -> CausalLM:
    torch.manual_seed(5)
    return CausalLM(MODEL)


def save_folder(model: nn.Module, folder: Path, *, parts: int) -> Path:
    """In the layout of Hugging Face: `parts` files and an index."""
    folder.mkdir()
    state = {name: value.detach() for name, value in model.named_parameters()}
    names = [f"model-{number + 1:05d}-of-{parts:05d}.safetensors" for number in range(parts)]
    where = {name: names[number % parts] for number, name in enumerate(state)}
    for file in names:
        save_file(
            {name: state[name].contiguous() for name in state if where[name] == file}, folder / file
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    return folder


def test_every_mode_reads_its_own_part_of_several_files_and_trains_alike(
    source: CausalLM, tmp_path: Path
) -> None:
    models = [source, CausalLM(LLAMA)]
    configs = []
    for number, model in enumerate(models):
        path = save_folder(model, tmp_path / str(number), parts=3)
        configs.append(
            RunConfig(model=model.config, training=TrainingConfig(initial_weights=str(path)))
        )
    texts = [config.model_dump_json() for config in configs]
    (output,) = run_ranks(1, ["-m", "tests.support.weights_rank", "4", *texts])
    found = sorted(line.split()[1:] for line in output.splitlines() if line.startswith("sha256"))
    modes = ("ddp", "fsdp2", "hsdp")
    numbers = ("0", "1")
    expected = []
    for rank in "0123":
        for number in numbers:
            expected += [[rank, number, mode] for mode in modes]
    assert [words[:3] for words in found] == expected, output
    for number, (model, config) in enumerate(zip(models, configs, strict=True)):
        loss = sum(text_loss(model, config, rank) for rank in range(4))
        loss.backward()
        norm = float(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))
        for words in found:
            if words[1] == str(number):
                assert words[3] == weights_sha256(model)
                assert [float(word) for word in words[4:]] == pytest.approx(
                    [loss.item(), norm], rel=1e-5
                ), words


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_fills_float32(dtype: torch.dtype, source: CausalLM, tmp_path: Path) -> None:
    halves = source.to(dtype)
    save_file(halves.state_dict(), tmp_path / "model.safetensors")
    target = CausalLM(MODEL)
    assert load_weights(str(tmp_path), target) == len(halves.state_dict())
    for name, parameter in target.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, halves.state_dict()[name].float())


def test_names_and_shapes_are_strict_and_change_nothing(source: CausalLM, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    state["head.norm.weight"] = torch.zeros(19)
    for number in range(5):
        state[f"surplus.{number}"] = torch.zeros(2)
    del state["embeddings.token.weight"], state["blocks.0.mlp_in.weight"]
    save_file(state, tmp_path / "bad.safetensors")
    target = CausalLM(MODEL)
    before = weights_sha256(target)
    with pytest.raises(WorkloadError) as caught:
        load_weights(str(tmp_path / "bad.safetensors"), target)
    for text in (
        "2 missing: embeddings.token.weight, blocks.0.mlp_in.weight;",
        "5 unexpected: surplus.0, surplus.1, surplus.2 and 2 more;",
        "1 of another shape: head.norm.weight is [19], the model's [18]",
        "fix:",
    ):
        assert text in str(caught.value)
    assert weights_sha256(target) == before


def test_names_can_be_translated_and_left_out(source: CausalLM, tmp_path: Path) -> None:
    state = {f"transformer.{name}": tensor.clone() for name, tensor in source.state_dict().items()}
    save_file({**state, "rotary.inv_freq": torch.zeros(3)}, tmp_path / "foreign.safetensors")
    target = CausalLM(MODEL)

    def ours(name: str) -> str | None:
        if name.startswith("transformer."):
            return name.removeprefix("transformer.")
        return None

    load_weights(str(tmp_path / "foreign.safetensors"), target, ours)
    assert weights_sha256(target) == weights_sha256(source)
    with pytest.raises(WorkloadError, match=r"are both x; fix"):
        load_weights(str(tmp_path / "foreign.safetensors"), target, lambda name: "x")


def test_tied_weights_are_wanted_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 3)
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("scale", torch.ones(1))

    source = Tied()
    target = Tied()
    source.scale.fill_(0.5)
    save_file(
        {"head.weight": source.head.weight.data, "scale": source.scale},
        tmp_path / "tied.safetensors",
    )
    load_weights(str(tmp_path / "tied.safetensors"), target)
    assert (
        torch.equal(target.embedding.weight, source.embedding.weight) and target.scale.item() == 0.5
    )


@pytest.mark.parametrize(
    "trouble", ["absent", "no safetensors", "cut off", "an empty folder", "a file of the index"]
)
def test_files_that_cannot_serve_are_named(trouble: str, source: CausalLM, tmp_path: Path) -> None:
    folder = save_folder(source, tmp_path / "weights", parts=2)
    path = folder
    message = ""
    if trouble == "absent":
        path = tmp_path / "nowhere"
        message = "no such file or folder"
    elif trouble == "no safetensors":
        path = tmp_path / "weights.bin"
        message = "is not a safetensors file"
        path.write_bytes(b"PK\x03\x04 a pickle")
    elif trouble == "cut off":
        path = folder / "model-00001-of-00002.safetensors"
        message = "is not a safetensors file"
        path.write_bytes(path.read_bytes()[:-4])
    elif trouble == "an empty folder":
        path = tmp_path / "empty"
        message = "it holds nothing"
        path.mkdir()
    else:
        (folder / "model-00002-of-00002.safetensors").unlink()
        message = "1 of its 2 files are missing: model-00002"
    with pytest.raises(WorkloadError, match=message):
        load_weights(str(path), CausalLM(MODEL))


def test_a_job_begins_with_them_once_and_a_commit_wins(tmp_path: Path) -> None:
    model = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, sequence_length=16)
    path = tmp_path / "start.safetensors"
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text(f"{number} ebb and flow, " * 40)
    source = CausalLM(model)
    with torch.no_grad():
        # Every token is then as likely: the loss is that of a uniform guess
        source.head.logits.weight.zero_()
    save_file(source.state_dict(), path)
    training = {"batch_size": 4, "initial_weights": str(path), "scheduler": {"warmup_steps": 0}}
    for steps in (2, 3):
        config = RunConfig(
            store=str(tmp_path / "store"),
            model=model,
            data={"path": str(texts), "suffixes": [".txt"], "held_out_fraction": 0.3},
            training={**training, "max_steps": steps},
            checkpoint={"interval_steps": 1},
        )
        assert run_alone(config, "job").step == steps
        save_file(CausalLM(model).state_dict(), path)  # it is not looked at again
    events = read_events(Store.open(str(tmp_path / "store" / "jobs" / "job")))
    begun = [event for event in events if event.name == "initial_weights"]
    assert [event.data["tensors"] for event in begun] == [len(source.state_dict())]
    assert len(begun[0].data["files"][0]["sha256"]) == 64
    losses = {event.step: event.data["loss"] for event in events if event.name == "step"}
    assert losses[1] == pytest.approx(math.log(256), rel=1e-6) and losses[3] < losses[1]
    assert [event.step for event in events if event.name == "restore"] == [2]


def test_the_record_names_the_files_of_the_initial_weights(
    source: CausalLM, tmp_path: Path
) -> None:
    path = save_folder(source, tmp_path / "weights", parts=2)
    first = describe_files(str(path))
    assert [Path(file["path"]).name[:11] for file in first] == ["model-00001", "model-00002"]
    with torch.no_grad():
        source.head.norm.weight[0] += 1
    changed = describe_files(str(save_folder(source, tmp_path / "changed", parts=2)))
    assert [a["sha256"] == b["sha256"] for a, b in zip(first, changed, strict=True)].count(
        False
    ) == 1
