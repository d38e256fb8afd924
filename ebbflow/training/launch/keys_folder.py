"""The folder for the key-value store of a gang on one machine, which is torch's FileStore.

The store is a file that its ranks lock with flock(2). Some network file systems refuse this call,
and some answer it never, so the folder is tried before ranks are started.
"""

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from ebbflow.training.errors import NoKeysFolder

_NAME = "keys"
_SHARED_MEMORY = Path("/dev/shm")
_TRY_SECONDS = 3.0


class KeysFolder:
    """Maker of private folders, one for each generation, in which files can be locked with
    flock(2).
    """

    def __init__(self, log_folder: str) -> None:
        self._logs = Path(log_folder).absolute()
        self._temporary = ExitStack()

    def make(self, generation: str) -> Path:
        """Make and return a folder with mode 0700 for this generation.

        It is below the logs, since nothing that cleans temporary files looks there; else, where a
        file cannot be locked, in TMPDIR or /dev/shm, until the next generation or this process's
        end.

        Raises:
            NoKeysFolder: no folder of this machine serves.
        """
        self._temporary.close()
        refused = []
        for folder in self._candidates(generation):
            problem = why_no_lock(folder)
            if not problem:
                return folder
            refused.append(f"{folder.parent}: {problem}")
        raise NoKeysFolder(
            "the ranks of a gang on one machine meet by a file that they lock, and no folder "
            f"serves ({'; '.join(refused)}); fix: set TMPDIR to a folder on a local disk"
        )

    def _candidates(self, generation: str) -> Iterator[Path]:
        yield self._logs / generation / _NAME
        for place in (Path(tempfile.gettempdir()), _SHARED_MEMORY):
            if os.access(place, os.W_OK | os.X_OK):
                made = tempfile.TemporaryDirectory(
                    prefix="ebbflow-keys-", dir=place, ignore_cleanup_errors=True
                )
                yield Path(self._temporary.enter_context(made))


def why_no_lock(folder: Path) -> str:
    """Make the folder with mode 0700, and test whether a file in it can be locked.

    Return why it cannot, or "" if it can.
    """
    problems = [f"locking a file took longer than {_TRY_SECONDS:g} s"]

    def try_lock() -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            with tempfile.TemporaryFile(dir=folder) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            problems[0] = f"flock: {error.strerror or error}"
        else:
            problems[0] = ""

    # A daemon: a file system that never answers must not keep the agent from going on
    attempt = threading.Thread(target=try_lock, daemon=True)
    attempt.start()
    attempt.join(_TRY_SECONDS)
    return problems[0]
