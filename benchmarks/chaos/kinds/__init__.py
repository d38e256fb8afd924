"""Every kind of fault, by what it is done with."""

from __future__ import annotations

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.kinds.disk import DISK
from benchmarks.chaos.kinds.hooked import HOOKED
from benchmarks.chaos.kinds.launching import LAUNCHING
from benchmarks.chaos.kinds.library import LIBRARY
from benchmarks.chaos.kinds.memory import MEMORY
from benchmarks.chaos.kinds.network import NETWORK
from benchmarks.chaos.kinds.signals import SIGNALS
from benchmarks.chaos.kinds.storage import STORAGE

FAULTS: dict[str, Fault] = {
    fault.kind: fault
    for group in (SIGNALS, HOOKED, MEMORY, LAUNCHING, NETWORK, DISK, STORAGE, LIBRARY)
    for fault in group
}
