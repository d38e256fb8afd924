"""Reader of a transformers folder: its model, initial or stored weights, and chat template."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ebbflow.core.json_values import Json
from ebbflow.training.errors import DataError, WorkloadError
from ebbflow.training.weights.files import StoredTensor, find_weights, open_weights
from ebbflow.training.weights.load import check_weights_fit, tied_names
from ebbflow.workloads.libraries import describe_import_failure

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
except (
    Exception
) as error:  # a torchvision that was built for another torch raises RuntimeError or OSError
    raise WorkloadError(describe_import_failure("transformers", error)) from error


class ModelFolder:
    """Folder with a causal language model, as `save_pretrained` or `hf download` leaves it.

    Nothing is downloaded.

    Args:
        root: the folder, or a config.json alone.
        lora_rank: rank of LoRA's matrices; 0 trains all weights.
        lora_alpha: scale of LoRA's matrices; 0: twice the rank.
        lora_targets: modules that get such matrices, separated by commas; "": all linear ones.
    """

    def __init__(
        self, root: Path, *, lora_rank: int = 0, lora_alpha: float = 0.0, lora_targets: str = ""
    ) -> None:
        self.root = root
        self._rank = lora_rank
        self._alpha = lora_alpha or 2.0 * lora_rank
        self._targets = lora_targets
        try:
            self.settings = AutoConfig.from_pretrained(root, local_files_only=True)
        except (
            OSError,
            ValueError,
        ) as error:  # no JSON, or a kind of model that this version does not know
            raise WorkloadError(
                f"{root}: its config.json cannot be read: {_one_line(error)}; fix: copy it "
                "again, or pip install --upgrade transformers"
            ) from error
        self.vocabulary = int(self.settings.get_text_config().vocab_size)
        if lora_rank and not self.stored:
            raise WorkloadError(
                f"workload_options.lora_rank: {root} has no weights to adapt; fix: leave it out"
            )

    @cached_property
    def stored(self) -> dict[str, StoredTensor]:
        """Stored tensors by their names in the model; empty if the folder has no safetensors
        file.
        """
        if self.root.is_file() or not any(self.root.glob("*.safetensors*")):
            return {}
        model = self._plain_model()
        known = model.state_dict().keys()
        prefix = f"{model.base_model_prefix}."
        ignored = [
            re.compile(pattern)
            for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        ]

        def translate(name: str) -> str | None:
            if not (name in known or prefix + name not in known):
                name = prefix + name
            if name not in known and any(pattern.search(name) for pattern in ignored):
                return None
            return name

        found = find_weights(str(self.root), translate)
        try:
            check_weights_fit(found, model, str(self.root))
        except WorkloadError as error:
            # The library renames or joins tensors of some published models as it reads them
            problem = str(error).partition("; fix: ")[0].removeprefix("training.initial_weights ")
            raise WorkloadError(
                f"workload_options.model: {problem}; fix: the files of this config.json, or, if "
                "transformers reads them, "
                f"{type(model).__name__}.from_pretrained({str(self.root)!r}).save_pretrained(FOLDER, "
                "save_original_format=False), and that folder"
            ) from error
        tied = tied_names(model)
        return {tied.get(name, name): stored for name, stored in found.items()}

    def model(self, *, lora: bool = True) -> PreTrainedModel:
        """Return the model on the meta device; with `lora` and a rank, it has LoRA's matrices."""
        model = self._plain_model()
        _use_own_initialisation(model, self.stored)
        if lora and self._rank:
            _add_lora(model, self._rank, self._alpha, self._targets)
        return model

    def _plain_model(self) -> PreTrainedModel:
        def make(attention: str) -> PreTrainedModel:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(
                    self.settings, attn_implementation=attention, dtype=torch.float32
                )

        try:
            return make("sdpa")
        except ValueError:
            # Gemma 2, BLOOM, gpt-oss and models without attention have no implementation with SDPA
            pass
        try:
            return make("eager")
        except ValueError as error:
            raise WorkloadError(
                f"{self.root} is no causal language model ({_one_line(error)}); fix: a decoder, "
                "such as of AutoModelForCausalLM"
            ) from error

    def check_length(self, length: int) -> None:
        """Raise WorkloadError if the model cannot process `length` tokens."""
        longest = getattr(self.settings, "max_position_embeddings", None)
        if isinstance(longest, int) and length > longest:
            raise WorkloadError(
                f"model.sequence_length is {length}, and {self.root} has positions for "
                f"{longest}; fix: model.sequence_length: {longest} or less"
            )


