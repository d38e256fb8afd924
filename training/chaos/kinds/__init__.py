"""Every kind of fault, by what it is done with."""

from __future__ import annotations

from training.chaos.fault import Fault
from training.chaos.kinds.disk import DISK
from training.chaos.kinds.hooked import HOOKED
from training.chaos.kinds.launching import LAUNCHING
from training.chaos.kinds.library import LIBRARY
from training.chaos.kinds.memory import MEMORY
from training.chaos.kinds.network import NETWORK
from training.chaos.kinds.signals import SIGNALS
from training.chaos.kinds.storage import STORAGE

FAULTS: dict[str, Fault] = {
    fault.kind: fault
    for group in (SIGNALS, HOOKED, MEMORY, LAUNCHING, NETWORK, DISK, STORAGE, LIBRARY)
    for fault in group
}
