"""The command `ebbflow deploy`: preview or apply Ebbflow's CloudFormation template in an AWS
account.

CloudFormation makes the changes. This module waits for them, prints a progress line for each event,
and explains each failed resource in one line, which the SDK's waiters do not do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import textwrap
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Required, TypedDict, cast

import yaml

from ebbflow.core.errors import CloudError, CloudForbidden, CloudRefused, CloudUnavailable, Outcome
from ebbflow.core.json_values import Json, JsonObject
from ebbflow.infra.aws.answers import (
    ChangeSetAnswer,
    LogGroupDetail,
    ResourceChangeDetail,
    StackChange,
    StackEvent,
    StacksAnswer,
)
from ebbflow.infra.aws.calls import RequestDeadline, aws_client, call_aws, paginate
from ebbflow.infra.aws.offerings import (
    FAMILIES_PARAMETER,
    GANG_FAMILIES_PARAMETER,
    choose_families,
    keep_families,
    refuse_too_many_queues,
)

if TYPE_CHECKING:
    from botocore.client import BaseClient

TEMPLATE = Path(__file__).with_name("template.yaml")
# https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/cloudformation-limits.html: in a
# request, in bytes.
LARGEST_TEMPLATE = 51_200
# Section of the template, and the field of its parts that is not sent
_LEFT_OUT = {"Resources": "Metadata", "Parameters": "Description", "Outputs": "Description"}


class TemplateParameter(TypedDict, total=False):
    """Parameter of the CloudFormation template."""

    Type: Required[str]
    Default: Required[str | int]
    AllowedValues: list[str | int]
    AllowedPattern: str
    MinValue: int
    MaxValue: int


class TemplateResource(TypedDict, total=False):
    """Resource of the CloudFormation template."""

    Type: Required[str]
    Condition: str  # name of the condition under which it is created


class Template(TypedDict, total=False):
    """CloudFormation template, limited to the fields that Ebbflow reads."""

    Parameters: Required[dict[str, TemplateParameter]]
    Conditions: dict[str, Json]
    Resources: Required[dict[str, TemplateResource]]


@dataclass(frozen=True, kw_only=True)
class ResourceChange:
    """A change to one resource of the stack."""

    action: str  # "Add", "Modify", "Remove" and so on
    name: str  # the resource's name in the template
    kind: str  # type of the resource, such as "AWS::S3::Bucket"
    replacement: str = ""  # whether it is replaced: "True", "False" or "Conditional"; "" if unknown
    because: tuple[str, ...] = ()  # names of the properties that change


class _Loader(yaml.SafeLoader):
    """YAML loader that accepts CloudFormation's short forms, such as `!Ref X` for `{"Ref": "X"}`."""


def _short_form(loader: yaml.SafeLoader, name: str, node: yaml.Node) -> JsonObject:
    if isinstance(node, yaml.ScalarNode):
        text = str(loader.construct_scalar(node))
        if name == "GetAtt":
            value: Json = text.split(".", 1)
        else:
            value = text
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        assert isinstance(node, yaml.MappingNode)
        value = cast(JsonObject, loader.construct_mapping(node, deep=True))
    return {name if name in ("Ref", "Condition") else f"Fn::{name}": value}


_Loader.add_multi_constructor("!", _short_form)


