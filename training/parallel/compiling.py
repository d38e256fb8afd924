"""When torch compiles: at the first call of a unit, in its first backward pass, and again for another shape."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable


def tell_compilation(begun: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """From now on `begun` is called when torch begins to compile anything, and what it returns when that is done.

    The hooks are private to torch, and found by trying: without them compilation is part of the phase that it happens
    in. Where nothing has loaded the compiler there is nothing to tell. Returns what takes the hooks away.
    """
    if "torch._dynamo" not in sys.modules:
        return lambda: None
    try:
        from torch._dynamo.callback import callback_handler as handler

        ends: list[Callable[[], None]] = []
        start = handler.register_start_callback(lambda _: ends.append(begun()))
        end = handler.register_end_callback(lambda _: ends.pop()() if ends else None)
    except (ImportError, AttributeError):
        return lambda: None

    def stop() -> None:
        with contextlib.suppress(AttributeError, ValueError):
            handler.remove_start_callback(start)
            handler.remove_end_callback(end)

    return stop
