"""Find jobs, load their reports, and compute what a job has cost so far.

In a notebook:

    from ebbflow.cost.jobs import CostTracker, load_report

    report = load_report("latest")
    tracker = CostTracker(config, job="runs/jobs/demo")
    if tracker.get_accumulated_cost() > limit: …
    if tracker.get_cheapest_suitable_instance()["savings_percent"] < 50: …
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from ebbflow.cost.errors import PlanError, ReportError
from ebbflow.cost.ledger.bills import NodeBill
from ebbflow.cost.ledger.generations import find_final_outcome
from ebbflow.cost.ledger.ledger import fold
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.prices.quote import PriceSource
from ebbflow.cost.prices.recorded import SpotRecord
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.errors import ObjectNotFound, Outcome, StoreError
from ebbflow.infra.events import PRICES, Event, LogContent, read_events, read_log
from ebbflow.infra.launchers import running_launcher
from ebbflow.infra.layout import job_prefix, known_job, runs_folder
from ebbflow.infra.program import PROJECT_ROOT
from ebbflow.infra.segments import Damage
from ebbflow.infra.store import Store

_NAME = "report.json"
_REQUEST_SECONDS = 10.0


def find_job_uri(job: str, store: str | None = None) -> str:
    """Where the job's events are: a URI as given, a folder that holds them, or a job of the store.

    Without a store: the one in which the job lies, if it was started from this machine. Raises ReportError with the
    places that were looked at.
    """
    if "://" in job:
        return job
    if store is not None and "://" in store:
        return f"{store.rstrip('/')}/{job_prefix(job)}"
    root = runs_folder(PROJECT_ROOT) if store is None else Path(store)
    places = [Path(job), root / job_prefix(job), root / job]
    known = known_job(root / job) or known_job(Path(job))
    if store is None and known is not None:
        if "://" in known.uri:
            return known.uri
        places.append(Path(known.uri))
    for place in places:
        if (place / "events").is_dir():
            return str(place)
    listed = "\n".join(f"  {place}/events" for place in places)
    raise ReportError(f"no events of job {job!r}; looked for\n{listed}")


def read_job(job: str, store: str | None = None) -> list[Event]:
    """All events of a job, by time. Raises ReportError when there are none, StoreError when they cannot be read."""
    uri = find_job_uri(job, store)
    events = read_events(Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS))
    if not events:
        raise ReportError(f"no events of job {job!r} in {uri}")
    return events


def read_job_log(job: str, store: str | None = None) -> LogContent:
    """The same with what is damaged in the job's log, for a report. Raises as `read_job`."""
    uri = find_job_uri(job, store)
    store_of_job = Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS)
    content = read_log(store_of_job)
    if not content.events:
        damage = "".join(f"\n  damage: {one.text}" for one in content.damage[:10])
        raise ReportError(f"no events of job {job!r} in {uri}{damage}")
    return replace(content, damage=(*content.damage, *_lost_since_report(store_of_job, content.events)))


def _lost_since_report(job_store: Store, events: Sequence[Event]) -> list[Damage]:
    """Events that the job's own report counted and that are no longer there: of a process whose log is lost whole."""
    try:
        counted = json.loads(job_store.get(_NAME))["events"]["counts"]
        known = {str(name): int(count) for name, count in counted.items()}
    except (StoreError, ValueError, KeyError, TypeError, AttributeError):
        return []  # the job has no report yet
    left = Counter(event.name for event in events)
    return [
        Damage(_NAME, f"counted {count:,} {name!r} events, of which {left[name]:,} are left")
        for name, count in known.items()
        if left[name] < count
    ]


def find_running_launcher(job: str, events: Sequence[Event], store: str | None = None) -> dict[str, Any] | None:
    """The launcher that runs the job now, by its claim in the store (`infra.launchers`); None where the job has ended.

    A launcher that has only its report left to write does not count. Raises ReportError, StoreError.
    """
    found = running_launcher(Store.open(find_job_uri(job, store), request_timeout_seconds=_REQUEST_SECONDS))
    if found is None:
        return None
    done = find_final_outcome(events)
    written = done is not None and done.data.get("outcome") == Outcome.COMPLETED
    if written and done is not None and done.t_wall >= found.launcher.since_utc:
        return None
    return found.to_json()


def list_known_jobs(root: Path | None = None) -> list[str]:
    """Jobs that this machine knows, the one that was last written to last; `latest` is not counted again."""
    folder = runs_folder(PROJECT_ROOT) if root is None else root
    found = [path for path in folder.glob("*") if path.name != "latest" and known_job(path) is not None]
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime)]


