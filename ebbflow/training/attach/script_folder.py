"""Send the folder of a user's script to other machines, as an archive in the store."""

import contextlib
import hashlib
import io
import os
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError, Outcome
from ebbflow.core.layout import script_key
from ebbflow.core.store import Store

_LARGEST_FILE_BYTES = 10 * 2**20
_LARGEST_FOLDER_BYTES = 100 * 2**20
_SKIPPED = frozenset({"__pycache__", "node_modules", "venv", "runs", ".metaflow", "build", "dist"})
_SECRET = re.compile(
    r"\.env(?!\.(?:example|sample|template)$)(\..+)?|\.netrc|\.pgpass|\.npmrc|\.pypirc|\.git-credentials|\.?credentials(\..+)?"
    r"|id_(rsa|dsa|ecdsa|ed25519)|.+\.(pem|key|p12|pfx)"
)
# Never copied. Unlike files of `_SECRET`, a script may well train without them
_LEFT_OUT = re.compile(
    r"secrets?\.(ya?ml|json|toml|txt|ini)|service[_-]?account.*\.json|token(\.(txt|json))?"
    r"|\.?kubeconfig(\.ya?ml)?",
    re.IGNORECASE,
)


class ScriptFolderError(InfraError, outcome=Outcome.CONFIG):
    """Raised if the folder of a script cannot be sent to other machines.

    The message names the file and the fix.
    """


def pack_script(config: RunConfig, store: Store) -> str:
    """Put an archive of the script's folder into the store.

    Return the archive's hash, which is part of its key.

    In a git checkout, the archive contains only files that git does not ignore. Raises
    ScriptFolderError if a file may be a secret or is too large. Files with names such as
    secrets.yaml are left out, with a message.
    """
    assert config.script is not None
    folder = Path(config.script).parent
    content = io.BytesIO()
    if not Path(config.script).is_file():
        raise ScriptFolderError(
            f"script {config.script}: no such file; fix: give the path of a Python file"
        )
    total = 0
    with tarfile.open(fileobj=content, mode="w") as archive:
        for path in _files(folder):
            name = str(path.relative_to(folder))
            if _LEFT_OUT.fullmatch(path.name):
                print(f"script folder: {name} is left out, since its name is that of a secret")
                continue
            size = path.stat().st_size
            fix = "move it out of the script's folder, or let git ignore it"
            if _SECRET.fullmatch(path.name):
                raise ScriptFolderError(
                    f"{path} looks like a secret, and the folder would be copied; fix: {fix}"
                )
            total += size
            if size > _LARGEST_FILE_BYTES or total > _LARGEST_FOLDER_BYTES:
                if size > _LARGEST_FILE_BYTES:
                    what = f"{size / 2**20:.1f} MiB, limit 10 MiB"
                else:
                    what = "over 100 MiB in all"
                raise ScriptFolderError(
                    f"{path}: {what}; fix: {fix}, and read data from the store or another bucket"
                )
            entry = tarfile.TarInfo(name)
            # The entry has no times, so that equal files have equal archives
            entry.size = size
            entry.mode = path.stat().st_mode & 0o777
            with path.open("rb") as file:
                archive.addfile(entry, file)
    data = content.getvalue()
    sha256 = hashlib.sha256(data).hexdigest()
    store.put(script_key(sha256), data)
    return sha256


def find_script(script: str, sha256: str | None, store: Store) -> Path:
    """Return the script's path on this machine. Raises ScriptFolderError.

    If `sha256` is given, the script's folder is in the store as an archive, which the first call
    unpacks.
    """
    path = Path(script)
    if sha256 is None:
        return path
    folder = Path(tempfile.gettempdir(), f"ebbflow-script-{os.getuid()}-{sha256[:16]}")
    if not folder.is_dir():
        data = store.get(script_key(sha256))
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ScriptFolderError(
                f"{store.uri}/{script_key(sha256)} is damaged; fix: start the job again"
            )
        with (
            tempfile.TemporaryDirectory(dir=folder.parent) as fresh,
            tarfile.open(fileobj=io.BytesIO(data)) as archive,
        ):
            archive.extractall(fresh, filter="data")
            try:
                os.rename(fresh, folder)
                os.mkdir(fresh)  # for TemporaryDirectory to delete
            except OSError:
                if not folder.is_dir():
                    raise
    if folder.stat().st_uid != os.getuid():
        raise ScriptFolderError(
            f"{folder} belongs to another user; fix: delete it, or set TMPDIR to a folder of yours"
        )
    return folder / path.name


def _files(folder: Path) -> list[Path]:
    command = [
        "git",
        "-C",
        str(folder),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    with contextlib.suppress(OSError):  # git is not installed
        listed = subprocess.run(command, capture_output=True, check=False)
        if listed.returncode == 0:
            names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
            kept = [folder / name for name in names if _SKIPPED.isdisjoint(Path(name).parts)]
            return sorted(path for path in kept if path.is_file())
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        found += [
            Path(parent, name)
            for name in names
            if not name.startswith(".") and not name.endswith(".pyc")
        ]
    return sorted(path for path in found if path.is_file())
