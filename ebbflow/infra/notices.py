"""Notices that this machine or process must stop soon: their sources, and the threads that poll
them.

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
_SILENT_STARTS = 3  # failed starts in a row before they are reported
_FIRST_START_PAUSE_SECONDS = 0.25  # doubled after each failed start
_LONGEST_START_PAUSE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 10.0
_SHORTEST_PAUSE_SECONDS = 0.02
_CLOSE_SECONDS = 3.0

_INSTANCE_ACTION = "meta-data/spot/instance-action"
_REBALANCE = "meta-data/events/recommendations/rebalance"
# Deadlines of the first requests for a token; the last applies to all later ones. A node that has
# just booted can take seconds to answer.
_TOKEN_DEADLINES = (0.5, 2.0, 5.0)
_WITHOUT_TOKEN_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
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
    """A notice that this machine or process may have to stop, from one source.

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
    """A source of notices that can be polled.

    Only the source's own thread of a `NoticeWatcher` calls its methods.
    """

    name: NoticeSource
    poll_seconds: float
    may_begin_later: bool  # whether `begin` can succeed after it has failed

    def begin(self) -> str:
        """Prepare the source for polling.

        Return "" if this source is available, else why it is not. The first call takes about a
        second at most.
        """
        ...

    def look(self) -> list[Notice]:
        """Poll the source once and return its current notices.

        Raises OSError if the source does not answer in time.
        """
        ...


class NoticeWatcher:
    """Threads, one for each source of notices, that poll their sources until the watcher is closed.

    A source that is unavailable at the start is tried again, quickly at first and then every 5 s.
    A slow source delays no other.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._absent: dict[str, str] = {}
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._names = [source.name for source in sources]
        self._polled: dict[str, threading.Event] = {name: threading.Event() for name in self._names}
        self._closed = threading.Event()
        self._known_ends: dict[tuple[str, str], float] = {}
        self._threads = [
            threading.Thread(target=self._watch, args=(source,), name="notices", daemon=True)
            for source in sources
        ]
        for thread in self._threads:
            thread.start()

    def new_notices(self) -> list[Notice]:
        """Return the notices that arrived since the last call.

        A repeated notice is returned again only in two cases: its new time is more than 1 s before
        the announced one, or the announced time passed more than 10 s ago and the new time is
        later.
        """
        return _all(self._notices)

    def wait_for_first_poll(self, seconds: float) -> bool:
        """Wait until each source has been polled once or was found unavailable.

        Return False if this takes longer than `seconds`.
        """
        limit = time.monotonic() + seconds
        return all(
            polled.wait(max(limit - time.monotonic(), 0.0)) for polled in self._polled.values()
        )

    def problems(self) -> list[str]:
        """Return one message for each source that has failed five times in a row, or that has not
        become available in three tries.

        Each message is returned once.
        """
        return _all(self._problems)

    def source_problems(self) -> dict[str, str] | None:
        """Map the name of each source to the reason why it is unavailable, or to "" if it is
        available.

        Return None until this is known, which takes about a second after the start.
        """
        known = dict(self._absent)
        if len(known) < len(self._names):
            return None
        return {name: known[name] for name in self._names}

    def close(self) -> None:
        self._closed.set()
        limit = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(limit - time.monotonic(), 0.0))

    def _watch(self, source: Source) -> None:
        if not self._begin(source):
            return
        failed = 0
        while not self._closed.is_set():
            failed = 0 if self._look(source, failed) else failed + 1
            self._polled[source.name].set()
            pause = min(source.poll_seconds * 2 ** min(failed, 8), _LONGEST_PAUSE_SECONDS)
            self._closed.wait(max(pause, _SHORTEST_PAUSE_SECONDS))

    def _begin(self, source: Source) -> bool:
        """Try to start a source until it is available. Return whether it is."""
        pause = _FIRST_START_PAUSE_SECONDS
        failed = 0
        while True:
            try:
                problem = source.begin()
            except Exception as error:
                problem = f"cannot be watched: {str(error) or type(error).__name__}"
            self._absent[source.name] = problem
            if not problem:
                return True
            self._polled[source.name].set()
            if not source.may_begin_later:
                return False
            failed += 1
            if failed == _SILENT_STARTS:
                self._problems.put(
                    f"{source.name}: {problem}; asked again every "
                    f"{_LONGEST_START_PAUSE_SECONDS:g} s"
                )
            if self._closed.wait(pause):
                return False
            pause = min(2 * pause, _LONGEST_START_PAUSE_SECONDS)

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
        self.may_begin_later = not self._absent
        self._service = MetadataService(metadata_endpoint(environment))
        self._token = ""
        self._token_until = 0.0
        self._version_1 = False
        self._knows_no_tokens = False
        self._unanswered_tokens = 0  # requests for a token without any answer, until the first
        self._has_answered_token = False
        self._ending = EffectiveTime()

    def begin(self) -> str:
        if self._absent:
            return self._absent
        seconds = _TOKEN_DEADLINES[min(self._unanswered_tokens, len(_TOKEN_DEADLINES) - 1)]
        try:
            problem = self._renew(seconds)
            if problem and self._knows_no_tokens:
                return self._without_token(problem)
            return problem
        except TimeoutError:
            self._unanswered_tokens += 1
            return self._without_token(
                f"{self._service.endpoint} gave no token within {seconds:g} s"
            )
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

    def _without_token(self, problem: str) -> str:
        """Try version 1 of the metadata service, which needs no token.

        Return "" if it works, else why it does not.

        In a container, a small hop limit can block the response that carries the token, but not the
        other responses. A slow service looks the same at first. The message therefore names the hop
        limit only if no request for a token was answered, not even with the longest deadline.
        """
        try:
            status, _ = self._service.get(_INSTANCE_ACTION, "", seconds=_WITHOUT_TOKEN_SECONDS)
        except (OSError, http.client.HTTPException, ValueError):
            return f"{problem}, and no other answer"
        if status in (200, 404):
            self._version_1 = True  # less secure, but better than no notice
            return ""
        problem = f"{problem}, while it answers {status} without one"
        if self._has_answered_token or self._unanswered_tokens < len(_TOKEN_DEADLINES):
            return problem
        return (
            f"{problem}, and none in {self._unanswered_tokens} requests: the hop limit may be too "
            f"small; fix: {HOP_LIMIT_FIX}"
        )

    def _renew(self, seconds: float) -> str:
        status, token = self._service.token(ttl_seconds=_TOKEN_TTL_SECONDS, seconds=seconds)
        self._has_answered_token = True
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
    """Converter from the ISO 8601 time in a notice to the clock of time.monotonic().

    As long as the source repeats the same text, `of` returns the same result, even if the time is
    unreadable or the system clock changes.
    """

    def __init__(self) -> None:
        self._text: object = None
        self._ends_at = 0.0

    def of(self, moment: object) -> float:
        """Convert an ISO 8601 time to this machine's monotonic clock.

        A time that cannot be parsed counts as 30 s from now.
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
    may_begin_later = False

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
    may_begin_later = False

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
