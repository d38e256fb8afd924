"""No escape sequence of foreign text reaches a terminal or a merged log, through whichever door it
comes.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.core.event_log import EventLog
from ebbflow.core.events import OUTCOME, Origin
from ebbflow.core.layout import job_prefix
from ebbflow.core.rank_logs import LogLine, escape_controls
from ebbflow.core.store import Store
from ebbflow.core.untrusted_text import GuardedStream, one_line, printable
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.logs import TerminalEcho, show_failed_logs
from tests.support.rank_logs import beat, rank_log, write

ROOT = Path(__file__).resolve().parents[2]
# Title, clipboard, cursor, 8-bit CSI, overwritten line, override of the writing direction, line
# separator, bell.
HOSTILE = "\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x1b\\\x1b[2J\x1b[1A\x9b31mfailed\rfine\u202egpj.exe\u2066\u2028x\x08\x7f"
RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
ANY_TEXT = st.text(st.characters(exclude_categories=())) | st.text(
    "\x1b[]0;m\x07\r\n\x9b\u202e\ud800aK1", max_size=40
)

DOORS = {
    "infra config": [
        "-m",
        "infra",
        "config",
        "configs/laptop.yaml",
        "--set",
        f"data.path={HOSTILE}",
    ],
    "infra config, refused": [
        "-m",
        "infra",
        "config",
        "configs/laptop.yaml",
        "--set",
        f"model.{HOSTILE}=1",
    ],
    "infra logs": ["-m", "infra", "logs", HOSTILE],
    "cost plan": ["-m", "cost", "plan", f"{HOSTILE}.yaml"],
    "cost report": ["-m", "cost", "report", HOSTILE],
    "checkpoints": ["-m", "training", "checkpoints", "list", HOSTILE],
    "run": ["flows/train_flow.py", "run", "--config", f"{HOSTILE}.yaml"],
    "supervise": ["flows/supervise.py", f"{HOSTILE}.yaml"],
    "an exception that is not caught": [
        "-c",
        "import sys\nfrom ebbflow.core.untrusted_text import guard_terminal\n"
        "guard_terminal()\nraise OSError(sys.argv[1])",
        HOSTILE + "\udcff",
    ],
}


class Worker:
    rank = 0

    def __init__(self, log: Path) -> None:
        self.log_path = log
        self.beat = beat(3)


class Group:
    def __init__(self, *workers: Worker) -> None:
        self.workers = workers


@given(ANY_TEXT)
def test_no_unsafe_character_is_left_and_nothing_else_is_changed(text: str) -> None:
    shown = printable(text)
    assert not RAW.search(shown) and printable(shown) == shown
    shown.encode()  # lone surrogates too
    assert (
        "\n" not in one_line(text)
        and not RAW.search(one_line(text))
        and not RAW.search(escape_controls(text))
    )
    assert printable(re.sub("[^ -~\n\t]", "", text)) == re.sub("[^ -~\n\t]", "", text)


def test_ordinary_text_of_any_language_stays_as_it_is() -> None:
    for text in ("step 3\tloss 2.31\n", "nötig · 広い → ✗ €", "می‌خواهم", "👩‍💻"):
        assert printable(text) == text
    assert printable("a\r\nb") == "a\nb"
    assert printable("\U000e0041") == "\\udb40\\udc41"


@given(st.dictionaries(ANY_TEXT, ANY_TEXT | st.integers(), max_size=4))
def test_a_json_document_stays_one_with_the_same_content(document: dict) -> None:
    shown = printable(json.dumps(document, ensure_ascii=False))
    assert not RAW.search(shown)
    assert json.loads(shown) == json.loads(json.dumps(document))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_a_guarded_stream_writes_no_control_character_and_never_fails(encoding: str) -> None:
    data = io.BytesIO()
    stream = GuardedStream(io.TextIOWrapper(data, encoding=encoding, errors="strict"))
    print(HOSTILE, "\ud800 · 広い", file=stream, flush=True)
    stream.writelines([HOSTILE, "\n"])
    stream.flush()
    written = data.getvalue().decode(encoding)
    assert not RAW.search(written) and "owned" in written and written.count("\n") == 2
    assert not stream.isatty() and stream.encoding == encoding
    with pytest.raises(TypeError):
        stream.write(b"bytes")


def test_metaflows_colours_pass_and_nothing_that_hides_or_moves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = GuardedStream(sys.stdout, keep_colours=True)
    own = "\x1b[35m2026-11-22 \x1b[0m\x1b[32m\x1b[1m[1/start/1]\x1b[0m\x1b[22m\x1b[K\n"
    stream.write(own)
    assert capsys.readouterr().out == own
    stream.write("\x1b[8mhidden\x1b[30;40mblack\x1b[2K\x1b[K\x1b]0;t\x07\r")
    assert capsys.readouterr().out.replace("\x1b[K", "") == (
        "\\u001b[8mhidden\\u001b[30;40mblack\\u001b[2K\\u001b]0;t\\u0007\\u000d"
    )


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.slow
def test_no_door_lets_a_control_character_through(door: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *DOORS[door]],
        cwd=ROOT,
        env={**os.environ, "EBBFLOW_RUNS": str(tmp_path), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        timeout=120,
    )
    shown = (done.stdout + done.stderr).decode()
    assert "failed" in shown and "gpj.exe" in shown, shown
    assert not RAW.search(shown), shown
    assert ("Traceback" in shown) == (door == "an exception that is not caught")


def test_the_merged_log_holds_what_a_rank_printed_and_can_be_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ebbflow.infra.__main__ import main

    folder = tmp_path / "job"
    log, raw = rank_log(folder)
    write(raw, HOSTILE.encode() + b" \xff\n\x1b[31mred\x1b[0m\n")
    log.follow(beat(1))
    log.finish(beat(1))
    assert HOSTILE.encode() in raw.read_bytes(), "the raw log keeps its bytes"
    records = raw.with_suffix(".jsonl").read_text()
    assert not RAW.search(records)
    assert json.loads(records.splitlines()[0])["text"] == HOSTILE + " \ufffd"
    for options in ([], ["--json"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EBBFLOW_RUNS", str(tmp_path))
            assert main(["logs", "job", *options]) == 0
        shown = capsys.readouterr().out
        assert not RAW.search(shown) and shown.count("\n") == 2
    assert shown.splitlines()[0] == records.splitlines()[0]


def test_a_record_that_was_forged_in_the_store_makes_one_line() -> None:
    forged = "\n2026-11-22T00:00:00.000Z g1 n0 r0 step 9 | all is well"
    line = LogLine(
        t=f"2026{forged}",
        job="job",
        generation=1,
        node=0,
        rank=0,
        step=1,
        phase=None,
        text=forged,
        start=0,
        end=1,
    )
    assert "\n" not in line.render() and "\n" not in LogLine.from_json(line.to_json()).render()


def test_an_agent_shows_only_printable_text_of_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(
        f"step 1 {HOSTILE}\n\n10%\r90%\nTraceback (most recent call last):\n{HOSTILE}\n".encode()
    )
    group = Group(Worker(log))
    TerminalEcho(group).echo_new_lines()
    shown = capsys.readouterr().out
    assert not RAW.search(shown) and shown.splitlines()[1:] == ["", "[1 overwritten] 90%"]
    failure = WorkerFailure(rank=0, message=HOSTILE)
    show_failed_logs(group, [failure], job="job", generation=1)
    shown = capsys.readouterr().out
    assert not RAW.search(shown) and "fine" in shown


def test_a_report_of_hostile_events_can_be_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ebbflow.cost.__main__ import main

    store = Store.open(str(tmp_path)).sub(job_prefix("job"))
    with EventLog(
        store, Origin(job="job", run="1", attempt=0, generation=1, process="report")
    ) as events:
        events.emit(OUTCOME, outcome="failed", step=0, message=HOSTILE + "\ud800")
    assert main(["report", "job", "--store", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "failed" in shown and "gpj.exe" in shown and not RAW.search(shown)
