"""Chat templates: a conversation as the text that a model of transformers was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbflow.training.errors import DataError, WorkloadError


class ChatTemplate:
    """The template of a model's folder: `chat_template` of its tokenizer_config.json, or chat_template.jinja."""

    def __init__(self, root: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise WorkloadError(f"transformers cannot be imported ({error}); fix: pip install transformers") from error
        self._root = root.parent if root.is_file() else root
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self._root, local_files_only=True)
        except Exception as error:  # the library raises many kinds
            raise WorkloadError(
                f"{self._root}: its tokenizer cannot be read: {' '.join(str(error).split())[:200]}; "
                "fix: tokenizer.json and tokenizer_config.json, as save_pretrained writes them"
            ) from error
        if not getattr(self._tokenizer, "chat_template", None):
            raise WorkloadError(
                f"{self._root} has no chat template; fix: a model that was tuned to chat, or chat_template in its "
                "tokenizer_config.json"
            )

    def as_user(self, text: str) -> str:
        """Return the text of one message by a user, up to where the assistant's answer begins."""
        return self.render([{"role": "user", "content": text}], answer=True)

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = False) -> str:
        """Return the text of a conversation; if `answer`, up to where the next answer begins. Raises DataError."""
        try:
            return str(
                self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer)
            )
        except Exception as error:  # templates raise their own errors, such as for an unknown role
            raise DataError(
                f"the chat template of {self._root} refuses the messages: {' '.join(str(error).split())[:200]}; "
                'fix: [{"role": "user" or "assistant", "content": TEXT}, …]'
            ) from error