class BypassedHead:
    """Context in which a model skips its output layer, and the caller can apply the layer itself.

    Inside the context, the layer returns its input. `model` may be wrapped, sharded or replicated.
    """

    def __init__(self, model: nn.Module) -> None:
        whole = next(part for part in model.modules() if isinstance(part, PreTrainedModel))
        layer = whole.get_output_embeddings()
        assert isinstance(layer, nn.Module)
        # The model then returns a view, in the eyes of autograd. No code changes it in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._layer = layer
        self._input = torch.empty(0)
        self._dtype = torch.float32

    def __enter__(self) -> BypassedHead:
        self._layer.forward = self._keep
        return self

    def __exit__(self, *_: object) -> None:
        del self._layer.forward

    def has_returned(self, logits: Tensor) -> bool:
        """Return whether `logits` are exactly what the bypassed layer returned.

        Otherwise the model computes something from the layer's output.
        """
        return logits.shape == self._input.shape and logits.data_ptr() == self._input.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the output layer to `x`, as the model would."""
        with torch.autocast(x.device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            return self._layer(x)

    def _keep(self, x: Tensor) -> Tensor:
        self._input = x
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            self._dtype = torch.get_autocast_dtype(kind)
        else:
            self._dtype = torch.float32
        return x


class ChatTemplate:
    """Chat template in a model's folder: tokenizer_config.json or chat_template.jinja."""

    def __init__(self, root: Path) -> None:
        if root.is_file():
            self._root = root.parent
        else:
            self._root = root
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self._root, local_files_only=True)
        except Exception as error:  # the library raises many kinds
            raise WorkloadError(
                f"{self._root}: its tokenizer cannot be read: "
                f"{' '.join(str(error).split())[:200]}; fix: tokenizer.json and "
                "tokenizer_config.json, as save_pretrained writes them"
            ) from error
        if not getattr(self._tokenizer, "chat_template", None):
            raise WorkloadError(
                f"{self._root} has no chat template; fix: a model that was tuned to chat, or "
                "chat_template in its tokenizer_config.json"
            )

    def mark(self, messages: Sequence[Json]) -> tuple[str, list[list[int]]]:
        """Render a conversation, and return its text and the spans of characters that assistants
        wrote.

        These are the spans between `{% generation %}` and `{% endgeneration %}`, if the template
        has them. Otherwise, a span is the text that a message of an assistant adds after the
        beginning of an answer, with its end of turn. Raises DataError.
        """
        text = self.render(messages)
        spans = []
        if re.search(r"\{%-?\s*generation\s*-?%\}", str(self._tokenizer.chat_template)):
            found = self._tokenizer.apply_chat_template(
                list(messages),
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"return_offsets_mapping": True},
            )
            marked = zip(found["offset_mapping"], found["assistant_masks"], strict=True)
            return text, [list(place) for place, counted in marked if counted]
        for number, message in enumerate(messages):
            if isinstance(message, Mapping) and message.get("role") == "assistant":
                begin = self.render(messages[:number], answer=True)
                end = self.render(messages[: number + 1])
                if not end.startswith(begin) or not text.startswith(end):
                    raise DataError(
                        f"the chat template of {self._root} writes message {number + 1} "
                        "differently when others follow or when it asks for an answer, so that "
                        "the assistant's part is unknown; fix: {% generation %} … {% "
                        "endgeneration %} around it in the template, or "
                        "workload_options.assistant_only_loss: false"
                    )
                spans.append([len(begin), len(end)])
        return text, spans

    def as_user(self, text: str) -> str:
        """Render a single message of a user, up to where the assistant's answer begins."""
        return self.render([{"role": "user", "content": text}], answer=True)

    def render(self, messages: Sequence[Json], *, answer: bool = False) -> str:
        """Render the text of a conversation.

        With `answer`, it ends where the next answer begins. Raises DataError.
        """
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=answer
                )
            )
        except Exception as error:  # templates raise their own errors, such as for an unknown role
            raise DataError(
                f"the chat template of {self._root} refuses the messages: {' '.join(str(error).split())[:200]}; "
                'fix: [{"role": "user" or "assistant", "content": TEXT}, …]'
            ) from error


