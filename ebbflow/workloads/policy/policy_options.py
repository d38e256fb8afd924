"""The `workload_options` of reinforcement fine-tuning, and the checks of their values."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.footprint import local_gang
from ebbflow.training.engine.parallel_limits import RankLayout, find_unsupported_options
from ebbflow.training.errors import WorkloadError
from ebbflow.training.workload import WorkloadContext
from ebbflow.workloads.options import read_options, refuse_option
from ebbflow.workloads.policy.policy_math import COMPARING, ESTIMATORS, KL_ESTIMATES, KL_IN_REWARD

_CHOICES = {
    "advantage_estimator": ESTIMATORS,
    "kl_estimator": ("", *KL_ESTIMATES),
    "engine": ("torch", "vllm"),
}
_MAY_BE_ZERO = (
    "held_out_prompts",
    "rollout_batch_size",
    "micro_rollout_batch_size",
    "lora_rank",
    "max_staleness",
    "engine_tp_size",
)

# Stages of ZeRO (Rajbhandari et al. 2020): the parallel modes that shard at least as much, and what
# the first one does.
_ZERO = {
    0: (("ddp",), "where every rank holds weights, gradients and optimizer state"),
    1: (("fsdp2", "hsdp"), "which shards weights and gradients too, not the optimizer state alone"),
    2: (("fsdp2", "hsdp"), "which shards weights too, not gradients and optimizer state alone"),
    3: (("fsdp2", "hsdp"), "which shards weights, gradients and optimizer state"),
}


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The `workload_options` of reinforcement fine-tuning, with their defaults."""

    # Rows with prompts: a file, a folder or a glob, also s3://; "": additions of two-digit numbers
    path: str = ""
    prompt_column: str = "prompt"
    held_out_prompts: int = 128
    prompt_max_len: int = 8  # tokens of a prompt at most
    generate_max_len: int = 4  # tokens of a completion at most, with the token that ends it
    # Rewards with weights, such as "exact_match=1, package.module:function=0.2"
    reward: str = "exact_match"
    reward_seconds: float = 10.0  # time limit of one reward of one completion
    test_memory_mib: int = 512  # memory limit of the reward unit_test
    model: str = ""  # folder of a causal language model of transformers; "": the built-in model
    lora_rank: int = 0  # rank of LoRA's matrices; 0 trains all weights
    lora_alpha: float = 0.0  # scale of LoRA's matrices; 0: twice the rank
    # Modules that get such matrices, separated by commas; "": all linear ones
    lora_targets: str = ""
    chat: bool = False  # a prompt is the message of a user, in the chat template of `model`
    weights: str = ""  # safetensors file or folder with the built-in model's first weights
    # Weights (or, with `model`, folder) of the reference; "": the policy's first weights
    reference: str = ""
    # Share of right answers at which a supervised start ends; 0: none
    supervised_start: float = 0.0
    supervised_batch_size: int = 256
    supervised_learning_rate: float = 1e-2
    # Share of probability that the supervised start spreads over all tokens
    supervised_smoothing: float = 0.0
    supervised_steps: int = 2000  # of the supervised start at most
    n_samples_per_prompt: int = 8  # rollouts of a prompt
    rollout_batch_size: int = 0  # prompts that are rolled out together; 0: training.batch_size
    max_epochs: int = 1  # how often the rollouts are trained on
    temperature: float = 1.0
    advantage_estimator: str = "grpo"  # grpo, cpgd, reinforce++, rloo or ppo
    clip: float = 0.2  # of the ratio of new to old probabilities
    kl_estimator: str = ""  # k1, k2 or k3; "": k1 in rewards, and k3 in the loss
    init_kl_coef: float = 0.001  # weight of the KL divergence from the reference; 0: no reference
    # KL divergence per token that the coefficient is adapted to; 0: the coefficient is constant
    kl_target: float = 0.0
    kl_horizon: float = 10000.0  # rollouts in which the coefficient is adapted
    drift_coef: float = 1.0  # cpgd: weight of the drift from the old policy
    reward_running_norm: bool = False  # divide rewards by their standard deviation so far
    reward_running_norm_minus_mean: bool = False  # and subtract their mean so far
    advantages_norm: bool = False  # normalise advantages over the tokens of a batch
    discount: float = 1.0  # ppo
    gae_lambda: float = 0.95  # ppo
    value_coef: float = 0.5  # ppo: weight of the value head's loss
    value_clip: float = 0.2  # ppo
    adam_offload: bool = False  # keep AdamW's moments in main memory
    zero_stage: int = -1  # stage of ZeRO that parallel.mode must offer; -1: any
    engine: str = "torch"  # torch or vllm
    engine_url: str = ""  # vllm: addresses of the servers, separated by commas
    # Vllm: folder that ranks and servers share, on which the servers were started
    engine_weights: str = ""
    engine_tp_size: int = 0  # GPUs that generate together; 0: parallel.tensor_size, or with vllm 1
    max_staleness: int = 0  # vllm: 1 draws the next rollouts while these are trained on
    # Vllm: limit of the weight that corrects for the engine's probabilities
    importance_cap: float = 2.0
    engine_mem_util: float = 0.5  # share of the GPU's memory for keys and values
    micro_rollout_batch_size: int = 0  # rollouts that are generated together; 0: all
    enable_engine_sleep: bool = False  # free the engine's weights and cache after each rollout

    def __post_init__(self) -> None:  # noqa: C901, PLR0912 - one refusal for each option
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                refuse_option(f"{name}: {getattr(self, name)!r}; fix: {' or '.join(allowed)}")
        for name, value in asdict(self).items():
            if type(value) is int and name != "zero_stage" and value < (name not in _MAY_BE_ZERO):
                refuse_option(f"{name}: {value}; fix: at least {int(name not in _MAY_BE_ZERO)}")
            if type(value) is float and not 0 <= value < float("inf"):
                refuse_option(f"{name}: {value}; fix: a number of at least 0")
        if self.zero_stage not in (-1, *_ZERO):
            refuse_option(f"zero_stage: {self.zero_stage}; fix: 0, 1, 2 or 3")
        if self.temperature <= 0:
            refuse_option(f"temperature: {self.temperature}; fix: more than 0, such as 1.0")
        if not 0 < self.clip < 1:
            refuse_option(f"clip: {self.clip}; fix: between 0 and 1, such as 0.2")
        if not 0 < self.engine_mem_util <= 1:
            refuse_option(
                f"engine_mem_util: {self.engine_mem_util}; fix: more than 0 and at most 1, such "
                "as 0.5"
            )
        if self.supervised_smoothing >= 1:
            refuse_option(
                f"supervised_smoothing: {self.supervised_smoothing}; fix: less than 1, such as 0.1"
            )
        if not self.kl_horizon:
            refuse_option("kl_horizon: 0.0; fix: a number of rollouts, such as 10000")
        if (
            self.kl_estimator == "k1"
            and self.init_kl_coef
            and self.advantage_estimator not in KL_IN_REWARD
        ):
            refuse_option(
                "kl_estimator: k1 is no penalty in the loss, as with "
                f"{self.advantage_estimator}: its gradient does not depend on the reference; "
                "fix: k2 or k3"
            )
        if self.kl_target and not self.init_kl_coef:
            refuse_option(
                "kl_target: there is no reference with init_kl_coef 0; fix: init_kl_coef: 0.001"
            )
        if self.n_samples_per_prompt < 2 and self.advantage_estimator in COMPARING:
            refuse_option(
                f"n_samples_per_prompt: {self.n_samples_per_prompt}: {self.advantage_estimator} "
                "compares the rollouts of a prompt; fix: at least 2, or advantage_estimator: "
                "reinforce++"
            )
        if self.model and (self.weights or self.supervised_start):
            refuse_option(
                "model: it has first weights of its own; fix: leave out weights and "
                "supervised_start"
            )
        if not self.model and (self.lora_rank or self.chat):
            refuse_option(
                "lora_rank and chat are for a model of transformers; fix: workload_options.model"
            )
        if self.reference and not self.init_kl_coef:
            refuse_option("reference: it is not used with init_kl_coef 0; fix: init_kl_coef: 0.001")
        if self.engine == "vllm":
            self._check_servers()
        elif self.max_staleness or self.engine_url or self.engine_weights:
            refuse_option(
                "max_staleness, engine_url and engine_weights are for servers; fix: engine: vllm"
            )

    def _check_servers(self) -> None:
        if not self.model:
            refuse_option(
                "engine: vllm serves models of transformers; fix: workload_options.model, or "
                "engine: torch"
            )
        if not self.engine_url or not self.engine_weights:
            refuse_option(
                "engine: vllm needs engine_url, such as http://127.0.0.1:8000, and "
                "engine_weights, a copy of the folder model that the servers read; fix: both, or "
                "engine: torch"
            )
        if self.advantage_estimator == "ppo":
            refuse_option(
                "advantage_estimator: ppo needs values, which vllm has not; fix: another, or "
                "engine: torch"
            )
        if self.max_staleness > 1:
            refuse_option(
                f"max_staleness: {self.max_staleness}; fix: 0, or 1 for one round of rollouts ahead"
            )
        if self.max_staleness and self.enable_engine_sleep:
            refuse_option(
                "max_staleness: an engine that draws ahead cannot sleep; fix: "
                "enable_engine_sleep: false"
            )
        if self.importance_cap < 1:
            refuse_option(f"importance_cap: {self.importance_cap}; fix: at least 1, such as 2")

    @classmethod
    def of(cls, context: WorkloadContext) -> PolicyOptions:
        """Read and check the options of a configuration.

        Raises WorkloadError for options that do not fit the configuration or each other.
        """
        options = read_options(cls, context.options)
        model = context.config.model
        if options.sequence > model.sequence_length:
            refuse_option(
                f"prompt_max_len + generate_max_len: {options.prompt_max_len} + "
                f"{options.generate_max_len} = {options.sequence} tokens are more than "
                f"model.sequence_length {model.sequence_length}; fix: model.sequence_length: "
                f"{options.sequence}"
            )
        if options.zero_stage >= 0:
            options.explain_zero(context.config)
        options.check_tensor_group(context.config, context.world_size)
        if model.end_of_document is not None:
            raise WorkloadError(
                f"model.end_of_document: {model.end_of_document}: a rollout is one document; "
                "fix: leave it out"
            )
        if options.adam_offload and context.config.fsdp.cpu_offload:
            refuse_option(
                "adam_offload: fsdp.cpu_offload keeps the moments in main memory too; fix: one "
                "of both"
            )
        batch = context.config.training.batch_size
        if options.prompts_per_rollout(batch) % batch:
            refuse_option(
                f"rollout_batch_size: {options.rollout_batch_size} prompts are not a multiple of "
                f"training.batch_size {batch}; fix: rollout_batch_size: "
                f"{-(-options.rollout_batch_size // batch) * batch}"
            )
        if context.config.training.initial_weights:
            raise WorkloadError(
                "training.initial_weights: the reference would have other weights; fix: "
                f"workload_options.weights: {context.config.training.initial_weights}"
            )
        return options

    def explain_zero(self, config: RunConfig) -> str:
        """Explain to the user which parallel modes correspond to `zero_stage`.

        Raises WorkloadError if `parallel.mode` is none of them.
        """
        modes, text = _ZERO[self.zero_stage]
        found = f"zero_stage {self.zero_stage}: parallel.mode {' or '.join(modes)}, {text}"
        if config.parallel.mode not in modes:
            refuse_option(f"{found}; it is {config.parallel.mode}; fix: parallel.mode: {modes[0]}")
        return found

    def check_tensor_group(self, config: RunConfig, groups: int) -> None:
        """Raise WorkloadError if `parallel.tensor_size` does not suit the policy or the engine.

        Args:
            groups: the number of tensor groups, which is used if the configuration does not set the number
                of ranks.
        """
        tensor = config.parallel.tensor_size
        gang = local_gang(config)
        if self.engine == "torch" and self.engine_tp_size not in (0, tensor):
            refuse_option(
                f"engine_tp_size: {self.engine_tp_size}: the engine torch splits layers as the "
                f"policy does, over parallel.tensor_size {tensor}; fix: leave it out, or "
                f"parallel.tensor_size: {self.engine_tp_size}"
            )
        if tensor == 1:
            return
        if self.model:
            raise WorkloadError(
                f"parallel.tensor_size {tensor}: only the layers of the built-in policy can be "
                f"split, not those of {self.model}; fix: parallel.tensor_size: 1"
            )
        ranks = gang.ranks if gang else groups * tensor
        ranks_per_node = gang.processes_per_node if gang else ranks
        place = RankLayout(ranks=ranks, ranks_per_node=ranks_per_node, gpu=False)
        plain = config.model_copy(update={"workload": None})
        found = [
            option
            for option in find_unsupported_options(plain, place)
            if "tensor_size" in option.message
        ]
        if found:
            raise WorkloadError("; and ".join(map(str, found)))

    @property
    def kl_kind(self) -> str:
        """Kind of estimate of the KL divergence: k1, k2 or k3.

        It is `kl_estimator` if that is set, else the kind in the papers on the advantage estimator.
        """
        return self.kl_estimator or ("k1" if self.advantage_estimator in KL_IN_REWARD else "k3")

    @property
    def sequence(self) -> int:
        """Largest number of tokens in a prompt with its completion."""
        return self.prompt_max_len + self.generate_max_len

    def prompts_per_rollout(self, batch_size: int) -> int:
        return self.rollout_batch_size or batch_size
