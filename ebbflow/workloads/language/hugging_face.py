"""Workload that trains or fine-tunes a causal language model of transformers from a local folder.

The folder is as `save_pretrained` or `hf download` leaves it; nothing is downloaded. Weights are
initialised by the library's own `_init_weights`, one module at a time, and read from the folder's
safetensors files if there are any.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from torch import nn

from ebbflow.core.config.device_settings import choose_loss_chunk
from ebbflow.core.config.schema import DataConfig
from ebbflow.core.json_values import Json, JsonObject
from ebbflow.training.data.build import prepare_tokens
from ebbflow.training.data.tokenizer import BYTES, open_tokenizer
from ebbflow.training.errors import DataError, WorkloadError
from ebbflow.training.workload import Cursor, Loss, WorkloadContext
from ebbflow.workloads.language.chat_data import AnswerMask, KeptOrder, MarkedText, prepare_chat
from ebbflow.workloads.language.language_model import TextBatch, TextWorkload, sum_cross_entropy
from ebbflow.workloads.language.model_folder import (
    BypassedHead,
    ChatTemplate,
    ModelFolder,
    find_folder,
    flops_per_token,
    list_blocks,
)
from ebbflow.workloads.language.multiple_choice import ChoiceTest, open_questions, pack_questions
from ebbflow.workloads.readers.files import DataFile, find_files, has_wildcard, locate
from ebbflow.workloads.readers.rows import find_rows, read_rows

# JSON may escape half a pair of UTF-16, which UTF-8 cannot write
_HALF_CHARACTERS = re.compile("[\ud800-\udfff]")

_OPTIONS = {
    "model": (
        "folder with config.json, tokenizer.json and perhaps safetensors files; or a config.json "
        "alone"
    ),
    "dataset": (
        "file, folder or glob, also s3://: text, .jsonl, .json, .parquet, .arrow; default: "
        "data.path"
    ),
    "column": "name of the column with the text",
    "chat": (
        "the column has lists of messages, which the folder's chat template makes texts of; "
        "default: false"
    ),
    "assistant_only_loss": "with `chat`, only tokens of assistants count in the loss; default: true",
    "choices": ".jsonl file with questions of several choices, which evaluations answer",
    "lora_rank": "rank of LoRA's matrices; 0 trains all weights",
    "lora_alpha": "scale of LoRA's matrices; default: twice the rank",
    "lora_targets": "modules that get such matrices, separated by commas; default: all linear ones",
}


@dataclass
class RowCounts:
    """Counters of the rows that were read, of those without text, and of repaired ones.

    A row is repaired if lone surrogates in its text were replaced.
    """

    rows: int = 0
    empty_rows: int = 0
    repaired_rows: int = 0

    def repair(self, text: str) -> str:
        """Replace lone surrogates in a row's text by U+FFFD, and count the row."""
        repaired = _HALF_CHARACTERS.sub("\ufffd", text)
        self.rows += 1
        self.empty_rows += not text.strip()
        self.repaired_rows += repaired != text
        return repaired


