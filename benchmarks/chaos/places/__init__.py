"""Where a job lives while faults are done to it: this machine as it is, or a place of its own that
can be hurt.
"""

from benchmarks.chaos.places.disk import SmallDisk
from benchmarks.chaos.places.namespaces import Namespaces
from benchmarks.chaos.places.place import Place
from benchmarks.chaos.places.shim import Shimmed
from benchmarks.chaos.places.store import FailingStore

__all__ = ["FailingStore", "Namespaces", "Place", "Shimmed", "SmallDisk"]
