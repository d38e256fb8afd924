"""Point clouds to train on, which are synthetic or packed from a folder of files into the store.

A folder has a CSV index with the columns `split`, `category` and `path`, and for completion perhaps
`partial`, the file with the known part of the cloud. Files are `.npy`, `.npz` or `.ply`.

<store>/clouds/<fingerprint>/train-0000.bin …   float32 coordinates `[points, 3]`, one cloud after the other
                             clouds.json        written last: if it exists, the data are complete
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ebbflow.core.errors import ObjectNotFound
from ebbflow.core.json_values import JsonObject
from ebbflow.core.store import Store
from ebbflow.training.data.tokens import download_shard
from ebbflow.training.errors import DataError

DESCRIPTION = "clouds.json"
COLUMNS = ("split", "category", "path")
SHAPES = ("sphere", "box", "torus", "cone")
PARTIAL = "partial"
_VERSION = 2
_SHARD_BYTES = 256 * 2**20
_NAMED = 3  # bad files that a message names

_PLY_TYPES = {
    **{
        "char": "i1",
        "int8": "i1",
        "uchar": "u1",
        "uint8": "u1",
        "short": "i2",
        "int16": "i2",
        "ushort": "u2",
    },
    **{
        "uint16": "u2",
        "int": "i4",
        "int32": "i4",
        "uint": "u4",
        "uint32": "u4",
        "float": "f4",
        "float32": "f4",
    },
    **{"double": "f8", "float64": "f8"},
}


class BadCloud(Exception):
    """Error: a file has no usable point cloud."""


@dataclass(frozen=True, kw_only=True)
class IndexRow:
    split: str
    category: str
    path: Path
    partial: Path | None
    line: int

    @property
    def files(self) -> list[Path]:
        if self.partial is None:
            return [self.path]
        return [self.path, self.partial]


class PackedClouds:
    """Memory-mapped clouds of one split, which `pack_folder` wrote.

    Raises DataError if they are incomplete.
    """

    def __init__(
        self, store: Store, fingerprint: str, split: str, alive: Callable[[], object] = lambda: None
    ) -> None:
        packed = store.sub(f"clouds/{fingerprint}")
        try:
            about = json.loads(packed.get(DESCRIPTION))["splits"][split]
        except (ObjectNotFound, ValueError, KeyError) as error:
            raise DataError(
                f"{packed.uri} holds no complete clouds: {error}; fix: prepare the data again"
            ) from error
        self.sizes = about["sizes"]
        self.categories = about["categories"]
        self.paths = about["paths"]
        self._places: list[tuple[int, int]] = []
        self._shards = []
        for shard in about["shards"]:
            cache = Path(tempfile.gettempdir()) / f"ebbflow-clouds-{os.getuid()}"
            path = packed.local_path(shard["key"])
            path = path or download_shard(
                packed, shard["key"], shard["sha256"], shard["bytes"], cache, alive
            )
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                raise DataError(
                    f"{path} is not the {shard['bytes']} bytes of {DESCRIPTION}; fix: prepare again"
                )
            start = 0
            for size in self.sizes[len(self._places) : len(self._places) + shard["clouds"]]:
                self._places.append((len(self._shards), start))
                start += size
            self._shards.append(np.asarray(np.memmap(path, dtype="<f4", mode="r")).reshape(-1, 3))

    def __len__(self) -> int:
        return len(self.sizes)

    def cloud(self, number: int) -> tuple[Tensor, int]:
        shard, start = self._places[number]
        points = self._shards[shard][start : start + self.sizes[number]]
        return torch.from_numpy(points.astype(np.float32)), self.categories[number]


def seeded(*parts: object) -> torch.Generator:
    """Return a random generator whose seed depends only on `parts`."""
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def synthetic_cloud(number: int, points: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Draw points `[points, 3]` on the surface of synthetic shape `number`; return them and its
    category.

    Proportions and orientation about the vertical axis depend on `number` alone, the points on
    `generator` too.
    """
    kind = number % len(SHAPES)
    size = 0.6 + 0.8 * torch.rand(3, generator=seeded("shape", number))
    turn = 2 * math.pi * float(torch.rand((), generator=seeded("turn", number)))
    u, v, side = torch.rand(3, points, generator=generator)
    around = 2 * math.pi * u
    if SHAPES[kind] == "sphere":
        z = 2 * v - 1
        ring = (1 - z.square()).clamp(min=0).sqrt()
        cloud = torch.stack([ring * around.cos(), ring * around.sin(), z], dim=1)
    elif SHAPES[kind] == "box":
        face = (side * 3).long().clamp(max=2)
        sign = torch.where((side * 6).long() % 2 == 0, -1.0, 1.0)
        plane = torch.stack([sign, 2 * u - 1, 2 * v - 1], dim=1)
        cloud = plane.gather(1, (torch.arange(3)[None] - face[:, None]) % 3)
    elif SHAPES[kind] == "torus":
        tube = 0.4
        across = 2 * math.pi * v
        ring = 1 + tube * across.cos()
        cloud = torch.stack([ring * around.cos(), ring * around.sin(), tube * across.sin()], dim=1)
    else:
        height = v.sqrt()  # evenly spread over the mantle
        cloud = torch.stack([height * around.cos(), height * around.sin(), 1 - 2 * height], dim=1)
    cloud = cloud * size
    cos = math.cos(turn)
    sin = math.sin(turn)
    return cloud @ torch.tensor([[cos, sin, 0.0], [-sin, cos, 0.0], [0.0, 0.0, 1.0]]), kind