def read_template(text: str) -> Template:
    return yaml.load(text, _Loader)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes CloudFormation's short forms.

    It writes no anchors, because CloudFormation does not support them.
    """

    # The argument is that of PyYAML's method.
    def ignore_aliases(self, data: Json) -> bool:  # noqa: ARG002
        return True


def _write_short_form(dumper: yaml.SafeDumper, value: dict[str, str]) -> yaml.Node:
    if value.keys() == {"Ref"} or (
        value.keys() == {"Fn::Sub"} and isinstance(value["Fn::Sub"], str)
    ):
        [(name, text)] = value.items()
        return dumper.represent_scalar(f"!{name.removeprefix('Fn::')}", text)
    if value.keys() == {"Fn::GetAtt"}:
        return dumper.represent_scalar("!GetAtt", ".".join(value["Fn::GetAtt"]))
    return dumper.represent_dict(value)


_Dumper.add_representer(dict, _write_short_form)


def condense_template(template: Template) -> str:
    """Render the template as compact YAML, so that it fits into a request.

    Comments, indentation, notes for linters, and the descriptions of parameters and outputs are
    left out.
    """
    sent: dict[str, object] = dict(template)
    for section, left_out in _LEFT_OUT.items():
        kept_parts = {}
        parts = cast("dict[str, dict[str, Json]]", template.get(section) or {})
        for name, part in parts.items():
            kept_parts[name] = {key: value for key, value in part.items() if key != left_out}
        sent[section] = kept_parts
    text = yaml.dump(
        sent,
        Dumper=_Dumper,
        default_flow_style=True,
        width=10**9,
        sort_keys=False,
        allow_unicode=True,
    )
    # Quoted without need
    return re.sub(r"(!\w+) '([\w.]+)'", r"\1 \2", text)


def _given_parameters(pairs: Sequence[str], template: Template) -> dict[str, str]:
    """Return the parameter values from the --parameter options, by name.

    Raises CloudRefused for unknown parameters and invalid values. The message has one line per
    problem.
    """
    known = template["Parameters"]
    given = {}
    problems = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise CloudRefused(f"--parameter {pair}: must be NAME=VALUE")
        given[name] = value
        if name not in known:
            problems.append(
                f"--parameter {name}: unknown; the template has {', '.join(sorted(known))}"
            )
        elif reason := _not_allowed(known[name], value):
            problems.append(f"--parameter {name}={value}: {reason}")
    if problems:
        raise CloudRefused("\n".join(problems))
    return given


def planned_resources(
    template: Template, given: Mapping[str, str], *, region: str
) -> list[ResourceChange]:
    """Return the resources that a new stack with these parameters would create, in the template's
    order.
    """
    values = {name: str(of["Default"]) for name, of in template["Parameters"].items()}
    values |= {"AWS::Region": region, **given}
    conditions = template.get("Conditions", {})
    return [
        ResourceChange(action="Add", name=name, kind=resource["Type"])
        for name, resource in template["Resources"].items()
        if "Condition" not in resource or _holds(conditions[resource["Condition"]], values)
    ]


def _not_allowed(parameter: TemplateParameter, value: str) -> str:
    allowed = [str(value) for value in parameter.get("AllowedValues", [])]
    if allowed and value not in allowed:
        return f"one of {', '.join(allowed)} is allowed"
    pattern = parameter.get("AllowedPattern")
    if pattern and not re.fullmatch(pattern, value):
        return f"must match {pattern}"
    if parameter["Type"] != "Number":
        return ""
    if not re.fullmatch(r"\d+", value):
        return "must be a whole number"
    least = parameter.get("MinValue")
    most = parameter.get("MaxValue")
    if (least is not None and int(value) < least) or (most is not None and int(value) > most):
        return f"must be at least {least}" + ("" if most is None else f" and at most {most}")
    return ""


def _holds(condition: Json, values: Mapping[str, str]) -> bool:
    """Evaluate a condition of the template.

    Only Fn::Equals, Fn::Not, Fn::And and Ref are supported.
    """
    if not isinstance(condition, dict):
        raise ValueError(f"{condition} is not a condition")
    [(function, arguments)] = condition.items()
    if not isinstance(arguments, list):
        raise ValueError(f"condition {function} has no list of arguments")
    if function == "Fn::And":
        return all(_holds(argument, values) for argument in arguments)
    if function == "Fn::Not":
        return not _holds(arguments[0], values)
    if function == "Fn::Equals":
        left, right = (_operand(argument, values) for argument in arguments)
        return left == right
    raise ValueError(f"condition {function} is not supported")


def _operand(argument: Json, values: Mapping[str, str]) -> str:
    if isinstance(argument, dict):
        return values[str(argument["Ref"])]
    return str(argument)


BATCH_LOG_GROUP = "/aws/batch/job"
_LOG_PARAMETER = "CreateBatchLogGroup"
_BILL_PARAMETER = "BillingAlerts"
_BILLING_REGION = "us-east-1"  # where AWS publishes an account's charges
_ANSWER_SECONDS = 20.0


def _with_found(
    given: Mapping[str, str],
    state: StackState | None,
    region: str,
    say: Callable[[str], None] = print,
) -> dict[str, str]:
    """Return `given` plus the parameters that follow from existing resources of the account.

    Parameters of an existing stack keep their values. If the account cannot be read, `say` prints a
    message, and these parameters get the template's defaults.
    """
    decided = {*given, *(state.parameters if state is not None else ())}

    def listed(
        what: str, give: str, service: str, operation: str, key: str, **request: str
    ) -> list[LogGroupDetail] | None:
        try:
            client = aws_client(service, region)
            answer = call_aws(
                client,
                operation,
                RequestDeadline.after(_ANSWER_SECONDS),
                shape=dict[str, list[LogGroupDetail]],
                **request,
            )
            return answer.get(key) or []
        except CloudError as error:
            say(f"whether {what} is unknown; --parameter {give}: {error}")
            return None

    found = dict(given)
    if _LOG_PARAMETER not in decided:
        give = f"{_LOG_PARAMETER}=no if it is"
        request = {"logGroupNamePrefix": BATCH_LOG_GROUP}
        groups = listed(
            f"{BATCH_LOG_GROUP} is there",
            give,
            "logs",
            "describe_log_groups",
            "logGroups",
            **request,
        )
        if any(group.get("logGroupName") == BATCH_LOG_GROUP for group in groups or []):
            found[_LOG_PARAMETER] = "no"
            say(f"{BATCH_LOG_GROUP} exists and stays as it is ({_LOG_PARAMETER}=no)")
    if _BILL_PARAMETER not in decided and region == _BILLING_REGION:
        give = f"{_BILL_PARAMETER}=yes if it does"
        request = {"Namespace": "AWS/Billing", "MetricName": "EstimatedCharges"}
        bills = listed(
            "the account publishes its bill",
            give,
            "cloudwatch",
            "list_metrics",
            "Metrics",
            **request,
        )
        if bills:
            found[_BILL_PARAMETER] = "yes"
        elif bills is not None:
            say(
                "no alarm on the bill: the account does not publish it; with `Receive CloudWatch "
                f"billing alerts` on in Billing's preferences, --parameter {_BILL_PARAMETER}=yes "
                "adds one (the budget warns without it)"
            )
    return found


_POLL_SECONDS = 5.0
_CAPABILITIES = ["CAPABILITY_IAM"]
# Reasons of resources that were only cancelled because another one failed.
_SECONDARY = ("cancelled", "Resource creation cancelled", "Resource update cancelled")


@dataclass(frozen=True, kw_only=True)
class StackState:
    """Status, parameters and outputs of an existing stack."""

    status: str  # CloudFormation's status, such as "CREATE_COMPLETE"
    reason: str  # CloudFormation's reason for the status, "" if it gives none
    parameters: Mapping[str, str]  # the stack's current values, by name
    outputs: Mapping[str, str]


class Stack:
    """A CloudFormation stack in the client's region.

    Requests have deadlines. `tell` prints progress.
    """

    def __init__(
        self,
        client: BaseClient,
        name: str,
        tell: Callable[[str], None],
        *,
        template_bucket: str | None = None,
    ) -> None:
        self._client = client
        self._name = name
        self._tell = tell
        self._template_bucket = template_bucket

    def state(self, deadline: RequestDeadline) -> StackState | None:
        """Read the stack's state, or return None if there is no such stack. Raises CloudError."""
        try:
            answer = call_aws(
                self._client, "describe_stacks", deadline, shape=StacksAnswer, StackName=self._name
            )
        except CloudRefused as error:
            if "does not exist" in str(error):
                return None
            raise
        [found] = answer["Stacks"]
        return StackState(
            status=found["StackStatus"],
            reason=found.get("StackStatusReason", ""),
            parameters={
                parameter["ParameterKey"]: parameter["ParameterValue"]
                for parameter in found.get("Parameters", [])
            },
            outputs={
                output["OutputKey"]: output["OutputValue"] for output in found.get("Outputs", [])
            },
        )

    def changes(
        self, body: str, given: Mapping[str, str], state: StackState, deadline: RequestDeadline
    ) -> list[ResourceChange]:
        """Return the changes that an update would make.

        Parameters that are not given keep their values.

        CloudFormation computes the changes as a change set, which is then deleted. Raises
        CloudError if CloudFormation refuses the update or the deadline has passed.
        """
        name = f"dry-run-{uuid.uuid4().hex[:12]}"
        request = {"StackName": self._name, "ChangeSetName": name}
        update = {"ChangeSetType": "UPDATE", **request, **self._request(body, given, state)}
        call_aws(self._client, "create_change_set", deadline, **update)
        try:
            while True:
                answer = call_aws(
                    self._client, "describe_change_set", deadline, shape=ChangeSetAnswer, **request
                )
                if answer["Status"] == "FAILED":
                    if _nothing_to_do(answer.get("StatusReason", "")):
                        return []
                    raise CloudError(
                        f"stack {self._name}: no change set: {answer.get('StatusReason')}"
                    )
                if answer["Status"] == "CREATE_COMPLETE":
                    found = paginate(
                        self._client,
                        "describe_change_set",
                        "Changes",
                        deadline,
                        shape=StackChange,
                        token="NextToken",
                        **request,
                    )
                    return [
                        _change(change["ResourceChange"])
                        for change in found
                        if "ResourceChange" in change
                    ]
                self._pause(deadline, f"its change set is {answer['Status']}")
        finally:
            call_aws(
                self._client,
                "delete_change_set",
                RequestDeadline.after(30),
                StackName=self._name,
                ChangeSetName=name,
            )

    def apply(
        self,
        body: str,
        given: Mapping[str, str],
        state: StackState | None,
        deadline: RequestDeadline,
    ) -> StackState:
        """Create or update the stack from the template `body`, wait until this is done, and return
        the new state.

        Parameters that are not given keep their values.

        Args:
            state: the stack's current state, or None to create the stack.

        Raises:
            CloudError: the stack cannot be changed now, or resources failed. The message names each
                failed resource with its reason.
            CloudUnavailable: the deadline has passed. CloudFormation continues on its own.
        """
        if state is not None and (refusal := _why_unchangeable(self._name, state)):
            raise CloudError(refusal)
        if state is None:
            known = set()
        else:
            known = {event["EventId"] for event in self._events(deadline)}
        if state is None:
            operation = "create_stack"
        else:
            operation = "update_stack"
        request = {"StackName": self._name, **self._request(body, given, state)}
        try:  # the token makes a retry after a lost answer harmless
            call_aws(
                self._client, operation, deadline, ClientRequestToken=uuid.uuid4().hex, **request
            )
        except CloudRefused as error:
            if state is not None and _nothing_to_do(str(error)):
                self._tell(f"stack {self._name}: nothing to change")
                return state
            raise
        return self._wait(known, deadline)

    def _wait(self, known: set[str], deadline: RequestDeadline) -> StackState:
        failures: list[str] = []
        while True:
            state = self.state(deadline)
            for event in reversed(list(self._events(deadline))):
                if event["EventId"] not in known:
                    known.add(event["EventId"])
                    self._tell(_line(event))
                    failures += _failure(event)
            if state is None:
                raise CloudError(f"stack {self._name}: it was deleted meanwhile")
            if not state.status.endswith("_IN_PROGRESS"):
                break
            self._pause(deadline, f"it is {state.status}")
        if state.status in ("CREATE_COMPLETE", "UPDATE_COMPLETE"):
            return state
        causes = failures or [state.reason or "no resource gives a reason"]
        raise CloudError(
            "\n".join([f"stack {self._name}: {state.status}", *(f"  {cause}" for cause in causes)])
        )

    def _request(self, body: str, given: Mapping[str, str], state: StackState | None) -> JsonObject:
        parameters: list[JsonObject] = [
            {"ParameterKey": name, "ParameterValue": value} for name, value in given.items()
        ]
        if state is not None:
            template = read_template(body)
            kept = [
                name
                for name in state.parameters
                if name not in given and name in template["Parameters"]
            ]
            parameters += [{"ParameterKey": name, "UsePreviousValue": True} for name in kept]
        tags = [
            {"Key": "project", "Value": "ebbflow"},
            {"Key": "ebbflow-stack", "Value": self._name},
        ]
        return {
            **self.template_request(body),
            "Parameters": parameters,
            "Capabilities": _CAPABILITIES,
            "Tags": tags,
        }

    def template_request(self, body: str) -> dict[str, str]:
        """Return the request fields that carry the template: its text, or the address of an
        uploaded copy.

        Raises CloudRefused if it is too large and there is no bucket for it.
        """
        data = body.encode()
        if len(data) <= LARGEST_TEMPLATE:
            return {"TemplateBody": body}
        if self._template_bucket is None:
            raise CloudRefused(
                f"the template has {len(data):,} bytes, and a request takes {LARGEST_TEMPLATE:,}; "
                "fix: --template-bucket BUCKET, or --parameter Families= with fewer families"
            )
        region = self._client.meta.region_name
        key = f"ebbflow-templates/{hashlib.sha256(data).hexdigest()}.yaml"
        call_aws(
            aws_client("s3", region),
            "put_object",
            RequestDeadline.after(_ANSWER_SECONDS),
            Bucket=self._template_bucket,
            Key=key,
            Body=body,
        )
        return {"TemplateURL": f"https://{self._template_bucket}.s3.{region}.amazonaws.com/{key}"}

    def _events(self, deadline: RequestDeadline) -> Iterator[StackEvent]:
        return paginate(
            self._client,
            "describe_stack_events",
            "StackEvents",
            deadline,
            shape=StackEvent,
            token="NextToken",
            StackName=self._name,
        )

    def _pause(self, deadline: RequestDeadline, what: str) -> None:
        if deadline.left() <= _POLL_SECONDS:
            raise CloudUnavailable(
                f"stack {self._name}: {what} and the deadline has passed; CloudFormation goes on "
                "by itself; fix: look at it with `aws cloudformation describe-stack-events "
                f"--stack-name {self._name}`, or run the same command again with a longer "
                "--minutes"
            )
        deadline.sleep(_POLL_SECONDS)


