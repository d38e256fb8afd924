"""How two agents prove to each other that they belong to the same start of a job, before either believes a message.

Node 0 draws a secret for each start and puts it into the job's store; every reader of that store can take part. Neither
side ever sends the secret: each answers a fresh nonce of the other with an HMAC (RFC 2104, SHA-256). The answer covers
both nonces, the start, the sender's role and the node's hello, so that none can be replayed, reflected or altered.
Messages after the handshake carry no HMAC of their own (docs/security.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any

from ebbflow.infra.errors import InfraError, ObjectNotFound, Outcome
from ebbflow.infra.layout import secret_key
from ebbflow.infra.store import Store
from ebbflow.training.errors import GangError, TrainingError

SECRET_BYTES = 32
LARGEST_GREETING_BYTES = 4096  # of any message before a peer is known
HANDSHAKE_SECONDS = 5.0  # from the connection to the welcome
_COORDINATOR, _FOLLOWER = "node 0", "follower"
_NONCE_BYTES = 32
_LONGEST_REFUSAL = 4096


def new_nonce() -> str:
    return secrets.token_hex(_NONCE_BYTES)


def coordinator_proof(secret: bytes, token: str, hello: Mapping[str, Any], nonces: tuple[str, str]) -> str:
    """What node 0 answers to a hello. nonces: the follower's, then node 0's."""
    return _proof(_COORDINATOR, secret, token, hello, nonces)


def follower_proof(secret: bytes, token: str, hello: Mapping[str, Any], nonces: tuple[str, str]) -> str:
    """What a follower answers to node 0's nonce."""
    return _proof(_FOLLOWER, secret, token, hello, nonces)


def is_proof(given: object, expected: str) -> bool:
    """Compared in constant time."""
    return isinstance(given, str) and hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def is_nonce(value: object) -> bool:
    return isinstance(value, str) and len(value) == 2 * _NONCE_BYTES


class StartSecret:
    """The secret of one start in the job's store. run, attempt: as in `GangSpec`."""

    def __init__(self, job_store: Store, run: str, attempt: int) -> None:
        self._store, self._key = job_store, secret_key(run, attempt)

    def publish(self, secret: bytes) -> None:
        """Let the followers read it; in a folder only this user can (mode 0600). Raises StoreError."""
        self._store.put(self._key, secret.hex().encode(), private=True)

    def refuse(self, error: TrainingError) -> None:
        """Put node 0's refusal in the secret's place, so that no follower waits for a start that will not come.

        It may stay: every start has a key of its own. A store that does not take it costs the followers their deadline.
        """
        refusal = {"refused": str(error)[:_LONGEST_REFUSAL], "outcome": error.outcome.value}
        with contextlib.suppress(InfraError):
            self._store.put(self._key, json.dumps(refusal).encode(), private=True)

    def fetch(self) -> bytes | None:
        """None while node 0 has not published it. Raises StoreError, and GangError where node 0 refuses the start."""
        try:
            content = self._store.get(self._key).decode("utf-8", "replace")
        except ObjectNotFound:
            return None
        if content.startswith("{"):
            raise _refusal(content)
        try:
            secret = bytes.fromhex(content)
        except ValueError:
            return None
        return secret if len(secret) == SECRET_BYTES else None

    def withdraw(self) -> None:
        """Delete it after the roll-call, when it opens nothing any more; so one that cannot be deleted may stay."""
        with contextlib.suppress(InfraError):
            self._store.delete(self._key)


def _refusal(content: str) -> GangError:
    try:
        document = json.loads(content)
        return GangError(
            f"node 0 refused the start: {document['refused']}", curable=False, outcome=Outcome(document["outcome"])
        )
    except (ValueError, LookupError, TypeError):
        return GangError("node 0 refused the start", curable=False)


def _proof(role: str, secret: bytes, token: str, hello: Mapping[str, Any], nonces: tuple[str, str]) -> str:
    covered = json.dumps([role, token, *nonces, dict(hello)], sort_keys=True, separators=(",", ":"))
    return hmac.new(secret, covered.encode(), hashlib.sha256).hexdigest()
