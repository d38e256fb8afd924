"""Object store in a folder. Each operation ends by its deadline even if the file system hangs.

A call into a hanging file system (NFS, FUSE) cannot be interrupted. Each operation therefore runs
in a daemon thread. At the deadline the thread is abandoned and the caller gets an error, so the
process can continue and can exit. Files are opened without blocking and must be regular: a FIFO or
a device in place of an object is refused.
"""

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ebbflow.core.errors import StoreError, StoreTimeout
from ebbflow.core.retry import call_within
from ebbflow.core.store.marker import StoreMarker

T = TypeVar("T")
# Unfinished files of this module, of `ebbflow.core.store.multipart.sinks`, and of obstore in older
# stores.
UNFINISHED = re.compile(r".+#\d+")
_MOST_ABANDONED = 64
_MOST_FOLDERS_LOST = 100


class HangGuard:
    """Runner of calls that may hang.

    It runs each call in its own thread, and counts the calls that hang.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = 0

    def run(self, call: Callable[[], T], seconds: float, what: str) -> T:
        """Run `call` in a thread, and return its result or raise its exception.

        `what` names the operation and the object in error messages. Raises StoreTimeout if the call
        takes longer than `seconds`, or if 64 earlier calls still hang. A call within such a call
        runs directly, under its deadline.
        """
        if hasattr(_RUNNING, "is_abandoned"):
            return call()
        if self._abandoned >= _MOST_ABANDONED:
            raise StoreTimeout(
                f"{what}: not tried: {self._abandoned} operations on folders hang already"
            )
        ended = abandoned = False

        def work() -> T:
            nonlocal ended
            _RUNNING.is_abandoned = lambda: abandoned
            try:
                return call()
            finally:
                with self._lock:
                    ended = True
                    self._abandoned -= abandoned

        def late() -> StoreTimeout:
            nonlocal abandoned
            with self._lock:
                abandoned = not ended
                self._abandoned += abandoned
            return StoreTimeout(
                f"{what}: no answer from the file system within {seconds:.3g} s; "
                "fix: check the mount (NFS, FUSE) or the disk, or use another store"
            )

        return call_within(seconds, work, "folder", late)


_RUNNING = threading.local()  # is_abandoned: whether the call that this thread runs was abandoned


def refuse_if_abandoned(what: str) -> None:
    """Raise StoreTimeout if the current call was abandoned at its deadline.

    An operation calls this just before it changes something: the caller of an abandoned call has
    continued and may have written newer data.
    """
    if hasattr(_RUNNING, "is_abandoned") and _RUNNING.is_abandoned():
        raise StoreTimeout(
            f"{what}: the file system answered after the deadline; nothing was changed"
        )


HANG_GUARD = HangGuard()  # one for the process: hanging calls are counted over all stores
# A forked child has none of the parent's threads
os.register_at_fork(after_in_child=HANG_GUARD.__init__)


def open_regular(path: Path | str) -> int:
    """Open a regular file for reading and return the descriptor.

    Raise StoreError for other files, such as a FIFO.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StoreError(f"{path}: not a regular file; fix: remove it")
    return descriptor