def _change(found: ResourceChangeDetail) -> ResourceChange:
    details = [detail.get("Target", {}).get("Name") for detail in found.get("Details", [])]
    return ResourceChange(
        action=found["Action"],
        name=found["LogicalResourceId"],
        kind=found["ResourceType"],
        replacement=found.get("Replacement", ""),
        because=tuple(dict.fromkeys(filter(None, details))),
    )


def _nothing_to_do(reason: str) -> bool:
    return any(
        text in reason
        for text in ("No updates are to be performed", "didn't contain changes", "no changes")
    )


def _why_unchangeable(name: str, state: StackState) -> str:
    """Return why the stack cannot be changed now, with a fix.

    Return "" if the stack can be changed.
    """
    if state.status.endswith("_COMPLETE") and state.status not in (
        "ROLLBACK_COMPLETE",
        "DELETE_COMPLETE",
    ):
        return ""
    if state.status.endswith("_IN_PROGRESS") and state.status != "REVIEW_IN_PROGRESS":
        return (
            f"stack {name} is {state.status}: another operation is running; fix: wait until it "
            "is done"
        )
    if state.status == "UPDATE_ROLLBACK_FAILED":
        return (
            f"stack {name} is {state.status}; fix: aws cloudformation continue-update-rollback "
            f"--stack-name {name}"
        )
    return (
        f"stack {name} is {state.status} and cannot be changed"
        f"{': ' + state.reason if state.reason else ''}; fix: aws cloudformation delete-stack "
        f"--stack-name {name}"
    )


