"""Thread of the launcher that watches the Spot prices of a job's possible pools, for the job's
budget and ledger.

New prices become `prices` events, which node 0's agent reads (`flows/gang.py`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import EbbflowError
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import PLAN, PRICES, Event, LogFollower
from ebbflow.core.layout import FLOW_EVENTS_PREFIX
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.terms import PriceWatch
from ebbflow.flows.job import Job

_STORE_SECONDS = 20.0
# Until there is a plan
_FIRST_LOOK_SECONDS = 2.0


class LauncherPrices:
    """Thread that queries the Spot prices of the plan's instance types and records changes.

    It queries every `cost.price_seconds` or more often (`PriceWatch`). It also records when the
    price source stops answering, and prints when it answers again.

    Args:
        job: "" if the run's id is the job's name.
        tell: prints a line for the user.
    """

    def __init__(
        self, job: str, config: RunConfig, run_id_file: Path, tell: Callable[[str], None]
    ) -> None:
        self._job_name = job
        self._config = config
        self._run_id_file = run_id_file
        self._tell = tell
        self._watch = PriceWatch.of(config)
        self._ending = threading.Event()
        self._known: list[object] = []
        self._answered_utc = 0.0
        self._silence = ""
        self._thread = threading.Thread(target=self._keep, name="prices", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """End the watch, without waiting for a request that hangs."""
        self._ending.set()
        self._thread.join(_FIRST_LOOK_SECONDS)

    def _keep(self) -> None:
        run = ""
        while not run and not self._ending.wait(_FIRST_LOOK_SECONDS):
            with contextlib.suppress(OSError):
                run = self._run_id_file.read_text().strip()
        if not run:
            return
        name = self._job_name or run
        job = Job(name=name, run=run, config=self._config, request_seconds=_STORE_SECONDS)
        log: EventLog | None = None
        events: list[Event] = []
        try:
            follower = LogFollower(job.store, wanted=_is_of_flow)
            log = job.events("price-watch")
            seconds = _FIRST_LOOK_SECONDS
            while not self._ending.wait(seconds):
                with contextlib.suppress(EbbflowError):  # the store may come back
                    for new in follower.read_new():
                        events += [event for event in new if event.name == PLAN]
                seconds = self._look(events, log)
        except EbbflowError as error:
            self._tell(f"prices are not watched: {error}")
        finally:
            if log is not None:
                log.close()

    def _look(self, events: list[Event], log: EventLog) -> float:
        """Query the prices if there is a plan, and record those that have changed. Return the
        seconds until the next query.
        """
        from ebbflow.cost.errors import PriceError
        from ebbflow.cost.ledger.pricing import read_plan, select_plans
        from ebbflow.cost.prices.quote import PoolPrice
        from ebbflow.cost.prices.source import read_price_changes

        plans = [read_plan(event) for event in select_plans(events)]
        if not plans:
            return _FIRST_LOOK_SECONDS
        first = plans[0]
        chosen = plans[-1]["chosen"]
        pools = [chosen]
        for plan in plans:
            pools += plan.get("ranked") or []
        kinds = sorted({pool["instance_type"] for pool in pools if pool["market"] == "spot"})
        seconds = self._watch.look_seconds(
            PoolPrice.from_json(chosen).node_usd_float * chosen["nodes"]
        )
        if not kinds:
            return seconds
        now = time.time()
        try:
            regions = sorted({pool.get("region") or "" for pool in pools} - {""})
            cost = self._config.cost.model_copy(update={"regions": regions})
            changes = read_price_changes(cost, first, kinds, now_utc=now, project_root=PROJECT_ROOT)
        except PriceError as error:
            self._record_silence(str(error), log, now)
            return seconds
        if self._silence:
            self._silence = ""
            self._tell(f"prices: answered again after {(now - self._answered_utc) / 60:.0f} min")
        self._answered_utc = now
        if changes != self._known:
            self._known = list(changes)
            log.emit(PRICES, flush=True, pools=changes, asked_utc=now)
        return seconds

    def _record_silence(self, problem: str, log: EventLog, now: float) -> None:
        """Record and print, once per outage, that the price source does not answer."""
        if self._silence:
            return
        self._silence = problem
        if self._answered_utc:
            age = f"those of {(now - self._answered_utc) / 60:.0f} min ago apply"
        else:
            age = "those of the plan apply"
        self._tell(f"prices: {age}, since {problem}")
        log.emit(PRICES, pools=[], asked_utc=self._answered_utc or None, problem=problem)


def _is_of_flow(key: str) -> bool:
    return key.startswith(FLOW_EVENTS_PREFIX)
