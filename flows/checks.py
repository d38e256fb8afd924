"""All rooms' checks together. Only the flow knows every room."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flows.job import PROJECT_ROOT

if TYPE_CHECKING:
    from infra.config.schema import RunConfig
    from infra.preflight import Result


def run_all_checks(config: RunConfig, config_path: str, *, quick_only: bool = False) -> list[Result]:
    """The results of every check; `quick_only`: of those that take well under a second and import nothing heavy.

    A remote store is tried in any case: nothing of a job can be told when it does not answer.
    """
    from cost.checks import CHECKS as cost_checks
    from infra.checks import CHECKS as infra_checks
    from infra.preflight import PreflightContext, run_checks
    from training.checks import CHECKS as training_checks

    context = PreflightContext(config=config, project_root=PROJECT_ROOT, config_path=Path(config_path))
    checks = [*infra_checks, *cost_checks, *training_checks]
    if quick_only:
        remote = {"store-probe"} if "://" in config.store else set()
        checks = [check for check in checks if check.tier == "quick" or check.id in remote]
    return run_checks(checks, context)
