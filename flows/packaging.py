"""`@package_sources`, which ships this flow's siblings with its code: Metaflow's own from 2.19.39 on, else ours.

Releases before have a hook of decorators for that, `add_to_package`, which puts files beside Metaflow in the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import metaflow

OWN = not hasattr(metaflow, "package_sources")
_FLOWS = Path(__file__).resolve().parent
_SHIPPED: list[tuple[Path, tuple[str, ...]]] = []


def package_sources(sources: Sequence[str], suffixes: Sequence[str]) -> Callable[[type], Any]:
    """A decorator of flows. sources: folders relative to the flow file. suffixes: of the files that are taken."""
    if not OWN:
        return metaflow.package_sources(list(sources), suffixes=list(suffixes))

    def remember(flow: type) -> type:
        _SHIPPED[:] = [((_FLOWS / source).resolve(), tuple(suffixes)) for source in sources]
        return flow

    return remember


def files() -> Iterator[tuple[str, str]]:
    """(path, name in the package) of what a decorator is to add; nothing where Metaflow adds it itself."""
    for folder, suffixes in _SHIPPED:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix in suffixes:
                yield str(path), str(path.relative_to(folder.parent))
