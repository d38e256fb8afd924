"""Commands of `ebbflow` for preflight, configuration, logs and AWS.

Each command imports only the packages that it needs.
"""

if __name__ == "__main__":  # before the imports that need a package
    from ebbflow.core.program import begin_program

    begin_program()
    from ebbflow.core.process import exit_when_interrupted

    exit_when_interrupted()

import argparse
import json
import sys
from collections.abc import Sequence

from ebbflow.core.config import ConfigError, load_config
from ebbflow.core.config.json_schema import schema_text
from ebbflow.core.config.load import render_sources, values_with_sources
from ebbflow.core.errors import Outcome
from ebbflow.core.preflight import CheckResult, failed_results, render_checks, render_results
from ebbflow.core.process import run_command
from ebbflow.core.program import DEFAULT_CONFIG, PACKAGE_ROOT, PROJECT_ROOT
from ebbflow.core.rank_logs import add_logs_command
from ebbflow.core.untrusted_text import guard_terminal
from ebbflow.diagnose.bundle import add_bundle_command
from ebbflow.diagnose.command import add_diagnose_commands
from ebbflow.infra.aws.adopt import add_adopt_command
from ebbflow.infra.aws.deploy import add_deploy_command
from ebbflow.infra.kubernetes.checks import add_kubernetes_command
from ebbflow.observe.command import add_observe_command

SCHEMA_FILE = PACKAGE_ROOT / "configs" / "schema.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of `ebbflow` and return its exit code."""
    guard_terminal()
    options = _parser().parse_args(arguments)
    return run_command(lambda: options.command(options))


def preflight(options: argparse.Namespace) -> int:
    """Run the preflight checks and print their results.

    The exit code is 0 if all checks pass, 2 if the configuration is unusable, and 3 if a check
    fails.
    """
    from ebbflow.flows.checks import all_checks, run_all_checks

    if options.list:
        print(render_checks(all_checks()))
        return 0
    try:
        loaded = load_config(options.config, options.set, project_root=PROJECT_ROOT)
    except ConfigError as error:
        if not options.json:
            raise
        print(_document(Outcome.CONFIG, problems=[problem.to_json() for problem in error.problems]))
        return Outcome.CONFIG.exit_code
    results = run_all_checks(loaded.config, str(loaded.path), quick_only=options.quick, target=None)
    if failed_results(results):
        outcome = Outcome.PREFLIGHT
    else:
        outcome = None
    print(_document(outcome, results=results) if options.json else render_results(results))
    if outcome is None:
        return Outcome.COMPLETED.exit_code
    return outcome.exit_code


def config(options: argparse.Namespace) -> int:
    """Print every configuration value with its source."""
    loaded = load_config(options.config, options.set, project_root=PROJECT_ROOT)
    rows = values_with_sources(loaded.config.model_dump(mode="json"), loaded.sources)
    print(
        json.dumps(rows, indent=1)
        if options.json
        else render_sources(rows, defaults=not options.changed)
    )
    return 0


def schema(options: argparse.Namespace) -> int:
    """Print the JSON schema of configurations or, with --write, write it to configs/schema.json."""
    text = schema_text()
    if not options.write:
        print(text, end="")
        return 0
    SCHEMA_FILE.write_text(text)
    print(f"wrote {SCHEMA_FILE}")
    return 0


def _document(
    outcome: Outcome | None, *, problems: Sequence[dict] = (), results: Sequence[CheckResult] = ()
) -> str:
    """Return the JSON that `preflight --json` prints. `outcome` is None if no check failed."""
    document = {
        "schema": 1,
        "outcome": outcome,
        "exit_code": 0 if outcome is None else outcome.exit_code,
        "problems": list(problems),
        "results": [result.to_json() for result in results],
    }
    return json.dumps(document, indent=1, ensure_ascii=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ebbflow", description=" ".join((__doc__ or "").split("\n\n")[0].split())
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "preflight", help="find what is wrong with a job before it starts"
    )
    command.add_argument("config", nargs="?", default=DEFAULT_CONFIG, metavar="CONFIG")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key"
    )
    command.add_argument("--json", action="store_true", help="print results for a program")
    command.add_argument(
        "--quick", action="store_true", help="leave out the checks that take seconds"
    )
    command.add_argument(
        "--list",
        action="store_true",
        help="what is checked, as the table of docs/preflight-checks.md",
    )
    command.set_defaults(command=preflight)
    command = commands.add_parser(
        "config", help="show every value of a configuration and where it comes from"
    )
    command.add_argument("config", nargs="?", default=DEFAULT_CONFIG, metavar="CONFIG")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key"
    )
    command.add_argument("--changed", action="store_true", help="leave out defaults")
    command.add_argument("--json", action="store_true", help="print them for a program")
    command.set_defaults(command=config)
    command = commands.add_parser(
        "schema", help="print the JSON schema of configurations, for editors"
    )
    command.add_argument(
        "--write", action="store_true", help=f"write it to {SCHEMA_FILE.relative_to(PACKAGE_ROOT)}"
    )
    command.set_defaults(command=schema)
    add_logs_command(commands, PROJECT_ROOT)
    add_bundle_command(commands, PROJECT_ROOT)
    add_diagnose_commands(commands, PROJECT_ROOT)
    add_observe_command(commands, PROJECT_ROOT)
    add_deploy_command(commands)
    add_adopt_command(commands)
    add_kubernetes_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
