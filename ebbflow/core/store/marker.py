"""Marker of a store: an object with a random id in its name, which identifies the store.

The device number of a folder changes with every mount, and two accounts may have a bucket of one
name. So a process that works for a job expects the marker that the job's launcher found: it is in
the process's environment, and its children inherit it. A folder in which the marker is missing is
another folder, such as the one below the mount point of a disk that is gone.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from ebbflow.core.errors import WrongStore
from ebbflow.core.layout import MARKERS_PREFIX, marker_key

VARIABLE = "EBBFLOW_STORE_MARKER"
_SHOWN = 3


@dataclass(frozen=True)
class StoreMarker:
    """A marker that a store is expected to have, and the address of that store."""

    id: str
    root: str

    def check_folder(self) -> None:
        """Raise WrongStore unless the folder has the marker.

        This takes a single stat call.
        """
        try:
            os.stat(os.path.join(self.root, marker_key(self.id)))
        except (FileNotFoundError, NotADirectoryError):
            raise self.error(_describe_folder(Path(self.root))) from None

    def error(self, seen: str) -> WrongStore:
        """Return the error for a store that lacks the marker; `seen` describes what it has
        instead.
        """
        return WrongStore(
            f"{self.root} is not the store that this job began in: its marker "
            f"{marker_key(self.id)} is missing, and {seen}; nothing is written there; fix: bring "
            "the store back (its mount, its folder's name or its content)"
        )


def expect_marker(uri: str, marker_id: str) -> None:
    """Let this process and its children accept the store at `uri` only if it has this marker.

    An empty `marker_id` changes nothing.
    """
    if marker_id:
        places = sorted({_absolute(uri), _resolved(uri)})
        os.environ[VARIABLE] = json.dumps({"id": marker_id, "places": places})


def find_marker(uri: str) -> StoreMarker | None:
    """Return the marker that the store at `uri` is expected to have, or None if none is expected.

    `uri` may also be a part of a store, such as one job.
    """
    known = os.environ.get(VARIABLE)
    if not known:
        return None
    expected = json.loads(known)
    for spelling in (_absolute(uri), _resolved(uri)):
        for place in expected["places"]:
            if spelling == place or spelling.startswith(f"{place.rstrip('/')}/"):
                return StoreMarker(expected["id"], place)
    return None


def expected_marker_id(uri: str) -> str:
    """Return the id of the marker that the store at `uri` is expected to have, or ""."""
    marker = find_marker(uri)
    if marker is None:
        return ""
    return marker.id


def _absolute(uri: str) -> str:
    if uri.startswith("s3://"):
        return uri.rstrip("/")
    return str(Path(uri.removeprefix("file://")).expanduser().absolute())


def _resolved(uri: str) -> str:
    if uri.startswith("s3://"):
        return uri.rstrip("/")
    return str(Path(uri.removeprefix("file://")).expanduser().resolve())


def _describe_folder(root: Path) -> str:
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return "there is no such folder"
    if not names:
        return "the folder is empty"
    try:
        markers = sorted(os.listdir(root / MARKERS_PREFIX))
    except (FileNotFoundError, NotADirectoryError):
        markers = []
    if markers:
        return f"it has the marker of another store ({', '.join(markers[:_SHOWN])})"
    return f"the folder has {len(names)} other entries ({', '.join(names[:_SHOWN])})"
