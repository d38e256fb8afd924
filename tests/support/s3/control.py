"""The way in for tests, beside S3: how a bucket is to behave, what happened there, and requests
that are held.

POST   /_control/BUCKET                 settings of `Conduct` as JSON; the bucket is made when missing
GET    /_control/BUCKET                 what happened: faults met, requests by operation, refusals by code, rotten keys,
                                        multipart uploads that are under way or left behind
DELETE /_control/BUCKET                 forget all of it
POST   /_control/BUCKET/hold            {"operation", "match", "point", "skip"} → {"hold": number}
GET    /_control/BUCKET/hold/N?seconds= waits until a request is held → {"held": true or false}
DELETE /_control/BUCKET/hold/N          let it go
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support.s3.faults import Hold
from tests.support.s3.request import Answer, Request

if TYPE_CHECKING:
    from tests.support.s3.server import Server


def control(server: Server, request: Request) -> Answer:
    """Errors are answered as 400 with their text: these requests come from tests."""
    name, _, rest = request.key.partition("/")
    try:
        return _json(_dispatch(server, request, name, rest))
    except (ValueError, TypeError, KeyError, IndexError) as error:
        return Answer(400, repr(error).encode())


def _dispatch(server: Server, request: Request, name: str, rest: str) -> dict[str, Any]:
    body = json.loads(request.body or b"{}")
    if not rest:
        if request.method == "POST":
            server.behave(name, body)
            return {}
        if request.method == "DELETE":
            server.forget(name)
            return {}
        bucket, conduct = server.bucket(name)
        return {
            **conduct.told(),
            "uploads": sorted(upload.key for upload in (bucket.uploads.values() if bucket else ())),
        }
    holds = server.bucket(name)[1].holds
    _, _, number = rest.partition("/")
    if request.method == "POST":
        holds.append(Hold(**body))
        return {"hold": len(holds) - 1}
    hold = holds[int(number)]
    if request.method == "DELETE":
        hold.taken.set()  # one that nothing fell into holds nothing any more
        hold.released.set()
        return {}
    return {"held": hold.arrived.wait(float(request.query.get("seconds", 0)))}


def _json(document: dict[str, Any]) -> Answer:
    return Answer(body=json.dumps(document).encode(), headers={"Content-Type": "application/json"})
