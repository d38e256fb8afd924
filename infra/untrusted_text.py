"""Foreign text on its way to a terminal: exception messages, lines of ranks, names of jobs, keys, reasons of AWS.

A terminal obeys what it prints: escape sequences move the cursor, erase lines, set the window's title or the clipboard,
a carriage return overwrites a line, and bidirectional overrides show text in another order than it is read in. Each
entry point calls `guard_terminal` first, so that all output of its process passes `printable`, whichever code prints
it. Raw logs of ranks keep their bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

from ebbflow.infra.program import REPLACE_UNPRINTABLE

# C0 but tab and line feed, DEL, C1, marks and overrides of writing direction, line and paragraph separators,
# annotations, lone surrogates, tags (invisible letters).
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
# "Select Graphic Rendition" (ECMA-48, 8.3.117).
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# What Metaflow writes for its own lines: bold, visible foreground colours, their end, and "erase to the end of line".
_METAFLOWS = re.compile(r"(\x1b\[(?:0|1|22|3[1-7]|39|9[1-7])?m|\x1b\[K)")


def printable(text: object) -> str:
    r"""The text with each unsafe character as its escape of JSON: \u001b for ESC.

    Tab and line feed stay, and a carriage return before a line feed is left out. Text that was made printable does not
    change again, and a JSON document stays one with the same content.
    """
    return _UNSAFE.sub(_escape, str(text).replace("\r\n", "\n"))


def one_line(text: object) -> str:
    """Printable text with each run of line breaks and tabs as one space."""
    return printable(re.sub(r"[\t\n\v\f\r\x85\u2028\u2029]+", " ", str(text)).strip())


def strip_colours(text: str) -> str:
    """The text without the sequences that only colour it. Text that they concealed is kept."""
    return _COLOURS.sub("", text)


def guard_terminal(*, keep_colours: bool = False) -> None:
    """Make everything printable that this process writes to sys.stdout and sys.stderr from now on.

    keep_colours: let Metaflow's own colours pass, for processes in which Metaflow writes to the terminal.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream, keep_colours=keep_colours))


class GuardedStream:
    """A text stream that makes printable what is written, and leaves all else to the stream behind it.

    Characters that the stream's encoding lacks are written as similar ASCII or as escapes: an ASCII terminal ends no
    process.
    """

    def __init__(self, stream: Any, *, keep_colours: bool = False) -> None:
        self._stream, self._keep_colours = stream, keep_colours

    def write(self, text: str) -> int:
        """Write the text and return its length, as text streams do."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self._keep_colours:
            parts = _METAFLOWS.split(text)
            shown = "".join(part if at % 2 else printable(part) for at, part in enumerate(parts))
        else:
            shown = printable(text)
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(shown.encode(encoding, REPLACE_UNPRINTABLE).decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of the lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    return f"\\u{0xD800 + (code - 0x10000 >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
