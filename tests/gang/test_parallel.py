"""The model's size, its start, and that spreading it changes neither weights nor gradients."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ebbflow.core.config.schema import ModelConfig, RunConfig, TrainingConfig
from ebbflow.core.footprint import causal_lm_shape
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import Checkpointer, open_generation, reachable_commits
from ebbflow.training.engine.optimizer import (
    hidden_matrices,
    make_optimizer,
    scale_and_clip,
    skip_if_non_finite,
)
from ebbflow.training.errors import WorkloadError
from ebbflow.training.weights.load import initialise, weights_sha256
from ebbflow.workloads.language.language_model import CausalLM, KeyValues, generate
from tests.support.gangs import run_ranks
from tests.support.spread_rank import ARRANGEMENTS

MODELS = [
    ModelConfig(hidden_size=32, num_layers=2, num_heads=4, sequence_length=16),
    ModelConfig(hidden_size=16, num_layers=3, num_heads=2, sequence_length=64, vocab_size=1000),
    ModelConfig(
        architecture="llama",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        sequence_length=16,
        head_size=6,
    ),
    ModelConfig(
        architecture="llama",
        hidden_size=16,
        num_layers=3,
        num_heads=2,
        sequence_length=64,
        vocab_size=1000,
        intermediate_size=40,
        tied_embeddings=True,
        qkv_bias=True,
        qk_norm=True,
    ),
]


class LargestLogits(TorchDispatchMode):
    """The most rows that a tensor as wide as the vocabulary has, apart from the weights."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.ndim > 1
                and leaf.shape[-1] == self._vocabulary
            ):
                self.rows = max(self.rows, leaf.numel() // self._vocabulary)
        return result


def meta_model(config: ModelConfig) -> CausalLM:
    with torch.device("meta"):
        return CausalLM(config)


@pytest.mark.parametrize("config", MODELS)
def test_the_planner_knows_the_models_size(config: ModelConfig) -> None:
    model = meta_model(config)
    shape = causal_lm_shape(config)
    if config.tied_embeddings:
        outer = [[model.embeddings, model.head]]
    else:
        outer = [[model.embeddings], [model.head]]
    units = []
    for unit in (*outer, *([block] for block in model.blocks)):
        units.append(nn.ModuleList(unit))
    sizes = []
    for unit in units:
        sizes.append(sum(parameter.numel() for parameter in unit.parameters()))
    assert (
        shape.parameters == sum(parameter.numel() for parameter in model.parameters()) == sum(sizes)
    )
    assert shape.largest_unit_parameters == max(sizes)


@pytest.mark.parametrize("config", MODELS)
def test_the_planner_knows_the_models_flops(config: ModelConfig) -> None:
    model = CausalLM(config)
    samples = 3
    counter = FlopCounterMode(display=False)
    # The counter knows no fused attention on the CPU; as plain matrix products it is the same
    # arithmetic.
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(samples, config.sequence_length, dtype=torch.long)).sum().backward()
    assert counter.get_total_flops() == samples * causal_lm_shape(config).flops_per_sample


@pytest.mark.parametrize("config", [MODELS[0], MODELS[2]])
def test_no_token_sees_a_later_one(config: ModelConfig) -> None:
    torch.manual_seed(0)
    model = CausalLM(config)
    tokens = torch.randint(0, config.vocab_size, (1, config.sequence_length))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % config.vocab_size
    before = model(tokens)
    after = model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("config", [MODELS[1], MODELS[2], MODELS[3]])
def test_a_cache_changes_no_generated_token(config: ModelConfig) -> None:
    torch.manual_seed(0)
    model = CausalLM(config)
    tokens = torch.randint(0, config.vocab_size, (3, 5))
    torch.testing.assert_close(cached_logits(model, tokens), model(tokens), rtol=1e-4, atol=1e-5)
    found = []
    for cached in (True, False):
        torch.manual_seed(1)
        greedy = generate(model, tokens, 11, cached=cached)
        found.append(
            torch.cat((greedy, generate(model, tokens, 11, temperature=0.7, cached=cached)))
        )
    assert torch.equal(*found) and torch.equal(found[0][:3, :5], tokens)
    assert not torch.equal(found[0][:3], found[0][3:])
    with pytest.raises(WorkloadError, match=r"5 \+ 60 = 65 tokens.*fix:"):
        generate(model, tokens, 60)


