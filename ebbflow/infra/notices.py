"""Notices that this machine or process is about to be ended: their sources, and the thread that
polls the sources.

Sources:

- EC2's metadata service announces a Spot interruption two minutes before the machine is stopped or
  terminated (AWS: "Spot Instance interruption notices"), or recommends leaving the machine (AWS:
  "EC2 instance rebalance recommendations"). While there is no notice, the service answers 404.
- Metaflow's spot monitor writes a file.
- A rehearsal (`--rehearse`) writes a file that simulates a notice.
"""

import contextlib
import http.client
import json
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from ebbflow.core.layout import write_atomically
from ebbflow.infra.instance import (
    HOP_LIMIT_FIX,
    MetadataService,
    metadata_endpoint,
    metadata_unavailable_reason,
)

RECLAIMS = frozenset({"terminate", "stop", "hibernate"})  # EC2's actions that take the machine back
# Actions that are not EC2's.
LEAVE = "leave"  # SIGTERM: the process is to end; the machine may stay
REBALANCE = "rebalance"  # a recommendation: an interruption is more likely than usual
STALE_SECONDS = 10.0  # a notice whose time passed longer ago is void, since the machine still runs

_SILENT_POLLS = 5  # failures in a row before they are reported
_LONGEST_PAUSE_SECONDS = 10.0
_SHORTEST_PAUSE_SECONDS = 0.02
_CLOSE_SECONDS = 3.0

_INSTANCE_ACTION = "meta-data/spot/instance-action"
_REBALANCE = "meta-data/events/recommendations/rebalance"
_FIRST_ANSWERS_SECONDS = 0.9
_ANSWER_SECONDS = 1.0
_TOKEN_TTL_SECONDS = 6 * 3600
# Statuses with which services without version 2 answer the PUT
_NO_SUCH_REQUEST = (400, 404, 405, 501)
_UNSAID_SECONDS = 30.0  # for unreadable times: as long as the shortest notices of clouds

# As in Metaflow 2.19's current.spot_termination_notice
METAFLOW_FILE = "/tmp/spot_termination_notice"


class NoticeSource(StrEnum):
    SIGNAL = "signal"
    METADATA = "metadata"
    METAFLOW = "metaflow"
    REHEARSAL = "rehearsal"


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A notice from one source.

    A second notice with the same source and action counts as a repetition.
    """

    source: NoticeSource
    action: str  # one of `RECLAIMS`, LEAVE or REBALANCE
    ends_at: float  # time.monotonic() at which the notice takes effect; infinite if unknown
    # Time.monotonic() at which the notice arrived
    heard_at: float = field(default_factory=time.monotonic)
    detail: str = ""  # the source's own text

    @property
    def seconds_left(self) -> float:
        return max(self.ends_at - time.monotonic(), 0.0)

    @property
    def reclaims(self) -> bool:
        return self.action in RECLAIMS


class Source(Protocol):
    """A source of notices. Only the thread of `NoticeWatcher` calls its methods."""

    name: NoticeSource
    poll_seconds: float

    def begin(self) -> str:
        """Prepare for polling, in about a second at most.

        Return "" if this source is available, else why it is not.
        """
        ...

    def look(self) -> list[Notice]:
        """Poll the source once and return its current notices.

        Raises OSError if the source does not answer in time.
        """
        ...


class NoticeWatcher:
    """A thread that polls sources of notices until it is closed.

    It skips the sources that are unavailable at the start. A slow source delays the other sources
    by at most its own deadline (about 2 s).
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self._notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._absent: dict[str, str] = {}
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._decided = threading.Event()
        self._looked = threading.Event()
        self._closed = threading.Event()
        self._known_ends: dict[tuple[str, str], float] = {}
        self._thread = threading.Thread(target=self._watch, name="notices", daemon=True)
        self._thread.start()

    def new_notices(self) -> list[Notice]:
        """Return the notices that arrived since the last call.

        A repeated notice is returned again only in two cases: its new time is more than 1 s before
        the announced one, or the announced time passed more than 10 s ago and the new time is
        later.
        """
        return _all(self._notices)

    def wait_for_first_poll(self, seconds: float) -> bool:
        """Wait until each available source has been polled once.

        Return False if this takes longer than `seconds`.
        """
        return self._looked.wait(seconds)

    def problems(self) -> list[str]:
        """Return one message for each source that has failed five times in a row.

        Each message is returned once.
        """
        return _all(self._problems)

    def source_problems(self) -> dict[str, str] | None:
        """Map the name of each source to the reason why it is unavailable, or to "" if it is
        available.

        Return None until this is known, which takes about a second after the start.
        """
        if self._decided.is_set():
            return dict(self._absent)
        return None

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_CLOSE_SECONDS)

    def _watch(self) -> None:
        for source in self._sources:
            try:
                self._absent[source.name] = source.begin()
            except Exception as error:
                self._absent[source.name] = (
                    f"cannot be watched: {str(error) or type(error).__name__}"
                )
        self._decided.set()
        watched = [source for source in self._sources if not self._absent[source.name]]
        due = {source.name: 0.0 for source in watched}
        failed = {source.name: 0 for source in watched}
        if not watched:
            self._looked.set()
            return
        while not self._closed.is_set():
            for source in watched:
                if time.monotonic() >= due[source.name]:
                    if self._look(source, failed[source.name]):
                        failed[source.name] = 0
                    else:
                        failed[source.name] = failed[source.name] + 1
                    pause = min(
                        source.poll_seconds * 2 ** min(failed[source.name], 8),
                        _LONGEST_PAUSE_SECONDS,
                    )
                    due[source.name] = time.monotonic() + pause
            self._looked.set()
            self._closed.wait(max(min(due.values()) - time.monotonic(), _SHORTEST_PAUSE_SECONDS))

    def _look(self, source: Source, failed: int) -> bool:
        try:
            found = source.look()
        except Exception as error:  # the thread must live for the other sources
            if failed + 1 == _SILENT_POLLS:
                self._problems.put(
                    f"{source.name}: {_SILENT_POLLS} requests in a row failed, the last: {error}"
                )
            return False
        for notice in found:
            key = (notice.source, notice.action)
            known_end = self._known_ends.get(key)
            if (
                known_end is None
                or notice.ends_at < known_end - 1.0
                or known_end < time.monotonic() - STALE_SECONDS < notice.ends_at
            ):
                self._known_ends[key] = notice.ends_at
                self._notices.put(notice)
        return True