def normalise(cloud: Tensor, like: Tensor) -> Tensor:
    """Move and scale `cloud` by the transformation that normalises `like`.

    It moves the mean of `like` to the origin, and scales its mean square coordinate to 1.
    """
    middle = like.mean(dim=0)
    return (cloud - middle) / (like - middle).square().mean().sqrt().clamp(min=1e-12)


def read_cloud(path: Path) -> np.ndarray:
    """Read the points of a file as float32 `[points, 3]`. Raises BadCloud."""
    try:
        if path.suffix == ".ply":
            found = _read_ply(path)
        elif path.suffix == ".npy":
            found = np.load(path, allow_pickle=False)
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                if "points" in arrays.files:
                    name = "points"
                else:
                    name = (arrays.files or [""])[0]
                found = arrays[name]
        else:
            raise BadCloud(f"has the suffix {path.suffix or '(none)'}; fix: .npy, .npz or .ply")
    except BadCloud:
        raise
    except Exception as error:  # NumPy raises many kinds for damaged files
        raise BadCloud(
            f"cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        ) from error
    if found.ndim != 2 or found.shape[1] < 3 or not len(found) or found.dtype.kind not in "fiu":
        raise BadCloud(
            f"holds {found.dtype} {list(found.shape)}; fix: numbers of shape [points, 3]"
        )
    cloud = np.ascontiguousarray(found[:, :3], dtype=np.float32)
    if not np.isfinite(cloud).all():
        raise BadCloud(
            f"{int((~np.isfinite(cloud)).any(axis=1).sum())} of {len(cloud)} points are not finite"
        )
    if not (cloud.max(axis=0) > cloud.min(axis=0)).any():
        raise BadCloud(f"all {len(cloud)} points are equal, so it cannot be scaled")
    return cloud


def read_index(folder: Path, index: str, *, train: str, held_out: str) -> list[IndexRow]:
    """Return the rows of the two splits, in the order of the index. Raises DataError."""
    path = folder / index
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (table.fieldnames or [])]
            if missing:
                found = ", ".join(table.fieldnames or []) or "none"
                raise DataError(
                    f"{path}:1: column {', '.join(missing)} is missing; it has {found}; fix: "
                    f"{','.join(COLUMNS)}"
                )
            rows = []
            columns = (*COLUMNS, *([PARTIAL] if PARTIAL in (table.fieldnames or []) else []))
            for row in table:
                if not all(row[name] for name in columns):
                    raise DataError(
                        f"{path}:{table.line_num}: a value is empty; fix: {', '.join(columns)} "
                        "in each row"
                    )
                place = folder / row["path"].strip()
                if PARTIAL in columns:
                    partial = folder / row[PARTIAL].strip()
                else:
                    partial = None
                place_of = {"path": place, "partial": partial, "line": table.line_num}
                rows.append(IndexRow(split=row["split"], category=row["category"], **place_of))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{path}: {error}; fix: a CSV file with the columns {', '.join(COLUMNS)}"
        ) from error
    for option, split in (("train_split", train), ("held_out_split", held_out)):
        if not any(row.split == split for row in rows):
            found = ", ".join(sorted({row.split for row in rows})) or "no rows"
            raise DataError(
                f"{path}: no row has split {split}; it has {found}; fix: workload_options.{option}"
            )
    return [row for row in rows if row.split in (train, held_out)]


