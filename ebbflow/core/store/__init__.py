"""Object store with one interface for a local folder (the default) and for S3."""

from ebbflow.core.store.objects import Buffer, ObjectMeta, Store

__all__ = ["Buffer", "ObjectMeta", "Store"]
