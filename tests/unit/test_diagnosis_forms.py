"""Logs in the forms in which lost machines, log shippers and CI systems leave them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbflow.diagnose.judging import Diagnosis, diagnose_files
from ebbflow.diagnose.reading import candidates, scan_logs
from ebbflow.infra.__main__ import main

LINES = [
    "step 900 loss 2.31",
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 12, in <module>',
    "    torch.save(state, path)",
    "OSError: [Errno 28] No space left on device: '/scratch/a.pt'",
    "torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank: 0",
]
TEXT = ("\n".join(LINES) + "\n").encode()
LONG = b"".join(b"step %d of the run is done\n" % step for step in range(50_000)) + TEXT


def diagnose(path: Path, data: bytes) -> Diagnosis:
    path.write_bytes(data)
    return diagnose_files([path])


def zipped(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


def tarred(members: dict[str, bytes], mode: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("log.gz", gzip.compress(TEXT)),
        ("named.log", gzip.compress(b"step 1\n") + gzip.compress(TEXT) + b"\0" * 512),
        ("log.xz", lzma.compress(TEXT)),
        ("log.bz2", bz2.compress(b"step 1\n") + bz2.compress(TEXT)),
        ("run.zip", zipped({"notes/": b"", "logs/0_train.txt": TEXT})),
        ("nested.zip", zipped({"rank3.log.gz": gzip.compress(TEXT)})),
        ("bundle.tar", tarred({"a.log": b"step 1\n", "b.log": TEXT}, "w")),
        ("bundle.tar.gz", tarred({"a.log": b"step 1\n", "b.log": TEXT}, "w:gz")),
        ("bundle.tar.xz", tarred({"b.log": TEXT}, "w:xz")),
        ("nul.log", b"\0" * 300_000 + TEXT),
        ("power.log", LONG[:5000] + b"\0" * 100_000 + b"\n" + TEXT),
        ("some.log", b"\0" * 4096 + TEXT),
    ],
)
def test_compressed_and_holed_logs_are_read(name: str, data: bytes, tmp_path: Path) -> None:
    diagnosis = diagnose(tmp_path / name, data)
    assert diagnosis.findings[0].rule.id == "H10"
    assert not any(scan.refused for scan in diagnosis.scans)


def test_zstd_is_read_if_a_library_for_it_is_installed(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    sink = io.BytesIO()
    with arrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(TEXT)
        stream.flush()
        data = b""
    stream = arrow.BufferOutputStream()
    with arrow.CompressedOutputStream(stream, "zstd") as packed:
        packed.write(TEXT)
    data = stream.getvalue().to_pybytes()
    assert diagnose(tmp_path / "log.zst", data).findings[0].rule.id == "H10"


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_a_cut_file_is_read_up_to_its_cut_and_the_cut_is_named(
    pack: Callable[[bytes], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = TEXT + LONG[:2_000_000] + TEXT
    (tmp_path / "cut.log").write_bytes(pack(late)[:-9])
    assert main(["diagnose", "--json", str(tmp_path / "cut.log")]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["findings"][0]["symptom"] == "H10"
    assert "then: cut" in document["files"][0]["gaps"] and "then: cut" in shown.err


def test_a_gzip_that_is_cut_in_its_last_block_yields_its_last_lines(tmp_path: Path) -> None:
    diagnosis = diagnose(tmp_path / "cut.gz", gzip.compress(LONG)[:-9])
    assert diagnosis.findings[0].rule.id == "H10"
    assert diagnosis.scans[0].unread is not None


def test_nul_bytes_are_counted(tmp_path: Path) -> None:
    assert diagnose(tmp_path / "log", b"\0" * 200_000 + TEXT).scans[0].nul_bytes == 200_000
    hole = tmp_path / "hole.log"
    with open(hole, "wb") as log:
        log.seek(3 << 30)
        log.write(TEXT)
    began = time.process_time()
    assert diagnose_files([hole]).findings[0].rule.id == "H10"
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("form", "rank"),
    [
        ("2026-11-28T10:00:07.1234567Z ##[error]{}", None),
        ("##vso[task.logissue type=error;]{}", None),
        ("::error file=train.py,line=3::{}", None),
        ("│ {:<110} │", None),
        ("[1,3]<stderr>:{}", 3),
        ("[1,mpirank:5,algo-2]<stderr>:{}", 5),
        ("[trainer3]:{}", 3),
        ("[trainer0|2]:{}", 0),
        ("[kubeflow][worker-1] {}", 1),
    ],
)
def test_prefixes_of_launchers_and_ci_systems_are_read(
    form: str, rank: int | None, tmp_path: Path
) -> None:
    text = "\n".join(form.format(line) for line in LINES)
    root = diagnose(tmp_path / "log", text.encode()).findings[0]
    assert root.rule.id == "H10"
    assert root.ranks == (() if rank is None else (rank,))


def test_a_journal_with_messages_as_bytes_is_read(tmp_path: Path) -> None:
    for space in ("", " "):
        records = []
        for line in LINES:
            message = ",".join(map(str, f"\x1b[31m{line}\x1b[0m".encode()))
            records.append(f'{{"MESSAGE"{space}:{space}[{message}],"_PID":"812"}}')
        diagnosis = diagnose(tmp_path / "log", "\n".join(records).encode())
        assert diagnosis.findings[0].rule.id == "H10"


def test_worker_0_is_rank_1_beside_a_master(tmp_path: Path) -> None:
    killed = "RuntimeError: DataLoader worker (pid 44) is killed by signal: Killed."
    merged = f"[pod/job-master-0/pytorch] step 5\n[pod/job-worker-0/pytorch] {killed}\n"
    assert diagnose(tmp_path / "log", merged.encode()).findings[0].ranks == (1,)
    alone = f"[pod/job-worker-0/pytorch] {killed}\n"
    assert diagnose(tmp_path / "log", alone.encode()).findings[0].ranks == (0,)
    pods = tmp_path / "pods"
    pods.mkdir()
    (pods / "job-master-0.log").write_text("step 5\n")
    (pods / "job-worker-0.log").write_text(killed)
    assert diagnose_files(sorted(pods.iterdir())).findings[0].ranks == (1,)


def test_what_is_no_log_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = {
        "cut.zip": zipped({"a.log": TEXT})[:-30],
        "key.zip": zipped({"a.bin": os.urandom(5000)}),
        "noise": os.urandom(5000),
        "cut.xz": lzma.compress(TEXT)[:20],
    }
    for name, data in damaged.items():
        (tmp_path / name).write_bytes(data)
        assert main(["diagnose", str(tmp_path / name)]) == 1, name
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and name in lines[0], lines


def test_a_log_that_grows_while_it_is_read_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(TEXT)

    class Growing(type(path)):  # type: ignore[misc]
        """A path whose file grows with each look at it."""

        def is_file(self, **options: bool) -> bool:
            with open(path, "ab") as log:
                log.write(b"step\n" * 100)
            return super().is_file(**options)

    assert diagnose_files([Growing(path)]).scans[0].lines < 1000


def test_of_many_files_few_equal_lines_are_read(tmp_path: Path) -> None:
    """So 10,000 files take seconds; the failure is found wherever it is."""
    steps = "".join(f"step {step} loss {2 - step / 1000:.3f}\n" for step in range(600))
    (tmp_path / "rank_7.log").write_bytes(steps.encode() + TEXT)
    found = []
    for files in (1, 10_000):
        for log in scan_logs(tmp_path / "rank_7.log"):
            found.append(list(candidates(log, (b"loss", b"errno"), files=files)))
    of_one, of_many = found
    assert len(of_one) > 500 and len(of_many) < 20
    assert of_many[-1].text == of_one[-1].text == LINES[4]