def load_report(uri: str, *, store: str | None = None, fresh: bool = False) -> RunReport:
    """The report of a job, with `total_usd` as Decimal; `cost.report.report` makes DataFrames of its ledger and losses.

    uri: a report.json, the folder or s3:// URI of a job, or the name of a job that this machine knows ("latest").
    fresh: fold the events anew, also where a report was written, as is done for a running job. Raises ReportError when
    there is neither, naming the places; StoreError when the store does not answer.
    """
    path = Path(uri)
    if "://" not in uri and path.suffix == ".json":
        return _parse(path.read_bytes() if path.is_file() else b"", uri)
    place = find_job_uri(uri, store)
    running = find_running_launcher(uri, (), store)
    if not fresh and running is None:
        try:
            return _parse(Store.open(place, request_timeout_seconds=_REQUEST_SECONDS).get(_NAME), f"{place}/{_NAME}")
        except ObjectNotFound:
            pass  # the job died before its report, or is still going on
    content = read_job_log(uri, store)
    if running is not None:  # its claim stands: the events say whether there is only the report left to write
        running = find_running_launcher(uri, content.events, store)
    return build_report(content.events, running=running, damage=content.damage)


def _parse(content: bytes, where: str) -> RunReport:
    try:
        return RunReport.from_json(json.loads(content))
    except ReportError as error:
        raise ReportError(f"{where}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{where}: not a report: {error!r}") from error


def get_cheapest_suitable_instance(
    config: RunConfig, *, prices: PriceSource | None = None, now_utc: float | None = None
) -> dict[str, Any]:
    """The pool that finishes the job for the fewest expected dollars, among those that fit and meet the deadline.

    instance_type, nodes, market, region, zone, usd_per_hour (of one node), on_demand_usd_per_hour, savings_percent
    (None where no on-demand price of the type and region is on record), price_kind, expected_hours, expected_usd. Cheap
    per hour is not cheap: a slow GPU at half the price may cost more. Raises PlanError when nothing is suitable.
    """
    plan = make_plan(config, now_utc=time.time() if now_utc is None else now_utc, prices=prices)
    best = plan.chosen
    if best is None:
        reason = plan.refusal
        raise PlanError("no instance is suitable" if reason is None else f"{reason.message} ({reason.hint})")
    names = ("instance_type", "nodes", "market", "region", "zone", "usd_per_hour", "on_demand_usd_per_hour")
    known = {name: getattr(best, name) for name in (*names, "price_kind", "expected_hours", "expected_usd")}
    return {**known, "savings_percent": best.savings_percent}


def get_accumulated_cost(job: str | Sequence[Event], *, history: Iterable[SpotRecord] = ()) -> Decimal:
    """What a job's instances have cost so far, in dollars: the integral of the price over the time each was paid.

    job: its events, or the folder or s3:// URI that they lie below. history: change events of spot prices (as
    `cost.prices.recorded.read_recording` reads them), beside those that the events hold; without any, the plan's price.
    The total of the ledger (`cost.ledger.ledger.fold`) of a job that may still be running: by the second, at least a
    minute of each instance. Raises ReportError where there are no events or `history` lacks the pool of a spot node,
    LedgerError for contradictory events, and StoreError.
    """
    events = read_events(Store.open(job, request_timeout_seconds=_REQUEST_SECONDS)) if isinstance(job, str) else job
    if not events:
        raise ReportError(f"no events of job {job!r}")
    pools = _changes(history)
    told = [replace(events[0], name=PRICES, data={"pools": pools})] if pools else []
    ledger = fold([*events, *told], running=True)
    priced = {str(bill.price.pool): bool(bill.price.curve.changes) for bill in ledger.nodes if _is_spot(bill)}
    if pools and not all(priced.values()):
        lacking = ", ".join(sorted(name for name, known in priced.items() if not known))
        raise ReportError(
            f"the history has no price of {lacking}, so that its changes cannot be told; it has {_names(pools)}"
        )
    return ledger.total_usd


def _is_spot(bill: NodeBill) -> bool:
    return bill.price.pool is not None and bill.price.pool.market == "spot"


def _names(pools: Sequence[dict[str, Any]]) -> str:
    return ", ".join(sorted(f"{pool['instance_type']} in {pool['zone']}" for pool in pools))


def _changes(history: Iterable[SpotRecord]) -> list[dict[str, Any]]:
    """The changes of each pool, as a `prices` event holds them, by its zone's id and by its name: plans have either."""
    pools: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for record in history:
        for zone in {record.zone_id, record.zone_name} - {""}:
            place = (record.instance_type, record.region, zone)
            pools.setdefault(place, []).append((record.at, f"{record.usd_per_hour:f}"))
    return [
        {"instance_type": kind, "market": "spot", "region": region, "zone": zone, "changes": changes}
        for (kind, region, zone), changes in pools.items()
    ]


@dataclass(frozen=True, kw_only=True)
class CostTracker:
    """Both questions of one job. job: see `get_accumulated_cost`; None: it has not begun, and has cost nothing."""

    config: RunConfig
    job: str | None = None
    prices: PriceSource | None = None
    history: Sequence[SpotRecord] = ()

    def get_cheapest_suitable_instance(self) -> dict[str, Any]:
        return get_cheapest_suitable_instance(self.config, prices=self.prices)

    def get_accumulated_cost(self) -> Decimal:
        return Decimal(0) if self.job is None else get_accumulated_cost(self.job, history=self.history)
