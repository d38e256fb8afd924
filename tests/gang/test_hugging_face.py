"""Models of transformers, trained by its own code or as the built-in model, and returned."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import ModelConfig, RunConfig
from ebbflow.core.events import read_events
from ebbflow.core.preflight import PreflightContext
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.commands import main as checkpoints
from ebbflow.training.checkpoint.file_formats import write_file
from ebbflow.training.checkpoint.hugging_face import our_name, read_settings
from ebbflow.training.checkpoint.portable_state import PortableState, unwrap_weights
from ebbflow.training.checks import check_initial_weights
from ebbflow.training.engine.optimizer import learning_rate, make_optimizer
from ebbflow.training.errors import TrainingError, WorkloadError
from ebbflow.training.gang import Gang
from ebbflow.training.weights.load import initialise, load_weights, materialise
from ebbflow.training.workload import Cursor
from ebbflow.training.workload_loader import workload_context
from ebbflow.tryout.trial import try_workload
from ebbflow.workloads.language.hugging_face import HuggingFace
from ebbflow.workloads.language.language_model import CausalLM, generate
from tests.support.alone import run_alone
from tests.support.gangs import run_ranks
from tests.support.s3.fixture import FailingServer, failing_s3

__all__ = ["failing_s3"]

SIZE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

TIED = LlamaConfig(vocab_size=300, max_position_embeddings=64, tie_word_embeddings=True, **SIZE)
GPT2 = GPT2Config(
    vocab_size=300,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=64,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)

TOKENS_OF_FAMILY = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
FAMILY = {**SIZE, **TOKENS_OF_FAMILY, "vocab_size": 300, "max_position_embeddings": 64}
FAMILIES = {
    "mistral": MistralConfig(**FAMILY, num_key_value_heads=2, sliding_window=8),
    "gemma": GemmaConfig(**FAMILY, num_key_value_heads=2, head_dim=8),
    # Has no implementation with SDPA
    "gemma 2": Gemma2Config(**FAMILY, num_key_value_heads=2, head_dim=8),
    "phi": PhiConfig(**FAMILY),
    "opt": OPTConfig(**{**FAMILY, "word_embed_proj_dim": 32, "ffn_dim": 64, "dropout": 0.0}),
    "mixtral": MixtralConfig(**FAMILY, num_key_value_heads=2, num_local_experts=4),
}

TRY_IMPORTS = """
import importlib, shutil
for module, gone in zip(["hugging_face", *["timm_models"] * 3], ["", "", "torchvision", "timm"]):
    if gone:
        shutil.rmtree(gone)
        importlib.invalidate_caches()
    try:
        importlib.import_module(f"ebbflow.workloads.{module}")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""

GROUPED = {**SIZE, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64}
STRETCHED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
THEIRS = {
    "llama": LlamaConfig(**GROUPED, rms_norm_eps=1e-5, rope_theta=5000.0),
    "llama 3.1": LlamaConfig(
        **GROUPED,
        head_dim=16,
        tie_word_embeddings=True,
        rope_theta=500.0,
        rope_scaling={**STRETCHED, "original_max_position_embeddings": 32},
    ),
    "qwen2": Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=12, rope_theta=1e6),
}
TOKENS = torch.arange(3 * 40).reshape(3, 40) * 7 % 299 + 1  # without 0, which is taken for padding


class Bypassing(HuggingFace):
    """Workload that gives torch's modules in a model of transformers torch's own initial weights."""

    def model(self) -> PreTrainedModel:
        model = super().model()
        for part in model.modules():
            if type(part).__module__.startswith("torch.nn"):
                vars(part).pop("reset_parameters", None)
        return model


