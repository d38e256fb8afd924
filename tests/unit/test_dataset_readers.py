"""Datasets over files: each sample by its index, in this process and in workers, and one line for
what is wrong.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import importlib.util
import io
import json
import lzma
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from ebbflow.core.store import Store
from ebbflow.training.errors import DataError
from ebbflow.training.workload import Cursor
from ebbflow.workloads.language.hugging_face import RowCounts
from ebbflow.workloads.readers.datasets import SampleLoader
from ebbflow.workloads.readers.files import (
    ImageFolder,
    MosaicShards,
    ParquetRows,
    TarShards,
    find_files,
)
from ebbflow.workloads.readers.rows import find_rows, read_rows
from tests.support.s3.fixture import FailingServer, failing_s3

__all__ = ["failing_s3"]  # a fixture

TEXTS = (".txt", ".md")
ROWS = [f"row {number}, höhe" for number in range(9)]
OBJECTS = [{"text": f"row {number} with a \u2028 line separator"} for number in range(5)]
LINES = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in OBJECTS).encode()
LIST = json.dumps(OBJECTS).encode()


def write_tar(path: Path, files: dict[str, bytes], mode: str = "w") -> None:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_samples_of_tar_shards_are_read_by_their_place(tmp_path: Path) -> None:
    for shard in range(3):
        files = {}
        for number in range(4):
            key = f"data/{4 * shard + number:04d}"
            files[f"{key}.x.json"] = json.dumps({"number": 4 * shard + number}).encode()
            files[f"{key}.cls"] = str(number % 2).encode()
        write_tar(tmp_path / f"shard-{shard}.tar", files)
    shards = TarShards(tmp_path / "shard-*.tar", lambda sample: sample)
    assert len(shards) == 12
    assert shards[7] == {"__key__": "data/0007", "x.json": b'{"number": 7}', "cls": b"1"}
    assert (
        shards.fingerprint != TarShards(tmp_path / "shard-1.tar", lambda sample: sample).fingerprint
    )
    numbers = TarShards(tmp_path, lambda sample: json.loads(sample["x.json"])["number"])
    loader = SampleLoader(numbers, default_collate, seed=1, batch_size=4, workers=2)
    read = []
    for step in range(3):
        for value in loader.load(Cursor(4 * step, 4)):
            read.append(int(value))
    assert sorted(read) == list(range(12)) and read != list(range(12))
    write_tar(tmp_path / "packed.tar", {"a.txt": b"a"}, "w:gz")
    with pytest.raises(
        DataError, match=r"packed\.tar: not an uncompressed tar file .*; fix: unpack \.gz shards"
    ):
        TarShards(tmp_path, lambda sample: sample)


def write_mds(
    folder: Path, samples: list[dict[str, bytes]], encodings: dict[str, str], per_shard: int
) -> None:
    """As MosaicML's MDSWriter documents its format, with an `int` of 8 bytes as the only column of
    a fixed size.
    """
    shards = []
    sizes = [8 if encoding == "int" else None for encoding in encodings.values()]
    for number, first in enumerate(range(0, len(samples), per_shard)):
        rows = samples[first : first + per_shard]
        made = []
        for row in rows:
            made.append(
                b"".join(
                    struct.pack("<I", len(row[name]))
                    for name, size in zip(encodings, sizes, strict=True)
                    if not size
                )
                + b"".join(row[name] for name in encodings)
            )
        config = json.dumps({"column_names": list(encodings)}).encode()
        start = 4 * (len(rows) + 2) + len(config)
        places = [start + sum(map(len, made[:count])) for count in range(len(made) + 1)]
        content = struct.pack(f"<{len(rows) + 2}I", len(rows), *places) + config + b"".join(made)
        (folder / f"shard.{number:05d}.mds").write_bytes(content)
        about = {
            "column_names": list(encodings),
            "column_encodings": list(encodings.values()),
            "column_sizes": sizes,
        }
        about |= {
            "samples": len(rows),
            "compression": None,
            "zip_data": None,
            "version": 2,
            "format": "mds",
        }
        shards.append(
            about | {"raw_data": {"basename": f"shard.{number:05d}.mds", "bytes": len(content)}}
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def test_samples_of_mosaic_shards_are_read_by_their_place(tmp_path: Path) -> None:
    encodings = {
        "number": "int",
        "text": "str",
        "pixels": "ndarray:uint8:2,2",
        "free": "ndarray",
        "half": "float16",
    }
    samples = [
        {
            "number": struct.pack("<q", number),
            "text": f"row {number}".encode() * number,
            "pixels": bytes([number] * 4),
            "free": bytes([34, (2 << 2) | 1]) + struct.pack("<2H2f", 1, 2, number, 0.5),
            "half": struct.pack("<e", -number),
        }
        for number in range(7)
    ]
    write_mds(tmp_path, samples, encodings, per_shard=3)
    shards = MosaicShards(tmp_path)
    assert len(shards) == 7 and [shards[index]["number"] for index in range(7)] == list(range(7))
    found = shards[4]
    assert found["text"] == "row 4" * 4 and found["pixels"].tolist() == [[4, 4], [4, 4]]
    assert found["free"].tolist() == [[4.0, 0.5]] and found["half"] == -4
    sound = (tmp_path / "shard.00001.mds").read_bytes()
    for damaged in (b"\xff" * len(sound), sound[:8] + b"\x01" + sound[9:]):
        (tmp_path / "shard.00001.mds").write_bytes(damaged)
        with pytest.raises(DataError, match=r"shard\.00001\.mds: its table of samples is damaged"):
            MosaicShards(tmp_path)[3]
    (tmp_path / "shard.00001.mds").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"shard\.00001\.mds: 0 bytes, \d+ bytes in index.json; fix: copy it again"
    ):
        MosaicShards(tmp_path)
    write_mds(tmp_path, samples[:1], {**encodings, "text": "pkl"}, per_shard=3)
    with pytest.raises(
        DataError, match="column text is encoded as pkl, which is not read here; fix:"
    ):
        MosaicShards(tmp_path)


def test_datasets_in_a_bucket_are_those_of_the_folder_also_in_workers(
    tmp_path: Path, failing_s3: FailingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = failing_s3
    bucket = failing_s3.new_bucket()
    server.use(monkeypatch)
    for shard in range(2):
        files = {
            f"{4 * shard + number:04d}.txt": bytes([4 * shard + number]) * 700
            for number in range(4)
        }
        write_tar(tmp_path / f"shard-{shard}.tar", files)
    rows = [{"number": struct.pack("<q", number)} for number in range(8)]
    write_mds(tmp_path, rows, {"number": "int"}, per_shard=5)
    store = Store.open(f"s3://{bucket}/data")
    for path in tmp_path.iterdir():
        store.put(f"own/{path.name}", path.read_bytes())

    def numbers(path: str) -> tuple[list[int], str]:
        tar = TarShards(f"{path}/shard-*.tar", lambda sample: sample["txt"][0])
        loader = SampleLoader(tar, default_collate, seed=1, batch_size=4, workers=2)
        read = []
        for step in range(2):
            read += [int(value) for value in loader.load(Cursor(4 * step, 4))]
        mosaic = SampleLoader(MosaicShards(path), default_collate, seed=1, batch_size=4, workers=1)
        read += [
            int(value) for step in range(2) for value in mosaic.load(Cursor(4 * step, 4))["number"]
        ]
        return read, tar.fingerprint + MosaicShards(path).fingerprint

    assert numbers(f"s3://{bucket}/data/own") == numbers(str(tmp_path))
    assert len(TarShards(f"s3://{bucket}/data/own/shard-1.tar", lambda sample: sample)) == 4
    with pytest.raises(DataError, match=r"s3://.*/data/none: no file that ends in \.parquet; fix:"):
        find_files(f"s3://{bucket}/data/none", (".parquet",))


def test_images_are_numbered_by_the_names_of_their_folders(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for name, colour in {"dogs": 200, "cats": 10}.items():
        (tmp_path / name).mkdir()
        for number in range(2):
            image.new("L", (4, 4), colour + number).save(tmp_path / name / f"{number}.PNG", "PNG")
    (tmp_path / "notes.txt").write_text("not an image")
    folder = ImageFolder(
        tmp_path, lambda picture: torch.tensor(list(picture.tobytes())).view(4, 4, 3)
    )
    assert folder.classes == ["cats", "dogs"] and len(folder) == 4
    picture, label = folder[3]
    assert label == 1 and picture.shape == (4, 4, 3) and int(picture[0, 0, 0]) == 201
    with pytest.raises(DataError, match=r"no file that ends in .jpg, .*; fix: name a folder"):
        ImageFolder(tmp_path / "nothing", lambda picture: picture)


def test_rows_of_parquet_files_are_found_by_index(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        with pytest.raises(
            DataError,
            match="pyarrow is not installed, which reads Parquet; fix: pip install pyarrow",
        ):
            ParquetRows(tmp_path)
        pytest.skip("pyarrow is not installed; the message was tested")
    import pyarrow
    import pyarrow.parquet

    for part in range(2):
        table = pyarrow.table(
            {"number": list(range(10 * part, 10 * part + 10)), "text": ["x"] * 10}
        )
        pyarrow.parquet.write_table(table, tmp_path / f"{part}.parquet", row_group_size=4)
    rows = ParquetRows(tmp_path, ["number"], keep=2)
    assert len(rows) == 20 and [rows[index] for index in (0, 3, 4, 9, 10, 19)] == [
        {"number": number} for number in (0, 3, 4, 9, 10, 19)
    ]
    assert len(rows._kept) == 2
    loader = SampleLoader(
        rows, lambda found: [row["number"] for row in found], seed=1, batch_size=5, workers=2
    )
    read = []
    for step in range(4):
        read += loader.load(Cursor(5 * step, 5))
    assert sorted(read) == list(range(20))
    assert rows.fingerprint != ParquetRows(tmp_path, ["text"]).fingerprint
    pyarrow.parquet.write_table(pyarrow.table({"other": [1]}), tmp_path / "2.parquet")
    with pytest.raises(
        DataError, match=r"2\.parquet: there is no column number; fix: one of other"
    ):
        ParquetRows(tmp_path, ["number"])
    (tmp_path / "2.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"2\.parquet: .*0 bytes; fix: copy it again"):
        ParquetRows(tmp_path, ["number"])


def write_rows(path: Path, texts: Sequence[str]) -> None:
    """Write rows in the format that the path's ending names; without one as `save_to_disk` writes
    it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"text": text, "n": 1}) for text in texts))
    elif path.suffix == ".json":
        path.write_text(json.dumps([{"text": text} for text in texts], indent=1))
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        table = pyarrow.table({"text": texts, "n": [1] * len(texts)})
        if path.suffix == ".parquet":
            importlib.import_module("pyarrow.parquet").write_table(table, path)
            return
        if path.suffix:
            file = path
        else:
            file = path / "data-00000-of-00001.arrow"
        file.parent.mkdir(exist_ok=True)
        if path.suffix:
            make: Any = pyarrow.ipc.new_file
        else:
            make = pyarrow.ipc.new_stream
        with make(str(file), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        if not path.suffix:
            (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": file.name}]}))
            (path / "dataset_info.json").write_text("{}")
            (path / "cache-1f.arrow").write_bytes(b"of a call of map")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow", ""])
def test_rows_of_a_file_a_folder_and_a_glob_are_read_here_and_in_a_bucket(
    suffix: str, tmp_path: Path, failing_s3: FailingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_s3.use(monkeypatch)
    bucket = failing_s3.new_bucket()
    write_rows(tmp_path / f"one{suffix}", ROWS)
    for part in range(3):
        write_rows(
            tmp_path / "many.v2" / f"sub {part % 2}" / f"{part}{suffix}",
            ROWS[3 * part : 3 * part + 3],
        )
    (tmp_path / "many.v2" / "README.md").write_text("about the rows")
    for hidden in (".cache/0", ".0"):
        write_rows(tmp_path / "many.v2" / f"{hidden}{suffix or '.jsonl'}", ["hidden"])
    for path in tmp_path.rglob("*.*"):
        if path.is_file():
            Store.open(f"s3://{bucket}").put(
                f"in/{path.relative_to(tmp_path).as_posix()}", path.read_bytes()
            )
    if not suffix:
        matched = "0/*.arrow"
    else:
        matched = f"?{suffix}"
    for root in (str(tmp_path), f"s3://{bucket}/in"):
        for name in (
            f"one{suffix}",
            "many.v2",
            f"many.v2/*/{matched}",
            f"many.v2/**/{matched}",
            f"many.v2/**/**/{matched}",
        ):
            found = [
                placed.row["text"]
                for placed in read_rows(find_rows(f"{root}/{name}", TEXTS), "text")
            ]
            if name.endswith("0/*.arrow"):
                wanted = ROWS[:3]
            else:
                wanted = ROWS
            assert sorted(found) == wanted, (root, name)
    first = next(read_rows(find_rows(f"s3://{bucket}/in/one{suffix}", TEXTS), "nothing"))
    assert (
        {"text"} <= first.row.keys()
        and str(first).startswith(f"s3://{bucket}/in/one")
        and ", row 1" in str(first)
    )


def test_of_several_splits_the_one_to_train_on_is_read(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_rows(tmp_path / "hub" / f"{split}-00000-of-00001.jsonl", [split])
        write_rows(tmp_path / "saved" / split, [split])
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for name in ("hub", "saved"):
        assert [
            placed.row["text"] for placed in read_rows(find_rows(tmp_path / name, TEXTS), "text")
        ] == ["train"]
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["test"]}))
    with pytest.raises(
        DataError, match="saved has the splits test; fix: name the folder of one of them"
    ):
        find_rows(tmp_path / "saved", TEXTS)


def test_a_folder_of_text_has_no_rows(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "about.json"):
        (tmp_path / name).write_text("{}")
    assert (
        find_rows(tmp_path, TEXTS)
        == find_rows(tmp_path / "a.txt", TEXTS)
        == find_rows(f"{tmp_path}/*.m?", ())
        == []
    )


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (
            {"a.jsonl": b'{"text": "x"}', "b.txt": b"x"},
            r"files that end in \.jsonl, \.txt; fix: .*/\*\*/\*\.jsonl",
        ),
        (
            {"a.jsonl": b'{"text": "x"}', "b.parquet": b""},
            r"end in \.jsonl, \.parquet; fix: name those of one kind",
        ),
        ({"a.jsonl": b"", "b.jsonl": b"\n \n"}, r"a\.jsonl and 1 more files have no rows; fix"),
        (
            {"a.jsonl": b"", "b.jsonl": b'{"text": "x"}\n[1]'},
            r"b\.jsonl, row 2: a list; fix: one JSON object",
        ),
        (
            {"a.jsonl": b'{"text": "x"}\n{"text": "\xff"}'},
            r"a\.jsonl:2: not UTF-8 \(.*; fix: one JSON object per line",
        ),
        ({"a.json": b'[{"text": "x"}'}, r"a\.json: not JSON \(.*; fix: a list of objects, or one"),
        ({"a.parquet": b""}, r"a\.parquet: .*; fix: copy it again"),
        ({"a.parquet": b"PAR1 cut"}, r"a\.parquet: .*; fix: copy it again"),
        ({"a.arrow": b""}, r"a\.arrow: .*; fix: copy it again"),
        ({"a.arrow": b"ARROW1\0\0 cut"}, r"a\.arrow: .*; fix: copy it again"),
        (
            {"state.json": b'{"_data_files": [{"filename": "d.arrow"}]}'},
            r"d\.arrow is missing, but .*state",
        ),
        ({"state.json": b"{", "d.arrow": b""}, r"state\.json: not JSON"),
        (
            {"state.json": b'{"_indices_files": [{}]}', "d.arrow": b""},
            r"selection of rows; fix: flatten_indices\(\)",
        ),
        (
            {"a.csv": b"text"},
            r"no file that ends in \.jsonl, \.parquet, \.arrow, \.json, \.ndjson, \.txt, \.md \(.*JSON Lines",
        ),
    ],
)
def test_a_dataset_without_rows_is_one_line_with_the_fix(
    files: dict[str, bytes], problem: str, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem) as caught:
        list(read_rows(find_rows(tmp_path, TEXTS), "text"))
    assert "\n" not in str(caught.value)


