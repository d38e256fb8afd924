"""One CloudFormation stack: what a change would do, doing it, and waiting for the end with a deadline."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.aws.calls import Patience, ask, pages
from ebbflow.infra.errors import CloudAway, CloudError, CloudRefused

_POLL_SECONDS = 5.0
_CAPABILITIES = ["CAPABILITY_IAM"]
# What a resource says that was only stopped because another one failed.
_SECONDARY = ("cancelled", "Resource creation cancelled", "Resource update cancelled")


@dataclass(frozen=True, kw_only=True)
class Change:
    """action: Add, Modify, Remove … replacement: True, False or Conditional; because: the properties that change."""

    action: str
    name: str
    kind: str
    replacement: str = ""
    because: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StackState:
    """status: CloudFormation's word. parameters: those it was last applied with."""

    status: str
    reason: str
    parameters: Mapping[str, str]
    outputs: Mapping[str, str]


class Stack:
    """A stack of this name in the client's region. Every call ends within its `patience`."""

    def __init__(self, client: Any, name: str, tell: Callable[[str], None]) -> None:
        self._client = client
        self._name = name
        self._tell = tell

    def state(self, patience: Patience) -> StackState | None:
        """None where there is no such stack. Raises CloudError."""
        try:
            [found] = ask(self._client, "describe_stacks", patience, StackName=self._name)["Stacks"]
        except CloudRefused as error:
            if "does not exist" in str(error):
                return None
            raise
        return StackState(
            status=found["StackStatus"],
            reason=found.get("StackStatusReason", ""),
            parameters={one["ParameterKey"]: one["ParameterValue"] for one in found.get("Parameters", [])},
            outputs={one["OutputKey"]: one["OutputValue"] for one in found.get("Outputs", [])},
        )

    def changes(self, body: str, given: Mapping[str, str], state: StackState, patience: Patience) -> list[Change]:
        """What applying would do to the stack that is there. The change set is deleted again. Raises CloudError."""
        name = f"dry-run-{uuid.uuid4().hex[:12]}"
        request = {"StackName": self._name, "ChangeSetName": name}
        self._ask("create_change_set", patience, ChangeSetType="UPDATE", **request, **self._request(body, given, state))
        try:
            while True:
                answer = self._ask("describe_change_set", patience, **request)
                if answer["Status"] == "FAILED":
                    if _nothing_to_do(answer.get("StatusReason", "")):
                        return []
                    raise CloudError(f"stack {self._name}: no change set: {answer.get('StatusReason')}")
                if answer["Status"] == "CREATE_COMPLETE":
                    found = pages(
                        self._client, "describe_change_set", "Changes", patience, token="NextToken", **request
                    )
                    return [_change(one["ResourceChange"]) for one in found if "ResourceChange" in one]
                self._pause(patience, f"its change set is {answer['Status']}")
        finally:
            self._ask("delete_change_set", Patience.of(30), **request)

    def apply(self, body: str, given: Mapping[str, str], state: StackState | None, patience: Patience) -> StackState:
        """Create or update the stack and wait for the end. Raises CloudError with every resource that failed."""
        if state is not None and not _can_be_changed(state.status):
            raise CloudError(_how_to_go_on(self._name, state))
        told = set() if state is None else {event["EventId"] for event in self._events(patience)}
        operation = "create_stack" if state is None else "update_stack"
        request = self._request(body, given, state)
        try:  # the token makes asking again after a lost answer harmless
            self._ask(operation, patience, StackName=self._name, ClientRequestToken=uuid.uuid4().hex, **request)
        except CloudRefused as error:
            if state is not None and _nothing_to_do(str(error)):
                self._tell(f"stack {self._name}: nothing to change")
                return state
            raise
        return self._wait(told, patience)

    def _wait(self, told: set[str], patience: Patience) -> StackState:
        failures: list[str] = []
        while True:
            state = self.state(patience)
            for event in reversed(self._events(patience)):
                if event["EventId"] not in told:
                    told.add(event["EventId"])
                    self._tell(_line(event))
                    failures += _failure(event)
            if state is None:
                raise CloudError(f"stack {self._name}: is gone")
            if not state.status.endswith("_IN_PROGRESS"):
                break
            self._pause(patience, f"it is {state.status}")
        if state.status in ("CREATE_COMPLETE", "UPDATE_COMPLETE"):
            return state
        causes = failures or [state.reason or "no resource says why"]
        raise CloudError("\n".join([f"stack {self._name}: {state.status}", *(f"  {one}" for one in causes)]))

    def _request(self, body: str, given: Mapping[str, str], state: StackState | None) -> dict[str, Any]:
        """A parameter that is not given keeps the value it has."""
        parameters = [{"ParameterKey": name, "ParameterValue": value} for name, value in given.items()]
        if state is not None:
            kept = [name for name in state.parameters if name not in given and f"\n  {name}:\n" in body]
            parameters += [{"ParameterKey": name, "UsePreviousValue": True} for name in kept]
        tags = [{"Key": "project", "Value": "ebbflow"}, {"Key": "ebbflow-stack", "Value": self._name}]
        return {"TemplateBody": body, "Parameters": parameters, "Capabilities": _CAPABILITIES, "Tags": tags}

    def _events(self, patience: Patience) -> list[Mapping[str, Any]]:
        """Newest first."""
        return list(
            pages(
                self._client,
                "describe_stack_events",
                "StackEvents",
                patience,
                token="NextToken",
                StackName=self._name,
            )
        )

    def _ask(self, operation: str, patience: Patience, **request: Any) -> Mapping[str, Any]:
        return ask(self._client, operation, patience, **request)

    def _pause(self, patience: Patience, what: str) -> None:
        if patience.left() <= _POLL_SECONDS:
            raise CloudAway(
                f"stack {self._name}: {what} and the time is up; CloudFormation goes on by itself; "
                f"fix: look at it with `aws cloudformation describe-stack-events --stack-name {self._name}`, "
                "or run the same command again with a longer --minutes"
            )
        patience.sleep(_POLL_SECONDS)


