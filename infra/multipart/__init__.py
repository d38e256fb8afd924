"""Large objects in parts, each with a checksum, a deadline and a name: what obstore keeps to itself."""

from ebbflow.infra.multipart.client import Bucket, Part, Upload
from ebbflow.infra.multipart.folder import FolderSink
from ebbflow.infra.multipart.sinks import BucketSink, Sink, open_sink
from ebbflow.infra.multipart.throttle import Throttle

__all__ = ["Bucket", "BucketSink", "FolderSink", "Part", "Sink", "Throttle", "Upload", "open_sink"]
