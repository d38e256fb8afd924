"""The memory estimate against torch's own accounting: a step of the real model on fake tensors, tracked by kind."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import cross_entropy

from cost.plan.fit import memory_fit
from infra.config.schema import RunConfig
from training.workloads.language_model import CausalLM

MODELS = {
    "narrow": {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "sequence_length": 128},
    "wide": {"hidden_size": 512, "num_layers": 3, "num_heads": 8, "sequence_length": 512},
}


def tracked(config: RunConfig) -> dict[str, int]:
    """Bytes by kind at the peak of an optimizer step, as torch counts them; nothing is allocated."""
    with FakeTensorMode():
        model = CausalLM(config.model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):  # the second step has the optimizer's state from its beginning
                shape = (config.training.batch_size, config.model.sequence_length)
                tokens = torch.randint(0, config.model.vocab_size, shape)
                logits = model(tokens).flatten(0, 1)
                cross_entropy(logits, tokens.flatten(), reduction="sum").backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    return {str(kind).rpartition(".")[2]: size for kind, size in peak.items()}


@pytest.mark.parametrize("batch_size", [4, 16])
@pytest.mark.parametrize("name", MODELS)
def test_state_is_exact_and_the_peak_is_never_underestimated(name: str, batch_size: int):
    config = RunConfig.model_validate({"model": MODELS[name], "training": {"batch_size": batch_size}})
    fit, peak = memory_fit(config, 1), tracked(config)
    assert fit.parameters == peak["PARAM"]
    assert fit.optimizer == pytest.approx(peak["OPT"], rel=1e-3), "torch adds a step counter to each parameter"
    step = fit.total - fit.allowance
    assert peak["Total"] <= step, "the allowance is for what torch does not see: context, workspaces, fragmentation"
    assert step <= 1.9 * peak["Total"], "gradients and activations are at their most at different moments"


def test_activations_grow_with_the_batch_as_torch_says():
    small, large = (
        RunConfig.model_validate({"model": MODELS["wide"], "training": {"batch_size": size}}) for size in (4, 16)
    )
    mine = memory_fit(large, 1).activations - memory_fit(small, 1).activations
    theirs = tracked(large)["ACT"] - tracked(small)["ACT"]
    assert theirs <= mine <= 2 * theirs