def compress_zstd(content: bytes) -> bytes:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is an option")
    return arrow.compress(content, codec="zstd", asbytes=True)


COMPRESS = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": compress_zstd,
}


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize(
    ("name", "content"), [("rows.jsonl", LINES), ("rows.ndjson", LINES), ("rows.json", LIST)]
)
def test_compressed_rows_are_read(tmp_path: Path, ending: str, name: str, content: bytes) -> None:
    path = tmp_path / f"{name}{ending}"
    path.write_bytes(COMPRESS[ending](content))
    for place in (path, tmp_path):
        assert [placed.row for placed in read_rows(find_rows(place, (".txt",)))] == OBJECTS


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_a_damaged_compressed_file_is_one_line(tmp_path: Path, ending: str, damage: str) -> None:
    content = COMPRESS[ending](LINES)
    path = tmp_path / f"rows.jsonl{ending}"
    path.write_bytes(content[:-9] if damage == "cut" else b"no archive")
    with pytest.raises(DataError, match="fix:") as refused:
        list(read_rows(find_rows(path, ())))
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_compressed_and_plain_rows_of_one_kind_are_one_data_set(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.ndjson.gz").write_bytes(gzip.compress(LINES))
    assert len(list(read_rows(find_rows(tmp_path, ())))) == 2 * len(OBJECTS)


def test_a_folder_of_csv_files_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\na\n")
    with pytest.raises(DataError, match=r"write it as JSON Lines \(pandas"):
        find_rows(tmp_path, (".txt",))


def test_rows_without_text_and_with_half_characters_are_counted() -> None:
    counts = RowCounts()
    texts = [counts.repair(text) for text in ("a", " ", "half \ud83d", "")]
    assert texts == ["a", " ", "half \ufffd", ""]
    assert counts == RowCounts(rows=4, empty_rows=2, repaired_rows=1)