def find_folder(root: Path, given: object, option: str = "model") -> Path:
    """Return the path of a model's folder, or of its config.json.

    Raises WorkloadError if there is none.
    """
    if not isinstance(given, str) or not given:
        raise WorkloadError(
            f"workload_options.{option} is missing; fix: a folder with config.json and "
            "tokenizer.json"
        )
    path = root / Path(given).expanduser()
    if not (path if path.is_file() else path / "config.json").is_file():
        raise WorkloadError(
            f"workload_options.{option} {path}: there is no config.json; fix: hf download "
            f"ORGANISATION/MODEL --local-dir {given}, or save_pretrained"
        )
    return path


def list_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the decoder's blocks.

    Embeddings and head, whose weights may be tied, are not among them.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(
        max(lists, key=lambda list_: sum(parameter.numel() for parameter in list_.parameters()))
    )


def flops_per_token(model: nn.Module) -> float:
    """Return the floating point operations per token of forward and backward.

    6 for each trained parameter (Kaplan et al. 2020, section 2.1), and 4 for frozen ones, which
    need no gradients.
    """
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return 4.0 * sum(parameter.numel() for parameter in model.parameters()) + 2.0 * trained


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


class _Initialise:
    """Replacement of a module's `reset_parameters`: apply the library's rules, then load stored
    weights.

    Some rules are those of a parent, such as GPT-2's smaller residual projections. Of a parent only
    this module has memory; the others are on the meta device, where filling them does nothing.
    """

    def __init__(
        self, chain: list[tuple[PreTrainedModel, nn.Module]], stored: dict[str, StoredTensor]
    ) -> None:
        self._chain = chain
        self._stored = stored

    @torch.no_grad()
    def __call__(self) -> None:
        module = self._chain[0][1]
        own = {
            **dict(module.named_parameters(recurse=False)),
            **dict(module.named_buffers(recurse=False)),
        }
        if own.keys() - self._stored.keys():
            for owner, part in self._chain:
                owner._init_weights(part)
        for name, stored in self._stored.items():
            with open_weights(stored.file, framework="pt") as file:
                own[name].copy_(file.get_tensor(stored.name))


def _use_own_initialisation(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> None:
    parts = dict(model.named_modules())
    for name, module in parts.items():
        if name:
            words = name.split(".")
        else:
            words = []
        above = [parts[".".join(words[:count])] for count in range(len(words), -1, -1)]
        owners = []
        for at in range(len(above)):
            owners.append(next(part for part in above[at:] if isinstance(part, PreTrainedModel)))
        if name:
            path = f"{name}."
        else:
            path = ""
        own = [
            key
            for key, _ in [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]
        ]
        kept = {key: stored[path + key] for key in own if path + key in stored}
        chain = list(zip(owners, above, strict=True))
        module.reset_parameters = _Initialise(chain, kept)  # type: ignore[assignment]


def _add_lora(model: PreTrainedModel, rank: int, alpha: float, targets: str) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise WorkloadError(
            "workload_options.lora_rank needs peft; fix: pip install peft"
        ) from error
    if targets:
        wanted = [part.strip() for part in targets.split(",")]
    else:
        wanted = "all-linear"
    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=wanted, lora_dropout=0.0)  # type: ignore[arg-type]
    try:
        inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise WorkloadError(
            f"workload_options.lora_targets: {' '.join(str(error).split())}"
        ) from error
    for name, module in model.named_modules():
        if name.endswith("lora_B.default"):  # so that training begins with the model as it is
            module.reset_parameters = _Zeros(module)  # type: ignore[assignment]


class _Zeros:
    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> None:
        for parameter in self._module.parameters():
            nn.init.zeros_(parameter)