def cached_logits(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    past = [KeyValues(tokens.shape[1]) for _ in model.blocks]
    return torch.cat(
        [model(part, past) for part in (tokens[:, :2], *tokens[:, 2:].split(1, dim=1))], dim=1
    )


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    config = MODELS[0]
    digests = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(digests))  # what else was drawn before must not matter
        model = meta_model(config).to_empty(device="cpu")
        initialise(model, meta_model(config), seed=seed)
        digests.append(weights_sha256(model))
    assert digests[0] == digests[1] != digests[2]
    assert model.blocks[0].mlp_out.weight.std().item() == pytest.approx(
        0.02 / (2 * config.num_layers) ** 0.5, rel=0.1
    )
    assert model.blocks[0].mlp_in.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(model.head.norm.weight, torch.ones(config.hidden_size))


def test_a_module_that_cannot_start_itself_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        blank = Bare()
        model = Bare()
    with pytest.raises(WorkloadError, match=r"Bare.*'scale'.*fix:"):
        initialise(model.to_empty(device="cpu"), blank, seed=0)


def test_the_digest_of_weights_matches_its_description() -> None:
    model = nn.Module()
    model.register_parameter("b", nn.Parameter(torch.tensor([[1.0, -2.0, 3.0]])))
    model.register_parameter("a", nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16)))
    expected = b"a\nbfloat16\n\n" + bytes.fromhex("c03f")
    expected += b"b\nfloat32\n1,3\n" + bytes.fromhex("0000803f000000c000004040")
    assert weights_sha256(model) == hashlib.sha256(expected).hexdigest()


@pytest.mark.parametrize("limit", [None, 0.5, 1e6])
def test_scaling_and_clipping_is_what_torch_does(limit: float | None) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(5, 7)), nn.Parameter(torch.zeros(11))]
    ours = [torch.randn_like(parameter) for parameter in parameters]
    scale = 0.125
    for parameter, gradient in zip(parameters, ours, strict=True):
        parameter.grad = gradient * scale
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    if limit is not None:
        nn.utils.clip_grad_norm_(parameters, limit)
    scale_and_clip(ours, scale=scale, norm=float(norm), limit=limit)
    for parameter, gradient in zip(parameters, ours, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0)


def step_on_same_text(model: CausalLM, optimizer: torch.optim.Optimizer, seed: int) -> None:
    text = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(seed))
    nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("config", [MODELS[0], MODELS[3].model_copy(update={"vocab_size": 256})])
