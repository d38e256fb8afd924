"""Uploads of large objects in parts, each with a checksum and a deadline, which obstore does not offer."""

from ebbflow.infra.multipart.requests import Throttle
from ebbflow.infra.multipart.sinks import (
    Bucket,
    BucketSink,
    FolderSink,
    MultipartUpload,
    UploadedPart,
    UploadSink,
    open_sink,
)

__all__ = [
    "Bucket",
    "BucketSink",
    "FolderSink",
    "MultipartUpload",
    "Throttle",
    "UploadSink",
    "UploadedPart",
    "open_sink",
]
