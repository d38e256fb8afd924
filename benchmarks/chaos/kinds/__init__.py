"""All kinds of faults by name."""

from __future__ import annotations

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.kinds.hooked import HOOKED
from benchmarks.chaos.kinds.launching import LAUNCHING
from benchmarks.chaos.kinds.machine import MACHINE
from benchmarks.chaos.kinds.network import NETWORK
from benchmarks.chaos.kinds.signals import SIGNALS

FAULTS: dict[str, Fault] = {
    fault.kind: fault for fault in SIGNALS + HOOKED + LAUNCHING + NETWORK + MACHINE
}
