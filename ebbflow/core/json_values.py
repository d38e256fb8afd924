"""Types of JSON values."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

# The containers are read-only types, so that `list[str]` and `dict[str, float]` are JSON values too.
Json: TypeAlias = str | float | bool | Sequence["Json"] | Mapping[str, "Json"] | None
JsonObject: TypeAlias = dict[str, Json]
