"""Calls that may hang where nobody can interrupt them: name servers, sources of credentials, foreign libraries."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, find: Callable[[], T], what: str, late: Callable[[], Exception]) -> T:
    """What `find` returns or raises. It runs in a thread named `what`, a daemon that keeps no process from ending.

    Raises what `late` makes when there is no answer within `seconds`.
    """
    answer: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(find())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if errors:
        raise errors[0]
    if not answer:
        raise late()
    return answer[0]
