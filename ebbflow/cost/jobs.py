"""Functions to find jobs, load their reports and compute the cost of a job so far.

In a notebook:

    from ebbflow.cost.jobs import CostTracker, load_report

    report = load_report("latest")
    tracker = CostTracker(config, job="runs/jobs/demo")
    if tracker.get_accumulated_cost() > limit: …
    if tracker.get_cheapest_suitable_instance()["savings_percent"] < 50: …
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TypedDict

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import ObjectNotFound, Outcome, StoreError
from ebbflow.core.events import PRICES, Event, LogContent, read_events, read_log
from ebbflow.core.grouping import group_by_key
from ebbflow.core.json_values import JsonObject
from ebbflow.core.launchers import RunningJob, running_launcher
from ebbflow.core.layout import (
    find_local_folder,
    job_prefix,
    known_job,
    list_other_runs_folders,
    runs_folder,
)
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.segments import Damage
from ebbflow.core.store import Store
from ebbflow.cost.errors import PlanError, ReportError
from ebbflow.cost.ledger.generations import find_final_outcome
from ebbflow.cost.ledger.ledger import fold
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.prices.quote import PriceSource
from ebbflow.cost.prices.recorded import SpotRecord
from ebbflow.cost.report.report import RunReport, build_report

_NAME = "report.json"
_REQUEST_SECONDS = 10.0


class SuitableInstance(TypedDict):
    """Pool that can run a job, with its expected total cost.

    Prices are those of one node. `savings_percent` is against the on-demand price; None if that is
    unknown.
    """

    instance_type: str
    nodes: int
    market: str
    region: str | None
    zone: str | None
    usd_per_hour: float
    on_demand_usd_per_hour: float | None
    price_kind: str
    expected_hours: float
    expected_usd: float
    savings_percent: float | None


@dataclass(frozen=True, kw_only=True)
class CostTracker:
    """Cost queries about one job, for scripts that repeat them."""

    config: RunConfig
    job: str | None = None  # folder or s3:// URI of the job; None if it has not started
    # source of the prices for `get_cheapest_suitable_instance`; None for the static table
    prices: PriceSource | None = None
    # spot price changes for `get_accumulated_cost`, in addition to those in the events
    history: Sequence[SpotRecord] = ()

    def get_cheapest_suitable_instance(self) -> SuitableInstance:
        return get_cheapest_suitable_instance(self.config, prices=self.prices)

    def get_accumulated_cost(self) -> Decimal:
        if self.job is None:
            return Decimal(0)
        return get_accumulated_cost(self.job, history=self.history)


def find_job_uri(job: str, store: str | None = None) -> str:
    """Return the folder or URI that has a job's events.

    Args:
        job: A URI, a folder, or the name of a job.
        store: URI or folder of the store. With None, search this machine's folder of runs, which
            records the stores of its jobs.

    Raises:
        ReportError: There are no events. The message lists the places that were searched.
    """
    if "://" in job:
        return job
    if store is not None and "://" in store:
        return f"{store.rstrip('/')}/{job_prefix(job)}"
    if store is None:
        root = runs_folder(PROJECT_ROOT)
    else:
        root = Path(store)
    places = [Path(job), root / job_prefix(job), root / job]
    local = root / job if store is not None else find_local_folder(PROJECT_ROOT, job)
    known = known_job(local) or known_job(Path(job))
    if store is None and known is not None:
        if "://" in known.uri:
            return known.uri
        places.append(Path(known.uri))
    for place in places:
        try:
            if (place / "events").is_dir():
                return str(place)
        except OSError as error:
            raise ReportError(f"{place}/events: {error.strerror}") from error
    listed = "\n".join(f"  {place}/events" for place in places)
    raise ReportError(f"no events of job {job!r}; looked for\n{listed}")


def read_job(job: str, store: str | None = None) -> list[Event]:
    """Read all events of a job, ordered by time.

    Raises:
        ReportError: The job has no events.
        StoreError: The store cannot be read.
    """
    uri = find_job_uri(job, store)
    events = read_events(_open(uri))
    if not events:
        raise ReportError(f"no events of job {job!r} in {uri}")
    return events


def read_job_log(job: str, store: str | None = None) -> LogContent:
    """Read all events of a job, and a list of the damage to its event log.

    Raises the same errors as `read_job`.
    """
    uri = find_job_uri(job, store)
    store_of_job = _open(uri)
    content = read_log(store_of_job)
    if not content.events:
        damage = "".join(f"\n  damage: {flaw.text}" for flaw in content.damage[:10])
        raise ReportError(f"no events of job {job!r} in {uri}{damage}")
    return replace(
        content, damage=(*content.damage, *_lost_since_report(store_of_job, content.events))
    )


def find_running_launcher(
    job: str, events: Sequence[Event], store: str | None = None
) -> RunningJob | None:
    """Find the launcher that is running the job, from its claim in the store (`ebbflow.core.launchers`).

    Returns:
        The launcher as JSON values. None if no launcher is running, or if the job is completed and
        its launcher only writes the report.

    Raises:
        ReportError: There are no events of the job.
        StoreError: The store does not answer.
    """
    found = running_launcher(_open(find_job_uri(job, store)))
    if found is None:
        return None
    done = find_final_outcome(events)
    if (
        done is None
        or done.payload.outcome is not Outcome.COMPLETED
        or done.t_wall < found.launcher.since_utc
    ):
        return found.to_json()
    return None


def list_jobs(store: str | None) -> list[str]:
    """List the jobs of a store, one request each; without a store, those that this machine knows.

    Raises:
        ReportError: The folder of the store cannot be read.
        StoreError: The store does not answer.
    """
    if store is None:
        return list_known_jobs()
    opened = _open(store)
    folder = opened.local_path("jobs")
    if folder is not None:
        try:
            if folder.is_dir():
                return sorted(path.name for path in folder.iterdir() if path.is_dir())
            return []
        except OSError as error:
            raise ReportError(f"{folder}: {error.strerror}") from error
    found: list[str] = []
    # "0" is the character after "/": the next request begins behind the keys of the last job.
    while page := next(opened.pages("jobs", after=f"jobs/{found[-1]}0" if found else ""), []):
        found.append(page[0].key.split("/")[1])
    return found


def list_known_jobs(root: Path | None = None) -> list[str]:
    """List the jobs that this machine knows, the most recently changed job last.

    Args:
        root: the folder of runs to list. None lists those of all projects of this machine; a job
            of another project whose name exists here as well is listed by its folder.
    """
    if root is None:
        roots = [runs_folder(PROJECT_ROOT), *list_other_runs_folders(PROJECT_ROOT)]
    else:
        roots = [root]
    names: dict[str, Path] = {}
    for folder in roots:
        for path in folder.glob("*"):
            if path.name == "latest" or known_job(path) is None:
                continue
            names[str(path) if path.name in names else path.name] = path
    return sorted(names, key=lambda name: names[name].stat().st_mtime)


def load_report(uri: str, *, store: str | None = None, fresh: bool = False) -> RunReport:
    """Load the report of a job.

    If no report was written or the job is running, build it from the events.

    Args:
        uri: A report.json, the folder or s3:// URI of a job, the name of a job that this machine
            knows, or "latest".
        fresh: Build the report from the events even if a report was written.

    Raises:
        ReportError: There is neither a report nor events. The message lists the places that were
            searched.
        StoreError: The store does not answer.
    """
    path = Path(uri)
    if "://" not in uri and path.suffix == ".json":
        try:
            return _parse(path.read_bytes(), uri)
        except OSError as error:
            raise ReportError(f"{uri}: {error.strerror}") from error
    place = find_job_uri(uri, store)
    running = find_running_launcher(uri, (), store)
    if not fresh and running is None:
        try:
            return _parse(_open(place).get(_NAME), f"{place}/{_NAME}")
        except ObjectNotFound:
            pass  # the job died before it wrote a report
    content = read_job_log(uri, store)
    # The events show whether the job is completed and only its report is missing
    if running is not None:
        running = find_running_launcher(uri, content.events, store)
    return build_report(content.events, running=running, damage=content.damage)


def get_cheapest_suitable_instance(
    config: RunConfig, *, prices: PriceSource | None = None, now_utc: float | None = None
) -> SuitableInstance:
    """Find the pool with the lowest expected total cost among those that fit the model and meet the
    deadline.

    The lowest price per hour is not always the lowest cost: a slow GPU at half the price may cost
    more.

    Returns:
        The pool, with its expected hours and dollars.

    Raises:
        PlanError: No instance is suitable.
    """
    plan = make_plan(config, now_utc=time.time() if now_utc is None else now_utc, prices=prices)
    best = plan.chosen
    if best is None:
        reason = plan.refusal
        raise PlanError(
            "no instance is suitable" if reason is None else f"{reason.message} ({reason.hint})"
        )
    return {
        "instance_type": best.instance_type,
        "nodes": best.nodes,
        "market": best.market,
        "region": best.region,
        "zone": best.zone,
        "usd_per_hour": best.price.usd_float,
        "on_demand_usd_per_hour": best.on_demand_usd_per_hour,
        "price_kind": best.price.kind,
        "expected_hours": best.expected_hours,
        "expected_usd": best.expected_usd,
        "savings_percent": best.savings_percent,
    }


def get_accumulated_cost(
    job: str | Sequence[Event], *, history: Iterable[SpotRecord] = ()
) -> Decimal:
    """Compute the dollars that a job has cost so far. The job may still be running.

    This is the total of the ledger: the price integrated over the paid time of each instance, which
    is billed by the second and for at least a minute.

    Args:
        job: The events, or the folder or s3:// URI of the job.
        history: Spot price changes in addition to those in the events. If it is empty, a pool
            without price changes in the events has the plan's price.

    Raises:
        ReportError: There are no events, or `history` is given but has no prices for the pool of a
            spot node.
        LedgerError: The events contradict each other.
        StoreError: The store does not answer.
    """
    if isinstance(job, str):
        events = read_events(_open(job))
    else:
        events = job
    if not events:
        raise ReportError(f"no events of job {job!r}")
    pools = _changes(history)
    if pools:
        prices = [replace(events[0], name=PRICES, data={"pools": pools})]
    else:
        prices = []
    ledger = fold([*events, *prices], running=True)
    used = [
        bill.price
        for bill in ledger.nodes
        if bill.price.pool is not None and bill.price.pool.market == "spot"
    ]
    priced = {str(price.pool): bool(price.curve.changes) for price in used}
    if pools and not all(priced.values()):
        lacking = ", ".join(sorted(name for name, known in priced.items() if not known))
        known = ", ".join(sorted(f"{pool['instance_type']} in {pool['zone']}" for pool in pools))
        raise ReportError(f"the price history lacks {lacking}; it has {known}")
    return ledger.total_usd


def _open(uri: str) -> Store:
    return Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS, create=False)


def _lost_since_report(job_store: Store, events: Sequence[Event]) -> list[Damage]:
    """Find events lost since the stored report was written, by comparing the number of events of
    each kind.

    The comparison also finds losses that leave no trace in the event log, such as a missing log of
    one process.
    """
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


def _parse(content: bytes, where: str) -> RunReport:
    try:
        return RunReport.from_json(json.loads(content))
    except ReportError as error:
        raise ReportError(f"{where}: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReportError(f"{where}: not a report: {error!r}") from error


def _changes(history: Iterable[SpotRecord]) -> list[JsonObject]:
    """Convert price records to the data of a `prices` event: a list of pools with their price
    changes.

    Each record is listed under its zone id and under its zone name, because plans may use either.
    """
    pools = group_by_key(
        ((record.instance_type, record.region, zone), (record.at, f"{record.usd_per_hour:f}"))
        for record in history
        for zone in {record.zone_id, record.zone_name} - {""}
    )
    return [
        {
            "instance_type": kind,
            "market": "spot",
            "region": region,
            "zone": zone,
            "changes": changes,
        }
        for (kind, region, zone), changes in pools.items()
    ]
