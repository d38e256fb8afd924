"""Text through a vocabulary: the tokens are those of the tokenizer, whatever the size of the files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbflow.core.config.schema import DataConfig, ModelConfig, RunConfig
from ebbflow.core.preflight import PreflightContext, run_checks
from ebbflow.core.store import Store
from ebbflow.training.checks import CHECKS
from ebbflow.training.data import open_tokens, prepare_tokens
from ebbflow.training.data.tokenizer import PIECE_BYTES, open_tokenizer, text_pieces
from ebbflow.training.errors import DataError

tokenizers = pytest.importorskip(
    "tokenizers", reason="the package tokenizers is an option: pip install tokenizers"
)

SIDES = ("train", "held_out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and tokenizers trained on them: of 260 tokens, with an end of text; and small,
    without.
    """
    folder = tmp_path_factory.mktemp("texts")
    for number in range(8):
        lines = [
            f"{number} ebb and flow {line}: näïve tides rise and fall\n" for line in range(200)
        ]
        (folder / f"{number}.txt").write_text("".join(lines), encoding="utf-8")
    for name, size, special in (("large", 260, ["<|endoftext|>"]), ("small", 60, [])):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, show_progress=False
        )
        tokenizer.train([str(path) for path in sorted(folder.glob("*.txt"))], trainer)
        tokenizer.save(str(folder / f"{name}.json"))
    return folder


def data(folder: Path, name: str = "large") -> DataConfig:
    return DataConfig(
        path=str(folder),
        suffixes=[".txt"],
        tokenizer=str(folder / f"{name}.json"),
        held_out_fraction=0.2,
    )


@pytest.mark.parametrize(("name", "dtype"), [("large", "<u2"), ("small", "u1")])
def test_shards_decode_to_the_text(name: str, dtype: str, folder: Path, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    tokens = prepare_tokens(data(folder, name), store, project_root=folder)
    arrays = open_tokens(store, tokens.fingerprint)
    assert arrays.train.dtype == np.dtype(dtype)
    assert (arrays.train.size, arrays.held_out.size) == (
        tokens.train_tokens,
        tokens.held_out_tokens,
    )
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / f"{name}.json"))
    read = {
        side: tokenizer.decode(getattr(arrays, side).tolist(), skip_special_tokens=False)
        for side in SIDES
    }
    texts = {path.read_text(encoding="utf-8") for path in folder.glob("*.txt")}
    if name == "large":  # it has an end of text, which stands between files
        read_texts = set()
        for side in read.values():
            read_texts |= set(side.split("<|endoftext|>"))
        assert read_texts == texts
    else:
        assert sum(map(len, read.values())) == sum(map(len, texts))
    held_out = [
        path
        for path in folder.glob("*.txt")
        if path.read_text(encoding="utf-8") in read["held_out"]
    ]
    assert tokens.held_out_bytes == sum(path.stat().st_size for path in held_out) > 0
    shares = np.bincount(arrays.train) / arrays.train.size
    assert tokens.unigram_entropy_nats == pytest.approx(
        -sum(s * math.log(s) for s in shares if s), rel=1e-9
    )


def test_the_tokenizers_content_is_part_of_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    first = prepare_tokens(data(folder), store, project_root=folder)
    copy = tmp_path / "copy.json"
    copy.write_bytes((folder / "large.json").read_bytes())
    moved = data(folder).model_copy(update={"tokenizer": str(copy)})
    assert prepare_tokens(moved, store, project_root=folder) == first, (
        "where it lies does not matter"
    )
    copy.write_bytes((folder / "large.json").read_bytes() + b"\n")
    assert prepare_tokens(moved, store, project_root=folder).fingerprint != first.fingerprint
    in_bytes = data(folder).model_copy(update={"tokenizer": "bytes"})
    assert prepare_tokens(in_bytes, store, project_root=folder).fingerprint != first.fingerprint


def test_another_version_of_the_package_makes_other_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_tokenizer(data(folder), project_root=folder).identity
    assert (
        first == open_tokenizer(data(folder), project_root=folder).identity
        and tokenizers.__version__ in first
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} of tomorrow")
    assert open_tokenizer(data(folder), project_root=folder).identity != first