class HuggingFace(TextWorkload):
    """Workload of next-token prediction on packed sequences of `model.sequence_length` tokens.

    `workload_options`: `model`, `dataset`, `column` (text, or messages with `chat`),
    `assistant_only_loss` (true), `choices`, `lora_rank` (0), `lora_alpha`, `lora_targets`.
    """

    def __init__(self, context: WorkloadContext) -> None:
        context = _with_folder(context)
        options = context.options
        self._folder = ModelFolder(
            _model_path(context),
            lora_rank=int(_number(options, "lora_rank", int)),
            lora_alpha=float(_number(options, "lora_alpha", float)),
            lora_targets=str(options.get("lora_targets", "")),
        )
        changed = context.config.model.model_copy(update={"vocab_size": self._folder.vocabulary})
        context = replace(context, config=context.config.model_copy(update={"model": changed}))
        super().__init__(context)
        self._folder.check_length(changed.sequence_length)
        if context.config.training.initial_weights and self._folder.stored:
            raise WorkloadError(
                f"both training.initial_weights and {self._folder.root} have weights; fix: leave "
                "out training.initial_weights"
            )
        if changed.end_of_document is not None:
            raise WorkloadError(
                "model.end_of_document: models of transformers attend across documents; fix: "
                "remove it"
            )
        self._flops = flops_per_token(self.model())
        self._changes_logits = False  # after its output layer; known from the first step on
        self._answers: AnswerMask | None = None
        if AnswerMask.is_stored(self._tokens.about):
            self._answers = AnswerMask(
                context.store, self._tokens.about, self._length, context.alive
            )
            self._order = KeptOrder(self._answers.windows("train"), context.config.training.seed)
            kept = self._answers.windows("held_out")
            self._held_out = kept[self._evenly_spaced(len(kept))]
        self._choices: ChoiceTest | None = None
        if choices := context.prepared.get("choices"):
            tokenizer = open_tokenizer(context.config.data, project_root=context.project_root)
            self._choices = ChoiceTest(
                open_questions(context.store, choices), tokenizer, changed.sequence_length
            )

    @classmethod
    def prepare(cls, context: WorkloadContext) -> JsonObject:
        """Tokenize and pack the dataset, unless the store already has its tokens.

        The questions for `choices` are copied to the store as well.
        """
        context = _with_folder(context)
        about = cls._prepare_text(context)
        if choices := context.options.get("choices"):
            path = context.project_root / Path(str(choices)).expanduser()
            about["choices"] = pack_questions(context.store, path)
        return about

    @classmethod
    def _prepare_text(cls, context: WorkloadContext) -> JsonObject:
        data = context.config.data
        root = context.project_root
        options = context.options
        if data.path is None:
            return prepare_tokens(data, context.store, project_root=root).to_json()
        if data.suffixes == DataConfig().suffixes:  # the default is for source code
            data = data.model_copy(update={"suffixes": [".txt", ".md"]})
        path = locate(root, str(data.path))
        files = find_rows(path, data.suffixes)
        if not files:
            if given := [name for name in ("column", "chat") if options.get(name)]:
                raise DataError(
                    f"workload_options.{given[0]}: {path} is plain text, which has no columns; "
                    "fix: leave it out, or a dataset of .jsonl, .parquet or .arrow files"
                )
            if isinstance(path, Path):
                return prepare_tokens(data, context.store, project_root=root).to_json()
            with tempfile.TemporaryDirectory(prefix="ebbflow-bucket-") as folder:
                copied = str(_fetch(path, data.suffixes, Path(folder)))
                here = data.model_copy(update={"path": copied})
                return prepare_tokens(here, context.store, project_root=root).to_json()
        if options.get("chat"):
            chat = ChatTemplate(_model_path(context))
        else:
            chat = None
        column = str(options.get("column", "text" if chat is None else "messages"))
        counts = RowCounts()
        if chat is not None and _answers_only(options):
            tokenizer = open_tokenizer(data, project_root=root)
            marked = _mark_rows(files, column, chat, counts)
            about = prepare_chat(marked, tokenizer, data.held_out_fraction, context.store)
            return {**about.to_json(), **asdict(counts)}
        between = _separator(data, root)
        with tempfile.TemporaryDirectory(prefix="ebbflow-rows-") as folder:
            # A single file, whose last part is held out
            text = Path(folder, PurePosixPath(path).name)
            with text.open("w", encoding="utf-8") as file:
                for row in _rows(files, column, chat, counts):
                    file.write(row + between)
            here = data.model_copy(update={"path": str(text)})
            about = prepare_tokens(here, context.store, project_root=root)
            return {**about.to_json(), **asdict(counts)}

    def model(self) -> nn.Module:
        return self._folder.model()

    def translate_weights(self, name: str) -> str | None:
        return name

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the decoder's blocks, each of which is sharded as a unit.

        Embeddings and head, whose weights may be tied, stay outside.
        """
        return list_blocks(model)

    def next_batch(self, model: nn.Module, cursor: Cursor) -> TextBatch:
        batch = super().next_batch(model, cursor)
        if self._answers is None or self._context.device.type != "cuda":  # `_batch` has marked it
            return batch
        return self._answers.mark(batch, "train", self._order.window(cursor.first, cursor.count))

    def _batch(self, tokens: np.ndarray, windows: np.ndarray) -> TextBatch:
        batch = super()._batch(tokens, windows)
        if self._answers is None:
            return batch
        return self._answers.mark(
            batch, "train" if tokens is self._tokens.train else "held_out", windows
        )

    def loss(self, model: nn.Module, batch: TextBatch) -> Loss:
        configured = self._config.training.loss_chunk_tokens
        chunk = self._automatic_chunk() if configured == "auto" else configured
        if chunk is None:
            logits = model(input_ids=batch.inputs, use_cache=False).logits
            return Loss(sum_cross_entropy(nn.Identity(), logits, batch.targets), batch.weight)
        with BypassedHead(model) as head:
            x = model(input_ids=batch.inputs, use_cache=False).logits
        if not head.has_returned(x):
            if configured == "auto":
                self._changes_logits = True
                return self.loss(model, batch)
            raise WorkloadError(
                f"training.loss_chunk_tokens {chunk}: the model in {self._folder.root} changes "
                "the logits of its output layer, so they cannot be computed in chunks; fix: "
                "training.loss_chunk_tokens null"
            )
        return Loss(sum_cross_entropy(head, x, batch.targets, chunk), batch.weight)

    def _automatic_chunk(self) -> int | None:
        """Return the number of tokens whose loss is computed at a time; None: all tokens.

        It is None on a CPU, and for a model that changes its logits.
        """
        if self._changes_logits or self._context.device.type != "cuda":
            return None
        return choose_loss_chunk(self._folder.vocabulary)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the held-out loss and, with `choices`, the accuracies on multiple-choice
        questions.
        """
        metrics = super().evaluate(model)
        if self._answers is not None:
            del metrics["held_out_bits_per_byte"]  # the bytes are those of all messages
        if self._choices is None:
            return metrics
        training = self._config.training
        context = self._context
        batch = max(
            1, training.batch_size // (context.world_size * training.gradient_accumulation_steps)
        )
        return metrics | self._choices.evaluate(
            lambda tokens: model(input_ids=tokens, use_cache=False).logits, context, batch
        )

    def flops(self, batch: TextBatch) -> float:
        return self._flops * batch.inputs.numel()


