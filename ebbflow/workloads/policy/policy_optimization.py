"""Reinforcement fine-tuning of a causal language model: rollouts, rewards and policy updates.

A step of the engine is one update. Prompts and random numbers of a rollout are functions of (seed,
prompt, position in the order of prompts), and rollouts that several steps use are part of the
commit. So restarts change nothing, and world size only changes the rounding.
docs/policy-optimization.md is the guide.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from html import escape
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ebbflow.core.json_values import JsonObject
from ebbflow.training.data import SampleOrder, check_vocabulary
from ebbflow.training.engine.optimizer import make_optimizer
from ebbflow.training.engine.parallel import DTYPES
from ebbflow.training.errors import DataError
from ebbflow.training.workload import Cursor, Loss, WorkloadContext
from ebbflow.workloads.language.offloaded_adam import make_offloaded
from ebbflow.workloads.points.point_data import seeded
from ebbflow.workloads.policy import policy_math as math_of
from ebbflow.workloads.policy.policy_math import COMPARING, KL_IN_REWARD, RunningMoments
from ebbflow.workloads.policy.policy_model import (
    COLUMNS,
    MEANS,
    BuiltInModels,
    PolicyModels,
    Record,
    make_start,
    unwrap,
)
from ebbflow.workloads.policy.policy_options import PolicyOptions
from ebbflow.workloads.policy.policy_prompts import (
    ARITHMETIC_PAIRS,
    Codec,
    Prompt,
    Prompts,
    additions,
    check_lengths,
    open_prompts,
    pack_prompts,
    read_prompts,
)
from ebbflow.workloads.policy.policy_rewards import Reward
from ebbflow.workloads.policy.policy_rollouts import (
    Engine,
    Rollouts,
    TorchEngine,
    check_version,
    completion_mask,
    correct_importance,
    find_tensor_group,
    greedy_draws,
    send,
    split_policy,
    token_log_probs,
)
from ebbflow.workloads.readers.files import locate

_SHOWN = 12  # rollouts in the report's table

T = TypeVar("T")

# Pixels of the report's table
_ROW = 18
_WIDTHS = (260, 260, 160, 60)


class RolloutBatch(NamedTuple):
    """Rollouts with all that the loss needs, such as log-probabilities and advantages.

    Tensors with a value per token are `[rollouts, sequence - 1]`, as in `Rollouts`.
    """

    tokens: Tensor  # int64 `[rollouts, sequence]`
    prompt_lengths: Tensor
    lengths: Tensor
    old: Tensor  # log-probabilities under the policy that drew the tokens
    reference: Tensor  # log-probabilities under the reference
    advantages: Tensor
    values: Tensor
    returns: Tensor

    @property
    def weight(self) -> float:
        return float(len(self.tokens))

    @property
    def mask(self) -> Tensor:
        return completion_mask(self.tokens.shape[1], self.prompt_lengths, self.lengths)

    def rows(self, first: int, last: int) -> RolloutBatch:
        return RolloutBatch(*(tensor[first:last] for tensor in self))

    def split(self, parts: int) -> list[RolloutBatch]:
        split_tensors = [tensor.tensor_split(parts) for tensor in self]
        return [RolloutBatch(*part) for part in zip(*split_tensors, strict=True)]


class PolicyOptimization:
    """Workload that trains a policy on rewards of its own completions."""

    weight_unit = "rollouts"
    batch_phase = "forward"  # rollouts are computed, not waited for

    def __init__(self, context: WorkloadContext) -> None:
        self._context = context
        self._options = PolicyOptions.of(context)
        options = self._options
        training = context.config.training
        self._seed = training.seed
        self._batch_size = training.batch_size
        self._models = _find_models(context, options)
        self._codec = _codec_of(context, options, self._models)
        self._prompts = _prompts_of(context, options, context.prepared["prompts"])
        self._order = SampleOrder(len(self._prompts.train), training.seed)
        self._reward = Reward(
            options.reward,
            seconds=options.reward_seconds,
            memory_mib=options.test_memory_mib,
            root=context.project_root,
            device=context.device,
        )
        self._round_prompts = options.prompts_per_rollout(training.batch_size)
        self._round_batches = self._round_prompts // training.batch_size
        self._round_steps = self._round_batches * options.max_epochs
        self._dtype = DTYPES[context.config.fsdp.compute_dtype]
        sharded = context.config.parallel.mode != "ddp"
        # The models beside the policy have the type in which it computes
        if sharded:
            self._kept_dtype = self._dtype
        else:
            self._kept_dtype = torch.float32
        self._engine = self._open_engine()
        # The next round's rollouts, while they are drawn
        self._ahead: tuple[int, Future[Rollouts]] | None = None
        self._reference: nn.Module | None = None
        self._shown: list[tuple[str, str, str, float]] = []
        self._clipped = torch.zeros(2, device=context.device)  # tokens that were clipped, and all
        self._seconds = {"rollout": 0.0, "update": 0.0}
        self._tokens = {"rollout": 0.0, "update": 0.0}
        # A model's record, and the round whose rollouts it has
        self._recorded: tuple[Record, float] | None = None
        self._left_at: float | None = None  # when the last `next_batch` returned

    @classmethod
    def check(cls, context: WorkloadContext) -> str:
        """Check the job's options and prompts, and return how many rollouts an episode has, as
        text.

        Preflight calls this, without the store. Raises WorkloadError or DataError if the job cannot
        be prepared.
        """
        options = PolicyOptions.of(context)
        held_out = options.held_out_prompts
        count = ARITHMETIC_PAIRS - held_out
        if options.path:
            path = locate(context.project_root, options.path)
            count = (
                len(read_prompts(path, column=options.prompt_column, held_out=held_out)) - held_out
            )
        each = options.prompts_per_rollout(context.config.training.batch_size)
        if options.zero_stage >= 0:
            remarks = [options.explain_zero(context.config)]
        else:
            remarks = []
        found = (
            f"num_rollouts_per_episodes = {count} prompts // {each} prompts per rollout = "
            f"{count // each}"
        )
        if not count // each:
            raise DataError(
                f"{found}; fix: workload_options.rollout_batch_size and training.batch_size of "
                f"at most {count}, or more prompts"
            )
        return "; ".join([found, *remarks])

    @classmethod
    def prepare(cls, context: WorkloadContext) -> JsonObject:
        """Copy the prompts to the store, and train the supervised start if the options ask for one.

        Raises DataError for unusable prompts.
        """
        cls.check(context)
        options = PolicyOptions.of(context)
        about: JsonObject = {"prompts": ""}
        if options.path:
            path = locate(context.project_root, options.path)
            held_out = options.held_out_prompts
            about["prompts"] = pack_prompts(
                context.store, path, column=options.prompt_column, held_out=held_out
            )
        models = _find_models(context, options)
        prompts = _prompts_of(context, options, str(about["prompts"]))
        codec = _codec_of(context, options, models)
        check_vocabulary(models.config, codec.vocab_size)
        check_lengths(prompts, codec, options.prompt_max_len)
        each = options.prompts_per_rollout(context.config.training.batch_size)
        count = len(prompts.train)
        about |= {
            "train": count,
            "held_out": len(prompts.held_out),
            "num_rollouts_per_episodes": count // each,
        }
        about |= models.describe()
        if options.supervised_start and not options.weights:
            about["start"] = make_start(context, options, prompts, codec)
        same = (
            "path",
            "prompt_column",
            "chat",
            "prompt_max_len",
            "generate_max_len",
            "n_samples_per_prompt",
            "rollout_batch_size",
            "max_epochs",
        )
        content = {
            **about,
            **{name: getattr(options, name) for name in same},
            "tokenizer": codec.identity,
        }
        about["fingerprint"] = hashlib.sha256(
            json.dumps(content, sort_keys=True).encode()
        ).hexdigest()
        return about | {"weight_unit": cls.weight_unit}

    def model(self) -> nn.Module:
        options = self._options
        if self._round_steps > 1:
            kept = self._round_prompts * options.n_samples_per_prompt
        else:
            kept = 0
        with torch.device("meta"):
            record = Record(options, kept)
        return self._models.policy(record)

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        return self._models.units(model)

    def other_bytes(self) -> int:
        """Return the bytes of the other weights that a rank keeps beside the policy.

        These are the reference, the engine's gathered weights, and models that give rewards.
        """
        kept = self._uses_reference and not (
            self._options.lora_rank and not self._options.reference
        )
        gathered = self._options.engine == "torch" and self._context.config.parallel.mode != "ddp"
        each = self._models.parameters // self._context.config.parallel.tensor_size
        return each * self._kept_dtype.itemsize * (kept + gathered) + self._reward.model_bytes

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state is kept in main memory."""
        return self._options.adam_offload

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self._options.adam_offload:
            make = make_offloaded
        else:
            make = make_optimizer
        return make(model, self._context.config.training)

    def next_batch(self, model: nn.Module, cursor: Cursor) -> RolloutBatch:
        module = unwrap(model)
        begun = time.perf_counter()
        if self._left_at is not None:
            self._seconds["update"] += begun - self._left_at
        if next(module.parameters()).is_meta:  # only shapes are wanted
            return self._blank(cursor.count)
        step = cursor.first // self._batch_size
        number, place = divmod(step, self._round_steps)
        group = self._options.n_samples_per_prompt
        device = self._context.device
        if place == 0 or self._find_recorded_round(module.record, number) != number:
            table = self._roll_out(module, step, number)
            self._recorded = module.record, number
        else:
            kept = module.record
            table = RolloutBatch(
                kept.tokens.long(), *kept.spans.long().unbind(1), *kept.columns.unbind(0)
            )
        first = (
            (place % self._round_batches) * self._batch_size
            + cursor.first
            - step * self._batch_size
        )
        batch = table.rows(first * group, (first + cursor.count) * group)
        batch = RolloutBatch(*(part.to(device) for part in batch))
        self._left_at = time.perf_counter()
        self._seconds["rollout"] += self._left_at - begun
        self._tokens["update"] += batch.tokens.numel()
        return batch

    def loss(self, model: nn.Module, batch: RolloutBatch) -> Loss:
        options = self._options
        mask = batch.mask
        found = model(batch.tokens[:, :-1])
        if isinstance(found, tuple):
            logits, values = found
        else:
            logits = found
            values = None
        log_probs = token_log_probs(logits, batch.tokens[:, 1:], options.temperature)
        if options.advantage_estimator == "cpgd":
            losses = math_of.drift_loss(
                log_probs, batch.old, batch.advantages, options.clip, options.drift_coef
            )
        else:
            losses = math_of.clipped_loss(log_probs, batch.old, batch.advantages, options.clip)
        if self._uses_reference and options.advantage_estimator not in KL_IN_REWARD:
            kl = math_of.estimate_kl(options.kl_kind, log_probs, batch.reference)
            losses = losses + self._coefficient(model) * kl
        if values is not None:
            value_losses = math_of.value_loss(
                values.float(), batch.values, batch.returns, options.value_clip
            )
            losses = losses + options.value_coef * value_losses
        if torch.is_grad_enabled():
            outside = ((log_probs.detach() - batch.old).exp() - 1).abs() > options.clip
            self._clipped += torch.stack([(outside * mask).sum(), mask.sum()])
        return Loss(math_of.sum_over_rollouts(losses, mask), batch.weight)

    def flops(self, batch: RolloutBatch) -> float:
        """Return the floating point operations of an update and of its share of generation and
        scoring.

        Rollouts that several updates train on are generated once, and scored once by the reference.
        """
        rollout = self._models.flops_per_token() * (self._options.sequence - 1)
        passes = (1 + self._uses_reference) / 3 / self._options.max_epochs
        return batch.weight * rollout * (1 + passes)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Complete the held-out prompts with the likeliest tokens; return their reward and training
        metrics.

        Collective.
        """
        options = self._options
        context = self._context
        begun = time.perf_counter()
        prompts = self._prompts.held_out
        count = len(prompts)
        if not count:
            return self._figures(unwrap(model).record.read())
        if self._ahead is not None:  # drawn with the weights that the servers have now
            self._ahead[1].exception()
        share = -(-count // context.world_size)
        mine = [prompts[min(context.rank * share + place, count - 1)] for place in range(share)]
        self._engine.wake()
        self._engine.update_weights(model, 0)
        found = self._generate(mine, greedy_draws(share, options.generate_max_len))
        texts = self._texts(found.tokens, found.prompt_lengths, found.lengths)
        own = send(torch.tensor(self._reward.judge(mine, texts)), context.device)
        rewards = context.gather(own).flatten()[:count].double()
        self._shown = [
            (prompt.text, text, prompt.answer, float(reward))
            for prompt, text, reward in zip(mine[:_SHOWN], texts, own.tolist(), strict=False)
        ]
        if options.enable_engine_sleep:
            self._engine.sleep()
        metrics = {"held_out_reward": float(rewards.mean())} | self._figures(
            unwrap(model).record.read()
        )
        if self._left_at is None:
            self._left_at = None
        else:
            self._left_at = self._left_at + time.perf_counter() - begun
        return metrics

    def _figures(self, figures: dict[str, float]) -> dict[str, float]:
        """Return means of the training metrics since the last evaluation, and the time of each
        phase.

        Collective.
        """
        metrics = {name: figures[name] / max(figures["rollouts"], 1.0) for name in MEANS[1:]}
        if not self._uses_reference:
            del metrics["kl"]
        own = [*self._seconds.values(), *self._tokens.values(), *self._clipped.tolist()]
        table = self._context.gather(
            torch.tensor(own, dtype=torch.float64, device=self._context.device)
        )
        rollout, update = table[:, :2].mean(dim=0).tolist()
        drawn, trained, clipped, all_clipped = table[:, 2:].sum(dim=0).tolist()
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._tokens = dict.fromkeys(self._tokens, 0.0)
        self._clipped.zero_()
        return metrics | {
            "kl_coefficient": figures["kl_coefficient"],
            "clipped_share": clipped / max(all_clipped, 1.0),
            "rollouts": figures["all_rollouts"],
            "rollout_time_share": rollout / max(rollout + update, 1e-9),
            "rollout_tokens_per_second": drawn / max(rollout, 1e-9),
            "update_tokens_per_second": trained / max(update, 1e-9),
        }

    def pictures(self) -> dict[str, str]:
        """Return an SVG table of some completions of the last evaluation."""
        if self._shown:
            return {"completions": draw_table(self._shown)}
        return {}

    @property
    def _uses_reference(self) -> bool:
        return self._options.init_kl_coef > 0

    def _coefficient(self, model: nn.Module) -> Tensor:
        """Return the coefficient of the KL divergence for the newest rollouts."""
        return unwrap(model).record.figures[0, Record.NAMES.index("kl_coefficient")].float()

    def _open_engine(self) -> Engine:
        options = self._options
        context = self._context
        every = -(-self._round_prompts // context.world_size) * options.n_samples_per_prompt
        batch = min(options.micro_rollout_batch_size or every, every)
        if options.engine == "vllm":
            from ebbflow.workloads.policy.vllm_engine import VllmEngine

            return VllmEngine(
                options,
                stop=self._codec.stop,
                batch=batch,
                dtype=self._dtype,
                device=context.device,
                rank=context.rank,
                gather=context.gather,
            )
        return TorchEngine(
            self._models.policy(),
            sequence=options.sequence,
            stop=self._codec.stop,
            temperature=options.temperature,
            batch=batch,
            device=context.device,
            memory_share=options.engine_mem_util,
            dtype=self._kept_dtype,
        )

    def _generate(self, prompts: Sequence[Prompt], draws: Tensor) -> Any:
        with torch.autocast(
            self._context.device.type, dtype=self._dtype, enabled=self._dtype != torch.float32
        ):
            return self._engine.generate(
                [self._codec.encode(prompt.text) for prompt in prompts], draws
            )

    def _texts(self, tokens: Tensor, begins: Tensor, ends: Tensor) -> list[str]:
        rows = zip(tokens.tolist(), begins.tolist(), ends.tolist(), strict=True)
        return [self._codec.decode(row[begin:end]) for row, begin, end in rows]

    @torch.no_grad()
    def _roll_out(self, module: Any, step: int, number: int) -> RolloutBatch:
        """Draw and reward this rank's share of a round's rollouts; return the rollouts of all
        ranks.

        A round is a set of rollouts that one or several steps train on. Collective.
        """
        options = self._options
        context = self._context
        group = self._options.n_samples_per_prompt
        if self._ahead is not None and self._ahead[0] == number:
            prompts, _ = self._round(number)
            found = self._ahead[1].result()
        else:
            prompts, draws = self._round(number)
            self._engine.wake()
            self._engine.update_weights(module, step)
            found = self._generate(prompts, draws)
        check_version(found, step, staleness=options.max_staleness * self._round_steps)
        if options.max_staleness:
            self._engine.update_weights(module, step)
            self._ahead = (
                number + 1,
                in_background(partial(self._generate, *self._round(number + 1))),
            )
        texts = self._texts(found.tokens, found.prompt_lengths, found.lengths)
        rewards = self._reward.judge(prompts, texts)
        own = isinstance(self._engine, TorchEngine)
        if own:
            old = found.log_probs
        else:
            old = self._score(module, found.tokens)[0]
        columns = [found.tokens, found.prompt_lengths[:, None], found.lengths[:, None]]
        columns += [send(torch.tensor(rewards), context.device)[:, None], old * found.mask]
        columns += [self._score_by_reference(module, found.tokens) if self._uses_reference else old]
        if options.advantage_estimator == "ppo":
            assert isinstance(self._engine, TorchEngine)
            columns += [self._score(self._engine.model, found.tokens)[1]]
        elif not own:
            current = found.version == step
            columns += [
                correct_importance(
                    old, found.log_probs, found.mask, most=options.importance_cap, current=current
                )
            ]
        if options.enable_engine_sleep:
            self._engine.sleep()
        self._tokens["rollout"] += float(found.mask.sum())
        own = torch.cat([column.float() for column in columns], dim=1)
        every = context.gather(own.flatten()).view(-1, own.shape[1])[: self._round_prompts * group]
        parts = every.split([column.shape[1] for column in columns], dim=1)
        return self._judge(module.record, step, number, *parts)

    def _round(self, number: int) -> tuple[list[Prompt], Tensor]:
        """Return this rank's prompts of a round, and the random numbers for their rollouts.

        Each prompt is repeated for each of its rollouts.
        """
        options = self._options
        context = self._context
        group = self._options.n_samples_per_prompt
        share = -(-self._round_prompts // context.world_size)
        mine = [
            min(context.rank * share + place, self._round_prompts - 1) for place in range(share)
        ]
        numbers = self._order.window(number * self._round_prompts, self._round_prompts)
        prompts = []
        for place in mine:
            prompts += [self._prompts.train[int(numbers[place])]] * group
        places = [number * self._round_prompts + place for place in mine]
        draws = [
            torch.rand(group, options.generate_max_len, generator=seeded(self._seed, "rollout", p))
            for p in places
        ]
        return prompts, torch.cat(draws)

    def _find_recorded_round(self, record: Record, expected: int) -> float:
        """Return the number of the round whose rollouts the record holds.

        Reading it from a GPU makes the host wait.
        """
        known = self._recorded
        if known is None or known[0] is not record or known[1] != expected:
            known = record, record.read()["round"]
            self._recorded = known
        return known[1]

    def _judge(  # noqa: PLR0912, PLR0913, PLR0915 - one loss whose terms belong together
        self,
        record: Record,
        step: int,
        number: int,
        tokens: Tensor,
        begins: Tensor,
        ends: Tensor,
        rewards: Tensor,
        old: Tensor,
        reference: Tensor,
        further: Tensor | None = None,
    ) -> RolloutBatch:
        """Compute the advantages of all rollouts, and update the record in the same way on all
        ranks.

        Args:
            further: the values of ppo, or the weights of `correct_importance`.
        """
        if self._options.advantage_estimator == "ppo":
            values = further
        else:
            values = None
        options = self._options
        group = self._options.n_samples_per_prompt
        before = record.read(before_round=number)
        begins = begins[:, 0].long()
        ends = ends[:, 0].long()
        rewards = rewards[:, 0]
        mask = completion_mask(tokens.shape[1], begins, ends)
        lengths = mask.sum(dim=1)
        kl = math_of.estimate_kl(options.kl_kind, old, reference) * mask
        drawn = rewards
        moments = RunningMoments(
            *(before[f"reward_{name}"] for name in ("count", "mean", "squares"))
        )
        moments = moments.add(rewards)
        if options.reward_running_norm:
            rewards = moments.normalise(rewards, minus_mean=options.reward_running_norm_minus_mean)
        returns = torch.zeros_like(old)
        coefficient = before["kl_coefficient"]
        kind = options.advantage_estimator
        inside = (kl * mask).sum(dim=1)
        if kind in ("grpo", "cpgd"):
            advantages = (
                math_of.group_advantages(rewards, group, scaled=kind == "grpo")[:, None] * mask
            )
        elif kind == "rloo":
            advantages = (
                math_of.leave_one_out_advantages(rewards - coefficient * inside, group)[:, None]
                * mask
            )
        else:
            each = math_of.token_rewards(rewards, kl, mask, coefficient)
            if values is None:
                advantages = math_of.normalise_over_tokens(math_of.rewards_to_go(each, mask), mask)
            else:
                discount = options.discount
                trace = options.gae_lambda
                advantages, returns = math_of.generalised_advantages(
                    each, values, mask, discount=discount, trace=trace
                )
        if options.advantages_norm:
            advantages = math_of.normalise_over_tokens(advantages, mask)
        if values is None and further is not None:
            advantages = advantages * further
        window = float(step // self._context.config.training.evaluation_interval_steps)
        sums = {name: before[name] * (before["window"] == window) for name in MEANS}
        after = {
            **before,
            "round": number,
            "window": window,
            "all_rollouts": before["all_rollouts"] + len(rewards),
        }
        after |= {f"reward_{name}": value for name, value in asdict(moments).items()}
        per_token = inside.sum() / lengths.sum()
        means = {
            "rollouts": torch.ones_like(drawn),
            "reward": drawn,
            "kl": inside / lengths,
            "length": lengths,
        }
        if kind in COMPARING:
            means["accept_rate"] = math_of.accepted(drawn, group)
        else:
            means["accept_rate"] = (advantages * mask).any(dim=1)
        means["entropy"] = -(old * mask).sum(dim=1) / lengths  # E[-log p] is the entropy
        totals = torch.stack([value.double().sum() for value in means.values()]).tolist()
        after |= {name: sums[name] + total for name, total in zip(means, totals, strict=True)}
        if options.kl_target:
            after["kl_coefficient"] = math_of.adapt_kl_coefficient(
                coefficient, float(per_token), options.kl_target, len(rewards), options.kl_horizon
            )
        record.write(before, after)
        if values is None:
            values = torch.zeros_like(old)
        table = RolloutBatch(
            tokens.long(), begins, ends, old, reference, advantages, values, returns
        )
        if self._round_steps > 1:
            record.tokens.copy_(tokens)
            record.spans.copy_(torch.stack([begins, ends], dim=1))
            record.columns.copy_(torch.stack(table[3:]))
        return table

    def _score(self, model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities and the values of tokens under a model.

        Collective if the model is sharded.
        """
        options = self._options
        parts = []
        if isinstance(self._engine, TorchEngine):
            size = self._engine.batch
        else:
            size = options.micro_rollout_batch_size
        with torch.autocast(
            tokens.device.type, dtype=self._dtype, enabled=self._dtype != torch.float32
        ):
            for part in tokens.split(size or len(tokens)):
                found = model(part[:, :-1])
                if isinstance(found, tuple):
                    logits, values = found
                else:
                    logits = found
                    values = torch.zeros(part[:, 1:].shape)
                parts.append(
                    (token_log_probs(logits, part[:, 1:], options.temperature), values.float())
                )
        log_probs, values = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(values)

    def _score_by_reference(self, module: nn.Module, tokens: Tensor) -> Tensor:
        if self._reference is None:
            self._reference = self._models.reference(self._context.device, self._kept_dtype)
            tensor_group = find_tensor_group(module)
            if self._reference is not None and tensor_group is not None:
                split_policy(self._reference, tensor_group)
        if self._reference is not None:
            return self._score(self._reference, tokens)[0]
        from ebbflow.workloads.policy.policy_folder import without_lora

        if isinstance(self._engine, TorchEngine):
            model = self._engine.model
        else:
            model = module
        with without_lora(model):
            return self._score(model, tokens)[0]

    def _blank(self, count: int) -> RolloutBatch:
        rows = count * self._options.n_samples_per_prompt
        device = self._context.device
        tokens = torch.zeros(rows, self._options.sequence, dtype=torch.int64, device=device)
        lengths = torch.full((rows,), self._options.sequence, device=device)
        columns = [torch.zeros(rows, self._options.sequence - 1, device=device) for _ in COLUMNS]
        return RolloutBatch(
            tokens, torch.full_like(lengths, self._options.prompt_max_len), lengths, *columns
        )


