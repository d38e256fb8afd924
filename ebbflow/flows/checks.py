"""The preflight checks of all packages (infra, cost, training, flows), for the flow and for
`ebbflow preflight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ebbflow.core.program import PROJECT_ROOT
from ebbflow.flows.remote import refusal_reason, requested_backend, set_environment

if TYPE_CHECKING:
    from ebbflow.core.config.schema import RunConfig
    from ebbflow.core.preflight import Check, CheckResult, Target

# Checks that need a network and still run before anything is submitted to AWS Batch.
_BEFORE_A_SUBMIT = ("aws-queues", "aws-metaflow", "aws-metadata", "aws-clock")
# Prefixes of the ids of a backend's checks
_OF_BACKENDS = {"aws-": "batch", "kubernetes-": "kubernetes", "slurm-": "slurm"}
# Checks of pools of a cloud, none of which a job on Slurm needs
_OF_POOLS = ("planned-memory", "budget-deadline")


def all_checks() -> list[Check]:
    from ebbflow.cost.checks import CHECKS as cost_checks
    from ebbflow.flows.attempts.settlement import CHECKS as batch_checks
    from ebbflow.flows.metaflow_fixes import CHECKS as metaflow_checks
    from ebbflow.infra.checks import CHECKS as infra_checks
    from ebbflow.training.checks import CHECKS as training_checks
    from ebbflow.tryout.examine import CHECKS as tryout_checks

    return [
        *infra_checks,
        *cost_checks,
        *training_checks,
        *tryout_checks,
        *metaflow_checks,
        *batch_checks,
    ]


def check_before_launch(
    config: RunConfig, config_path: str, *, job: str | None, words: Sequence[str]
) -> str | None:
    """Return why a `run` or `resume` must not start, as text for the user, or None if it may start.

    Call this before Metaflow is imported, because it also sets Metaflow's environment variables for
    the backend. `words` is the command line.
    """
    from ebbflow.core.preflight import failed_results, render_results

    backend = requested_backend(words, config.cluster.plan_for)
    refusal = refusal_reason(config, backend, words)
    if refusal:
        return refusal
    if backend is not None:
        set_environment(config, backend)
    failed = failed_results(
        run_all_checks(config, config_path, quick_only=True, job=job, target=backend or "local")
    )
    if failed:
        return render_results(failed)
    return None


def run_all_checks(
    config: RunConfig,
    config_path: str,
    *,
    quick_only: bool = False,
    job: str | None = None,
    target: Target | None = "local",
) -> list[CheckResult]:
    """Run the preflight checks and return their results.

    Args:
        quick_only: run only the checks that take well under a second, and a few slower ones that
            every launch needs.
        target: backend of the run. Checks for other backends are left out. None means that no
            checks are left out.
    """
    from ebbflow.core.preflight import PreflightContext, run_checks

    context = PreflightContext(
        config=config,
        project_root=PROJECT_ROOT,
        config_path=Path(config_path) if config_path else None,
        job=job,
        target=target,
    )
    if "://" in config.store:
        at_once = {"store-probe"}
    else:
        at_once = set()
    if target == "batch":
        at_once |= set(_BEFORE_A_SUBMIT)
    else:
        at_once |= set()
    checks = [
        replace(check, tier="quick") if check.id in at_once else check for check in all_checks()
    ]
    if target == "slurm":
        checks = [check for check in checks if check.id not in _OF_POOLS]
    if target is not None:
        others = tuple(prefix for prefix, backend in _OF_BACKENDS.items() if backend != target)
        checks = [check for check in checks if not check.id.startswith(others)]
    return run_checks(checks, context, quick_only=quick_only)