def _reason(event: StackEvent) -> str:
    return " ".join(str(event.get("ResourceStatusReason") or "").split())


def _line(event: StackEvent) -> str:
    line = f"{event.get('ResourceStatus', ''):<28} {event.get('LogicalResourceId', '')}"
    if reason := _reason(event):
        return f"{line}: {reason}"
    return line


def _failure(event: StackEvent) -> list[str]:
    status = event.get("ResourceStatus", "")
    reason = _reason(event)
    is_stack = event.get("ResourceType") == "AWS::CloudFormation::Stack"
    if not status.endswith("_FAILED") or is_stack or reason.startswith(_SECONDARY):
        return []
    return [
        f"{event.get('LogicalResourceId')} ({event.get('ResourceType')}): {status}: "
        f"{reason or 'no reason given'}"
    ]


_QUESTION_SECONDS = 60.0
# The queues, the repository and a log group are named after the stack; ECR accepts only lower case.
_STACK_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
_MARKS = {"Add": "+", "Modify": "~", "Remove": "-"}


def add_deploy_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "deploy", help="the stack on AWS: network, bucket, queues, roles, schedule, budget"
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--dry-run",
        action="store_true",
        help="show what would be created or changed, and change nothing",
    )
    what.add_argument(
        "--apply", action="store_true", help="create or update the stack, and wait until it is done"
    )
    command.add_argument(
        "--stack", default="ebbflow", metavar="NAME", help="also the prefix of the queues' names"
    )
    command.add_argument("--region", metavar="REGION", help="default: the region of every AWS tool")
    command.add_argument(
        "--minutes",
        type=float,
        default=45.0,
        help="how long --apply waits for the end (default: 45)",
    )
    value = {"action": "append", "default": [], "metavar": "NAME=VALUE"}
    command.add_argument("--parameter", **value, help=f"described in {TEMPLATE.name}")
    command.add_argument(
        "--env", type=Path, metavar="FILE", help="shell script that --apply writes the settings to"
    )
    command.add_argument(
        "--template-bucket",
        metavar="BUCKET",
        help="bucket for a template that has become too large for a request",
    )
    command.set_defaults(command=deploy)


