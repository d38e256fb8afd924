"""`ebbflow deploy`: what the template would make in an account, or make it."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbflow.infra.aws.calls import Patience, ask, aws_client
from ebbflow.infra.aws.existing import found_parameters
from ebbflow.infra.aws.stack import Change, Stack, StackState
from ebbflow.infra.aws.template import TEMPLATE, Planned, check_parameters, planned, read_template
from ebbflow.infra.errors import CloudAway, CloudForbidden, CloudRefused, InfraError
from ebbflow.infra.outcome import Outcome

_QUESTION_SECONDS = 60.0
# The queues, the repository and a log group are called after the stack; ECR takes lower case only.
_STACK_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
_MARKS = {"Add": "+", "Modify": "~", "Remove": "-"}


def add_deploy_command(commands: Any) -> None:
    """Add `deploy` to argparse's subparsers."""
    command = commands.add_parser("deploy", help="the stack on AWS: network, bucket, queues, roles, schedule, budget")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--dry-run", action="store_true", help="say what would be made or changed, and change nothing")
    what.add_argument("--apply", action="store_true", help="create or update the stack, and wait until it is done")
    command.add_argument("--stack", default="ebbflow", metavar="NAME", help="also the prefix of the queues' names")
    command.add_argument("--region", metavar="REGION", help="default: as every AWS tool finds it")
    command.add_argument("--minutes", type=float, default=45.0, help="how long --apply waits for the end (default: 45)")
    command.add_argument(
        "--parameter", action="append", default=[], metavar="NAME=VALUE", help=f"of {TEMPLATE.name}, which explains it"
    )
    command.add_argument("--env", type=Path, metavar="FILE", help="--apply also writes the settings there, for a shell")
    command.set_defaults(command=deploy)


def deploy(options: argparse.Namespace) -> int:
    """Exit code 0; 2 for a request that cannot be made so; 1 when AWS refuses, does not answer, or a resource fails."""
    try:
        given = _given(options.parameter)
        if not _STACK_NAME.fullmatch(options.stack):
            raise CloudRefused(f"--stack {options.stack!r}: lower-case letters, digits and -, at most 40")
        if options.env is not None and not options.env.absolute().parent.is_dir():
            raise CloudRefused(f"--env {options.env}: there is no folder {options.env.parent}")
        body = TEMPLATE.read_text(encoding="utf-8")
        template = read_template(body)
        check_parameters(template, given)
        client = aws_client("cloudformation", options.region)
        stack = Stack(client, options.stack, print)
        if options.dry_run:
            _dry_run(stack, client, body, template, given)
        else:
            _apply(stack, client, body, given, Patience.of(60.0 * options.minutes), options)
    except InfraError as error:
        print(error, file=sys.stderr)
        return error.outcome.exit_code
    return Outcome.COMPLETED.exit_code


def _given(pairs: Sequence[str]) -> dict[str, str]:
    given = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise CloudRefused(f"--parameter {pair}: must be NAME=VALUE")
        given[name] = value
    return given


def _dry_run(stack: Stack, client: Any, body: str, template: Mapping[str, Any], given: Mapping[str, str]) -> None:
    patience, region = Patience.of(_QUESTION_SECONDS), client.meta.region_name
    try:
        state = stack.state(patience)
    except (CloudForbidden, CloudAway) as error:
        print(_additions(planned(template, given, region=region)))
        print(f"the account was not asked, because {error}")
        return
    given = _with_found(given, state, region)
    if state is None:
        ask(client, "validate_template", patience, TemplateBody=body)
        print(_additions(planned(template, given, region=region)))
        return
    changes = stack.changes(body, given, state, patience)
    print(_table(changes) if changes else "nothing to change")


def _additions(resources: Sequence[Planned]) -> str:
    return _table([Change(action="Add", name=one.name, kind=one.kind) for one in resources])


def _with_found(given: Mapping[str, str], state: StackState | None, region: str) -> dict[str, str]:
    """The parameters, with what follows from the account; those of the stack that is there stay as they are."""
    decided = {*given, *(state.parameters if state is not None else ())}
    return {**found_parameters(region, decided, print), **given}


def _apply(
    stack: Stack,
    client: Any,
    body: str,
    given: Mapping[str, str],
    patience: Patience,
    options: argparse.Namespace,
) -> None:
    state = stack.state(patience)
    state = stack.apply(body, _with_found(given, state, client.meta.region_name), state, patience)
    settings = _settings(options.stack, state, client.meta.region_name)
    print(f"stack {options.stack}: {state.status}\nthe machine that launches runs needs:")
    print(textwrap.indent(settings, "    "), end="")
    if options.env is not None:
        options.env.write_text(settings, encoding="utf-8")
        print(f"wrote {options.env}")
    print(f"the image goes to {state.outputs.get('RepositoryUri', '')}; docs/aws.md goes on from here")


def _table(changes: Sequence[Change]) -> str:
    rows = []
    for change in changes:
        why = f"  replaced, because of {', '.join(change.because)}" if change.replacement == "True" else ""
        if not why and change.because:
            why = f"  {', '.join(change.because)}"
        rows.append(f"{_MARKS.get(change.action, '?')} {change.name:<24} {change.kind}{why}")
    counts = Counter(change.action for change in changes)
    rows.append(", ".join(f"{count} to {action.lower()}" for action, count in counts.items()))
    return "\n".join(rows)


def _settings(stack: str, state: StackState, region: str) -> str:
    """Lines for a shell; nothing of them is secret. Who launches runs has rights of their own."""
    outputs = state.outputs
    exports = {
        "AWS_DEFAULT_REGION": region,
        "EBBFLOW__STORE": outputs.get("Store", ""),
        "METAFLOW_DEFAULT_DATASTORE": "s3",
        "METAFLOW_DATASTORE_SYSROOT_S3": outputs.get("MetaflowDataStoreS3Url", ""),
        "METAFLOW_BATCH_JOB_QUEUE": outputs.get("LightQueueName", ""),
        "METAFLOW_BATCH_CONTAINER_IMAGE": outputs.get("Image", ""),
        "METAFLOW_ECS_S3_ACCESS_IAM_ROLE": outputs.get("JobRoleArn", ""),
        "METAFLOW_BATCH_EMIT_TAGS": "true",  # flow, run and step of each job, for cost allocation
        # The roles of the stack may end jobs that have this tag, and no others.
        "METAFLOW_BATCH_DEFAULT_TAGS": json.dumps({"ebbflow-stack": stack}),
    }
    if service := state.parameters.get("MetadataServiceUrl"):
        exports |= {"METAFLOW_DEFAULT_METADATA": "service", "METAFLOW_SERVICE_URL": service}
    return "".join(f"export {key}={shlex.quote(value)}\n" for key, value in exports.items())