def _change(found: Mapping[str, Any]) -> Change:
    details = [one.get("Target", {}).get("Name") for one in found.get("Details", [])]
    return Change(
        action=found["Action"],
        name=found["LogicalResourceId"],
        kind=found["ResourceType"],
        replacement=found.get("Replacement", ""),
        because=tuple(dict.fromkeys(one for one in details if one)),
    )


def _nothing_to_do(reason: str) -> bool:
    return any(text in reason for text in ("No updates are to be performed", "didn't contain changes", "no changes"))


def _can_be_changed(status: str) -> bool:
    return status.endswith("_COMPLETE") and status not in ("ROLLBACK_COMPLETE", "DELETE_COMPLETE")


def _how_to_go_on(name: str, state: StackState) -> str:
    if state.status.endswith("_IN_PROGRESS") and state.status != "REVIEW_IN_PROGRESS":
        return f"stack {name} is {state.status}: somebody is at it; fix: wait until it is done"
    if state.status == "UPDATE_ROLLBACK_FAILED":
        return f"stack {name} is {state.status}; fix: aws cloudformation continue-update-rollback --stack-name {name}"
    return (
        f"stack {name} is {state.status} and cannot be changed"
        f"{': ' + state.reason if state.reason else ''}; fix: aws cloudformation delete-stack --stack-name {name}"
    )


def _line(event: Mapping[str, Any]) -> str:
    reason = " ".join(str(event.get("ResourceStatusReason") or "").split())
    line = f"{event.get('ResourceStatus', ''):<28} {event.get('LogicalResourceId', '')}"
    return f"{line}: {reason}" if reason else line


def _failure(event: Mapping[str, Any]) -> list[str]:
    status, reason = event.get("ResourceStatus", ""), " ".join(str(event.get("ResourceStatusReason") or "").split())
    if not status.endswith("_FAILED") or event.get("ResourceType") == "AWS::CloudFormation::Stack":
        return []
    if any(reason.startswith(text) for text in _SECONDARY):
        return []
    return [f"{event['LogicalResourceId']} ({event['ResourceType']}): {status}: {reason or 'no reason given'}"]