class MetadataSource:
    """Source of Spot interruptions and rebalance recommendations: EC2's metadata service."""

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
        self._service = MetadataService(metadata_endpoint(environment))
        self._token = ""
        self._token_until = 0.0
        self._version_1 = self._knows_no_tokens = False
        self._ending = EffectiveTime()

    def begin(self) -> str:
        if self._absent:
            return self._absent
        limit = time.monotonic() + _FIRST_ANSWERS_SECONDS
        try:
            problem = self._renew(0.6 * _FIRST_ANSWERS_SECONDS)
            if problem and self._knows_no_tokens:
                return self._without_token(limit - time.monotonic())
            return problem
        except TimeoutError:
            return self._without_token(limit - time.monotonic())
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{self._service.endpoint} does not answer: {str(error) or type(error).__name__}"

    def look(self) -> list[Notice]:
        found: list[Notice] = []
        try:
            for find in (self._interruption, self._recommendation):
                notice = find()
                if notice is not None:
                    found.append(notice)
        except OSError:
            if not found:  # an interruption counts although the second request failed
                raise
        except (http.client.HTTPException, ValueError) as error:
            if not found:
                raise OSError(f"{self._service.endpoint}: {error!r}") from error
        return found

    def _without_token(self, seconds: float) -> str:
        """Try version 1 of the metadata service, which needs no token.

        Return "" if it works, else why it does not.

        In a container, a small hop limit can block the response that carries the token, but not the
        other responses.
        """
        problem = f"{self._service.endpoint} gave no token in time"
        try:
            status, _ = self._service.get(_INSTANCE_ACTION, "", seconds=seconds)
        except (OSError, http.client.HTTPException, ValueError):
            return f"{problem}, and no other answer"
        if status in (200, 404):
            self._version_1 = True  # less secure, but better than no notice
            return ""
        return (
            f"{problem}, while it answers {status} without one: the hop limit is too small; fix: "
            f"{HOP_LIMIT_FIX}"
        )

    def _renew(self, seconds: float) -> str:
        status, token = self._service.token(ttl_seconds=_TOKEN_TTL_SECONDS, seconds=seconds)
        if status == 403:
            return f"{self._service.endpoint} is turned off (403)"
        self._knows_no_tokens = status in _NO_SUCH_REQUEST
        if status != 200 or not token:
            return f"{self._service.endpoint} gives no token: status {status}"
        self._token = token
        self._token_until = time.monotonic() + _TOKEN_TTL_SECONDS / 2
        return ""

    def _get(self, path: str) -> str | None:
        """Return the text at a path, or None for status 404.

        If the token is refused, try once with a new token.
        """
        if (
            not self._version_1
            and time.monotonic() >= self._token_until
            and (problem := self._renew(_ANSWER_SECONDS))
        ):
            raise OSError(problem)
        status, text = self._service.get(path, self._token, seconds=_ANSWER_SECONDS)
        if status == 401 and not self._version_1:
            if problem := self._renew(_ANSWER_SECONDS):
                raise OSError(problem)
            status, text = self._service.get(path, self._token, seconds=_ANSWER_SECONDS)
        if status not in (200, 404):
            raise OSError(f"{self._service.endpoint}: {path} answers {status}")
        if status == 200:
            return text
        return None

    def _interruption(self) -> Notice | None:
        text = self._get(_INSTANCE_ACTION)
        if text is None:
            return None
        document: object = None
        with contextlib.suppress(ValueError):  # an unreadable notice is still a notice
            document = json.loads(text)
        if not isinstance(document, dict):
            document = {}
        ends_at = self._ending.of(document.get("time"))
        # Stale: the machine was stopped and restarted, or was not taken after all.
        if ends_at < time.monotonic() - STALE_SECONDS:
            return None
        action = str(document.get("action"))
        return Notice(
            source=self.name,
            action=action if action in RECLAIMS else "terminate",
            ends_at=ends_at,
            detail=text[:200],
        )

    def _recommendation(self) -> Notice | None:
        text = self._get(_REBALANCE)
        if text is None:
            return None
        return Notice(source=self.name, action=REBALANCE, ends_at=float("inf"), detail=text[:200])


