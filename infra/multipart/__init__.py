"""Large objects in parts, each with a checksum, a deadline and a name: what obstore keeps to itself."""

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