@pytest.mark.parametrize("content", ["lines", "one long line"])
def test_a_large_file_is_cut_where_nothing_is_lost(content: str, tmp_path: Path) -> None:
    if content == "lines":
        text = ("the tide … " * 9 + "\n") * 30_000
    else:
        text = "näïve" * 900_000
    path = tmp_path / "large.txt"
    path.write_text(text, encoding="utf-8")
    with path.open("rb") as file:
        found = list(text_pieces(file))
    assert b"".join(found) == text.encode() and len(found) > 2
    assert max(map(len, found)) <= 3 * PIECE_BYTES
    for piece in found:
        piece.decode("utf-8")  # no character is cut
        assert content == "one long line" or piece.endswith(b"\n")


def checked(folder: Path, check: str, **changes: Any) -> Any:
    config = RunConfig(data=changes.pop("data", data(folder)), **changes)
    checks = [candidate for candidate in CHECKS if candidate.id == check]
    return run_checks(checks, PreflightContext(config=config, project_root=folder))[0]


def test_preflight_compares_the_vocabulary_with_the_model(folder: Path, tmp_path: Path) -> None:
    found = checked(folder, "tokenizer")
    assert found.status == "failed"
    assert "has 260 tokens, model.vocab_size is 256: 4 too few" in found.detail
    assert found.fix == "set model.vocab_size to 260, or to 320, which GPUs multiply faster"
    assert checked(folder, "tokenizer", model=ModelConfig(vocab_size=260)).status == "passed"
    assert checked(folder, "dataset", model=ModelConfig(vocab_size=260)).status == "passed"


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ("{}", r"is not a tokenizer\.json")]
)
def test_a_tokenizer_that_cannot_serve_is_named(
    content: str | None, message: str, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    bad = data(folder).model_copy(update={"tokenizer": str(path)})
    with pytest.raises(DataError, match=f"{message}.*fix:"):
        prepare_tokens(bad, Store.open(str(tmp_path / "store")), project_root=folder)
    assert checked(folder, "tokenizer", data=bad).status == "failed"


def test_preflight_without_the_tokenizers_package_names_the_command_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tokenizers" else find(name)
    )
    found = checked(folder, "tokenizer")
    assert (found.status, found.fix) == ("failed", "pip install tokenizers")


def saved_with(folder: Path, target: Path, *, truncation: bool, padding: bool) -> Path:
    """A tokenizer.json as transformers saves it after a call that truncates or pads."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "large.json"))
    if truncation:
        tokenizer.enable_truncation(128)
    if padding:
        tokenizer.enable_padding(length=4096, pad_id=0, pad_token="<|endoftext|>")
    tokenizer.save(str(target))
    return target


@pytest.mark.parametrize(("truncation", "padding"), [(True, False), (False, True), (True, True)])
def test_saved_truncation_and_padding_change_no_token(
    folder: Path, tmp_path: Path, truncation: bool, padding: bool
) -> None:
    store = Store.open(str(tmp_path / "store"))
    plain = prepare_tokens(data(folder), store, project_root=folder)
    path = saved_with(folder, tmp_path / "saved.json", truncation=truncation, padding=padding)
    moved = data(folder).model_copy(update={"tokenizer": str(path)})
    saved = prepare_tokens(moved, store, project_root=folder)
    assert saved.shard_sha256 == plain.shard_sha256
    assert saved.fingerprint != plain.fingerprint, "shards made with truncation are not used again"
    finding = checked(folder, "tokenizer", data=moved, model=ModelConfig(vocab_size=260))
    assert ("truncation to 128 tokens is switched off" in finding.detail) == truncation
    assert ("padding is switched off" in finding.detail) == padding


def word_tokenizer(target: Path, words: list[str], *, splits: bool = True) -> Path:
    vocabulary = {"[UNK]": 0, **{word: number for number, word in enumerate(words, start=1)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    if splits:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(target))
    return target


@pytest.mark.parametrize(
    ("words", "splits", "status", "detail"),
    [
        (["ebb", "flow"], True, "failed", "of them are the token for unknown text"),
        (["ebb"], False, "failed", "which is not between 0.05 and 1.1"),
        (None, True, "passed", "tokens per byte"),
    ],
)
def test_preflight_judges_the_tokens_of_a_sample_by_numbers(
    folder: Path,
    tmp_path: Path,
    words: list[str] | None,
    splits: bool,
    status: str,
    detail: str,
) -> None:
    path = folder / "large.json"
    if words is not None:
        path = word_tokenizer(tmp_path / "words.json", words, splits=splits)
    config = data(folder).model_copy(update={"tokenizer": str(path)})
    finding = checked(folder, "tokenizer", data=config, model=ModelConfig(vocab_size=260))
    assert finding.status == status and detail in finding.detail, finding.detail