class FolderBackend:
    """Object store that keeps each object as a file below `root`.

    Methods raise OSError, and WrongStore if the store lacks its `marker`; `Store` runs them in a
    `HangGuard`.
    """

    def __init__(self, root: Path, marker: StoreMarker | None = None) -> None:
        self.root = root
        self._marker = marker

    def put(
        self, key: str, data: memoryview, *, create: bool = False, private: bool = False
    ) -> None:
        """Write an object, and sync the file and each folder up to the root to make it durable.

        With `create`, raise FileExistsError if the object exists. With `private`, only the current
        user can read the file.
        """
        path = self._path(key)
        unfinished = path.with_name(f"{path.name}#{os.getpid()}{threading.get_ident()}")
        descriptor = create_file(unfinished, os.O_WRONLY, 0o600 if private else 0o666)
        try:
            try:
                while data:
                    data = data[os.write(descriptor, data) :]
                # Before the object has its name, so that a crash leaves the whole object or none
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            refuse_if_abandoned(key)
            if create:
                os.link(unfinished, path)
                unfinished.unlink()
            else:
                os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        sync_folders(path.parent, self.root)
        self._check_marker()  # the mount may have gone since the check before

    def get(self, key: str) -> bytes:
        with os.fdopen(open_regular(self._path(key)), "rb") as file:
            return file.read()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with os.fdopen(open_regular(self._path(key)), "rb") as file:
            file.seek(start)
            return file.read(length)

    def head(self, key: str) -> tuple[int, float]:
        """Return (size in bytes, Unix time of modification).

        Raises FileNotFoundError unless it is a regular file.
        """
        found = self._path(key).stat()
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(key))
        return found.st_size, found.st_mtime

    def delete(self, key: str) -> None:
        """Delete an object, and each folder that becomes empty, because folders take inodes."""
        path = self._path(key)
        path.unlink()
        for folder in path.parents:
            if folder == self.root:
                return
            try:
                folder.rmdir()
            except OSError:  # not empty
                return

    def list(self, prefix: str, after: str) -> list[tuple[str, int, float]]:
        """Return (key, size in bytes, Unix time of modification) of each file below the folder
        `prefix`, unsorted.

        Only keys greater than `after` are returned. Unfinished files, names that are not UTF-8, and
        links that are broken or circular are skipped. Raises OSError if a folder cannot be read,
        instead of returning a partial listing.
        """
        try:
            found = [*self._walk(prefix)]
        except FileNotFoundError:  # a folder was deleted meanwhile
            found = [*self._walk(prefix)]
        return [entry for entry in found if entry[0] > after]

    def _check_marker(self) -> None:
        if self._marker is not None:
            self._marker.check_folder()

    def _walk(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        top = self._path(prefix)
        if not top.is_dir():
            return
        pending = [(str(top), prefix, frozenset[tuple[int, int]]())]
        while pending:
            folder, below, above = pending.pop()
            about = os.stat(folder)
            identity = about.st_dev, about.st_ino
            if identity in above:  # a link that leads back up
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    name = entry.name
                    if UNFINISHED.fullmatch(name) or not _is_utf8(name):
                        continue
                    if below:
                        key = f"{below}/{name}"
                    else:
                        key = name
                    try:
                        found = entry.stat()
                    except OSError as error:
                        # Gone meanwhile, or a dead link
                        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                            continue
                        raise
                    if stat.S_ISDIR(found.st_mode):
                        pending.append((entry.path, key, above | {identity}))
                    elif stat.S_ISREG(found.st_mode):
                        yield key, found.st_size, found.st_mtime

    def _path(self, key: str) -> Path:
        if key:
            parts = key.split("/")
        else:
            parts = []
        if any(part in ("", ".", "..") for part in parts):
            raise StoreError(f"{self.root}/{key}: not a valid key")
        self._check_marker()
        return self.root.joinpath(*parts)


def create_file(path: Path, flags: int, mode: int) -> int:
    """Create an empty file for writing, with its folder if needed, and return the descriptor.

    Another process may delete the folder while it is empty; then it is created again.
    """
    for left in reversed(range(_MOST_FOLDERS_LOST)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, FileNotFoundError):
            # `mkdir` says that a folder exists as a file if it is deleted between two of its looks
            if not left:
                raise
            continue
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags | os.O_CREAT | os.O_TRUNC, mode)
    return os.open(path, flags | os.O_CREAT | os.O_TRUNC, mode)


def sync_folders(folder: Path, root: Path) -> None:
    """Sync `folder` and its parents up to `root`, so that a crash cannot lose the name of a new
    file.
    """
    for each in (folder, *folder.parents):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if each == root:
            return


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