def deploy(options: argparse.Namespace) -> int:
    """Run `ebbflow deploy`, and return the exit code.

    The exit code is 0 on success, 2 for invalid options or a request that AWS rejects as invalid,
    and 1 for any other failure.
    """
    if not _STACK_NAME.fullmatch(options.stack):
        raise CloudRefused(
            f"--stack {options.stack!r}: lower-case letters, digits and -, at most 40"
        )
    if options.env is not None and not options.env.absolute().parent.is_dir():
        raise CloudRefused(f"--env {options.env}: there is no folder {options.env.parent}")
    template = read_template(TEMPLATE.read_text(encoding="utf-8"))
    given = _given_parameters(options.parameter, template)
    client = aws_client("cloudformation", options.region)
    stack = Stack(client, options.stack, print, template_bucket=options.template_bucket)
    if options.dry_run:
        _dry_run(stack, client, template, given)
    else:
        _apply(stack, client, template, given, options)
    return Outcome.COMPLETED.exit_code


def _dry_run(
    stack: Stack, client: BaseClient, template: Template, given: Mapping[str, str]
) -> None:
    deadline = RequestDeadline.after(_QUESTION_SECONDS)
    region = client.meta.region_name
    try:
        state = stack.state(deadline)
    except (CloudForbidden, CloudUnavailable) as error:
        print(_table(planned_resources(template, given, region=region)))
        print(f"the account was not read: {error}")
        return
    template, given = _fit_account(template, given, state, region)
    body = condense_template(template)
    if state is None:
        sent = stack.template_request(body)
        if "TemplateURL" in sent:
            url = sent["TemplateURL"]
            call_aws(client, "validate_template", deadline, TemplateURL=url)
        else:
            call_aws(client, "validate_template", deadline, TemplateBody=body)
        print(_table(planned_resources(template, given, region=region)))
        return
    changes = stack.changes(body, given, state, deadline)
    print(_table(changes) if changes else "nothing to change")


