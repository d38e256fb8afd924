"""Notices that a machine or process is about to go: who gives them (`Source`), one thread that watches (`Watcher`)."""

from ebbflow.infra.notices.files import METAFLOW_FILE, MetaflowSource, RehearsalSource, rehearse_notice
from ebbflow.infra.notices.metadata import MetadataSource
from ebbflow.infra.notices.notice import LEAVE, REBALANCE, RECLAIMS, STALE_SECONDS, Notice, NoticeSource, Source
from ebbflow.infra.notices.watcher import Watcher

__all__ = [
    "LEAVE",
    "METAFLOW_FILE",
    "REBALANCE",
    "RECLAIMS",
    "STALE_SECONDS",
    "MetadataSource",
    "MetaflowSource",
    "Notice",
    "NoticeSource",
    "RehearsalSource",
    "Source",
    "Watcher",
    "rehearse_notice",
]
