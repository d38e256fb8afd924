"""What S3 answers when it refuses: a status, a code, a message, as XML."""

from __future__ import annotations

from xml.sax.saxutils import escape

_STATUS = {
    "AccessDenied": 403,
    "BadDigest": 400,
    "BucketAlreadyOwnedByYou": 409,
    "BucketNotEmpty": 409,
    "ConditionalRequestConflict": 409,
    "EntityTooSmall": 400,
    "IncompleteBody": 400,
    "InsufficientStorage": 507,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidDigest": 400,
    "InvalidPart": 400,
    "InvalidPartOrder": 400,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "MalformedXML": 400,
    "MethodNotAllowed": 405,
    "MissingContentLength": 411,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "NotImplemented": 501,
    "PreconditionFailed": 412,
    "QuotaExceeded": 403,
    "RequestTimeout": 400,
    "RequestTimeTooSkewed": 403,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
    "XAmzContentSHA256Mismatch": 400,
}


class Refused(Exception):
    """Becomes the answer. code: S3's own name for it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = _STATUS[code]

    def body(self, path: str) -> bytes:
        return (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{self.code}</Code>'
            f"<Message>{escape(str(self))}</Message><Resource>{escape(path)}</Resource></Error>"
        ).encode()
