"""`@package_sources`, which ships this flow's siblings with its code: Metaflow's own from 2.19.39 on, else ours.

Releases before have a hook of decorators for that, `add_to_package`, which puts files beside Metaflow in the package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import metaflow

from ebbflow.infra.program import IMPORT_ROOT, INSTALLED

OWN = not hasattr(metaflow, "package_sources")
_SUFFIXES = (".py", ".yaml", ".csv")
_SHIPPED: list[Path] = []


def package_sources() -> Callable[[type], Any]:
    """Decorate a flow so that its code package holds the package `ebbflow` and, in a checkout, `examples`."""
    folders = [IMPORT_ROOT / "ebbflow", *([] if INSTALLED else [IMPORT_ROOT / "examples"])]
    folders = [folder for folder in folders if folder.is_dir()]  # in a code package itself there may be no examples
    if not OWN:
        return metaflow.package_sources([(str(folder), folder.name) for folder in folders], suffixes=list(_SUFFIXES))

    def remember(flow: type) -> type:
        _SHIPPED[:] = folders
        return flow

    return remember


def files() -> Iterator[tuple[str, str]]:
    """(path, name in the package) of what a decorator is to add; nothing where Metaflow adds it itself."""
    for folder in _SHIPPED:
        for parent, _, names in sorted(os.walk(folder, followlinks=True)):  # the rooms are links in a checkout
            for path in (Path(parent, name) for name in sorted(names)):
                if path.suffix in _SUFFIXES:
                    yield str(path), str(path.relative_to(folder.parent))
