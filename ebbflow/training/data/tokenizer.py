"""Turn text into token IDs: one token per byte, or a vocabulary that the optional package
`tokenizers` reads.

Files are cut into pieces of whole lines before they are encoded, so that neither a large file nor
its tokens need to fit into memory. The positions of the cuts depend only on the file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

import numpy as np

from ebbflow.core.config.schema import DataConfig, RunConfig
from ebbflow.training.errors import DataError

if TYPE_CHECKING:
    import tokenizers

BYTES = "bytes"
PIECE_BYTES = 2**20
# Names of the end-of-text token, in order of preference.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    """Interface of tokenizers, which convert text into token IDs."""

    identity: str  # changes with anything that could change a token
    vocab_size: int
    # Token between two files, so that a window across both does not read as one text
    separator: int | None

    def encode(self, piece: bytes) -> np.ndarray:
        """Return the token IDs of a piece of a file, with shape [tokens] and dtype
        `dtype_of(vocab_size)`.
        """
        ...


class ByteTokenizer:
    """Tokenizer with one token per byte.

    The separator between files is byte 0, which no text file contains.
    """

    identity = BYTES
    vocab_size = 256
    separator: int | None = 0

    def encode(self, piece: bytes) -> np.ndarray:
        return np.frombuffer(piece, dtype=np.uint8)


class VocabularyTokenizer:
    """Tokenizer with the vocabulary of a tokenizer.json file. It reads invalid UTF-8 as U+FFFD.

    The file may truncate or pad what it encodes, because transformers saves the settings of the
    last call. Both are switched off: a piece of a file is no sample.
    """

    def __init__(self, path: Path) -> None:
        content = _read(path)
        try:
            import tokenizers

            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the package raises plain Exception
            raise DataError(
                f"data.tokenizer {path} is not a tokenizer.json: "
                f"{' '.join(str(error).split())[:200]}; fix: the file that tokenizers' "
                "Tokenizer.save writes"
            ) from error
        # Another version of the package may split the same text differently.
        version = importlib.metadata.version("tokenizers")
        self.identity = (
            f"tokenizer.json sha256 {hashlib.sha256(content).hexdigest()}, tokenizers {version}"
        )
        self.switched_off = _switch_off(self._tokenizer)
        if self.switched_off:  # tokens that were made with them are others
            self.identity += f", without {' and '.join(self.switched_off)}"
        self.unknown_id = _find_unknown_id(content)
        self.vocab_size = (
            max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        self.separator = next(
            (n for n in map(self._tokenizer.token_to_id, _END_OF_TEXT) if n is not None), None
        )
        self._dtype = dtype_of(self.vocab_size)

    def encode(self, piece: bytes) -> np.ndarray:
        text = piece.decode("utf-8", errors="replace")
        return np.array(
            self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=self._dtype
        )


def open_tokenizer(data: DataConfig, *, project_root: Path) -> Tokenizer:
    """Open the configured tokenizer.

    Raises DataError if its file or the package `tokenizers` is unusable.
    """
    if data.tokenizer == BYTES:
        return ByteTokenizer()
    path = project_root / Path(data.tokenizer).expanduser()
    return VocabularyTokenizer(path / "tokenizer.json" if path.is_dir() else path)


def check_vocabulary(config: RunConfig, vocab_size: int) -> None:
    """Raise DataError if the model's vocabulary is smaller than the tokenizer's `vocab_size`."""
    if vocab_size > config.model.vocab_size:
        raise DataError(
            f"data.tokenizer {config.data.tokenizer} has {vocab_size} tokens, model.vocab_size "
            f"is {config.model.vocab_size}: {vocab_size - config.model.vocab_size} too few; fix: "
            f"set model.vocab_size to {vocab_size}, or to {-(-vocab_size // 64) * 64}, which "
            "GPUs multiply faster"
        )


def dtype_of(vocab_size: int) -> np.dtype:
    """Return the smallest unsigned little-endian integer type that holds every token ID."""
    if vocab_size <= 2**8:
        return np.dtype("u1")
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def text_pieces(file: BinaryIO, *, limit: int | None = None) -> Iterator[bytes]:
    """Yield up to `limit` bytes of a file in pieces of about 1 MiB.

    Lines of up to 2 MiB are not divided.
    """
    rest = b""
    if limit is None:
        left = sys.maxsize
    else:
        left = limit
    while block := file.read(min(PIECE_BYTES, left)):
        left -= len(block)
        rest += block
        end = rest.rfind(b"\n") + 1 or (
            _whole_characters(rest) if len(rest) >= 2 * PIECE_BYTES else 0
        )
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def encode_files(files: Iterable[Iterable[bytes]], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the tokens of files: one array per piece of a file, and a separator between files."""
    for number, content in enumerate(files):
        if number and tokenizer.separator is not None:
            yield np.array([tokenizer.separator], dtype=dtype_of(tokenizer.vocab_size))
        for piece in content:
            yield tokenizer.encode(piece)


def _switch_off(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Switch off truncation and padding, and return descriptions of those that were on."""
    found = []
    if tokenizer.truncation is not None:
        found.append(f"truncation to {tokenizer.truncation['max_length']} tokens")
        tokenizer.no_truncation()
    if tokenizer.padding is not None:
        found.append("padding")
        tokenizer.no_padding()
    return found


def _find_unknown_id(content: bytes) -> int | None:
    """Return the ID of the token for unknown text in a tokenizer.json file, or None."""
    model = json.loads(content).get("model") or {}
    if isinstance(model.get("unk_id"), int):  # Unigram
        return model["unk_id"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        return vocabulary.get(model.get("unk_token"))
    return None


def _whole_characters(text: bytes) -> int:
    """Return the number of bytes of `text` up to the end of its last complete character.

    Its last character may be cut off.
    """
    end = len(text)
    while end > len(text) - 4 and text[end - 1] & 0xC0 == 0x80:
        end -= 1
    if text[end - 1] >= 0xC0:
        return end - 1
    return len(text)


def _read(path: Path) -> bytes:
    if importlib.util.find_spec("tokenizers") is None:
        raise DataError(
            f"data.tokenizer {path} needs a package that is not installed; fix: pip install "
            "tokenizers"
        )
    if path.exists() and not path.is_file():
        raise DataError(
            f"data.tokenizer {path} is not a regular file; fix: name a tokenizer.json, or bytes"
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"data.tokenizer {path} cannot be read: {error.strerror}; fix: name a "
            "tokenizer.json, or bytes"
        ) from error
