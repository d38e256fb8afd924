"""The types of the ledger and of the prices: their values do not change, and each is named where it
is made.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import is_dataclass

import pytest

import ebbflow.cost.ledger
import ebbflow.cost.prices

# The paid time of a node is completed while it is read: a rank list that is lost follows from the
# other nodes.
MUTABLE = {"NodeTime"}
# These are short, and made in many places.
POSITIONAL = {"PriceCurve", "Pricing", "Span"}


def dataclasses_of_money() -> Iterator[type]:
    for package in (ebbflow.cost.ledger, ebbflow.cost.prices):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for _, member in inspect.getmembers(
                importlib.import_module(module.name), inspect.isclass
            ):
                if is_dataclass(member) and member.__module__ == module.name:
                    yield member


@pytest.mark.parametrize("kind", list(dataclasses_of_money()), ids=lambda kind: kind.__name__)
def test_a_dataclass_of_money_is_frozen_and_takes_its_values_by_name(kind: type) -> None:
    assert kind.__dataclass_params__.frozen is (kind.__name__ not in MUTABLE)
    parameters = list(inspect.signature(kind).parameters.values())
    by_name = all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters)
    assert by_name is (kind.__name__ not in POSITIONAL)
