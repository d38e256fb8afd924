"""Train or fine-tune a causal language model of Hugging Face transformers from a folder, without code of your own.

The folder is as `save_pretrained` or `hf download` leaves it; nothing is downloaded. Weights are initialised by the
library's own `_init_weights`, one module at a time, and read from the folder's safetensors files if there are any.
"""

from __future__ import annotations

import importlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import nn

from ebbflow.infra.config.schema import DataConfig
from ebbflow.training.data.build import prepare_tokens
from ebbflow.training.data.tokenizer import BYTES, open_tokenizer
from ebbflow.training.errors import DataError, WorkloadError
from ebbflow.training.weights.files import StoredTensor, find_weights, open_weights
from ebbflow.training.weights.load import check_weights_fit, tied_names
from ebbflow.training.workload import Loss, WorkloadContext
from ebbflow.training.workloads.language_model import TextBatch, TextWorkload

try:
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
except ImportError as error:
    raise WorkloadError(f"transformers cannot be imported ({error}); fix: pip install transformers") from error

_OPTIONS = {
    "model": "folder with config.json, tokenizer.json and perhaps safetensors files; or a config.json alone",
    "dataset": "text file, folder or glob; .jsonl or .parquet; or a folder that `datasets` saved; default: data.path",
    "column": "name of the column with the text",
    "lora_rank": "rank of LoRA's matrices; 0 trains all weights",
    "lora_alpha": "scale of LoRA's matrices; default: twice the rank",
    "lora_targets": "modules that get such matrices, separated by commas; default: all linear ones",
}


class HuggingFace(TextWorkload):
    """Next-token prediction on packed sequences of `model.sequence_length` tokens.

    `workload_options`: `model`, `dataset`, `column` (text), `lora_rank` (0), `lora_alpha`, `lora_targets`.
    """

    def __init__(self, context: WorkloadContext) -> None:
        context = _with_folder(context)
        self._root, options = _model_path(context), context.options
        self._settings = AutoConfig.from_pretrained(self._root, local_files_only=True)
        vocabulary = int(self._settings.get_text_config().vocab_size)
        changed = context.config.model.model_copy(update={"vocab_size": vocabulary})
        context = replace(context, config=context.config.model_copy(update={"model": changed}))
        super().__init__(context)
        length, longest = changed.sequence_length, getattr(self._settings, "max_position_embeddings", None)
        if isinstance(longest, int) and length > longest:
            raise WorkloadError(
                f"model.sequence_length is {length}, and {self._root} has positions for {longest}; fix: "
                f"model.sequence_length: {longest} or less"
            )
        self._lora_rank = int(options.get("lora_rank", 0))
        self._lora_alpha = float(options.get("lora_alpha", 2 * self._lora_rank))
        self._lora_targets = str(options.get("lora_targets", ""))
        self._stored = self._find_weights()
        if self._lora_rank and not self._stored:
            raise WorkloadError(f"workload_options.lora_rank: {self._root} has no weights to adapt; fix: leave it out")
        if context.config.training.initial_weights and self._stored:
            raise WorkloadError(
                f"both training.initial_weights and {self._root} have weights; fix: leave out training.initial_weights"
            )
        model = self.model()
        trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
        # 6 for each trained parameter and token (Kaplan et al. 2020, section 2.1); frozen ones need no gradients.
        self._flops = 4.0 * sum(one.numel() for one in model.parameters()) + 2.0 * trained

    @classmethod
    def prepare(cls, context: WorkloadContext) -> dict[str, Any]:
        """Tokenize and pack the dataset, unless the store already has its tokens."""
        context = _with_folder(context)
        data, root = context.config.data, context.project_root
        path = data.path and root / Path(data.path).expanduser()
        kind = _kind_of(path) if path else ""
        if not path or not kind:
            if path and data.suffixes == DataConfig().suffixes:  # the default is for source code
                data = data.model_copy(update={"suffixes": [".txt", ".md"]})
            return prepare_tokens(data, context.store, project_root=root).to_json()
        between = _separator(data, root)
        with tempfile.TemporaryDirectory(prefix="ebbflow-rows-") as folder:
            text = Path(folder, path.name)  # a single file, whose last part is held out
            with text.open("w", encoding="utf-8") as file:
                for row in _rows(path, kind, str(context.options.get("column", "text"))):
                    file.write(row + between)
            return prepare_tokens(
                data.model_copy(update={"path": str(text)}), context.store, project_root=root
            ).to_json()

    def model(self) -> nn.Module:
        model = self._plain_model()
        _use_own_initialisation(model, self._stored)
        if self._lora_rank:
            _add_lora(model, self._lora_rank, self._lora_alpha, self._lora_targets)
        return model

    def _plain_model(self) -> PreTrainedModel:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self._settings, attn_implementation="sdpa", dtype=torch.float32)

    def _find_weights(self) -> dict[str, StoredTensor]:
        """Return the folder's tensors by the model's names; none if it has no safetensors file."""
        if self._root.is_file() or not any(self._root.glob("*.safetensors*")):
            return {}
        model = self._plain_model()
        known, prefix = model.state_dict().keys(), f"{model.base_model_prefix}."
        ignored = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]

        def translate(name: str) -> str | None:
            name = name if name in known or prefix + name not in known else prefix + name
            return None if name not in known and any(one.search(name) for one in ignored) else name

        found = find_weights(str(self._root), translate)
        check_weights_fit(found, model, str(self._root))
        tied = tied_names(model)
        return {tied.get(name, name): stored for name, stored in found.items()}

    def translate_weights(self, name: str) -> str | None:
        return name

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the decoder's blocks. Embeddings and head, whose weights may be tied, stay outside."""
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=lambda one: sum(parameter.numel() for parameter in one.parameters()))

    def loss(self, model: nn.Module, batch: TextBatch) -> Loss:
        logits = model(input_ids=batch.inputs, use_cache=False).logits
        total = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum")
        return Loss(total, batch.weight)

    def flops(self, batch: TextBatch) -> float:
        return self._flops * batch.weight


