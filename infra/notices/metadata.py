"""Spot interruptions and rebalance recommendations, as the metadata service of EC2 tells them.

AWS: "Spot Instance interruption notices" (instance-action: two minutes before terminate or stop; hibernation begins at
once) and "EC2 instance rebalance recommendations". Both answer 404 until there is one.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from ebbflow.infra.metadata import HOP_LIMIT_FIX, MetadataService, endpoint, metadata_unavailable_reason
from ebbflow.infra.notices.notice import REBALANCE, RECLAIMS, STALE_SECONDS, Notice, NoticeSource

_INSTANCE_ACTION = "meta-data/spot/instance-action"
_REBALANCE = "meta-data/events/recommendations/rebalance"
_FIRST_ANSWERS_SECONDS = 0.9
_ANSWER_SECONDS = 1.0
_TOKEN_TTL_SECONDS = 6 * 3600
_NO_SUCH_REQUEST = (400, 404, 405, 501)  # to the PUT: a service of before version 2, or a stand-in that has only GET
_UNSAID_SECONDS = 30.0  # for an action whose time cannot be read: what the shortest notices of clouds leave


class MetadataSource:
    """What EC2 says of this instance. environment, system: where to look for the service (`ebbflow.infra.metadata`)."""

    name = NoticeSource.METADATA

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        *,
        system: Path = Path("/"),
        poll_seconds: float = 2.0,
    ) -> None:
        self.poll_seconds = poll_seconds
        self._absent = metadata_unavailable_reason(environment, system)
        self._service = MetadataService(endpoint(environment))
        self._token = ""
        self._token_until = 0.0
        self._version_1 = self._knows_no_tokens = False
        self._ending = Ending()

    def begin(self) -> str:
        if self._absent:
            return self._absent
        limit = time.monotonic() + _FIRST_ANSWERS_SECONDS
        try:
            problem = self._renew(0.6 * _FIRST_ANSWERS_SECONDS)
            return self._without_token(limit - time.monotonic()) if problem and self._knows_no_tokens else problem
        except TimeoutError:
            return self._without_token(limit - time.monotonic())
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{self._service.endpoint} cannot be asked: {error or type(error).__name__}"

    def look(self) -> list[Notice]:
        found: list[Notice] = []
        try:
            for find in (self._interruption, self._recommendation):
                if (notice := find()) is not None:
                    found.append(notice)
        except OSError:
            if not found:  # an interruption that was heard counts, whatever becomes of the second question
                raise
        except (http.client.HTTPException, ValueError) as error:
            if not found:
                raise OSError(f"{self._service.endpoint}: {error!r}") from error
        return found

    def _without_token(self, seconds: float) -> str:
        """The token's answer may not travel as far as a container; other answers may, where version 1 is allowed."""
        said = f"{self._service.endpoint} gives no token in time"
        try:
            status, _ = self._service.get(_INSTANCE_ACTION, "", seconds=seconds)
        except (OSError, http.client.HTTPException, ValueError):
            return f"{said}, nor any other answer"
        if status in (200, 404):
            self._version_1 = True  # not as safe, and better than to be taken by surprise
            return ""
        return f"{said}, while it answers {status} without one: the hop limit is too small; fix: {HOP_LIMIT_FIX}"

    def _renew(self, seconds: float) -> str:
        status, token = self._service.token(ttl_seconds=_TOKEN_TTL_SECONDS, seconds=seconds)
        if status == 403:
            return f"{self._service.endpoint} is turned off (403)"
        self._knows_no_tokens = status in _NO_SUCH_REQUEST
        if status != 200 or not token:
            return f"{self._service.endpoint} gives no token: status {status}"
        self._token, self._token_until = token, time.monotonic() + _TOKEN_TTL_SECONDS / 2
        return ""

    def _get(self, path: str) -> str | None:
        """None: nothing is said. A token that is refused is replaced once."""
        if not self._version_1 and time.monotonic() >= self._token_until and (problem := self._renew(_ANSWER_SECONDS)):
            raise OSError(problem)
        status, text = self._service.get(path, self._token, seconds=_ANSWER_SECONDS)
        if status == 401 and not self._version_1:
            if problem := self._renew(_ANSWER_SECONDS):
                raise OSError(problem)
            status, text = self._service.get(path, self._token, seconds=_ANSWER_SECONDS)
        if status not in (200, 404):
            raise OSError(f"{self._service.endpoint}: {path} answers {status}")
        return text if status == 200 else None

    def _interruption(self) -> Notice | None:
        text = self._get(_INSTANCE_ACTION)
        if text is None:
            return None
        said = _object(text)
        ends_at = self._ending.of(said.get("time"))
        if ends_at < time.monotonic() - STALE_SECONDS:  # of a machine that was stopped, or was left alone after all
            return None
        action = str(said.get("action") or "terminate")
        return Notice(
            source=self.name,
            action=action if action in RECLAIMS else "terminate",
            ends_at=ends_at,
            detail=text[:200],
        )

    def _recommendation(self) -> Notice | None:
        text = self._get(_REBALANCE)
        return None if text is None else Notice(
            source=self.name, action=REBALANCE, ends_at=float("inf"), detail=text[:200]
        )  # fmt: skip


class Ending:
    """When what one source says takes effect. The same word heard again means the same moment, also where it cannot be
    read, or the machine's clock was set meanwhile."""

    def __init__(self) -> None:
        self._said: object = None
        self._ends_at = 0.0

    def of(self, moment: object) -> float:
        """time.monotonic() of what was said."""
        said = str(moment)
        if said != self._said:
            self._said, self._ends_at = said, time.monotonic() + _seconds_until(moment)
        return self._ends_at


def _seconds_until(moment: object) -> float:
    """From now to an ISO 8601 time, in UTC unless it says otherwise, by this machine's clock; 30 s where it is none."""
    try:
        told = datetime.fromisoformat(str(moment).replace("Z", "+00:00"))
        return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp() - time.time()
    except ValueError:
        return _UNSAID_SECONDS


def _object(text: str) -> dict:
    """A notice counts even where its words cannot be read."""
    try:
        said = json.loads(text)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
