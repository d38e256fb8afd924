"""Batch's REST interface over HTTP, and a door for tests: /_control/… changes settings, takes
instances away, tells.
"""

from __future__ import annotations

import email.utils
import json
import time
from datetime import UTC, datetime
from functools import cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import botocore.loaders
import botocore.model
import botocore.validate

from tests.support.batch.api import Api
from tests.support.batch.faults import Refused, raise_for
from tests.support.batch.settings import Settings
from tests.support.local_service import LocalServer

_SIGNATURE_SECONDS = 300.0


class Server(LocalServer):
    """Jobs lie in `folder`."""

    def __init__(self, settings: Settings, folder: Path, port: int = 0) -> None:
        super().__init__(_Handler, port)
        self.api = Api(settings, folder)

    def server_close(self) -> None:
        self.api.scheduler.close()
        super().server_close()


@cache
def service() -> botocore.model.ServiceModel:
    """botocore's model of Batch."""
    return botocore.model.ServiceModel(
        botocore.loaders.Loader().load_service_model("batch", "service-2")
    )


def control(api: Api, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    """settings: change them. trace: traces begin now. reclaim: {job, node, notice}. jobs: all that
    there are. told: requests and faults so far. Raises Refused and ValueError."""
    with api.scheduler.lock:
        if path == "settings":
            api.settings.change(asked)
            api.conduct.rules = api.settings.rules
            return {}
        if path == "trace":
            api.scheduler.traces_began = time.monotonic()
            return {}
        if path == "reclaim":
            job = api.job(asked["job"])
            api.scheduler.reclaim(job, asked.get("node", 0), notice=asked.get("notice", True))
            return {}
        if path == "jobs":
            return {
                "jobs": [
                    {**job.detail(), "request": job.request} for job in api.scheduler.jobs.values()
                ]
            }
        if path == "told":
            return {"requests": dict(api.conduct.requests), "met": dict(api.conduct.met)}
    raise Refused("UnknownOperationException", f"no such control: {path}", 404)


@cache
def _operations() -> dict[str, str]:
    """Names of the operations by their paths."""
    return {
        service().operation_model(name).http["requestUri"]: name
        for name in service().operation_names
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        try:
            asked = json.loads(body or b"{}")
            if path.startswith("/_control/"):
                self._answer(200, control(self.server.api, path.removeprefix("/_control/"), asked))
            else:
                self._operate(_operations().get(path), asked)
        except Refused as refused:
            self._answer(
                refused.status, {"message": str(refused)}, {"x-amzn-ErrorType": refused.code}
            )
        except ValueError as error:
            self._answer(400, {"message": str(error)}, {"x-amzn-ErrorType": "ClientException"})

    def _operate(self, operation: str | None, asked: dict[str, Any]) -> None:
        """Raises Refused."""
        api = self.server.api
        if operation not in api.operations:
            raise Refused(
                "UnknownOperationException", f"{self.path}: not an operation of this Batch", 404
            )
        self._check_signature()
        with api.scheduler.lock:
            fault = api.conduct.draw(operation)
        if fault is not None:
            raise_for(fault["kind"], operation)
        problems = botocore.validate.ParamValidator().validate(
            asked, service().operation_model(operation).input_shape
        )
        if problems.has_errors():
            raise Refused("ClientException", problems.generate_report())
        if fault is not None and fault["kind"] == "late":
            api.conduct.late[operation].append(asked)
            self.close_connection = True
            return
        told = api.answer(operation, asked)
        for late in api.conduct.late.pop(operation, []):
            api.answer(operation, late)
        if fault is not None and fault["kind"] == "lost":
            self.close_connection = True
            return
        if fault is not None and fault["kind"] == "slow":
            time.sleep(fault.get("seconds", 1.0))
        self._answer(200, told)

    def _check_signature(self) -> None:
        """That there is one, and that it is not too old; it is not computed anew.

        Raises Refused.
        """
        if "AWS4-HMAC-SHA256" not in self.headers.get("Authorization", ""):
            raise Refused(
                "MissingAuthenticationTokenException", "Missing Authentication Token", 403
            )
        signed = (
            datetime.strptime(self.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ")
            .replace(tzinfo=UTC)
            .timestamp()
        )
        now = self.server.api.now_ms() / 1000
        if abs(now - signed) > _SIGNATURE_SECONDS:
            raise Refused(
                "InvalidSignatureException",
                f"Signature expired: signed {signed:.0f}, now {now:.0f}",
                403,
            )

    def _answer(
        self, status: int, document: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return email.utils.formatdate(self.server.api.now_ms() / 1000, usegmt=True)

    def log_message(self, *words: object) -> None:
        pass