def random_model(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """Write a small model with a tokenizer, as `save_pretrained` does, and a dataset of 300 rows
    beside its folder.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    rows = [
        f"the tide comes in, number {number}\nand the tide goes out again" for number in range(300)
    ]
    tokenizer.train_from_iterator(rows, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    folder.with_name("data.jsonl").write_text(
        "".join(json.dumps({"text": row}) + "\n" for row in rows)
    )
    return model


def settings_for(folder: Path, **options: Any) -> RunConfig:
    """A configuration that trains the model in `folder` for 4 steps by a single rank."""
    return RunConfig.model_validate(
        {
            "store": str(folder.with_name("store")),
            "workload": "ebbflow.workloads:HuggingFace",
            "workload_options": {
                "model": str(folder),
                "dataset": str(folder.with_name("data.jsonl")),
                **options,
            },
            "model": {"sequence_length": 16},
            "training": {
                "batch_size": 4,
                "max_steps": 4,
                "learning_rate": 1e-2,
                "scheduler": {"warmup_steps": 0},
            },
            "checkpoint": {"interval_steps": 4},
            "cluster": {"nodes": 1, "processes_per_node": 1, "device": "cpu"},
        }
    )


def test_the_example_trains_a_folder_on_two_ranks_and_returns_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    exported = tmp_path / "exported"
    start = random_model(TIED, folder)
    exported.mkdir()
    settings = {
        "store": tmp_path / "store",
        "workload_options.model": folder,
        "workload_options.dataset": tmp_path / "data.jsonl",
        "workload_options.lora_rank": 0,
        "model.sequence_length": 16,
        "training.batch_size": 4,
        "training.max_steps": 4,
        "training.learning_rate": 1e-9,  # so small that the weights stay where they started
        "training.scheduler.warmup_steps": 0,
        "checkpoint.interval_steps": 4,
        "cluster.processes_per_node": 2,
        "cluster.device": "cpu",
    }
    words = []
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    example = PROJECT_ROOT / "examples" / "hugging_face.yaml"
    assert (
        len(
            [line for line in example.read_text().splitlines() if line and not line.startswith("#")]
        )
        <= 15
    )
    run_ranks(2, ["-m", "ebbflow.training", str(example), "--job", "tide", *words])
    target = exported / "model.safetensors"
    assert (
        checkpoints(
            ["export", str(tmp_path / "store" / "jobs" / "tide"), str(target), "--weights-only"]
        )
        == 0
    )
    (exported / "config.json").write_bytes((folder / "config.json").read_bytes())
    end, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(end(tokens).logits, start(tokens).logits, rtol=0, atol=1e-5)
    changed = [
        name
        for name, value in end.state_dict().items()
        if not torch.equal(value, start.state_dict()[name])
    ]
    assert changed  # it was trained, if only a little


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_initial_weights_that_are_not_the_librarys_are_named_with_the_loss(
    lora_rank: int, tmp_path: Path, failing_s3: FailingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = failing_s3
    server.use(monkeypatch)
    bucket = server.new_bucket()
    folder = tmp_path / "model"
    random_model(TIED, folder)
    Store.open(f"s3://{bucket}").put("data.jsonl", (tmp_path / "data.jsonl").read_bytes())
    if not lora_rank:
        (folder / "model.safetensors").unlink()  # so that the weights are random
    config = settings_for(folder, lora_rank=lora_rank)
    texts = []
    for workload in ("ebbflow.workloads:HuggingFace", f"{__name__}:Bypassing"):
        config = config.model_copy(update={"workload": workload})
        own = workload_context(config, Gang(), store=Store.open(config.store))
        texts.append(try_workload(config, replace(own, prepared=HuggingFace.prepare(own))).text)
    lines = (tmp_path / "data.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "texts").mkdir()
    for part in range(2):
        (tmp_path / "texts" / f"{part}.jsonl").write_text(
            "".join(lines[150 * part : 150 * part + 150])
        )
        Store.open(f"s3://{bucket}/texts").put(
            f"{part}.jsonl", (tmp_path / "texts" / f"{part}.jsonl").read_bytes()
        )
    known = []
    for root, name in [
        (root, name)
        for name in ("data.jsonl", "texts", "texts/?.jsonl")
        for root in (tmp_path, bucket)
    ]:
        if root == bucket:
            at = f"s3://{bucket}/{name}"
        else:
            at = str(tmp_path / name)
        changed = config.model_copy(
            update={"workload_options": {**config.workload_options, "dataset": at}}
        )
        known.append(HuggingFace.prepare(workload_context(changed, Gang(), store=own.store)))
    assert (
        known[0] == known[1] == HuggingFace.prepare(own)
        and known[2] == known[3]
        and known[4] == known[5]
    )
    assert len({(data["bytes"], data["shard_sha256"]["train"]) for data in known}) == 1, (
        "the same text in all"
    )
    assert "first loss" not in texts[0] and "torch fills" not in texts[0], texts[0]
    found = re.search(
        r"the first loss is ([\d.]+) per prediction, and ln\(300\) = 5\.7 is usual", texts[1]
    )
    assert found and float(found[1]) > 11.4, texts[1]
    assert "LlamaForCausalLM of transformers: torch fills model.embed_tokens" in texts[1], texts[1]


@pytest.mark.parametrize(
    ("config", "lora_rank"), [(TIED, 0), (GPT2, 4)], ids=["llama", "gpt2-lora"]
)
def test_a_workload_learns_what_transformers_learns(
    config: PreTrainedConfig, lora_rank: int, tmp_path: Path
) -> None:
    reference = random_model(config, tmp_path / "model")
    settings = settings_for(tmp_path / "model", **({"lora_rank": lora_rank} if lora_rank else {}))
    assert run_alone(settings, "tide").step == 4
    job = tmp_path / "store" / "jobs" / "tide"
    assert (
        checkpoints(["export", str(job), str(tmp_path / "end.safetensors"), "--weights-only"]) == 0
    )
    ours = load_file(tmp_path / "end.safetensors")

    store = Store.open(settings.store)
    prepared = next(
        event.data for event in read_events(store.sub("jobs/tide")) if event.name == "prepared"
    )
    own = workload_context(settings, Gang(), store=store, prepared=prepared)
    workload = HuggingFace(own)
    if lora_rank:
        inject_adapter_in_model(
            LoraConfig(r=lora_rank, lora_alpha=8, target_modules="all-linear"), reference
        )
        begun = workload.model()
        materialise(begun, "cpu")
        initialise(begun, workload.model(), seed=settings.training.seed)
        reference.load_state_dict(begun.state_dict())
    optimizer = make_optimizer(reference, settings.training)
    losses = []
    for step in range(1, 5):
        batch = workload.next_batch(reference, Cursor(4 * (step - 1), 4))
        tokens = torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1)
        loss = reference(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings.training, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = [
        event.data["loss"] for event in read_events(store.sub("jobs/tide")) if event.name == "step"
    ]
    assert found == pytest.approx(losses, rel=1e-5) and losses[-1] < losses[0] - 0.05
    expected = reference.state_dict()
    for name, value in ours.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)
        frozen = lora_rank and "lora_" not in name
        assert not frozen or torch.equal(value, expected[name])


@pytest.mark.parametrize("mode", ["alone", "fsdp2", "ddp"])
def test_a_loss_in_chunks_is_the_loss_of_the_whole_logits(mode: str, tmp_path: Path) -> None:
    """Also through FSDP2's and autocast's bfloat16, where rounding is coarser.

    The same text is trained on.
    """
    folder = tmp_path / "model"
    random_model(TIED if mode != "fsdp2" else GPT2, folder)
    losses = {}
    for chunk in (None, 7):
        config = settings_for(folder).changed("training", loss_chunk_tokens=chunk)
        config = config.model_copy(update={"store": str(tmp_path / f"store-{chunk}")})
        if mode != "alone":
            config = config.changed("parallel", mode=mode).changed("fsdp", use_mixed_precision=True)
        assert run_alone(config, "tide").step == 4
        steps = read_events(Store.open(config.store).sub("jobs/tide"))
        losses[chunk] = [event.data["loss"] for event in steps if event.name == "step"]
    assert losses[7] == pytest.approx(losses[None], rel=1e-6 if mode == "alone" else 2e-3)
    assert len(set(losses[7])) == 4


def test_a_model_that_changes_its_logits_has_no_loss_in_chunks(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_model(GraniteConfig(vocab_size=300, logits_scaling=2.0, **SIZE), folder)
    config = settings_for(folder).changed("training", loss_chunk_tokens=7)
    own = workload_context(config, Gang(), store=Store.open(config.store))
    with pytest.raises(WorkloadError, match="changes the logits of its output layer"):
        try_workload(config, replace(own, prepared=HuggingFace.prepare(own)))


def test_the_end_of_documents_is_refused_for_models_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_model(GPT2, folder)
    config = settings_for(folder).changed("model", end_of_document=0)
    own = workload_context(config, Gang(), store=Store.open(config.store))
    with pytest.raises(WorkloadError, match="attend across documents; fix: remove it"):
        HuggingFace(replace(own, prepared=HuggingFace.prepare(own)))


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_and_loss_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    theirs = random_model(FAMILIES[kind], folder).eval()
    settings = settings_for(folder)
    own = workload_context(settings, Gang(), store=Store.open(settings.store))
    if kind == "mixtral":  # transformers joins the experts' tensors as it reads them
        with pytest.raises(
            WorkloadError, match=r"missing: .*; fix: .*save_original_format=False"
        ) as caught:
            HuggingFace(replace(own, prepared=HuggingFace.prepare(own)))
        assert "\n" not in str(caught.value)
        theirs.save_pretrained(folder, save_original_format=False)
    workload = HuggingFace(replace(own, prepared=HuggingFace.prepare(own)))
    model = workload.model().eval()
    materialise(model, "cpu")
    initialise(model, workload.model(), seed=1)
    batch = workload.next_batch(model, Cursor(0, 4))
    tokens = torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1)
    with torch.no_grad():
        loss = workload.loss(model, batch)
        assert torch.equal(
            model(input_ids=batch.inputs).logits, theirs(input_ids=batch.inputs).logits
        )
        assert float(loss.sum) / loss.weight == pytest.approx(
            float(theirs(input_ids=tokens, labels=tokens).loss), 1e-6
        )


def test_random_weights_are_those_of_the_library_and_depend_on_the_seed(tmp_path: Path) -> None:
    config = GPT2Config(**{**GPT2.to_dict(), "n_embd": 128, "n_layer": 4})
    theirs = random_model(config, tmp_path / "model")
    settings = settings_for(tmp_path / "model").model_copy(
        update={
            "workload_options": {
                "model": str(tmp_path / "model" / "config.json"),
                "dataset": str(tmp_path / "data.jsonl"),
            }
        }
    )
    own = workload_context(settings, Gang(), store=Store.open(str(tmp_path / "store")))
    own = replace(own, prepared=HuggingFace.prepare(own))
    trial = try_workload(settings, own)
    per_token = (
        float(re.search(r"loss of 64 tokens tried on the CPU: ([0-9.]+)", trial.text)[1]) / 64
    )
    assert per_token == pytest.approx(math.log(300), abs=0.15)
    models_made = []
    for seed in (1, 1, 2):
        model = HuggingFace(own).model()
        materialise(model, "cpu")
        initialise(model, HuggingFace(own).model(), seed=seed)
        models_made.append(model)
    for name, value in theirs.named_parameters():
        mine, again, other = (model.get_parameter(name) for model in models_made)
        assert torch.equal(mine, again)
        if value.std() > 0:
            assert not torch.equal(mine, other)
            # of n normal numbers, the deviation varies by 1 / sqrt(2 n); c_proj of GPT-2 has a
            # smaller one
            assert float(mine.detach().std() / value.detach().std()) == pytest.approx(
                1, abs=8 / math.sqrt(2 * value.numel())
            ), name
        else:
            assert torch.equal(mine, value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "nowhere"}, r"nowhere: there is no config.json; fix: hf download"),
        ({"modle": "x"}, r"there is no modle; fix: model: folder"),
        (
            {"column": "body"},
            r"data.jsonl, row 1: has no text in 'body', only text; fix: workload_options.column",
        ),
        ({"dataset": "broken.jsonl"}, r"broken.jsonl:2: not JSON"),
        (
            {"dataset": "notes.txt", "column": "text"},
            r"column: .*notes.txt is plain text, which has no columns; fix:",
        ),
        (
            {"lora_rank": 4, "lora_targets": "q_poj"},
            r"lora_targets: Target modules .*q_poj.* not found",
        ),
        ({"lora_rank": "four"}, r"lora_rank is 'four'; fix: a whole number from 0"),
        ({"lora_rank": 4, "lora_alpha": -1.0}, r"lora_alpha is -1.0; fix: a number from 0"),
        (
            {"model": "martian.json"},
            r"martian.json: its config.json cannot be read: .*martian.*; fix: copy it again",
        ),
        ({"model": "t5.json"}, r"t5.json is no causal language model \(.*; fix: a decoder"),
        (
            {"lora_rank": 4, "model": "model/config.json"},
            r"lora_rank: .*config.json has no weights to adapt",
        ),
    ],
)
def test_bad_options_are_one_line_with_the_fix(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    random_model(TIED, tmp_path / "model")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text"\n')
    for kind in ("martian", "t5"):
        (tmp_path / f"{kind}.json").write_text(json.dumps({"model_type": kind}))
        shutil.copy(tmp_path / "model" / "tokenizer.json", tmp_path)
    (tmp_path / "notes.txt").write_text("the tide comes in\n" * 300)
    given = {
        name: str(tmp_path / value) if name in ("model", "dataset") else value
        for name, value in options.items()
    }
    settings = settings_for(tmp_path / "model", **given)
    own = workload_context(settings, Gang(), store=Store.open(str(tmp_path / "store")))
    with pytest.raises(TrainingError, match=words) as caught:
        HuggingFace(replace(own, prepared=HuggingFace.prepare(own))).model()
    assert "\n" not in str(caught.value)


def test_a_torchvision_of_another_torch_is_named_with_the_fix(tmp_path: Path) -> None:
    """It has the metadata and the error of a wheel for CUDA beside a torch for the CPU. timm only
    begins its import.
    """
    for name, line in {
        "torchvision": "raise RuntimeError('operator torchvision::nms does not exist')",
        "timm": "import torchvision",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line)
        (tmp_path / f"{name}-0.28.0.dist-info").mkdir()
        (tmp_path / f"{name}-0.28.0.dist-info" / "METADATA").write_text(
            f"Name: {name}\nVersion: 0.28.0\n"
        )
    search = {"PYTHONPATH": f"{tmp_path}:{PROJECT_ROOT}"}
    lines = subprocess.run(
        [sys.executable, "-c", TRY_IMPORTS],
        cwd=tmp_path,
        env={**os.environ, **search},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.splitlines()
    broken = (
        "cannot be imported, because torchvision 0.28.0 was built for another torch than "
        f"{torch.__version__} (operator torchvision::nms does not exist); fix: pip install "
        "--force-reinstall --no-deps torchvision==0.28.0 --index-url INDEX"
    )
    assert (
        lines[0].startswith(f"WorkloadError: transformers {broken}")
        and "or pip uninstall torchvision" in lines[0]
    )
    assert lines[1].startswith(f"WorkloadError: timm {broken}") and "uninstall" not in lines[1]
    install = "fix: pip install -c constraints.txt"
    keep = f"with torch=={torch.__version__} in that file to keep your"
    assert lines[2:] == [
        f"WorkloadError: torchvision is not installed, which timm imports; {install} "
        f"torchvision, {keep} torch",
        f"WorkloadError: timm is not installed; {install} timm torchvision, {keep} torch",
    ]


def random_folder(kind: str, folder: Path) -> PreTrainedModel:
    """A model with random weights, biases and norms too, written as transformers writes it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(THEIRS[kind], attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return model


def settings_of(folder: Path) -> dict[str, Any]:
    return {**read_settings(folder / "config.json"), "sequence_length": 64}


@pytest.mark.parametrize("kind", THEIRS)
@torch.no_grad()
def test_the_built_in_model_computes_what_transformers_computes_and_returns_it(
    kind: str, tmp_path: Path
) -> None:
    theirs = random_folder(kind, tmp_path / "theirs")
    config = RunConfig(model=ModelConfig(**settings_of(tmp_path / "theirs")))
    ours = CausalLM(config.model)
    assert load_weights(str(tmp_path / "theirs"), ours, our_name) == len(
        dict(theirs.named_parameters())
    )
    expected = theirs(TOKENS).logits
    torch.testing.assert_close(
        ours(TOKENS), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
    )
    continued = theirs.generate(
        TOKENS, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(generate(ours, TOKENS, 8), continued)

    weights = unwrap_weights(ours.state_dict(), "the model")
    write_file(PortableState(weights=weights), tmp_path / "ours", "hugging-face", config)
    back, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and type(back) is type(theirs)
    assert torch.equal(back(TOKENS).logits, expected)


def test_a_job_starts_from_a_folder_of_qwen_and_exports_one(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    texts = tmp_path / "texts"
    exported = tmp_path / "exported"
    random_folder("qwen2", folder)
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text("the tide comes in and the tide goes out again\n" * 20)
    config = RunConfig(
        store=str(tmp_path / "store"),
        training={
            "batch_size": 4,
            "max_steps": 2,
            "initial_weights": str(folder),
            "scheduler": {"warmup_steps": 0},
        },
        data={"path": str(texts), "suffixes": [".txt"], "held_out_fraction": 0.3},
        checkpoint={"interval_steps": 2},
    )
    refused = check_initial_weights(PreflightContext(config=config, project_root=tmp_path))
    assert "model.num_kv_heads 4 is 2 there" in refused.detail
    path = tmp_path / "pasted.yaml"
    path.write_text(refused.fix or "")
    pasted = load_config(str(path), [], project_root=tmp_path).config.model
    assert pasted == ModelConfig(**{**settings_of(folder), "sequence_length": 128})
    with pytest.raises(
        WorkloadError, match=r"num_kv_heads 4 is 2 there.*fix: model: \{architecture"
    ):
        run_alone(config, "refused")

    config = config.model_copy(update={"model": pasted.model_copy(update={"sequence_length": 64})})
    assert (
        "tensors"
        in check_initial_weights(PreflightContext(config=config, project_root=tmp_path)).detail
    )
    assert run_alone(config, "tide").step == 2
    job = str(tmp_path / "store" / "jobs" / "tide")
    assert checkpoints(["export", job, str(exported), "--kind", "hugging-face"]) == 0
    assert checkpoints(["export", job, str(tmp_path / "plain.safetensors"), "--weights-only"]) == 0
    ours = CausalLM(config.model)
    load_weights(str(tmp_path / "plain.safetensors"), ours)
    back = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
    torch.testing.assert_close(back(TOKENS).logits, ours(TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral"}, "is of the kind mixtral"),
        (
            {"hidden_act": "gelu", "attention_bias": True},
            "has hidden_act gelu, attention_bias True",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "has rope_type yarn"),
        ({"hidden_size": None}, "cannot be read"),
    ],
)
def test_a_folder_that_the_built_in_model_cannot_be_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {**THEIRS["llama"].to_dict(), "rope_parameters": None, "head_dim": None, **changes}
        )
    )
    with pytest.raises(WorkloadError, match=rf"config.json: .*{words}.*fix: "):
        read_settings(path)
