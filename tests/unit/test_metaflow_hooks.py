"""Releases of Metaflow: the hooks that the flow needs."""

from __future__ import annotations

import pytest
from metaflow.decorators import StepDecorator

from ebbflow.flows.decorators import check_hooks


def test_a_release_without_a_needed_hook_is_refused_by_the_hooks_name() -> None:
    check_hooks(StepDecorator)

    class OldDecorator:
        step_init = add_to_package = task_pre_step = None

    with pytest.raises(ImportError, match=r"no hook runtime_step_cli; fix: pip install"):
        check_hooks(OldDecorator)
