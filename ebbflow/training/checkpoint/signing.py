"""Sign commits with HMAC-SHA256 and a key that other writers of the store do not have. Torch-free.

A signature covers the job, the commit's key (step, generation and the SHA-256 of the manifest) and
the SHA-256 of every chunk of data. It is written before the manifest, so every visible commit has
its signature. The manifest is merged from the ranks' indexes, which are also read from the store.
So each index carries an HMAC, and an index without a valid HMAC is treated as missing.

The key is in an environment variable that the user chooses. Another variable, whose name is the
constant `ebbflow.core.signing_key.NAME_VARIABLE`, holds the name of the first. If it is set, a process
signs commits and checks signatures. Ranks, uploaders and the processes that read a suspect commit
again inherit both variables.
"""

import hashlib
import hmac
import json
import os
from dataclasses import replace

from ebbflow.core.errors import ObjectNotFound
from ebbflow.core.layout import parse_commit_key, signature_key
from ebbflow.core.signing_key import NAME_VARIABLE, signing_key_problem
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.manifest import Manifest, RankIndex
from ebbflow.training.checkpoint.verified_io import canonical_json, fetch_verified, put_verified
from ebbflow.training.errors import CorruptCommit, NoSigningKey, RefusedCommit

_VERSION = 1
# Each derives a key for one purpose.
_COMMIT_PURPOSE = b"ebbflow commit signature 1"
_INDEX_PURPOSE = b"ebbflow index 1"


class Signer:
    """Signer and checker of commits, with the key in the environment variable `name`.

    Raises NoSigningKey.
    """

    def __init__(self, name: str) -> None:
        if problem := signing_key_problem(name):
            raise NoSigningKey(
                f"{problem}; fix: set it to the job's key, such as that of `openssl rand -hex 32`"
            )
        self.name = name
        secret = os.fsencode(os.environ[name])
        self._key = hmac.digest(secret, _COMMIT_PURPOSE, "sha256")
        self._index_key = hmac.digest(secret, _INDEX_PURPOSE, "sha256")

    def sign(self, store: Store, key: str, data: dict[str, list[str]] | None = None) -> None:
        """Write the signature of commit `key` and read it back. Raises StoreError.

        `data` has the SHA-256 of each chunk, by data object; it is needed only if the manifest
        lacks these values.
        """
        document = {
            "version": _VERSION,
            "key": key,
            "data": data,
            "hmac": self._hmac(store, key, data),
        }
        put_verified(store, _signature_key(key), canonical_json(document))

    def check(self, store: Store, key: str) -> dict[str, list[str]]:
        """Check the signature of commit `key`. Return the SHA-256 of each chunk, by data object.

        The result is empty if the manifest itself has these values. Raises RefusedCommit if the
        signature is missing or wrong, and StoreError if the store cannot be read.
        """
        try:
            return fetch_verified(
                store, _signature_key(key), lambda raw, _: self._checked(store, key, raw)
            )
        except ObjectNotFound as error:
            raise RefusedCommit(
                f"{store.uri}/{key}: is refused, because it is not signed; if it was saved "
                f"before signing was on: ebbflow checkpoints sign {store.uri} --signing-key-env "
                f"{self.name}"
            ) from error
        except CorruptCommit as error:
            raise RefusedCommit(
                f"{store.uri}/{key}: is refused, because its signature is wrong: it was made "
                f"with another key than {self.name} has, for another job or step, or by a forger"
            ) from error

    def check_index(self, store: Store, key: str, index: RankIndex) -> None:
        """Raise CorruptCommit unless the index, which is stored under `key`, has a valid HMAC for
        this job.
        """
        right = self.index_hmac(store, key, index).encode()
        if not hmac.compare_digest(right, index.hmac.encode(errors="replace")):
            raise CorruptCommit(
                f"{store.uri}/{key}: its HMAC is {'wrong' if index.hmac else 'missing'}: it was "
                f"made without the key that {self.name} has here, or by a forger; fix: give all "
                "nodes the same key"
            )

    def check_manifest(self, store: Store, key: str, manifest: Manifest) -> Manifest:
        """Check a commit's signature, and return the manifest completed with the SHA-256 of every
        chunk.

        Raises the errors of `check`.
        """
        signed = self.check(store, key)
        data = tuple(
            replace(stored, sha256=tuple(signed.get(stored.key, stored.sha256)))
            for stored in manifest.data
        )
        for stored in data:
            if len(stored.sha256) != len(stored.chunks):
                raise RefusedCommit(
                    f"{store.uri}/{key}: is refused, because {stored.key} has no SHA-256 that is "
                    "signed"
                )
        return replace(manifest, data=data)

    def _checked(self, store: Store, key: str, raw: bytes) -> dict[str, list[str]]:
        try:
            document = json.loads(raw)
            data = document["data"]
            stated = document["hmac"]
            right = hmac.compare_digest(self._hmac(store, key, data).encode(), stated.encode())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCommit(f"{key}: not a signature: {error!r}"[:300]) from error
        if not right:
            raise CorruptCommit(f"{key}: its signature is wrong")
        return data or {}

    def index_hmac(self, store: Store, key: str, index: RankIndex) -> str:
        content = replace(index, hmac="").to_bytes().decode()
        document = {"version": _VERSION, "job": _job(store), "key": key, "index": content}
        return hmac.digest(self._index_key, canonical_json(document), "sha256").hex()

    def _hmac(self, store: Store, key: str, data: object) -> str:
        document = {"version": _VERSION, "job": _job(store), "key": key, "data": data}
        return hmac.digest(self._key, canonical_json(document), "sha256").hex()


def use_signing_key(name: str | None) -> None:
    """Make this process and its children sign commits and check signatures with the key in the
    variable `name`.

    If `name` is None, they neither sign nor check.
    """
    if name is None:
        os.environ.pop(NAME_VARIABLE, None)
    else:
        os.environ[NAME_VARIABLE] = name


def signer() -> Signer | None:
    """Return the signer of this process, or None if it neither signs nor checks.

    Raises NoSigningKey.
    """
    name = os.environ.get(NAME_VARIABLE)
    if name:
        return Signer(name)
    return None


def sha256_of_chunks(data: memoryview, chunk_bytes: int) -> list[str]:
    return [
        hashlib.sha256(data[at : at + chunk_bytes]).hexdigest()
        for at in range(0, len(data), chunk_bytes)
    ]


def signed_index_bytes(store: Store, key: str, index: RankIndex) -> bytes:
    """Serialise an index that will be stored under `key`.

    Include its HMAC if this process signs.
    """
    signs = signer()
    if signs is not None:
        index = replace(index, hmac=signs.index_hmac(store, key, index))
    return index.to_bytes()


def _job(store: Store) -> str:
    return store.uri.rpartition("/")[2]


def _signature_key(key: str) -> str:
    return signature_key(parse_commit_key(key)[2])
