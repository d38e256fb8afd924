"""`python -m infra adopt`: its options, its files, and what it says."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from infra.aws.adopt.choosing import choose
from infra.aws.adopt.reading import read_account
from infra.aws.adopt.text import configuration_text, notes_text, settings_text
from infra.aws.metaflow import metaflow_settings
from infra.errors import InfraError
from infra.outcome import Outcome

_SETTINGS_SUFFIX = ".env"


def add_adopt_command(commands: argparse._SubParsersAction) -> None:
    """`adopt` and its options."""
    command = commands.add_parser("adopt", help="write a configuration from what an AWS account already has")
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write it, with FILE.env beside it; else printed"
    )
    command.add_argument("--region", metavar="NAME", help="of queues and bucket; else as every AWS tool finds it")
    command.add_argument(
        "--store", metavar="URI", help="s3://bucket/prefix of the jobs, where several buckets could be meant"
    )
    command.add_argument(
        "--stack", metavar="NAME", help="CloudFormation stack to take settings from, where there are several"
    )
    command.add_argument("--force", action="store_true", help="overwrite files that exist")
    command.set_defaults(command=adopt)


def adopt(options: argparse.Namespace) -> int:
    """Exit code 0, 1 when there is no queue that training may go to, 2 for a file in the way or a bad request."""
    files = _files(options.out)
    there = [str(file) for file in files if file.exists()]
    if there and not options.force:
        print(f"adopt: {', '.join(there)} exists; fix: choose another --out, or --force", file=sys.stderr)
        return Outcome.CONFIG.exit_code
    if options.store and not options.store.startswith("s3://"):
        print(
            f"adopt: --store {options.store} is no s3://bucket/prefix: containers reach nothing else", file=sys.stderr
        )
        return Outcome.CONFIG.exit_code
    try:
        facts = read_account(options.region)
    except InfraError as error:
        print(f"adopt: {error}", file=sys.stderr)
        return error.outcome.exit_code
    choice = choose(facts, metaflow_settings(), store=options.store, stack=options.stack)
    now = time.time()
    texts = (configuration_text(choice, now), settings_text(choice, now))
    if not files:
        print("\n".join(texts), end="")
    try:
        for file, text in zip(files, texts, strict=False):
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
    except OSError as error:
        print(f"adopt: {error}; fix: choose another --out", file=sys.stderr)
        return Outcome.CONFIG.exit_code
    if choice.notes:
        print(notes_text(choice), file=sys.stderr)
    if not choice.queues:
        fix = "make some with python -m infra deploy, or name another --region"
        print(f"adopt: {facts.region} has no queue that training may go to; fix: {fix}", file=sys.stderr)
        return Outcome.FAILED.exit_code
    return 0


def _files(out: Path | None) -> tuple[Path, ...]:
    return () if out is None else (out, out.with_name(f"{out.name.removesuffix('.yaml')}{_SETTINGS_SUFFIX}"))
