"""Scripts that keep their own loop: `ebbflow.attach`, and what runs them under an agent."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.training.attach.entry import attach, open_attached

__all__ = ["attach", "open_attached"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because these names need torch, and the script runner does
    not.
    """
    if name in __all__:
        from ebbflow.training.attach import entry

        return getattr(entry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
