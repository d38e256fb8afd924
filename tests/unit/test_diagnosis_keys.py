"""Fixes that name the configuration keys of a job of Ebbflow, with the value to set."""

from __future__ import annotations

import pytest

from ebbflow.core.config.keys import leaf_fields
from ebbflow.core.events import CONFIGURED
from ebbflow.core.rank_logs import LogLine
from ebbflow.diagnose.job import diagnose_job
from ebbflow.diagnose.reading import LogText
from ebbflow.diagnose.rules import KeyChange, Value, load_rules
from ebbflow.infra.__main__ import main
from tests.support.diagnosing import diagnose_lines
from tests.support.timelines import GangLog, event

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def fixes_of(text: str, **values: Value) -> tuple[str, ...]:
    gang = GangLog(1, 1.0, [[0]])
    gang.steps(1, 3, useful_step=0.1)
    settings = [{"key": key.replace("__", "."), "value": value} for key, value in values.items()]
    line = LogLine(
        t="2026-11-28T10:00:00.000Z",
        job="j",
        generation=1,
        node=0,
        rank=0,
        step=3,
        phase=None,
        text=text,
        start=0,
        end=1,
    )
    events = [event(CONFIGURED, 0.5, settings=settings), *gang.events]
    return diagnose_job(events, [line]).findings[0].rule.fix


def test_a_fix_of_a_job_names_its_keys_with_the_values_to_set() -> None:
    fixes = fixes_of(
        OOM,
        training__gradient_accumulation_steps=4,
        parallel__recompute="selective",
        training__loss_chunk_tokens=None,
    )
    assert fixes[:3] == (
        "training.gradient_accumulation_steps: 8 (now 4)",
        "parallel.recompute: full (now selective)",
        "training.loss_chunk_tokens: 1024 (now null)",
    )


def test_a_change_that_is_made_already_is_not_advised() -> None:
    fixes = fixes_of(OOM, training__gradient_accumulation_steps=1, parallel__recompute="full")
    assert fixes[0] == "training.gradient_accumulation_steps: 2 (now 1)"
    assert not any(fix.startswith("parallel.recompute") for fix in fixes)


def test_a_foreign_log_gets_the_general_fix() -> None:
    (finding,) = diagnose_lines([LogText("log", 1, OOM)]).findings
    assert finding.rule.fix == load_rules().find("C01").fix  # type: ignore[union-attr]


def test_explain_names_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "C01"]) == 0
    shown = capsys.readouterr().out
    assert "in a job of Ebbflow" in shown
    assert "training.gradient_accumulation_steps: its value × 2" in shown
    assert "parallel.recompute: the next of none, selective, full" in shown


def test_each_key_of_a_fix_exists_and_takes_its_values() -> None:
    fields = leaf_fields()
    for rule in load_rules().rules:
        for change in rule.keys:
            assert change.key in fields, (rule.id, change.key)
            assert sum((change.to is not None, change.factor is not None, bool(change.ladder))) == 1


@pytest.mark.parametrize(
    ("change", "now", "new"),
    [
        (KeyChange(key="k", factor=2), 3, 6),
        (KeyChange(key="k", factor=1.25), 10.0, 12.5),
        (KeyChange(key="k", factor=0.5), 3, 1),
        (KeyChange(key="k", factor=0.5), 1, None),
        (KeyChange(key="k", factor=2), None, None),
        (KeyChange(key="k", to=False), True, False),
        (KeyChange(key="k", to="auto"), "auto", None),
        (KeyChange(key="k", ladder=("a", "b")), "a", "b"),
        (KeyChange(key="k", ladder=("a", "b")), "b", None),
    ],
)
def test_a_change_is_derived_from_the_value_of_today(
    change: KeyChange, now: Value, new: Value
) -> None:
    assert change.apply(now) == new
