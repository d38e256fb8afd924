"""XML as S3 writes it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from xml.sax.saxutils import escape

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
Content = str | list[Any]


def document(root: str, content: Content) -> bytes:
    """content: text, or (name, content) of each child, in order."""
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<{root} '
        f'xmlns="{_NAMESPACE}">{_inner(content)}</{root}>'
    )
    return text.encode()


def time_text(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _inner(content: Content) -> str:
    if isinstance(content, str):
        return escape(content)
    return "".join(f"<{name}>{_inner(inner)}</{name}>" for name, inner in content)
