"""Where a job lives while faults are done to it: this machine as it is, or a place of its own that can be hurt."""

from training.chaos.places.disk import SmallDisk
from training.chaos.places.namespaces import Namespaces
from training.chaos.places.place import Place
from training.chaos.places.shim import Shimmed
from training.chaos.places.store import FailingStore

__all__ = ["FailingStore", "Namespaces", "Place", "Shimmed", "SmallDisk"]
