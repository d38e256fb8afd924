"""A pytest plugin that gives coverage the name of the running test, in every process that the test
starts.

Load it with `-p tests.mutants.contexts` under `coverage run`. At the end each process of tests
writes a file with the duration of each passed test into the folder that MUTANTS_SECONDS names.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import coverage
import pytest

_seconds: dict[str, float] = defaultdict(float)
_not_passed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    measured = coverage.Coverage.current()
    assert measured is not None, "run pytest under `coverage run`"
    measured.switch_context(item.nodeid)
    # Processes that the test starts read their configuration, with the static context, from this
    # variable.
    measured.config.context = item.nodeid
    os.environ["COVERAGE_PROCESS_CONFIG"] = measured.config.serialize()
    result = yield
    measured.switch_context("")
    return result


def adopt_context(environment: Mapping[str, str]) -> None:
    """Use the context of the test that asked for this process, in a process forked from an earlier
    one.
    """
    measured = coverage.Coverage.current()
    if measured is not None:
        context = measured.config.deserialize(environment["COVERAGE_PROCESS_CONFIG"]).context
        if context:
            measured.switch_context(context)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration
    if not report.passed:
        _not_passed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        passed = {name: seconds for name, seconds in _seconds.items() if name not in _not_passed}
        folder = Path(os.environ["MUTANTS_SECONDS"])
        (folder / f"{os.getpid()}.json").write_text(json.dumps(passed))
