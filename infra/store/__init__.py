"""One object store for everything: a local folder (the embedded default) or S3, through the same code path."""

from ebbflow.infra.store.objects import Buffer, ObjectMeta, Store

__all__ = ["Buffer", "ObjectMeta", "Store"]