def pack_folder(  # noqa: C901, PLR0912 - one refusal for each kind of bad file
    store: Store,
    folder: Path,
    index: str,
    *,
    train: str,
    held_out: str,
    most_bad: int,
    most_points: int,
) -> JsonObject:
    """Copy the clouds of a folder into `store`, unless it has them, and return their description.

    Of a cloud with more than `most_points`, evenly spaced points are kept. The fingerprint covers
    the index, the bytes of all files, and the arguments. Raises DataError if more than `most_bad`
    files are unusable.
    """
    rows = read_index(folder, index, train=train, held_out=held_out)
    categories = sorted({row.category for row in rows})
    digest = hashlib.sha256(json.dumps([_VERSION, train, held_out, most_points]).encode())
    clouds: list[IndexRow] = []
    bad: list[str] = []
    # Read twice, here and below, because the fingerprint names the place of the packed clouds
    for row in rows:
        sums: list[str] = []
        for path in row.files:
            try:
                sums.append(hashlib.sha256(path.read_bytes()).hexdigest())
                read_cloud(path)
            except (OSError, BadCloud) as error:
                if isinstance(error, OSError):
                    why = error.strerror
                else:
                    why = error
                bad.append(f"{folder / index}:{row.line}: {path}: {why}")
                break
        else:
            clouds.append(row)
            digest.update("\n".join([row.split, row.category, *sums, ""]).encode())
    if len(bad) > most_bad:
        if len(bad) > _NAMED:
            more = f" and {len(bad) - _NAMED} more"
        else:
            more = ""
        raise DataError(
            f"{len(bad)} of {len(rows)} clouds are unusable, {most_bad} are allowed: "
            f"{'; '.join(bad[:_NAMED])}{more}; fix: repair or remove them, or "
            f"workload_options.max_bad_files: {len(bad)}, which skips them"
        )
    if bad:
        print(
            f"{len(bad)} of {len(rows)} clouds are skipped: {'; '.join(bad[:_NAMED])}", flush=True
        )
    for category in categories:
        if not any(row.category == category and row.split == train for row in clouds):
            raise DataError(
                f"category {category} has no usable cloud of split {train}: its samples would be "
                f"noise; fix: add one, or remove the category's rows from {folder / index}"
            )
    if not any(row.split == held_out for row in clouds):
        raise DataError(
            f"no usable cloud of split {held_out} is left; fix: repair the files that were skipped"
        )
    fingerprint = digest.hexdigest()
    packed = store.sub(f"clouds/{fingerprint}")
    about = {
        "fingerprint": fingerprint,
        "categories": categories,
        "skipped": bad[:20],
        "skipped_count": len(bad),
    }
    about["partial"] = clouds[0].partial is not None
    for name, split in (("train", train), ("held_out", held_out)):
        about[name] = sum(row.split == split for row in clouds)
    if packed.head(DESCRIPTION) is not None:
        return about
    splits: JsonObject = {}
    for name, split in (("train", train), ("held_out", held_out)):
        own = [row for row in clouds if row.split == split]
        kinds = [categories.index(row.category) for row in own]
        for part, files in (
            (name, [row.path for row in own]),
            (f"{name}-{PARTIAL}", [row.partial for row in own]),
        ):
            paths = [path for path in files if path is not None]
            sizes, shards = _write_shards(
                packed, part, (_thin(read_cloud(path), most_points) for path in paths)
            )
            if paths:
                splits[part] = {
                    "sizes": sizes,
                    "categories": kinds,
                    "shards": shards,
                    "paths": list(map(str, paths)),
                }
    packed.put(DESCRIPTION, json.dumps({"version": _VERSION, "splits": splits}).encode())
    return about