def _with_folder(context: WorkloadContext) -> WorkloadContext:
    """Return the context with `config.data` changed to the options' dataset and the folder's
    tokenizer.
    """
    if unknown := sorted(context.options.keys() - _OPTIONS.keys()):
        known = "; ".join(f"{name}: {text}" for name, text in _OPTIONS.items())
        raise WorkloadError(f"workload_options: there is no {', '.join(unknown)}; fix: {known}")
    data = context.config.data
    folder = _model_path(context)
    changed: JsonObject = {}
    if "dataset" in context.options:
        changed["path"] = str(context.options["dataset"])
    if data.tokenizer == BYTES:
        changed["tokenizer"] = str(folder.parent if folder.is_file() else folder)
    data = data.model_copy(update=changed)
    return replace(context, config=context.config.model_copy(update={"data": data}))


def _number(options: Mapping[str, Any], name: str, kind: type) -> float:
    value = options.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or value < 0:
        if kind is int:
            what = "a whole number"
        else:
            what = "a number"
        raise WorkloadError(f"workload_options.{name} is {value!r}; fix: {what} from 0, such as 16")
    return value


def _answers_only(options: Mapping[str, Json]) -> bool:
    return bool(options.get("chat")) and bool(options.get("assistant_only_loss", True))


def _model_path(context: WorkloadContext) -> Path:
    return find_folder(context.project_root, context.options.get("model"))


def _fetch(uri: str, suffixes: Sequence[str], folder: Path) -> Path:
    """Copy the text files of a bucket into `folder`, and return the folder.

    If there is only one file, return its path.
    """
    files = find_files(uri)
    if len(files) > 1 and not has_wildcard(uri):
        files = find_files(uri, suffixes)
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with file.open() as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 8 * 1024 * 1024)
    if len(files) == 1:
        return folder / files[0].name
    return folder


def _rows(
    files: Sequence[DataFile], column: str, chat: ChatTemplate | None, counts: RowCounts
) -> Iterator[str]:
    """Yield the text of each row in a dataset."""
    for placed in read_rows(files, column):
        text = placed.row.get(column)
        if chat is not None and isinstance(text, list):
            try:
                text = chat.render(text)
            except DataError as error:
                raise DataError(f"{placed}: {error}") from error
        if column not in placed.row:
            raise DataError(
                f"{placed}: has no text in {column!r}, only {', '.join(map(str, placed.row))}; "
                "fix: workload_options.column"
            )
        if not isinstance(text, str):
            raise DataError(
                f"{placed}: has {column!r} of type {type(text).__name__}; fix: "
                "workload_options.column"
            )
        yield counts.repair(text)


def _mark_rows(
    files: Sequence[DataFile], column: str, chat: ChatTemplate, counts: RowCounts
) -> Iterator[MarkedText]:
    """Yield the text of each conversation in a dataset, with the spans that assistants wrote."""
    for placed in read_rows(files, column):
        messages = placed.row.get(column)
        if not isinstance(messages, list):
            raise DataError(
                f"{placed}: {column!r} is no list of messages; fix: workload_options.column, or "
                "workload_options.assistant_only_loss: false"
            )
        try:
            text, spans = chat.mark(messages)
        except (DataError, AttributeError) as error:
            raise DataError(f"{placed}: {error}") from error
        yield counts.repair(text), spans


def _separator(data: DataConfig, root: Path) -> str:
    """Return the text that separates documents: the tokenizer's end-of-text token, or a blank line.

    The tokenizer reads the text as that token.
    """
    tokenizer = open_tokenizer(data, project_root=root)
    vocabulary = getattr(tokenizer, "_tokenizer", None)
    if tokenizer.separator is None or vocabulary is None:
        return "\n\n"
    return vocabulary.id_to_token(tokenizer.separator)
