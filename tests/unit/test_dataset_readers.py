"""Datasets over files: each sample by its index, in this process and in workers, and one line for what is wrong."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from ebbflow.training.errors import DataError
from ebbflow.training.workload import Cursor
from ebbflow.workloads.datasets import SampleLoader
from ebbflow.workloads.readers import ImageFolder, ParquetRows, TarShards


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
    assert shards.fingerprint != TarShards(tmp_path / "shard-1.tar", lambda sample: sample).fingerprint
    numbers = TarShards(tmp_path, lambda sample: json.loads(sample["x.json"])["number"])
    loader = SampleLoader(numbers, default_collate, seed=1, batch_size=4, workers=2)
    read = [int(one) for step in range(3) for one in loader.load(Cursor(4 * step, 4))]
    assert sorted(read) == list(range(12)) and read != list(range(12))
    write_tar(tmp_path / "packed.tar", {"a.txt": b"a"}, "w:gz")
    with pytest.raises(DataError, match=r"packed\.tar: not an uncompressed tar file .*; fix: unpack \.gz shards"):
        TarShards(tmp_path, lambda sample: sample)


def test_images_are_numbered_by_the_names_of_their_folders(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for name, colour in {"dogs": 200, "cats": 10}.items():
        (tmp_path / name).mkdir()
        for number in range(2):
            image.new("L", (4, 4), colour + number).save(tmp_path / name / f"{number}.PNG", "PNG")
    (tmp_path / "notes.txt").write_text("not an image")
    folder = ImageFolder(tmp_path, lambda picture: torch.tensor(list(picture.tobytes())).view(4, 4, 3))
    assert folder.classes == ["cats", "dogs"] and len(folder) == 4
    picture, label = folder[3]
    assert label == 1 and picture.shape == (4, 4, 3) and int(picture[0, 0, 0]) == 201
    with pytest.raises(DataError, match=r"no file that ends in .jpg, .*; fix: name a folder"):
        ImageFolder(tmp_path / "nothing", lambda picture: picture)


def test_rows_of_parquet_files_are_found_by_index(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        with pytest.raises(DataError, match="pyarrow is not installed, which reads Parquet; fix: pip install pyarrow"):
            ParquetRows(tmp_path)
        pytest.skip("pyarrow is not installed; the message was tested")
    import pyarrow
    import pyarrow.parquet

    for part in range(2):
        table = pyarrow.table({"number": list(range(10 * part, 10 * part + 10)), "text": ["x"] * 10})
        pyarrow.parquet.write_table(table, tmp_path / f"{part}.parquet", row_group_size=4)
    rows = ParquetRows(tmp_path, ["number"], keep=2)
    assert len(rows) == 20 and [rows[index] for index in (0, 3, 4, 9, 10, 19)] == [
        {"number": number} for number in (0, 3, 4, 9, 10, 19)
    ]
    assert len(rows._kept) == 2
    loader = SampleLoader(rows, lambda found: [row["number"] for row in found], seed=1, batch_size=5, workers=2)
    read = [number for step in range(4) for number in loader.load(Cursor(5 * step, 5))]
    assert sorted(read) == list(range(20))
    assert rows.fingerprint != ParquetRows(tmp_path, ["text"]).fingerprint
