"""Adapt a new CloudFormation stack to its region.

The stack gets queues only for GPU families that the region offers, and a zone for multi-node jobs.
It is refused if the account would then have too many job queues.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from ebbflow.core.errors import CloudError, CloudRefused
from ebbflow.core.json_values import Json
from ebbflow.infra.aws.answers import QueueDetail, TypeOffering, ZonesAnswer
from ebbflow.infra.aws.calls import RequestDeadline, aws_client, call_aws, paginate

if TYPE_CHECKING:
    from ebbflow.infra.aws.deploy import Template

FAMILIES_PARAMETER = "Families"
GANG_FAMILIES_PARAMETER = "GangFamilies"
ZONE_PARAMETER = "GangZone"
# https://docs.aws.amazon.com/batch/latest/userguide/service_limits.html: of an account in a region
MOST_QUEUES = 50
_ZONES_NEEDED = 3  # subnets of the template
_ANSWER_SECONDS = 20.0
# Queue, compute environment or launch template of one family, such as SpotG4dnQueue
_OF_FAMILY = re.compile(r"(Spot|OnDemand|Gang)([A-Z]\d+[a-z]*)(Queue|Template)?")


def choose_families(
    template: Template,
    given: Mapping[str, str],
    known: Mapping[str, str] | None,
    region: str,
    say: Callable[[str], None],
) -> dict[str, str]:
    """Return the parameters `given`, plus the GPU families that the region offers and the zone for
    multi-node jobs.

    Args:
        known: Parameters of the existing stack, which are kept; None for a new one.

    Raises:
        CloudRefused: The region lacks a requested family, has none of the families, or has too few
            zones.
    """
    if known is not None and FAMILIES_PARAMETER in known and FAMILIES_PARAMETER not in given:
        return dict(given)
    decided = {**(known or {}), **given}
    wanted = _families(template, decided, FAMILIES_PARAMETER)
    try:
        zones_by_family = _ask_offerings(wanted, region)
        zones = _ask_zones(region)
    except CloudError as error:
        say(
            f"whether {region} offers {', '.join(wanted)} is unknown; --parameter "
            f"{FAMILIES_PARAMETER}={wanted[0]} asks for fewer: {error}"
        )
        return dict(given)
    if len(zones) < _ZONES_NEEDED:
        raise CloudRefused(
            f"{region} has {len(zones)} availability zones and the stack needs {_ZONES_NEEDED}; "
            "fix: --region"
        )
    absent = [family for family in wanted if zones_by_family[family].isdisjoint(zones)]
    _refuse_absent(wanted, absent, given, region)
    for family in absent:
        say(f"{region} offers no {family}: its queues are left out")
    offered = [family for family in wanted if family not in absent]
    chosen = dict(given)
    chosen[FAMILIES_PARAMETER] = ",".join(offered)
    gangs = [family for family in _gang_families(template, given, known) if family in offered]
    zone = decided.get(ZONE_PARAMETER, "")
    # Subnets of a stack without the parameter are in the first zone. CloudFormation cannot move them:
    # it makes the new ones, whose addresses are the same, before it deletes the old ones.
    keeps_first_zone = known is not None and not zone
    if keeps_first_zone:
        zone = zones[0]
    elif not zone:
        zone = _best_zone(gangs, zones_by_family, zones)
    there = [family for family in gangs if zone in zones_by_family[family]]
    chosen[GANG_FAMILIES_PARAMETER] = ",".join(there)
    if decided.get("Nat") == "no":
        return chosen
    if not keeps_first_zone:
        chosen[ZONE_PARAMETER] = zone
    for family in gangs:
        if family not in there:
            say(f"{zone} offers no {family}: its queue for several nodes is left out")
    if there:
        say(f"jobs of several nodes go to {zone}, which offers {', '.join(there)}")
    return chosen


def keep_families(template: Template, families: Sequence[str], gangs: Sequence[str]) -> Template:
    """Return the template with the queues of these GPU families only.

    References to the removed queues are removed too. `gangs` are the families that keep a queue for
    multi-node jobs.
    """
    removed = set()
    for name in template["Resources"]:
        found = _OF_FAMILY.fullmatch(name)
        if found is not None:
            kept = gangs if found[1] == "Gang" else families
            if found[2].lower() not in kept:
                removed.add(name)
    resources = {
        name: resource for name, resource in template["Resources"].items() if name not in removed
    }
    kept_template = {**template, "Resources": resources}
    return cast("Template", _without_references(cast(Json, kept_template), removed))


def refuse_too_many_queues(template: Template, region: str, say: Callable[[str], None]) -> None:
    """Raise CloudRefused if the account has no room for the queues of a new stack."""
    new = sum(
        resource["Type"] == "AWS::Batch::JobQueue" for resource in template["Resources"].values()
    )
    try:
        there = list(
            paginate(
                aws_client("batch", region),
                "describe_job_queues",
                "jobQueues",
                RequestDeadline.after(_ANSWER_SECONDS),
                shape=QueueDetail,
            )
        )
    except CloudError as error:
        say(f"whether the account has room for {new} more queues is unknown: {error}")
        return
    if len(there) + new > MOST_QUEUES:
        raise CloudRefused(
            f"the account has {len(there)} job queues in {region}, this stack adds {new}, and AWS "
            f"Batch allows {MOST_QUEUES}; fix: --parameter {FAMILIES_PARAMETER}=g5, or delete a "
            "stack that is not used"
        )


def _families(template: Template, given: Mapping[str, str], parameter: str) -> list[str]:
    default = template["Parameters"][parameter]["Default"]
    return [family for family in given.get(parameter, str(default)).split(",") if family]


def _gang_families(
    template: Template, given: Mapping[str, str], known: Mapping[str, str] | None
) -> list[str]:
    """Return the GPU families that get a queue for multi-node jobs.

    If the parameter is in `given`, or if the stack is new, the parameter's value or default
    decides. Otherwise, a family of the default gets such a queue if the existing stack (`known`)
    has one, or if the family is new to the stack.
    """
    if known is None or GANG_FAMILIES_PARAMETER in given:
        return _families(template, given, GANG_FAMILIES_PARAMETER)
    before = _families(template, known, FAMILIES_PARAMETER)
    kept = _families(template, known, GANG_FAMILIES_PARAMETER)
    usual = _families(template, {}, GANG_FAMILIES_PARAMETER)
    wanted = _families(template, given, FAMILIES_PARAMETER)
    return [
        family for family in usual if family in kept or (family in wanted and family not in before)
    ]


def _refuse_absent(
    wanted: Sequence[str], absent: Sequence[str], given: Mapping[str, str], region: str
) -> None:
    """Raise CloudRefused if the region lacks a family that the user asked for, or lacks all
    families.
    """
    if absent and FAMILIES_PARAMETER in given:
        raise CloudRefused(
            f"--parameter {FAMILIES_PARAMETER}={given[FAMILIES_PARAMETER]}: {region} offers no "
            f"{', '.join(absent)}"
        )
    if len(absent) == len(wanted):
        raise CloudRefused(f"{region} offers none of {', '.join(wanted)}; fix: --region")


def _best_zone(
    gangs: Sequence[str], zones_by_family: Mapping[str, set[str]], zones: Sequence[str]
) -> str:
    """Return the zone that offers most of the families, or "" if no zone offers any.

    Of several such zones, the first by name is returned.
    """
    best = ""
    most = 0
    for zone in sorted(zones):
        count = sum(zone in zones_by_family[family] for family in gangs)
        if count > most:
            best = zone
            most = count
    return best


def _ask_offerings(families: Sequence[str], region: str) -> dict[str, set[str]]:
    offered: dict[str, set[str]] = {family: set() for family in families}
    answers = paginate(
        aws_client("ec2", region),
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        RequestDeadline.after(_ANSWER_SECONDS),
        shape=TypeOffering,
        token="NextToken",
        LocationType="availability-zone",
    )
    for offering in answers:
        family = offering["InstanceType"].partition(".")[0]
        if family in offered:
            offered[family].add(offering["Location"])
    return offered


def _ask_zones(region: str) -> list[str]:
    answer = call_aws(
        aws_client("ec2", region),
        "describe_availability_zones",
        RequestDeadline.after(_ANSWER_SECONDS),
        shape=ZonesAnswer,
        Filters=[{"Name": "zone-type", "Values": ["availability-zone"]}],
    )
    return [zone["ZoneName"] for zone in answer.get("AvailabilityZones") or []]


def _without_references(value: Json, removed: set[str]) -> Json:
    if isinstance(value, dict):
        return {name: _without_references(part, removed) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_references(part, removed) for part in value if not _refers(part, removed)]
    return value


def _refers(value: Json, removed: set[str]) -> bool:
    """Return whether a list element of the template refers to a removed resource."""
    if not isinstance(value, dict):
        return False
    if value.keys() == {"Ref"}:
        return value["Ref"] in removed
    branches = value.get("Fn::If")
    return isinstance(branches, list) and len(branches) > 1 and _refers(branches[1], removed)