def _fit_account(
    template: Template, given: Mapping[str, str], state: StackState | None, region: str
) -> tuple[Template, dict[str, str]]:
    """Adapt the template and its parameters to this account and region.

    Raises CloudRefused if they cannot have the stack.
    """
    known = None if state is None else state.parameters
    chosen = choose_families(template, given, known, region, print)
    values = {**(known or {}), **chosen}
    defaults = template["Parameters"]
    kept = [
        str(values.get(name, defaults[name]["Default"])).split(",")
        for name in (FAMILIES_PARAMETER, GANG_FAMILIES_PARAMETER)
    ]
    fitting = keep_families(template, *kept)
    if state is None:
        refuse_too_many_queues(fitting, region, print)
    return fitting, _with_found(chosen, state, region)


def _apply(
    stack: Stack,
    client: BaseClient,
    template: Template,
    given: Mapping[str, str],
    options: argparse.Namespace,
) -> None:
    deadline = RequestDeadline.after(60.0 * options.minutes)
    region = client.meta.region_name
    state = stack.state(deadline)
    template, fitting = _fit_account(template, given, state, region)
    state = stack.apply(condense_template(template), fitting, state, deadline)
    settings = _settings(options.stack, state, region)
    print(f"stack {options.stack}: {state.status}\nthe launching machine needs:")
    print(textwrap.indent(settings, "    "), end="")
    if options.env is not None:
        options.env.write_text(settings, encoding="utf-8")
        print(f"wrote {options.env}")
    print(f"the image goes to {state.outputs.get('RepositoryUri', '')}; continue with docs/aws.md")


def _table(changes: Sequence[ResourceChange]) -> str:
    rows = []
    for change in changes:
        if change.replacement == "True":
            replaced = "replaced because of "
        else:
            replaced = ""
        if replaced or change.because:
            why = f"  {replaced}{', '.join(change.because)}"
        else:
            why = ""
        rows.append(f"{_MARKS.get(change.action, '?')} {change.name:<24} {change.kind}{why}")
    counts = Counter(change.action for change in changes)
    rows.append(", ".join(f"{count} to {action.lower()}" for action, count in counts.items()))
    return "\n".join(rows)


def _settings(stack: str, state: StackState, region: str) -> str:
    """Render a shell script that sets the environment variables for runs on this stack.

    It contains no secrets.
    """
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
