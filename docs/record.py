"""Record a run on a pseudo-terminal: `make recording` writes docs/images/rehearsal.svg and
docs/terminal.md.

The picture is an animated SVG of a real run that loses a node, three times as fast as the run. The
page has the screens at the end at 80 and 140 columns, and the output without a terminal.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
RUN = [sys.executable, str(DOCS.parent / "flows" / "train_flow.py"), "run"]
REHEARSAL = ["--job", "rehearsal", "--rehearse", "node-loss@60%"]
_CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")
_COLOURS = {31: "#f38ba8", 32: "#a6e3a1", 33: "#f9e2af", 36: "#89dceb", 90: "#6c7086"}
_FRAME_SECONDS = 0.1
_LONGEST_PAUSE = 1.0
_HOLD_SECONDS = 4.0
_SPEED = 3.0
_FONT = 13
_ROW = 18
_COLUMN = 7.83
Cell = tuple[str, str]  # character, style of the SVG

PAGE = """# The terminal

Written by `make recording` (`docs/record.py`) from real runs with `--rehearse node-loss@60%`; do not edit.
Seconds and dollars are those of the machine that recorded them; prices are simulated. `--verbose` shows
Metaflow's log, every check, the full plan and the full report instead.
"""


class Screen:
    """A terminal that knows what rich's live region uses: line ends, cursor up, erase line,
    colours.
    """

    def __init__(self) -> None:
        self.rows: list[list[Cell]] = [[]]
        self._row = self._column = 0
        self._style = ""

    def feed(self, text: str) -> None:
        for match in _CODE.finditer(text):
            if match[0] == "\r":
                self._column = 0
            elif match[0] == "\n":
                self._row += 1
                self.rows += [[] for _ in range(self._row + 1 - len(self.rows))]
            elif match[2] is None:
                self._write(match[0])
            elif match[2] == "A":
                self._row = max(0, self._row - int(match[1] or 1))
            elif match[2] == "K" and match[1] == "2":
                self.rows[self._row] = []
            elif match[2] == "m":
                self._style = _style([int(code or 0) for code in match[1].split(";")])

    def _write(self, text: str) -> None:
        row = self.rows[self._row]
        row += [(" ", "")] * (self._column - len(row))
        row[self._column : self._column + len(text)] = [
            (character, self._style) for character in text
        ]
        self._column += len(text)

    def lines(self) -> list[str]:
        return ["".join(character for character, _ in row).rstrip() for row in self.rows]


def record(
    words: list[str], columns: int, folder: str, environment: dict[str, str]
) -> list[tuple[float, str]]:
    """Run the words in a folder on a pseudo-terminal.

    Returns the output in pieces, each with its time in seconds.
    """
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
    process = subprocess.Popen(
        words,
        stdin=side,
        stdout=side,
        stderr=side,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    os.close(side)
    found = []
    began = time.monotonic()
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal as an error
            break
        if not piece:
            break
        found.append((time.monotonic() - began, piece.decode(errors="replace")))
    if process.wait():
        sys.exit(f"the run ended with {process.returncode}:\n{''.join(text for _, text in found)}")
    return found


def render(pieces: list[tuple[float, str]], columns: int, title: str) -> str:
    """Render the recording as an animated SVG.

    Each row of each frame is shown while it is the newest of its place.
    """
    screen = Screen()
    shown = {}
    intervals = []
    clock = before = drawn = 0.0
    for at, text in [*pieces, (pieces[-1][0] + 1.0, "")]:
        clock += min(at - before, _LONGEST_PAUSE) / _SPEED
        before = at
        screen.feed(text)
        if clock - drawn < _FRAME_SECONDS and text:
            continue
        drawn = clock
        for number, row in enumerate(screen.rows):
            old = shown.get(number)
            if old is None or old[1] != row:
                if old is not None:
                    intervals.append((number, old[1], old[0], clock))
                shown[number] = (clock, list(row))
    end = clock + _HOLD_SECONDS
    intervals += [(number, row, since, None) for number, (since, row) in shown.items()]
    width = round(columns * _COLUMN + 24)
    height = (len(screen.rows) + 1) * _ROW + 24
    body = [_row(*interval) for interval in intervals if interval[1]]
    head = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {head}>
<title>{escape(title)}</title>
<style>text{{font:{_FONT}px ui-monospace,Menlo,Consolas,monospace;fill:#cdd6f4;white-space:pre}}</style>
<rect width="{width}" height="{height}" rx="8" fill="#1e1e2e"><animate id="l" attributeName="rx" from="8" to="8"
 begin="0s;l.end" dur="{end:.2f}s"/></rect>
{chr(10).join(body)}
</svg>
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        own = {
            "EBBFLOW_RUNS": f"{folder}/runs",
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": f"{folder}/metaflow",
        }
        environment = {**os.environ, **own, "TERM": "xterm-256color", "COLORTERM": ""}
        words = [*RUN, "--set", f"store={folder}/store", *sys.argv[1:]]
        quiet = subprocess.run(
            [*words, "--job", "quiet"], env=environment, capture_output=True, text=True
        )
        assert quiet.returncode == 0, quiet.stdout + quiet.stderr
        parts = [PAGE]
        for columns in (80, 140):
            job = ["--job", f"columns-{columns}", *REHEARSAL[2:]]
            pieces = record([*words, *job], columns, folder, environment)
            screen = Screen()
            screen.feed("".join(text for _, text in pieces))
            parts += [
                f"## On a terminal of {columns} columns, at the end\n",
                _block(screen.lines(), folder),
            ]
            if columns == 80:
                title = "ebbflow run --rehearse node-loss@60%: a node is lost and the job continues"
                svg = render(pieces, columns, title).replace(folder, "/tmp/demo")
                (DOCS / "images" / "rehearsal.svg").write_text(svg, encoding="utf-8")
        done = subprocess.run(
            [*words, "--job", "plain", *REHEARSAL[2:]],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        parts += ["## Without a terminal\n", _block(done.stdout.splitlines(), folder)]
        (DOCS / "terminal.md").write_text("\n".join(parts), encoding="utf-8")


def _style(codes: list[int]) -> str:
    found = next((_COLOURS[code] for code in codes if code in _COLOURS), None)
    if found is None and 38 in codes:
        found = "#45475a"
    if 2 in codes:
        faint = "opacity:.7;"
    else:
        faint = ""
    return (f"fill:{found};" if found else "") + faint + ("font-weight:bold;" if 1 in codes else "")


def _row(number: int, row: list[Cell], since: float, until: float | None) -> str:
    spans = []
    start = 0
    for at in range(1, len(row) + 1):
        if at == len(row) or row[at][1] != row[start][1]:
            text = escape("".join(character for character, _ in row[start:at]))
            spans.append(
                f'<tspan style="{row[start][1]}">{text}</tspan>' if row[start][1] else text
            )
            start = at
    place = f'x="12" y="{(number + 1) * _ROW + 10}" xml:space="preserve"'
    if until is None:  # stays until the end, and is what a viewer without animation shows
        hidden = (
            '<set attributeName="visibility" to="hidden" begin="l.begin" '
            f'end="l.begin+{since:.2f}s"/>'
        )
        return f"<text {place}>{''.join(spans)}{hidden}</text>"
    shown = (
        f'<set attributeName="visibility" to="visible" begin="l.begin+{since:.2f}s" '
        f'end="l.begin+{until:.2f}s"/>'
    )
    return f'<text {place} visibility="hidden">{"".join(spans)}{shown}</text>'


def _block(lines: list[str], folder: str) -> str:
    # Metaflow's working directory does not matter
    own = re.compile(rf"(?:\.\./)*/?{re.escape(folder.lstrip('/'))}")
    shown = "\n".join(own.sub("/tmp/demo", line) for line in lines).strip("\n")
    return f"```text\n{shown}\n```\n"


if __name__ == "__main__":
    main()
