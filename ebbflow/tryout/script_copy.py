"""Copies of a script's folder for `ebbflow doctor`.

Large files are links to the originals until the script writes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

_MOST_BYTES = 8 << 20  # of a file that is copied
_ALL_BYTES = 256 << 20
_MOST_ENTRIES = 10_000  # of files in all; a folder that would exceed it becomes one link
_LEFT_OUT = {".git", "runs", ".venv", "__pycache__"}
_OF_TWO_PATHS = {"os.rename", "os.link", "os.symlink"}
_CHANGES = {"os.mkdir", "os.remove", "os.rmdir", *_OF_TWO_PATHS}
_WRITING = os.O_WRONLY | os.O_RDWR


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder, with links in place of large files.

    Each link of the original also becomes a link, to an absolute path. Files of the upper folders
    are copied first, because the script and its modules are among them.
    """
    copied = 0
    count = 0
    folders = [(source, target)]
    for folder, to in folders:  # grows while it is read: upper folders come first
        with os.scandir(folder) as all_entries:
            entries = [entry for entry in all_entries if entry.name not in _LEFT_OUT]
        entries.sort(key=lambda entry: entry.name)
        if folder != source and count + len(entries) > _MOST_ENTRIES:
            to.symlink_to(folder)
            continue
        to.mkdir(parents=True)
        count += len(entries)
        for entry in entries:
            path = Path(entry.path)
            new = to / entry.name
            if entry.is_symlink():
                new.symlink_to(_place_of(path, source, target))
            elif entry.is_dir():
                folders.append((path, new))
            elif entry.is_file():
                size = entry.stat().st_size
                if size <= _MOST_BYTES and copied + size <= _ALL_BYTES:
                    shutil.copy2(path, new)
                    copied += size
                else:
                    new.symlink_to(path)


def detach(copy: Path, path: Any, *, emptied: bool = False) -> None:
    """Replace each link on the path of a file in the copy, so that writing there changes no
    original.

    Args:
        emptied: the script is about to replace the content of the file, so that it need not be
            copied.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        return
    full = Path(os.path.abspath(os.fsdecode(path)))
    if not full.is_relative_to(copy):
        return
    place = copy
    for part in full.relative_to(copy).parts:
        place = place / part
        original = place.resolve()
        if not place.is_symlink() or original.is_relative_to(copy):
            continue
        if original.is_dir():
            place.unlink()
            place.mkdir()
            for entry in original.iterdir():
                (place / entry.name).symlink_to(entry)
        elif original.is_file():
            place.unlink()
            if not emptied:
                shutil.copy2(original, place)


def detach_before(copy: Path, event: str, given: tuple[Any, ...]) -> None:
    """Handle an audit event: detach the file or folder that the script is about to change.

    A removed or replaced link leaves its original as it is. Only the folders above it are detached.
    """
    if event == "open":
        path, mode, flags = given
        if set(str(mode or "")) & set("wax+") or int(flags or 0) & _WRITING:
            detach(copy, path, emptied="w" in str(mode or ""))
    elif event == "os.truncate":
        detach(copy, given[0])
    elif event in _CHANGES:
        count = 2 if event in _OF_TWO_PATHS else 1
        for path in given[:count]:
            if isinstance(path, str | bytes | os.PathLike):
                detach(copy, os.path.dirname(os.path.abspath(os.fsdecode(path))))


def _place_of(link: Path, source: Path, target: Path) -> Path:
    """Return the target of a copied link.

    It is inside the copy if the original's target is inside the copied folder.
    """
    place = Path(os.path.normpath(link.parent.resolve() / os.readlink(link)))
    inside = place.is_relative_to(source) and not _LEFT_OUT & set(place.relative_to(source).parts)
    if inside:
        return target / place.relative_to(source)
    return place
