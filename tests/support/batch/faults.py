"""What goes wrong with requests, by rules: the next `times` requests of an operation that fit meet
their fault.

throttle  429 TooManyRequestsException    error  500 ServerException       refuse  400 ClientException
lost      done, and no answer             slow   answered `seconds` late   forbid  403 AccessDeniedException
late      no answer, and done after the operation's next request that meets no fault
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

KINDS = ("throttle", "error", "refuse", "lost", "late", "slow", "forbid")


class Refused(Exception):
    """An answer that is an error: AWS's code and HTTP status."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class Conduct:
    """Counts requests and hands out their faults."""

    def __init__(self, rules: list[dict[str, Any]]) -> None:
        self.rules = rules
        self.requests: Counter[str] = Counter()
        self.met: Counter[str] = Counter()
        # By operation: what was asked, to be done yet
        self.late: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def draw(self, operation: str) -> dict[str, Any] | None:
        """The rule that this request meets, if any.

        Raises ValueError for a kind that there is not.
        """
        self.requests[operation] += 1
        for rule in self.rules:
            if rule["kind"] not in KINDS:
                raise ValueError(f"no such fault: {rule['kind']}")
            if rule.get("times", 1) > 0 and re.fullmatch(rule["operation"], operation):
                rule["times"] = rule.get("times", 1) - 1
                self.met[rule["kind"]] += 1
                return rule
        return None


def raise_for(kind: str, operation: str) -> None:
    """Raises what a request of that fault is answered with before anything is done."""
    if kind == "throttle":
        raise Refused("TooManyRequestsException", "Too Many Requests", 429)
    if kind == "error":
        raise Refused("ServerException", "Service unavailable, please retry", 500)
    if kind == "refuse":
        raise Refused("ClientException", f"{operation} is refused", 400)
    if kind == "forbid":
        raise Refused(
            "AccessDeniedException", f"User is not authorized to perform: batch:{operation}", 403
        )
