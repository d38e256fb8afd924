"""Running one check of any room, as the preflight would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebbflow.core.config import RunConfig
from ebbflow.core.preflight import CheckResult, PreflightContext, run_checks
from ebbflow.flows.checks import all_checks

ROOT = Path(__file__).resolve().parents[2]
ALL_CHECKS = all_checks()
CHECKS = {check.id: check for check in ALL_CHECKS}


def run(name: str, project_root: Path = ROOT, **sections: Any) -> CheckResult:
    """The result of one check with the default configuration but for these sections."""
    config = RunConfig.model_validate(sections)
    return run_checks([CHECKS[name]], PreflightContext(config=config, project_root=project_root))[0]


def failed(name: str, project_root: Path = ROOT, **sections: Any) -> CheckResult:
    result = run(name, project_root, **sections)
    assert result.status == ("warning" if CHECKS[name].severity == "warning" else "failed"), result
    assert result.fix
    return result


def passed(name: str, project_root: Path = ROOT, **sections: Any) -> CheckResult:
    result = run(name, project_root, **sections)
    assert result.status == "passed", result
    return result


def skipped(name: str, project_root: Path = ROOT, **sections: Any) -> CheckResult:
    result = run(name, project_root, **sections)
    assert result.status == "skipped", result
    assert result.detail.startswith("skipped, because ")
    return result
