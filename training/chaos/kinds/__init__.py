"""Every kind of fault, by what it is done with."""

from __future__ import annotations

from training.chaos.fault import Fault
from training.chaos.kinds.disk import DISK
from training.chaos.kinds.hooked import HOOKED
from training.chaos.kinds.launching import LAUNCHING
from training.chaos.kinds.network import NETWORK
from training.chaos.kinds.signals import SIGNALS

FAULTS: dict[str, Fault] = {
    fault.kind: fault for group in (SIGNALS, HOOKED, LAUNCHING, NETWORK, DISK) for fault in group
}
