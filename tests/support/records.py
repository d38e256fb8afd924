"""What a record promises by its declaration: fields by name only, and no change after it is made."""

from __future__ import annotations

import inspect
from typing import Any


def takes_names_only(record: type) -> bool:
    parameters = inspect.signature(record).parameters.values()
    return all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters)


def is_frozen(record: Any) -> bool:
    return record.__dataclass_params__.frozen