def _with_folder(context: WorkloadContext) -> WorkloadContext:
    """Return the context with the options' dataset and the folder's tokenizer in `config.data`."""
    if unknown := sorted(context.options.keys() - _OPTIONS.keys()):
        known = "; ".join(f"{name}: {text}" for name, text in _OPTIONS.items())
        raise WorkloadError(f"workload_options: there is no {', '.join(unknown)}; fix: {known}")
    data, folder = context.config.data, _model_path(context)
    changed: dict[str, Any] = {}
    if "dataset" in context.options:
        changed["path"] = str(context.options["dataset"])
    if data.tokenizer == BYTES:
        changed["tokenizer"] = str(folder.parent if folder.is_file() else folder)
    data = data.model_copy(update=changed)
    return replace(context, config=context.config.model_copy(update={"data": data}))


def _model_path(context: WorkloadContext) -> Path:
    given = context.options.get("model")
    if not isinstance(given, str) or not given:
        raise WorkloadError("workload_options.model is missing; fix: a folder with config.json and tokenizer.json")
    path = context.project_root / Path(given).expanduser()
    if not (path if path.is_file() else path / "config.json").is_file():
        raise WorkloadError(
            f"workload_options.model {path}: there is no config.json; fix: hf download ORGANISATION/MODEL --local-dir "
            f"{given}, or save_pretrained"
        )
    return path


def _kind_of(path: Path) -> str:
    """Return how rows are read from `path`; "" if it is plain text."""
    if path.is_dir():
        saved = any((path / name).is_file() for name in ("dataset_info.json", "state.json", "dataset_dict.json"))
        return "datasets" if saved else ""
    return {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}.get(path.suffix.lower(), "")


