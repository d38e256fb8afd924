"""The CloudFormation template, read without CloudFormation: its parameters, and what it would make of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ebbflow.infra.errors import CloudRefused

TEMPLATE = Path(__file__).with_name("template.yaml")
# https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/cloudformation-limits.html: in a request, in bytes.
LARGEST_TEMPLATE = 51_200


@dataclass(frozen=True)
class Planned:
    """A resource of the template. kind: such as AWS::S3::Bucket."""

    name: str
    kind: str


def read_template(text: str) -> dict[str, Any]:
    """The template as CloudFormation reads it, short forms (`!Ref X`) written out (`{"Ref": "X"}`)."""
    return yaml.load(text, _loader())


def check_parameters(template: Mapping[str, Any], given: Mapping[str, str]) -> None:
    """Raises CloudRefused, naming each parameter that the template does not have or whose value it does not allow."""
    known = template["Parameters"]
    problems = []
    for name, value in given.items():
        if name not in known:
            problems.append(f"--parameter {name}: there is none; the template has {', '.join(sorted(known))}")
        elif reason := _not_allowed(known[name], value):
            problems.append(f"--parameter {name}={value}: {reason}")
    if problems:
        raise CloudRefused("\n".join(problems))


def planned(template: Mapping[str, Any], given: Mapping[str, str], *, region: str) -> list[Planned]:
    """What would be made with these parameters, in the template's order."""
    values = {name: str(of["Default"]) for name, of in template["Parameters"].items() if "Default" in of}
    values |= {"AWS::Region": region, **given}
    conditions = template.get("Conditions", {})
    return [
        Planned(name, resource["Type"])
        for name, resource in template["Resources"].items()
        if "Condition" not in resource or _holds(conditions[resource["Condition"]], values)
    ]


def _not_allowed(parameter: Mapping[str, Any], value: str) -> str:
    allowed = [str(one) for one in parameter.get("AllowedValues", [])]
    if allowed and value not in allowed:
        return f"one of {', '.join(allowed)} is allowed"
    pattern = parameter.get("AllowedPattern")
    if pattern and not re.fullmatch(pattern, value):
        return f"must match {pattern}"
    if parameter["Type"] != "Number":
        return ""
    if not re.fullmatch(r"\d+", value):
        return "must be a whole number"
    least, most = parameter.get("MinValue"), parameter.get("MaxValue")
    if (least is not None and int(value) < least) or (most is not None and int(value) > most):
        return f"must be at least {least}" + ("" if most is None else f" and at most {most}")
    return ""


def _holds(condition: Mapping[str, Any], values: Mapping[str, str]) -> bool:
    """Equals, Not, And and Ref: what this template's conditions are made of."""
    [(function, arguments)] = condition.items()
    if function == "Fn::And":
        return all(_holds(one, values) for one in arguments)
    if function == "Fn::Not":
        return not _holds(arguments[0], values)
    if function == "Fn::Equals":
        left, right = (values[one["Ref"]] if isinstance(one, dict) else str(one) for one in arguments)
        return left == right
    raise ValueError(f"condition {function}: not known here")


def _loader() -> type[yaml.SafeLoader]:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("!", _short_form)
    return Loader


def _short_form(loader: yaml.SafeLoader, name: str, node: yaml.Node) -> dict[str, Any]:
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
        if name == "GetAtt":
            value = value.split(".", 1)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)
    return {name if name in ("Ref", "Condition") else f"Fn::{name}": value}