class EffectiveTime:
    """Converter of the ISO 8601 time in a notice to the clock of time.monotonic().

    As long as the source repeats the same text, `of` returns the same result, even if the time is
    unreadable or the system clock changes.
    """

    def __init__(self) -> None:
        self._text: object = None
        self._ends_at = 0.0

    def of(self, moment: object) -> float:
        """Convert an ISO 8601 time to this machine's monotonic clock.

        One that cannot be parsed is 30 s from now.
        """
        moment_text = str(moment)
        if moment_text != self._text:
            seconds = _UNSAID_SECONDS
            with contextlib.suppress(ValueError):
                utc = datetime.fromisoformat(moment_text.replace("Z", "+00:00"))
                seconds = (utc if utc.tzinfo else utc.replace(tzinfo=UTC)).timestamp() - time.time()
            self._text = moment_text
            self._ends_at = time.monotonic() + seconds
        return self._ends_at


class MetaflowSource:
    """Source that reads the file that Metaflow's spot monitor writes.

    The monitor's signal does not reach the task.

    The file contains the time of termination in ISO 8601, or nothing while it is being written. A
    time in the past is ignored: the file may be left over from before the machine was stopped and
    restarted.
    """

    name = NoticeSource.METAFLOW
    poll_seconds = 0.5

    def __init__(self, path: Path = Path(METAFLOW_FILE)) -> None:
        self._path = path
        self._ending = EffectiveTime()

    def begin(self) -> str:
        if self._path.parent.is_dir():
            return ""
        return f"no folder {self._path.parent}"

    def look(self) -> list[Notice]:
        try:
            text = self._path.read_text(errors="replace").strip()[:100]
        except FileNotFoundError:
            return []
        ends_at = self._ending.of(text)
        if not text or ends_at < time.monotonic() - STALE_SECONDS:
            return []
        return [
            Notice(
                source=self.name,
                action="terminate",
                ends_at=ends_at,
                detail=f"{self._path}: {text}",
            )
        ]


class RehearsalSource:
    """Source that reads the notices of `rehearse_notice` from a file, and deletes the file after
    reading it.
    """

    name = NoticeSource.REHEARSAL
    poll_seconds = 0.1

    def __init__(self, path: Path) -> None:
        self._path = path
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()  # left over from an earlier attempt

    def begin(self) -> str:
        return ""

    def look(self) -> list[Notice]:
        try:
            document = json.loads(self._path.read_text())
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise OSError(f"{self._path}: {error}") from error
        self._path.unlink(missing_ok=True)
        ends_at = document["t_mono"] + document["seconds"]
        return [
            Notice(
                source=self.name,
                action=document["action"],
                ends_at=ends_at,
                heard_at=document["t_mono"],
            )
        ]


def rehearse_notice(path: Path, *, action: str, seconds: float) -> None:
    """Write a notice for `RehearsalSource` into a file, atomically.

    The notice takes effect `seconds` from now.
    """
    document = {"action": action, "seconds": seconds, "t_mono": time.monotonic()}
    write_atomically(path, json.dumps(document).encode())


def _all(waiting: queue.SimpleQueue) -> list:
    found = []
    while not waiting.empty():
        found.append(waiting.get())
    return found
