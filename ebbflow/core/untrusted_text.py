"""Escaping of untrusted text before it is printed, such as exception messages and rank output.

A terminal executes control characters in its input: escape sequences move the cursor, erase lines,
and set the window's title or the clipboard; a carriage return overwrites a line; bidirectional
overrides reorder text. Each entry point calls `guard_terminal` first, so that all output of its
process goes through `printable`. The raw logs of ranks keep their bytes.
"""

import re
import sys
import textwrap
from collections.abc import Iterable
from typing import Any, TextIO

from ebbflow.core.program import REPLACE_UNPRINTABLE

# C0 except tab and line feed, DEL, C1, marks and overrides of writing direction, line and paragraph
# separators, annotations, lone surrogates, tags (invisible letters).
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
# "Select Graphic Rendition" (ECMA-48, 8.3.117).
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Sequences in Metaflow's own lines: bold, visible foreground colours, their end, and "erase to the
# end of line".
_METAFLOWS = re.compile(r"(\x1b\[(?:0|1|22|3[1-7]|39|9[1-7])?m|\x1b\[K)")


class GuardedStream:
    """A text stream that escapes unsafe characters and writes the result to another stream.

    Characters that the other stream cannot encode become similar ASCII or escapes, so that an ASCII
    terminal raises no error.
    """

    def __init__(self, stream: TextIO, *, keep_colours: bool = False) -> None:
        self._stream = stream
        self._keep_colours = keep_colours

    def write(self, text: str) -> int:
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

    @property
    def unguarded(self) -> TextIO:
        """The underlying stream, for a program that moves the cursor and escapes its text
        itself.
        """
        return self._stream

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def printable(text: object) -> str:
    """Replace each unsafe character by a JSON escape, such as \\u001b for ESC.

    Tabs and line feeds stay; a carriage return before a line feed is removed. The function is
    idempotent, and does not change the meaning of a JSON document.
    """
    return _UNSAFE.sub(_escape, str(text).replace("\r\n", "\n"))


def one_line(text: object) -> str:
    """Make text printable, and replace each run of line breaks and tabs by one space."""
    return printable(re.sub(r"[\t\n\v\f\r\x85\u2028\u2029]+", " ", str(text)).strip())


def wrap_line(text: str, width: int, *, indent: str = "  ") -> list[str]:
    """Wrap text to `width`, keeping its indentation.

    Products such as "2 × g5.xlarge" are not split.

    indent: the prefix of every line after the first.
    """
    margin = text[: len(text) - len(text.lstrip(" "))]
    joined = margin + one_line(text).replace(" × ", "\u00a0×\u00a0")
    lines = textwrap.wrap(joined, width, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]


def strip_colours(text: str) -> str:
    """Remove the escape sequences that set colours and styles.

    Text that such a sequence made invisible is kept.
    """
    return _COLOURS.sub("", text)


def guard_terminal(*, keep_colours: bool = False) -> None:
    """From now on, escape unsafe characters in all output of this process to stdout and stderr.

    With `keep_colours`, Metaflow's own colours stay; use it in processes in which Metaflow writes
    to the terminal.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream, keep_colours=keep_colours))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    return f"\\u{0xD800 + (code - 0x10000 >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
