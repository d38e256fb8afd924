"""Who may do what, by the template: actions of each role, and on what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def statements(template: Mapping[str, Any], role: str) -> list[Mapping[str, Any]]:
    """All that allow something, the role's own and those of the template's managed policies that it
    has.
    """
    resources = template["Resources"]
    properties = resources[role]["Properties"]
    documents = [policy["PolicyDocument"] for policy in properties.get("Policies", [])]
    for policy in properties.get("ManagedPolicyArns", []):
        if "Ref" in policy:
            documents.append(resources[policy["Ref"]]["Properties"]["PolicyDocument"])
    allowed = []
    for document in documents:
        allowed += [
            statement for statement in document["Statement"] if statement["Effect"] == "Allow"
        ]
    return allowed


def actions(template: Mapping[str, Any], role: str) -> set[str]:
    return {
        action for statement in statements(template, role) for action in listed(statement["Action"])
    }


def roles(template: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, resource in template["Resources"].items()
        if resource["Type"] == "AWS::IAM::Role"
    ]


def listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [value]


def broad_actions(template: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(role, action) of every action that is allowed on everything."""
    for role in roles(template):
        for statement in statements(template, role):
            if "*" in listed(statement["Resource"]):
                yield from ((role, action) for action in listed(statement["Action"]))
