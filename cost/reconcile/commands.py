"""`ebbflow reconcile RUN CUR_FILE`: the comparison as text or JSON."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from ebbflow.cost.jobs.load import read_job
from ebbflow.cost.reconcile.bill import BillLine, read_bill
from ebbflow.cost.reconcile.comparison import AGREED_SHARE, JOB_TAG, Reconciliation, compare, explain
from ebbflow.cost.report.figures import percent, plain, usd

_WIDTH = 100


def render(found: Reconciliation) -> str:
    """Forecast, metered, billed; the gap in parts; what is wrong; what could not be joined."""
    lines = list(_text_lines(found))
    return "\n".join(piece for line in lines for piece in _wrapped(line))


def _text_lines(found: Reconciliation) -> Iterator[str]:
    account = found.account
    bill = "synthetic bill" if account.synthetic else "bill"
    decimals = 2 if max(found.billed_usd, account.metered_usd) >= 10 else 4
    yield f"reconciliation of job {plain(account.job)} with the {bill}"
    yield f"  forecast  {usd(account.forecast_usd, decimals)}  (estimated by the plan)"
    simulated = ", SIMULATED: the job was priced as if, and no provider billed it" if account.simulated else ""
    yield f"  metered   {usd(account.metered_usd, decimals)}  (from the job's events{simulated})"
    unjoined = account.metered_usd - found.joined_usd
    if account.unknown:
        yield f"    of it {usd(unjoined, decimals)} on {len(account.unknown)} nodes whose instance is unknown"
    instances = len(account.billed)
    yield f"  billed    {usd(found.billed_usd, decimals)}  ({instances} of {len(account.metered)} instances found)"
    yield f"  gap       {usd(found.gap_usd, decimals)}  billed less metered on joined instances, of which"
    for cause, amount, count in _by_cause(found):
        yield f"    {cause:<18} {usd(amount, decimals):>12}  ({count} instance{'s' if count > 1 else ''})"
    share = found.unexplained_share
    if share is not None:
        within = "within" if Decimal(share) <= AGREED_SHARE else "more than"
        yield f"  unexplained: {percent(share, 2)} of the bill, {within} {percent(float(AGREED_SHARE), 0)}"
    for part in found.parts:
        yield f"  · {part.instance_id}: {part.cause} {usd(part.usd, decimals)}: {part.words}"
    for finding in found.findings:
        yield f"  ! {finding.kind}: {plain(finding.resource)} ({usd(finding.usd, decimals)}): {plain(finding.words)}"
    for instance_id, billed in sorted(account.billed.items()):
        if billed.elsewhere_usd:
            yield f"  · {instance_id}: {usd(billed.elsewhere_usd, decimals)} more at other times, not this job's"
    for instance_id in account.shared:
        yield f"  · {instance_id}: nodes of the job ran on it at once and divided its price"
    if account.twice:
        lines = f"{account.twice} lines were" if account.twice > 1 else "1 line was"
        yield f"  · {lines} given twice, as deliveries of one report repeat them, and counted once"
    for kind, amount in sorted(account.other_usd.items()):
        yield f"  · {kind}: {usd(amount, decimals)} in lines with the job's tag, which the ledger does not count"
    if account.unknown:
        yield (
            "  ! unknown instances cannot be joined with a bill; fix: let containers reach the metadata service "
            "(HttpPutResponseHopLimit 2), or set EBBFLOW_INSTANCE_ID, EBBFLOW_INSTANCE_TYPE and EBBFLOW_ZONE"
        )


def _by_cause(found: Reconciliation) -> list[tuple[str, Decimal, int]]:
    amounts: dict[str, list[Decimal]] = {}
    for part in found.parts:
        amounts.setdefault(part.cause, []).append(part.usd)
    return [(cause, sum(usd, Decimal(0)), len(usd)) for cause, usd in sorted(amounts.items())]


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, drop_whitespace=True, break_on_hyphens=False) or [""]


def add_command(commands: Any) -> None:
    parser = commands.add_parser("reconcile", help="compare a job's forecast and ledger with what was billed")
    parser.add_argument("job", metavar="RUN", help="a job's name, 'latest', or the folder or s3:// URI of a job")
    parser.add_argument("bill", type=Path, nargs="+", metavar="CUR_FILE", help="Cost and Usage Report: CSV or Parquet")
    parser.add_argument("--store", default=None, metavar="URI", help="where the job lies, if not as this machine knows")
    parser.add_argument("--tag", default=JOB_TAG, metavar="KEY", help=f"cost allocation tag of a job ({JOB_TAG})")
    parser.add_argument("--json", action="store_true", help="as JSON, dollars as exact strings")
    parser.set_defaults(run=_reconcile)


def _reconcile(arguments: argparse.Namespace) -> int:
    """Exit code 0 when both agree within the stated share and nothing is wrong, else 1."""
    found = explain(
        compare(read_job(arguments.job, arguments.store), _read_bill_lines(arguments.bill), job_tag=arguments.tag)
    )
    print(json.dumps(found.to_json(), indent=1, allow_nan=False) if arguments.json else render(found))
    return 0 if found.agrees else 1


def _read_bill_lines(paths: list[Path]) -> Iterator[BillLine]:
    for number, path in enumerate(paths):
        yield from read_bill(path, delivery=number)