def test_muon(config: ModelConfig, tmp_path: Path) -> None:
    """It moves hidden matrices alone as torch's does, skips a non-finite step, and resumes bit for
    bit.
    """
    assert (
        sum(p.numel() for p in hidden_matrices(meta_model(config)))
        == causal_lm_shape(config).hidden_parameters
    )
    settings = TrainingConfig(optimizer="muon", learning_rate=0.01, weight_decay=0.3)
    ours = CausalLM(config)
    theirs = CausalLM(config)
    resumed = CausalLM(config)
    initialise(ours, meta_model(config), seed=1)
    theirs.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(ours, settings, muon_dtype=torch.bfloat16)
    if hasattr(torch.optim, "Muon"):  # since torch 2.9
        hidden = hidden_matrices(theirs)
        muon = torch.optim.Muon(hidden, lr=0.01, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
        for seed in range(3):
            ours.load_state_dict(theirs.state_dict())
            step_on_same_text(ours, optimizer, seed)
            step_on_same_text(theirs, muon, seed)
            for tensor, other in zip(hidden_matrices(ours), hidden, strict=True):
                torch.testing.assert_close(tensor, other, rtol=0, atol=1e-6)
    store = Store.open(str(tmp_path)).sub("jobs/one")
    taken = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    with Checkpointer(store.uri, generation=open_generation(store, run="1", attempt=0)) as saver:
        saver.save(1, ours, optimizer, {})
        saver.wait()
    step_on_same_text(ours, optimizer, 7)
    again = make_optimizer(resumed, settings, muon_dtype=torch.bfloat16)
    key = reachable_commits(store)[0].key
    with Checkpointer(
        store.uri, generation=open_generation(store, run="2", attempt=0, parent=key)
    ) as saver:
        saver.restore([key], resumed, again)
    step_on_same_text(resumed, again, 7)
    assert weights_sha256(ours) == weights_sha256(resumed) and len(taken) == 1
    for parameter in ours.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    skip_if_non_finite(optimizer, torch.tensor(torch.nan))
    optimizer.step()
    optimizer.zero_grad()
    assert weights_sha256(ours) == weights_sha256(resumed)
    del optimizer.found_inf  # type: ignore[attr-defined]
    step_on_same_text(ours, optimizer, 8)
    step_on_same_text(resumed, again, 8)
    assert weights_sha256(ours) == weights_sha256(resumed), "the skipped step left its momentum"


def test_spreading_changes_no_bit_of_the_initial_weights() -> None:
    """Three ranks, so that no dimension divides evenly; all arrangements in one gang; the reference
    is one process.
    """
    config = RunConfig(model=MODELS[0])
    outputs = run_ranks(3, ["-m", "tests.support.spread_rank", config.model_dump_json()])
    found = []
    for output in outputs:
        found += [line.split()[1:] for line in output.splitlines() if line.startswith("sha256")]
    deadlines = []
    for output in outputs:
        deadlines += [line for line in output.splitlines() if line.startswith("timeout")]
    assert sorted(set(deadlines)) == ["timeout replicate 61.0", "timeout shard 61.0"], (
        "not torch's default"
    )
    model = meta_model(MODELS[0]).to_empty(device="cpu")
    initialise(model, meta_model(MODELS[0]), seed=config.training.seed)
    digest = weights_sha256(model)
    expected = []
    for name in ARRANGEMENTS:
        expected += [[name, digest] for _ in range(3)]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("config", [MODELS[1], MODELS[3]], ids=["gpt", "llama-tied"])
def test_a_loss_in_chunks_is_the_whole_loss_without_the_whole_logits(config: ModelConfig) -> None:
    torch.manual_seed(0)
    model = CausalLM(config)
    text = torch.randint(config.vocab_size, (3, 51))
    targets = text[:, 1:].clone()
    targets[1, 20:] = -100  # as of a conversation's questions
    found = {}
    for chunk in (None, 20, 1000):
        model.head.chunk_tokens = chunk
        with LargestLogits(config.vocab_size) as largest:
            loss = model(text[:, :-1], targets=targets)
            loss.backward()
        found[chunk] = (
            loss.item(),
            [parameter.grad.clone() for parameter in model.parameters()],
            largest.rows,
        )
        model.zero_grad()
    plain = nn.functional.cross_entropy(
        model(text[:, :-1]).flatten(0, 1), targets.flatten(), reduction="sum"
    )
    (whole, gradients, rows), (ours, ours_too, few), (_, _, all_of_them) = found.values()
    assert whole == plain.item() and rows == all_of_them == 150 and few == 20
    assert ours == pytest.approx(whole, rel=1e-6)
    for tensor, other in zip(ours_too, gradients, strict=True):
        torch.testing.assert_close(
            tensor, other, rtol=1e-6, atol=1e-6 * gradients[0].abs().max().item() + 1e-5
        )


@pytest.mark.parametrize(
    "config", [MODELS[1], MODELS[2], MODELS[3]], ids=["gpt", "llama-gqa", "llama-tied"]
)
def test_documents_in_a_row_have_the_losses_that_they_have_alone(config: ModelConfig) -> None:
    """Token 3 ends a document.

    The last one goes on beyond the row, and one has nothing but its end.
    """
    torch.manual_seed(0)
    config = config.model_copy(update={"end_of_document": 3})
    model = CausalLM(config)
    with torch.no_grad():  # larger weights than the initial ones, so that attention matters
        for parameter in model.double().parameters():
            parameter.mul_(4)
    lengths = [[5, 1, 6, 4], [9, 7]]  # 16 tokens in each row
    documents = []
    for row in lengths:
        documents.append([torch.randint(4, 200, (length,)) for length in row])
    for row in documents:
        for document in row[:-1]:
            document[-1] = 3
    rows = torch.stack([torch.cat(row) for row in documents])

    def losses(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )

    packed = model(rows)
    for number, row in enumerate(documents):
        start = 0
        for document in row:
            part = packed[number : number + 1, start : start + len(document)]
            torch.testing.assert_close(part, alone := model(document[None]), rtol=1e-5, atol=1e-5)
            ours = losses(part, document[None]).sum()
            theirs = losses(alone, document[None]).sum()
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            start += len(document)
    (one, other) = (
        torch.autograd.grad(
            total, list(model.parameters()), allow_unused=True, materialize_grads=True
        )
        for total in (
            packed.square().sum(),
            sum(model(sequence[None]).square().sum() for row in documents for sequence in row),
        )
    )
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-3, atol=1e-4 * max(1.0, theirs.abs().max().item())
        )
    crossing = CausalLM(config.model_copy(update={"end_of_document": None}))
    crossing.double().load_state_dict(model.state_dict())
    assert (crossing(rows) - packed).abs().max() > 0.01, "without documents, attention crosses"
    for length in (5, 8):  # up to an end, and beyond it
        longer = generate(model, rows[:1, :length], 3)
        assert torch.equal(longer, generate(model, rows[:1, :length], 3, cached=False))
