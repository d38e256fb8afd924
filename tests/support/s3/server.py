"""The server: buckets by name, each with its own conduct, behind a threaded HTTP server on the
loopback.
"""

from __future__ import annotations

import threading
from http.server import ThreadingHTTPServer
from typing import Any

from tests.support.s3.faults import Conduct
from tests.support.s3.handler import Handler
from tests.support.s3.objects import Bucket
from tests.support.s3.refusals import Refused
from tests.support.s3.request import Answer, Request
from tests.support.s3.xml_text import document


class Server(ThreadingHTTPServer):
    """A thread per connection; `closing` ends what lingers."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._buckets: dict[str, Bucket] = {}
        self._conducts: dict[str, Conduct] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def bucket(self, name: str) -> tuple[Bucket | None, Conduct]:
        """The bucket, None when there is none, and how it behaves."""
        with self._lock:
            return self._buckets.get(name), self._conducts.setdefault(name, Conduct())

    def behave(self, name: str, settings: dict[str, Any]) -> None:
        """Change the conduct of a bucket, which is made when it is missing. quota_bytes: of all its
        objects, None: no limit; quota_code: what a put beyond it is refused with."""
        quota_bytes = settings.pop("quota_bytes", None)
        quota_code = settings.pop("quota_code", "QuotaExceeded")
        with self._lock:
            bucket = self._buckets.setdefault(name, Bucket(name))
            conduct = self._conducts.setdefault(name, Conduct())
        conduct.change(**settings)
        bucket.quota_bytes = quota_bytes
        bucket.quota_code = quota_code

    def forget(self, name: str) -> None:
        with self._lock:
            self._buckets.pop(name, None)
            conduct = self._conducts.pop(name, None)
        for hold in conduct.holds if conduct else []:
            hold.released.set()

    def apply(self, request: Request, bucket: Bucket | None) -> Answer:
        """What concerns buckets as such: making, removing, the list of all. Raises Refused."""
        with self._lock:
            if request.method == "GET" and not request.bucket:
                rows = [("Bucket", [("Name", name)]) for name in sorted(self._buckets)]
                return Answer(body=document("ListAllMyBucketsResult", [("Buckets", rows)]))
            if request.method == "PUT" and not request.key:
                if bucket is not None:
                    raise Refused("BucketAlreadyOwnedByYou", f"{request.bucket} is there already")
                self._buckets[request.bucket] = Bucket(request.bucket)
                return Answer(headers={"Location": f"/{request.bucket}"})
            if bucket is None:
                raise Refused("NoSuchBucket", f"there is no bucket {request.bucket}")
            if bucket.objects or bucket.uploads:
                raise Refused(
                    "BucketNotEmpty", f"{bucket.name} holds {len(bucket.objects)} objects"
                )
            del self._buckets[bucket.name]
            return Answer(204)

    def handle_error(self, *_: Any) -> None:
        """A client that leaves in the middle is what this server is for."""
