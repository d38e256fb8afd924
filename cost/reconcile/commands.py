"""`python -m cost reconcile RUN CUR_FILE`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cost.jobs.find import read_job
from cost.reconcile.account import JOB_TAG, compare
from cost.reconcile.bill import BillLine, read_bill
from cost.reconcile.explain import explain
from cost.reconcile.text import render


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
    found = explain(compare(read_job(arguments.job, arguments.store), _lines(arguments.bill), job_tag=arguments.tag))
    print(json.dumps(found.to_json(), indent=1, allow_nan=False) if arguments.json else render(found))
    return 0 if found.agrees else 1


def _lines(paths: list[Path]) -> Iterator[BillLine]:
    for number, path in enumerate(paths):
        yield from read_bill(path, delivery=number)
