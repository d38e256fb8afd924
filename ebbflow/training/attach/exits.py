"""The exit code by which a script without an agent ends its process.

An agent sees the exit codes of its ranks. Without one, the job has to know at the end of the process
whether the script failed, and Python's exit handlers are not told of a SystemExit.

Each SystemExit is therefore marked. Python's top level drops the exception that ends the process
while no Python code runs; a script that catches the exception drops it earlier.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass

from ebbflow.training.attach.script_state import find_own_line
from ebbflow.training.errors import describe_exception

_MARK = "_ebbflow_end"
_former: Callable[..., object] | None = None  # `sys.exit` before it was watched


@dataclass(frozen=True)
class ProgramExit:
    """A SystemExit with a code other than 0."""

    message: str
    is_interrupt: bool  # whether it was raised in the handling of Ctrl-C


found: ProgramExit | None = None  # the exit that has ended this process


def watch_exits() -> None:
    """Mark the exceptions of `sys.exit` until `unwatch_exits`."""
    global _former
    original = sys.exit
    if _former is not None:
        return

    def exit_watched(code: object = None, /) -> None:
        try:
            original(code)  # type: ignore[arg-type]  # others may have replaced it, such as W&B
        except SystemExit as error:
            _mark(error)
            raise

    _former = original
    sys.exit = exit_watched  # type: ignore[assignment]


def unwatch_exits() -> None:
    """Restore `sys.exit`, unless others have replaced it since."""
    global _former
    if _former is not None and getattr(sys.exit, "__module__", "") == __name__:
        sys.exit = _former  # type: ignore[assignment]
        _former = None


def mark_pending_exit(frame: types.FrameType | None) -> None:
    """Mark a SystemExit that is being raised without `sys.exit`, such as by `exit()`.

    Call this where a generator is closed. It is not told which exception has left its loop.

    Args:
        frame: of the generator; its callers include the script.
    """
    frames: set[types.FrameType | None] = set()
    while frame is not None:
        frames.add(frame)
        frame = frame.f_back
    for value in gc.get_objects():
        if issubclass(type(value), SystemExit) and _is_raised_in(value, frames):
            _mark(value)


def describe_exit(error: SystemExit) -> ProgramExit:
    """Describe an exit with the line that called for it, as far as it is known."""
    mark = vars(error).get(_MARK)
    if isinstance(mark, _End):
        return mark.end
    message = describe_exception(error)
    place = find_own_line()
    if place:
        message = f"{place}: {message}"
    is_interrupt = isinstance(error.__context__, KeyboardInterrupt)
    return ProgramExit(message=message, is_interrupt=is_interrupt)


class _End:
    """Mark of a SystemExit, which is dropped with it."""

    def __init__(self, end: ProgramExit) -> None:
        self.end = end

    def __del__(self) -> None:
        global found
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and sys._getframe().f_back is None:
            found = self.end


def _mark(error: SystemExit) -> None:
    if error.code not in (None, 0) and _MARK not in vars(error):
        vars(error)[_MARK] = _End(describe_exit(error))


def _is_raised_in(error: SystemExit, frames: set[types.FrameType | None]) -> bool:
    """Return whether the exception was raised in a call by one of the frames."""
    entry = error.__traceback__
    if entry is None:
        # Python 3.11 adds the traceback when a handler, `finally` or `with` meets the exception
        return sys.version_info < (3, 12)
    raised: types.FrameType | None = entry.tb_frame
    while raised is not None and raised not in frames:
        raised = raised.f_back
    return raised is not None
