"""`python -m infra`: commands of the ground. A composition root: it may ask any room, and only when it needs it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from infra.config import ConfigError, load_config
from infra.outcome import Outcome
from infra.preflight import Result, blocking, render_results

PROJECT_ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = _parser().parse_args(arguments)
    return options.command(options)


def preflight(options: argparse.Namespace) -> int:
    """Exit code 0, 2 for a configuration that cannot be used, 3 for a check that stops the job."""
    try:
        loaded = load_config(options.config, options.set, project_root=PROJECT_ROOT)
    except ConfigError as error:
        if options.json:
            print(_document(Outcome.CONFIG, problems=[problem.to_json() for problem in error.problems]))
        else:
            print(error, file=sys.stderr)
        return Outcome.CONFIG.exit_code
    from flows.checks import run_all_checks

    results = run_all_checks(loaded.config, str(loaded.path), quick_only=options.quick)
    outcome = Outcome.PREFLIGHT if blocking(results) else None
    print(_document(outcome, results=results) if options.json else render_results(results))
    return Outcome.COMPLETED.exit_code if outcome is None else outcome.exit_code


def _document(outcome: Outcome | None, *, problems: Sequence[dict] = (), results: Sequence[Result] = ()) -> str:
    """The machine's form. outcome: null when nothing stops the job."""
    document = {
        "schema": 1,
        "outcome": outcome,
        "exit_code": 0 if outcome is None else outcome.exit_code,
        "problems": list(problems),
        "results": [result.to_json() for result in results],
    }
    return json.dumps(document, indent=1, ensure_ascii=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("preflight", help="find what is wrong with a job before it starts")
    command.add_argument("config", nargs="?", default=PROJECT_ROOT / "configs" / "laptop.yaml", metavar="CONFIG")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    command.add_argument("--json", action="store_true", help="print results for a program")
    command.add_argument("--quick", action="store_true", help="leave out the checks that take seconds")
    command.set_defaults(command=preflight)
    return parser


if __name__ == "__main__":
    sys.exit(main())