def _rows(path: Path, kind: str, column: str) -> Iterator[str]:
    """Yield the texts of a dataset's rows."""
    count = 0
    for count, row in enumerate(_read_rows(path, kind, column), 1):
        text = row.get(column)
        if not isinstance(text, str):
            what = f"has no text in {column!r}, only {', '.join(map(str, row))}" if column not in row else (
                f"has {column!r} of type {type(text).__name__}"
            )  # fmt: skip
            raise DataError(f"{path}, row {count}: {what}; fix: workload_options.column")
        yield text
    if not count:
        raise DataError(f"{path} has no rows; fix: another dataset")


def _read_rows(path: Path, kind: str, column: str) -> Iterator[Mapping[str, Any]]:
    if kind == "jsonl":
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line) if line.strip() else None
                except ValueError as error:
                    raise DataError(f"{path}:{number}: not JSON ({error}); fix: one JSON object per line") from error
                if row is not None:
                    yield row if isinstance(row, dict) else {}
    elif kind == "parquet":
        from ebbflow.workloads.readers import import_parquet

        with import_parquet().ParquetFile(path) as file:
            wanted = [column] if column in file.schema_arrow.names else None
            for batch in file.iter_batches(columns=wanted):
                yield from batch.to_pylist()
    else:
        try:
            datasets = importlib.import_module("datasets")
        except ImportError as error:
            raise DataError(f"{path} was saved by `datasets`; fix: pip install datasets") from error
        found = datasets.load_from_disk(str(path))
        if isinstance(found, dict):
            if "train" not in found:
                raise DataError(f"{path} has the splits {', '.join(found)}; fix: name the folder of one of them")
            found = found["train"]
        yield from found


def _separator(data: DataConfig, root: Path) -> str:
    """Return the text of the tokenizer's end-of-text token, which the tokenizer reads as that token."""
    tokenizer = open_tokenizer(data, project_root=root)
    vocabulary = getattr(tokenizer, "_tokenizer", None)
    if tokenizer.separator is None or vocabulary is None:
        return "\n\n"
    return vocabulary.id_to_token(tokenizer.separator)


class _Initialise:
    """`reset_parameters` of one module: the library's rules for it and for its parents, then the stored weights.

    Some rules are those of a parent, such as GPT-2's smaller residual projections. Of a parent only this module has
    memory; the others are on the meta device, where filling them does nothing.
    """

    def __init__(self, chain: list[tuple[PreTrainedModel, nn.Module]], stored: dict[str, StoredTensor]) -> None:
        self._chain, self._stored = chain, stored

    @torch.no_grad()
    def __call__(self) -> None:
        module = self._chain[0][1]
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        if own.keys() - self._stored.keys():
            for owner, part in self._chain:
                owner._init_weights(part)
        for name, stored in self._stored.items():
            with open_weights(stored.file, framework="pt") as file:
                own[name].copy_(file.get_tensor(stored.name))


def _use_own_initialisation(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> None:
    parts = dict(model.named_modules())
    for name, module in parts.items():
        words = name.split(".") if name else []
        above = [parts[".".join(words[:count])] for count in range(len(words), -1, -1)]
        owners = [next(one for one in above[at:] if isinstance(one, PreTrainedModel)) for at in range(len(above))]
        path = f"{name}." if name else ""
        own = [key for key, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]]
        kept = {key: stored[path + key] for key in own if path + key in stored}
        chain = list(zip(owners, above, strict=True))
        module.reset_parameters = _Initialise(chain, kept)  # type: ignore[assignment]


def _add_lora(model: PreTrainedModel, rank: int, alpha: float, targets: str) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise WorkloadError("workload_options.lora_rank needs peft; fix: pip install peft") from error
    wanted = [one.strip() for one in targets.split(",")] if targets else "all-linear"
    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=wanted, lora_dropout=0.0)  # type: ignore[arg-type]
    try:
        inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise WorkloadError(f"workload_options.lora_targets: {' '.join(str(error).split())}") from error
    for name, module in model.named_modules():
        if name.endswith("lora_B.default"):  # so that training begins with the model as it is
            module.reset_parameters = _Zeros(module)  # type: ignore[assignment]


class _Zeros:
    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> None:
        for parameter in self._module.parameters():
            nn.init.zeros_(parameter)
