"""One connection: from the bytes of a request to the bytes of its answer, with the faults that were
drawn for it.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING

from tests.support.s3.bodies import BrokenBody, decode, read_raw
from tests.support.s3.control import control
from tests.support.s3.faults import Conduct, Fault, Hold
from tests.support.s3.objects import Bucket, flipped
from tests.support.s3.operations import apply, check_precondition, operation_of
from tests.support.s3.refusals import Refused
from tests.support.s3.request import Answer, Request
from tests.support.s3.signature import Signature, check_payload

if TYPE_CHECKING:
    from tests.support.s3.server import Server

_REFUSING = {
    "error": ("InternalError", "injected"),
    "slow_down": ("SlowDown", "injected: reduce your request rate"),
    "conflict": ("ConditionalRequestConflict", "injected: a conflicting operation was under way"),
    "time_out": ("RequestTimeout", "injected: the connection was idle for too long"),
}
_HOLD_SECONDS = 60.0


class Handler(BaseHTTPRequestHandler):
    """Speaks HTTP/1.1 with connections that are kept."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    timeout = 120
    server: Server

    def handle_expect_100(self) -> bool:
        """A client that asks first waits a second for the answer: it must not stay in the buffer."""
        said = super().handle_expect_100()
        self.wfile.flush()
        return said

    def _serve(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers)
        try:
            if request.bucket == "_control":
                request.body = read_raw(self.rfile, request, None)
                self._send(control(self.server, request), request)
                return
            self._serve_s3(request)
        except _Hangup:
            self._reset()
        except (BrokenBody, OSError):
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815 - the names that http.server looks for

    def _serve_s3(self, request: Request) -> None:
        bucket, conduct = self.server.bucket(request.bucket)
        operation = operation_of(request)
        fault = conduct.draw(operation, request.key)
        hold = conduct.held(operation, request.key)
        if fault:
            kind = fault.kind
        else:
            kind = ""
        if kind == "stall":
            self._linger(conduct.stall_seconds)
            raise _Hangup
        try:
            answer = self._answered(request, bucket, conduct, fault, hold)
        except Refused as refused:
            conduct.count_refusal(refused.code if kind not in _REFUSING else "injected")
            answer = Answer(
                refused.status, refused.body(request.path), {"Content-Type": "application/xml"}
            )
        if kind == "rot" and bucket is not None and fault is not None:
            bucket.flip(request.key, fault.fraction)
        if kind == "stall_done":
            self._linger(conduct.stall_seconds)
        if kind in ("stall_done", "lost"):
            raise _Hangup
        if kind == "flip" and fault is not None and answer.content and answer.body:
            answer.body = flipped(answer.body, fault.fraction)
        self._send(answer, request, cut=kind == "reset")

    def _answered(
        self,
        request: Request,
        bucket: Bucket | None,
        conduct: Conduct,
        fault: Fault | None,
        hold: Hold | None,
    ) -> Answer:
        """Check, read, wait, apply, in S3's order. Raises Refused once the body has been read."""
        refused: Refused | None = None
        signature: Signature | None = None
        try:
            signature = Signature(request)
            if conduct.racy and bucket is not None and operation_of(request) in ("put", "complete"):
                check_precondition(request, bucket)
        except Refused as error:
            refused = error
        raw = read_raw(self.rfile, request, self._halfway(request, fault, hold))
        if refused is not None or signature is None:
            raise refused or AssertionError("neither signed nor refused")
        request.body = decode(raw, request, signature)
        check_payload(request)
        if fault is not None and fault.kind == "slow":
            time.sleep(conduct.slow_seconds(fault))
        if fault is not None and fault.kind in _REFUSING:
            raise Refused(*_REFUSING[fault.kind])
        self._wait(hold, "before")
        if bucket is None or operation_of(request) in ("bucket_put", "bucket_delete"):
            return self.server.apply(request, bucket)
        answer = apply(request, bucket, conduct)
        self._wait(hold, "after")
        return answer

    def _halfway(
        self, request: Request, fault: Fault | None, hold: Hold | None
    ) -> Callable[[], None] | None:
        """What happens when half of the body has come."""
        if request.method not in ("PUT", "POST"):
            return None
        if fault is not None and fault.kind == "reset":
            return self._hang_up
        if hold is not None and hold.point == "mid":
            return lambda: self._wait(hold, "mid")
        return None

    def _hang_up(self) -> None:
        raise _Hangup

    def _wait(self, hold: Hold | None, point: str) -> None:
        if hold is not None and hold.point == point:
            hold.arrived.set()
            hold.released.wait(_HOLD_SECONDS)

    def _send(self, answer: Answer, request: Request, *, cut: bool = False) -> None:
        """cut: the connection is reset in the middle of the body."""
        self.send_response_only(answer.status)
        for name, value in {
            "Server": "ebbflow-test-s3",
            "Date": self.date_time_string(),
            **answer.headers,
        }.items():
            self.send_header(name, value)
        if answer.status not in (204, 304):
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if request.method != "HEAD" and answer.status not in (204, 304):
            self.wfile.write(answer.body[: len(answer.body) // 2] if cut else answer.body)
        self.wfile.flush()
        if cut:
            raise _Hangup

    def _linger(self, seconds: float) -> None:
        """Say nothing, until the client leaves."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.server.closing.is_set():
            readable, _, _ = select.select([self.connection], [], [], 0.2)
            if readable:
                try:
                    if not self.connection.recv(1 << 16):
                        return
                except OSError:
                    return

    def _reset(self) -> None:
        """End with a reset rather than in peace."""
        self.close_connection = True
        try:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        except OSError:
            return

    def log_message(self, *_: object) -> None:
        """The counts at the control address say more."""


class _Hangup(Exception):
    """The connection is to end without an answer."""
