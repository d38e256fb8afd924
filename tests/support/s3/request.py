"""One request as the operations see it, and the answer that they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit


@dataclass
class Request:
    """target: as in the request line. headers: by lower-case name. body: decoded, once it was read."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Decoded, beginning with a slash."""
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    @property
    def bucket(self) -> str:
        return self.path[1:].partition("/")[0]

    @property
    def key(self) -> str:
        return self.path[1:].partition("/")[2]

    def header(self, name: str) -> str | None:
        """A header, or a trailer, which counts as one."""
        return self.headers.get(name, self.trailers.get(name))


@dataclass
class Answer:
    """status, headers and body. content: what a client would take for the object's bytes, and a
    fault may hurt.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    content: bool = False
