"""The object store, a local folder (the default) or S3, behind one interface."""

from ebbflow.core.store.objects import Buffer, ObjectMeta, Store

__all__ = ["Buffer", "ObjectMeta", "Store"]