def in_background(work: Callable[[], T]) -> Future[T]:
    """Start `work` in a daemon thread, and return a future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="rollouts-ahead", daemon=True).start()
    return future


def draw_table(rows: Sequence[tuple[str, str, str, float]]) -> str:
    """Draw an SVG table of prompts, completions, answers and rewards."""
    width = sum(_WIDTHS)
    height = _ROW * (len(rows) + 1) + 4
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect width="{width}" height="{height}" '
        'fill="#fff"/>'
    ]
    for number, row in enumerate([("prompt", "completion", "answer", "reward"), *rows]):
        left = 4
        if not number:
            colour = "#666"
        else:
            colour = "#0b4f6c"
        for cell, wide in zip(row, _WIDTHS, strict=True):
            if isinstance(cell, float):
                text = f"{cell:.3g}"
            else:
                text = " ".join(str(cell).split())
            most = wide // 8
            text = escape(
                "".join(c for c in text if c.isprintable())[:most]
                + ("…" if len(text) > most else "")
            )
            place = f'x="{left}" y="{_ROW * (number + 1) - 4}"'
            parts.append(
                f'<text {place} font-family="monospace" font-size="11" '
                f'fill="{colour}">{text}</text>'
            )
            left += wide
    return "".join([*parts, "</svg>"])


def _find_models(context: WorkloadContext, options: PolicyOptions) -> PolicyModels:
    """Return the policy's and the reference's models, as the options choose them.

    Raises WorkloadError if they do not fit each other.
    """
    if options.model:
        from ebbflow.workloads.policy.policy_folder import FolderModels

        return FolderModels(context, options)
    return BuiltInModels(context, options)


def _codec_of(context: WorkloadContext, options: PolicyOptions, models: PolicyModels) -> Codec:
    wrap = None
    if options.chat:
        from ebbflow.workloads.language.model_folder import ChatTemplate, find_folder

        wrap = ChatTemplate(find_folder(context.project_root, options.model)).as_user
    return Codec(models.config.data, context.project_root, stop=models.stop, wrap=wrap)


def _prompts_of(context: WorkloadContext, options: PolicyOptions, fingerprint: str) -> Prompts:
    if fingerprint:
        return open_prompts(context.store, fingerprint, options.prompt_column)
    return additions(options.held_out_prompts, context.config.training.seed)
