"""A line that a rank printed is never lost and never doubled, whoever dies."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ebbflow.training.launch.logs
from ebbflow.core.config.schema import RunConfig, SurvivalConfig
from ebbflow.core.errors import StoreError
from ebbflow.core.layout import job_prefix
from ebbflow.core.rank_logs import LONGEST_LINE_BYTES, escape_controls, read_logs, split_lines
from ebbflow.core.store import Store
from ebbflow.training.launch.logs import LogUploader, RankOutput, TerminalEcho
from tests.support.flow import wait_until
from tests.support.rank_logs import beat, rank_log, texts, write

ROOT = Path(__file__).resolve().parents[2]

FOLLOWER = """
import sys
from pathlib import Path
from ebbflow.training.launch.heartbeat import HeartbeatReading
from ebbflow.training.launch.logs import RankLog
log = RankLog(Path(sys.argv[1]), job="job", generation=1, node=0, rank=0, limit_bytes=2**26)
while True:
    log.follow(HeartbeatReading(1, 3, "forward", 0.0))
"""

MIB = 2**20


class FlakyStore:
    """A store that fails, or keeps what it is given and then says that it failed, as often as it is
    told to.
    """

    def __init__(self, store: Store, *, lost_answers: int) -> None:
        self._store = store
        self._lost_answers = lost_answers
        self.uri = store.uri

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data)
        if self._lost_answers > 0:
            self._lost_answers -= 1
            raise StoreError("no answer")


@given(
    pieces=st.lists(
        st.binary(max_size=200) | st.just(b"\n") | st.text(max_size=50).map(str.encode), max_size=30
    ),
    long=st.integers(0, 3 * LONGEST_LINE_BYTES),
    cuts=st.lists(st.integers(0, 300), max_size=10),
)
def test_whatever_comes_in_whatever_pieces_every_byte_is_in_exactly_one_line(
    pieces, long, cuts
) -> None:
    data = b"".join(pieces) + "é".encode() * (long // 2) + b"\n" + b"".join(pieces)
    read = 0
    taken = []
    for end in [*sorted({min(cut * 100, len(data)) for cut in cuts}), len(data)]:
        for piece, more in split_lines(data[read:end], at_end=False):
            assert more != piece.endswith(b"\n")
            taken.append(piece)
            read += len(piece)
    taken += [piece for piece, _ in split_lines(data[read:], at_end=True)]
    assert b"".join(taken) == data
    assert all(piece.count(b"\n") <= 1 and len(piece) <= LONGEST_LINE_BYTES + 1 for piece in taken)


def test_a_long_line_is_cut_between_characters() -> None:
    data = ("·" * LONGEST_LINE_BYTES).encode() + b"\n"
    pieces = split_lines(data, at_end=False)
    assert len(pieces) > 2 and "".join(piece.decode() for piece, _ in pieces) == data.decode()


def test_a_log_line_has_its_position_and_partial_lines_wait(tmp_path: Path) -> None:
    log, raw = rank_log(tmp_path, 3)
    write(raw, b"one\ntwo \xc2")
    assert len(log.follow(beat(5))) == 1
    write(raw, b"\xb7 half\nno line feed")
    log.follow(beat(6, "backward"))
    log.finish(beat(7))
    lines = read_logs([tmp_path], []).lines
    assert [(line.text, line.step) for line in lines] == [
        ("one", 5),
        ("two · half", 6),
        ("no line feed", 7),
    ]
    record = json.loads((raw.parent / "rank-3.jsonl").read_text().splitlines()[1])
    place = {
        "job": "job",
        "generation": 1,
        "node": 1,
        "rank": 3,
        "step": 6,
        "phase": "backward",
        "start": 4,
        "end": 16,
    }
    assert record.items() >= place.items() and set(record) == {*place, "t", "text"}


def test_lines_of_a_killed_agent_are_read_from_the_raw_log(tmp_path: Path) -> None:
    log, raw = rank_log(tmp_path)
    write(raw, b"first\nsecond\n")
    log.follow(beat(1))
    write(raw, b"third\nlast words")
    records = raw.with_suffix(".jsonl")
    whole = records.read_bytes()
    records.write_bytes(whole[:-20])  # torn in mid-write
    logs = read_logs([tmp_path], [])
    assert [line.text for line in logs.lines] == [
        "first",
        "second",
        "third",
        "last words",
    ] and not logs.notices
    assert [line.step for line in logs.lines] == [1, None, None, None]
    records.unlink()
    raw.with_suffix(".spec.json").write_text(json.dumps({"job": "job", "generation": 1, "node": 0}))
    assert texts(tmp_path) == ["first", "second", "third", "last words"]


@pytest.mark.parametrize("records_before_the_kill", [1, 500, 3000])
@pytest.mark.slow
def test_an_agent_killed_in_the_midst_of_writing_loses_and_doubles_nothing(
    records_before_the_kill: int, tmp_path: Path
) -> None:
    _, raw = rank_log(tmp_path)
    records = raw.with_suffix(".jsonl")
    printed = []
    with subprocess.Popen([sys.executable, "-c", FOLLOWER, str(raw)], cwd=ROOT) as agent:
        limit = time.monotonic() + 60
        while not records.exists() or records.read_bytes().count(b"\n") < records_before_the_kill:
            assert agent.poll() is None and time.monotonic() < limit, "the follower wrote nothing"
            more = [
                f"line {len(printed) + number} · {'x' * (number * 37 % 900)}"
                for number in range(100)
            ]
            write(raw, "\n".join([*more, ""]).encode())
            printed += more
            time.sleep(0.01)
        agent.kill()
    write(raw, b"the last words")
    logs = read_logs([tmp_path], [])
    assert [line.text for line in logs.lines] == [*printed, "the last words"] and not logs.notices
    assert any(line.step == 3 for line in logs.lines) and logs.lines[-1].step is None


def test_a_disk_that_was_full_costs_no_line_once_there_is_room(tmp_path: Path) -> None:
    log, raw = rank_log(tmp_path)
    records = raw.with_suffix(".jsonl")
    records.mkdir()  # cannot be written to
    write(raw, b"first\n")
    with pytest.raises(OSError):
        log.follow(beat(1))
    records.rmdir()
    records.write_bytes(b'{"t":"20')  # what the failed write got to the disk
    write(raw, b"second\n")
    log.finish(beat(2))
    logs = read_logs([tmp_path], [])
    assert [line.text for line in logs.lines] == ["first", "second"]
    [notice] = logs.notices
    assert notice.startswith(f"{records}:1: a damaged line, passed over")


def test_a_rank_that_floods_its_log_keeps_head_and_tail(tmp_path: Path) -> None:
    log, raw = rank_log(tmp_path, limit_bytes=1000, tail_bytes=100)
    write(raw, b"".join(b"line %04d\n" % number for number in range(1000)))
    log.follow(beat(1))
    log.finish(beat(9))
    found = texts(tmp_path)
    assert found[0] == "line 0000" and found[-1] == "line 0999" and len(found) < 130
    [gap] = [text for text in found if text.startswith("[")]
    kept = sum(len(text) + 1 for text in found if text != gap)
    assert gap == (
        f"[{10_000 - kept} bytes are left out here: the rank printed more than "
        "survival.rank_log_mib keeps]"
    )


@pytest.mark.parametrize("agent_dies", [False, True])
def test_a_raw_log_keeps_its_size_limit_and_reports_omitted_bytes(
    agent_dies: bool, tmp_path: Path
) -> None:
    log, raw = rank_log(tmp_path, limit_bytes=MIB)
    with open(raw, "ab", buffering=0) as rank:  # writes on through the same descriptor
        for number in range(64):
            rank.write(
                b"".join(
                    b"line %06d %s\n" % (number * 700 + offset, b"x" * 83) for offset in range(700)
                )
            )
            log.free_middle()
            log.follow(beat(number))
            assert raw.stat().st_blocks * 512 <= MIB + 700 * 96 + 8192
        rank.write(b"the last words")
    if not agent_dies:
        log.finish(beat(99))
    size = raw.stat().st_size
    assert size > 4 * MIB and raw.with_suffix(".jsonl").stat().st_size <= 4 * MIB
    logs = read_logs([tmp_path], [])
    found = [line.text for line in logs.lines]
    assert (
        found[0].startswith("line 000000 ") and found[-1] == "the last words" and not logs.notices
    )
    [gap] = [line for line in logs.lines if line.dropped]
    assert gap.text == (
        f"[{gap.dropped} bytes are left out here: the rank printed more than "
        "survival.rank_log_mib keeps]"
    )
    assert gap.dropped > 2 * MIB
    assert sum(line.end - line.start for line in logs.lines) + gap.dropped == size
    assert not any("\0" in text for text in found)
    content = raw.read_bytes()
    for line in logs.lines:
        if line is not gap:
            assert content[line.start : line.end].decode().removesuffix("\n") == line.text, (
                "offsets stay valid"
            )


def test_the_records_of_empty_lines_stay_within_the_limit_too(tmp_path: Path) -> None:
    log, raw = rank_log(tmp_path, limit_bytes=MIB // 8)
    write(raw, b"\n" * MIB)
    shipped = sum(len(record) + 1 for record in [*log.follow(beat(1)), *log.finish(beat(2))])
    assert shipped == raw.with_suffix(".jsonl").stat().st_size <= 4 * MIB // 8
    lines = read_logs([tmp_path], []).lines
    assert sum(line.end - line.start + line.dropped for line in lines) == MIB and len(lines) > 1000


def test_a_flood_of_lines_keeps_no_agent_from_answering_the_others(tmp_path: Path) -> None:
    log, raw = rank_log(tmp_path, limit_bytes=64 * MIB)
    write(raw, b"\n" * (8 * MIB))
    answers = [time.process_time()]

    def answer() -> None:
        answers.append(time.process_time())

    log.follow(beat(1))
    answer()
    log.finish(beat(2), until=time.monotonic() + 0.5, meanwhile=answer)
    echo = TerminalEcho(SimpleNamespace(workers=[SimpleNamespace(rank=0, log_path=raw)]))
    answer()
    echo.echo_new_lines()
    answer()
    gaps = [after - before for before, after in itertools.pairwise(answers)]
    assert max(gaps) < 2.0, "another agent waits 4 s at the smallest hang floor"
    lines = read_logs([tmp_path], []).lines
    assert sum(line.end - line.start + line.dropped for line in lines) == 8 * MIB
    [gap] = [line for line in lines if line.dropped]
    assert "printed faster than its agent reads; the raw log has them" in gap.text


@pytest.mark.slow
def test_a_file_system_without_hole_punching_is_reported_once(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(95, "Operation not supported")

    said: list[str] = []
    monkeypatch.setattr(ebbflow.training.launch.logs, "punch_hole", refuse)
    monkeypatch.setattr(ebbflow.training.launch.logs, "print_line", said.append)
    workers = [
        SimpleNamespace(rank=rank, log_path=tmp_path / f"rank-{rank}.log", beat=beat(1))
        for rank in (0, 1)
    ]
    for worker in workers:
        write(worker.log_path, b"line\n" * (MIB // 2))
    spec = SimpleNamespace(
        job="job",
        node=0,
        log_folder=str(tmp_path / "logs"),
        config=RunConfig(survival=SurvivalConfig(rank_log_mib=1)),
    )
    output = RankOutput(SimpleNamespace(workers=workers), spec, 1, Store.open(str(tmp_path)))
    output.follow()
    output.close(lambda: None)
    [warning] = [line for line in said if "WARNING" in line]
    assert (
        "raw logs exceed survival.rank_log_mib" in warning and "Operation not supported" in warning
    )


def test_a_colourful_progress_bar_is_shown_as_it_stood_last() -> None:
    assert (
        escape_controls("\x1b[31mred\x1b[0m and \x1b]0;title\x07plain\x07")
        == "red and \\u001b]0;title\\u0007plain\\u0007"
    )
    assert escape_controls("10%|#   |\r90%|### |\r\r\n") == "[1 overwritten] 90%|### |"


def test_segments_of_the_store_and_records_of_the_disk_are_one_log(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store")).sub(job_prefix("job"))
    said = []
    shipper = LogUploader(
        FlakyStore(store, lost_answers=2),
        generation=1,
        node=1,
        say=said.append,
        interval_seconds=0.01,
    )
    log, raw = rank_log(tmp_path / "disk", 2)
    for number in range(50):
        write(raw, b"line %d\n" % number)
        shipper.add(2, log.follow(beat(number)))
    shipper.close()
    expected = [f"line {number}" for number in range(50)]
    assert [line.text for line in read_logs([], [store]).lines] == expected
    assert [line.text for line in read_logs([tmp_path / "disk"], [store]).lines] == expected
    assert len(said) == 1 and "accepts no logs for now" in said[0]


def test_an_unavailable_store_is_reported_and_delays_no_log_line(tmp_path: Path) -> None:
    class Away:
        uri = "s3://away/jobs/job"

        def put(self, key: str, data: bytes) -> None:
            raise StoreError("refused")

    said: list[str] = []
    shipper = LogUploader(
        Away(), generation=1, node=0, say=said.append, interval_seconds=0.01, queue_bytes=100
    )
    shipper.add(0, [b"x" * 60, b"y" * 60, b"z" * 30])
    wait_until("a warning", lambda: said, timeout=60)
    shipper.close(deadline_seconds=0.1)
    assert (
        "retrying: refused" in said[0]
        and "3 lines did not reach s3://away/jobs/job/logs" in said[-1]
    )
