"""Import of OpenCost and Kubecost allocations: the dollars that a cluster's cost monitor charges to
a job's pods.

The module reads answers of the allocation API, aggregated by pod (JSON,
https://opencost.io/docs/integrations/api), and OpenCost's CSV export. Unless they know the bill,
both monitors price nodes at list prices. They charge a pod for the resources that it requests or
uses. Their dollars may therefore differ from the ledger's, but the times must agree.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from ebbflow.core.event_payloads import BatchAttemptPayload
from ebbflow.core.events import Event, select_events
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.amounts import format_usd, read_decimal
from ebbflow.cost.errors import BillError
from ebbflow.cost.ledger.ledger import fold

# Per pod: the monitor looks about once per minute, at its start and at its end
_RESOLUTION_SECONDS = 120.0
_AGREED_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Dollars and seconds of one pod in one time window.

    OpenCost's CSV export has no times: `seconds` is None.
    """

    pod: str
    seconds: float | None
    usd: Decimal


@dataclass(frozen=True, kw_only=True)
class AttemptAllocation:
    """Comparison of the node seconds of one attempt with the allocations of its pods.

    `cluster_seconds` come from the cluster. `pods`, `seconds` and `usd` come from the cost monitor.
    """

    attempt: str
    cluster_seconds: float
    pods: int
    seconds: float | None
    usd: Decimal

    @property
    def agrees(self) -> bool:
        slack = _AGREED_SHARE * self.cluster_seconds + _RESOLUTION_SECONDS * max(self.pods, 1)
        return bool(self.pods) and (
            self.seconds is None or abs(self.seconds - self.cluster_seconds) <= slack
        )


def is_allocation(path: Path) -> bool:
    if path.suffix != ".csv":
        return path.suffix == ".json"
    try:
        with path.open(newline="") as file:
            return {"Pod", "TotalCost"} <= set(next(csv.reader(file), []))
    except (OSError, ValueError, csv.Error):
        return False  # the reader of bills reports it


def read_allocations(path: Path) -> list[Allocation]:
    """Read the allocations in a JSON or CSV file. Raises BillError for an invalid file."""
    if path.suffix == ".csv":
        rows = _csv_rows(path)
    else:
        rows = _json_rows(path)
    found = []
    for where, pod, minutes, usd in rows:
        try:
            if minutes is None:
                seconds = None
            else:
                seconds = 60 * float(read_decimal(str(minutes)))
            if (seconds or 0) < 0:
                raise ValueError
            found.append(Allocation(pod=pod, seconds=seconds, usd=read_decimal(str(usd))))
        except ValueError:
            raise BillError(
                f"{where}: minutes {minutes!r} or total cost {usd!r} is no number"
            ) from None
    return found


def compare_allocations(
    events: Sequence[Event], allocations: Sequence[Allocation]
) -> list[AttemptAllocation]:
    """Add up the pods' allocations per attempt on Kubernetes, and compare each sum with the
    ledger's cost.

    A pod belongs to an attempt if the pod's name begins with the attempt's name.
    """
    newest = {
        event.payload.job_id: event.payload for event in select_events(events, BatchAttemptPayload)
    }
    found = []
    for attempt in newest.values():
        if attempt.queue != "kubernetes" or not attempt.node_times:
            continue
        mine = [
            allocation
            for allocation in allocations
            if allocation.pod.startswith(f"{attempt.job_name}-")
        ]
        seconds = [allocation.seconds for allocation in mine if allocation.seconds is not None]
        found.append(
            AttemptAllocation(
                attempt=str(attempt.job_name),
                pods=len({allocation.pod for allocation in mine}),
                cluster_seconds=sum(
                    end - start for start, end in attempt.node_times if start and end
                ),
                seconds=sum(seconds) if len(seconds) == len(mine) else None,
                usd=sum((allocation.usd for allocation in mine), Decimal(0)),
            )
        )
    return found


def render_allocations(events: Sequence[Event], found: Sequence[AttemptAllocation]) -> str:
    """Render one line per attempt, and a last line that compares the total with the ledger."""
    if not found:
        return "the job has no attempt on Kubernetes whose times are known"
    lines = ["allocations of OpenCost or Kubecost, by attempt"]
    for allocation in found:
        if allocation.seconds is None:
            told = "no seconds told"
        else:
            told = f"{allocation.seconds:,.0f} s"
        if allocation.agrees:
            verdict = ""
        elif not allocation.pods:
            verdict = "  ! no pod found"
        else:
            verdict = "  ! more than the resolution apart"
        lines.append(
            f"  {one_line(allocation.attempt)}: {allocation.pods} pods, {told} "
            f"({allocation.cluster_seconds:,.0f} s by the cluster), "
            f"{format_usd(allocation.usd, 4)}{verdict}"
        )
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    total = sum((allocation.usd for allocation in found), Decimal(0))
    lines.append(
        f"  sum: {format_usd(total, 4)} allocated, {format_usd(fold(ordered).total_usd, 4)} metered"
    )
    return "\n".join(lines)


def _json_rows(path: Path) -> Iterator[tuple[str, str, Any, Any]]:
    try:
        windows = json.loads(path.read_text())["data"]
        for number, window in enumerate(windows):
            for name, row in (window or {}).items():
                if not name.startswith("__"):  # __idle__, __unmounted__
                    pod = (row.get("properties") or {}).get("pod") or name.rpartition("/")[2]
                    yield (
                        f"{path}: window {number}, {name}",
                        str(pod),
                        row["minutes"],
                        row["totalCost"],
                    )
    except OSError as error:
        raise BillError(f"{path}: cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fix = "curl -G …/allocation -d window=7d -d aggregate=pod > allocation.json"
        raise BillError(
            f"{path}: no answer of the allocation API ({error!r}); fix: {fix}"
        ) from None


def _csv_rows(path: Path) -> Iterator[tuple[str, str, None, str]]:
    try:
        with path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                yield f"{path}:{number}", row["Pod"] or "", None, row["TotalCost"]
    except (OSError, ValueError, csv.Error) as error:
        raise BillError(f"{path}: cannot be read: {error}") from error
