"""metrics.prom: the figures of a job's report as a page for Prometheus' textfile collector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ebbflow.infra.events import COMMIT, COMMIT_FAILED, STEP, Event
from ebbflow.infra.metrics.board import Board
from ebbflow.infra.metrics.catalogue import JOB_METRICS
from ebbflow.infra.outcome import Outcome

# Words of a plan or a ledger line, and what they say of a figure: the weakest of several holds.
_STRENGTH = ("measured", "live", "recorded", "estimated", "simulated")


def job_page(report: dict[str, Any], events: Sequence[Event]) -> bytes:
    """report: as in report.json. events: the ones it was made from, for what a report does not add up."""
    board = Board(JOB_METRICS, {"job": report["job"]})
    _set_end(board, report)
    _set_money(board, report)
    _set_work(board, report)
    _set_counts(board, events)
    return board.page()


def _set_end(board: Board, report: dict[str, Any]) -> None:
    for outcome in Outcome:
        board.set("ebbflow_job_outcome", float(outcome == report["outcome"]), outcome.value)
    for name in ("interruptions", "failures", "redone_steps"):
        board.set(f"ebbflow_job_{name}_total", report[name])
    hours = report["actual"].get("wall_hours")
    board.set("ebbflow_job_wall_seconds", None if hours is None else hours * 3600)


def _set_money(board: Board, report: dict[str, Any]) -> None:
    price = str(report["actual"].get("price_kind") or "unpriced")
    for line in report["ledger"]:
        board.set("ebbflow_job_rank_seconds_total", line["rank_seconds"], line["class"], line["kind"])
        if price != "unpriced":  # without a price nothing is known to have been paid, which is not nothing
            board.set("ebbflow_job_usd_total", line["usd"], line["class"], weakest(price, line["kind"]))
    board.set("ebbflow_job_savings_usd", report["savings_usd"], weakest(price, "estimated"))
    plan = report["plan"] or {}
    board.set("ebbflow_job_budget_usd", plan.get("budget_usd"))
    chosen = plan.get("chosen") or {}
    if not chosen:
        return
    kind = "simulated" if plan.get("simulated") else "measured"
    board.set("ebbflow_job_capacity_info", 1, str(chosen.get("instance_type")), str(chosen.get("market")))
    board.set("ebbflow_job_nodes", chosen.get("nodes"), kind)
    board.set("ebbflow_job_planned_usd", chosen.get("expected_usd"), "estimated")
    hours = chosen.get("expected_hours")
    board.set("ebbflow_job_planned_seconds", None if hours is None else hours * 3600, "estimated")


def _set_work(board: Board, report: dict[str, Any]) -> None:
    actual = report["actual"]
    board.set("ebbflow_job_step", actual.get("steps"))
    board.set("ebbflow_job_loss", report["loss_curve"][-1][1] if report["loss_curve"] else None)
    board.set("ebbflow_job_held_out_loss", actual.get("held_out_loss"))
    board.set("ebbflow_job_tokens_per_second", actual.get("tokens_per_second"))
    board.set("ebbflow_job_mfu_ratio", actual.get("mfu"), "measured")
    board.set("ebbflow_job_goodput_ratio", actual.get("goodput"))
    board.set("ebbflow_job_unattributed_ratio", actual.get("unattributed_share"))
    board.set("ebbflow_job_generations_total", actual.get("generations"))
    board.set("ebbflow_job_commits_total", actual.get("commits"))


def _set_counts(board: Board, events: Sequence[Event]) -> None:
    """Every rank tells the whole gang's tokens: rank 0's are counted."""
    steps = [event for event in events if event.name == STEP and event.rank == 0]
    commits = {event.data.get("key", event.step): event.data for event in events if event.name == COMMIT}.values()
    board.set("ebbflow_job_tokens_total", sum(event.data.get("tokens") or 0 for event in steps))
    board.set("ebbflow_job_committed_bytes_total", sum(data.get("bytes") or 0 for data in commits))
    board.set("ebbflow_job_commit_seconds_total", sum(data.get("seconds") or 0 for data in commits))
    board.set("ebbflow_job_commit_failures_total", sum(event.name == COMMIT_FAILED for event in events))
    board.set("ebbflow_job_last_event_timestamp_seconds", max((event.t_wall for event in events), default=None))


def weakest(*words: str) -> str:
    """Of "recorded 2026-07-20" and "measured": recorded. A figure is no better than the worst that it is made from."""
    kinds = [word.split()[0] if word else "estimated" for word in words]
    return max(kinds, key=lambda kind: _STRENGTH.index(kind) if kind in _STRENGTH else len(_STRENGTH))