def choose_points(cloud: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Choose `count` points of the cloud at random, in random order.

    Of a smaller cloud, all points are returned, and some of them repeatedly.
    """
    if len(cloud) >= count:
        return cloud[torch.randperm(len(cloud), generator=generator)[:count]]
    repeated = torch.randint(len(cloud), (count - len(cloud),), generator=generator)
    return torch.cat([cloud, cloud[repeated]])[torch.randperm(count, generator=generator)]


def known_first(cloud: Tensor, known: int, generator: torch.Generator) -> Tensor:  # noqa: ARG001 (as the other rules take)
    """Sort the points along a random direction, so that the first `known` are on one side of the
    cloud.
    """
    direction = torch.randn(3, generator=generator)
    order = (cloud @ direction).argsort(descending=True, stable=True)
    return cloud[order]


def _read_ply(path: Path) -> np.ndarray:
    """Read x, y and z of the vertices in a PLY file, in any of its three encodings.

    The element `vertex` must be the first one in the file.
    """
    content = path.read_bytes()
    end = re.search(rb"end_header\r?\n", content)
    if not content.startswith(b"ply") or end is None:
        raise BadCloud("has no PLY header")
    lines = [
        line.split() for line in content[: end.start()].decode("ascii", "replace").splitlines()
    ]
    encoding = next((line[1] for line in lines if line[:1] == ["format"]), "")
    elements = [number for number, line in enumerate(lines) if line[:1] == ["element"]]
    if not elements or lines[elements[0]][1] != "vertex":
        raise BadCloud("the first element of its PLY header is not vertex")
    count = int(lines[elements[0]][2])
    if len(elements) > 1:
        last = elements[1]
    else:
        last = len(lines)
    fields = [
        (line[-1], _PLY_TYPES[line[1]])
        for line in lines[elements[0] : last]
        if line[:1] == ["property"]
    ]
    names = [name for name, _ in fields]
    if not {"x", "y", "z"} <= set(names):
        raise BadCloud(f"its vertices have the properties {', '.join(names)}; fix: x, y and z")
    if encoding == "ascii":
        rows = np.array(content[end.end() :].split()[: count * len(fields)], dtype=np.float64)
        rows = rows.reshape(count, len(fields))
        return rows[:, [names.index(axis) for axis in "xyz"]]
    order = {"binary_little_endian": "<", "binary_big_endian": ">"}[encoding]
    kind = np.dtype([(name, order + code) for name, code in fields])
    table = np.frombuffer(content, dtype=kind, count=count, offset=end.end())
    return np.stack([table[axis].astype(np.float64) for axis in "xyz"], axis=1)


def _thin(cloud: np.ndarray, most: int) -> np.ndarray:
    if len(cloud) <= most:
        return cloud
    return cloud[np.arange(most) * len(cloud) // most]


def _write_shards(
    store: Store, name: str, clouds: Iterator[np.ndarray]
) -> tuple[list[int], list[JsonObject]]:
    sizes: list[int] = []
    shards: list[JsonObject] = []
    held = bytearray()
    count = 0

    def flush() -> None:
        nonlocal held, count
        key = f"{name}-{len(shards):04d}.bin"
        store.put(key, bytes(held))
        shards.append(
            {
                "key": key,
                "bytes": len(held),
                "sha256": hashlib.sha256(held).hexdigest(),
                "clouds": count,
            }
        )
        held = bytearray()
        count = 0

    for cloud in clouds:
        held += cloud.astype("<f4").tobytes()
        sizes.append(len(cloud))
        count += 1
        if len(held) >= _SHARD_BYTES:
            flush()
    if count:
        flush()
    return sizes, shards
