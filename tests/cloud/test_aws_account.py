"""Preflight of an account made up in moto: each check is seen to fail, to pass, and to be skipped
with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.client import BaseClient
from moto.iam.responses import IamResponse
from moto.servicequotas.models import ServiceQuotasBackend

from ebbflow.core.config import RunConfig
from ebbflow.core.config.schema import BatchConfig
from ebbflow.flows.checks import run_all_checks
from ebbflow.infra.__main__ import main
from ebbflow.infra.batch import batch_client, describe_queues, training_queues
from tests.support.aws_account import ACCOUNT, BUCKET, IMAGE, JOB_ROLE, REGION, Account, account
from tests.support.batch.fixture import local_batch
from tests.support.checks import failed, passed, skipped

STORE = f"s3://{BUCKET}/ebbflow"
SPOT = {"name": "spot-g5", "market": "spot"}
GANG = {"name": "gang-p4d", "market": "on_demand", "multi_node": True}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    with account(monkeypatch) as made:
        yield made


def batch(*queues: dict[str, Any], nodes: int | str = "auto", **section: Any) -> dict[str, Any]:
    """The sections of a job that goes to Batch."""
    cluster = {"nodes": nodes, "processes_per_node": "auto"}
    return {"store": STORE, "cluster": cluster, "batch": {"queues": list(queues), **section}}


def test_account_checks_run_only_for_jobs_on_aws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where an answer would be a refusal
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for name in (
        "aws-queues",
        "aws-role",
        "aws-bucket",
        "aws-image",
        "aws-clock",
        "aws-capacity",
        "aws-quota",
    ):
        assert "the store is a folder" in skipped(name).detail
        assert (
            "cluster.plan_for is kubernetes"
            in skipped(name, store=STORE, cluster={"plan_for": "kubernetes"}).detail
        )
    results = run_all_checks(RunConfig(), "laptop.yaml", quick_only=True)
    assert results and not [result.id for result in results if result.id.startswith("aws-")]


def test_queues(aws: Account) -> None:
    found = passed("aws-queues", **batch(SPOT, GANG, nodes=2, light_queue="light"))
    assert (
        "gang-p4d: EC2 (p4d.24xlarge), several nodes" in found.detail
        and "placement group" not in found.detail
    )
    assert "no jobStateTimeLimitActions" in found.detail
    assert (
        "is Fargate: Metaflow runs none there without METAFLOW_ECS_FARGATE_EXECUTION_ROLE"
        in found.detail
    )
    passed("aws-queues", **batch())  # none declared: those of the account
    assert (
        "there is no job queue spot-g6 in us-east-1"
        in failed("aws-queues", **batch({**SPOT, "name": "spot-g6"})).detail
    )
    wrong = failed("aws-queues", **batch({"name": "spot-g5", "market": "on_demand"}))
    assert (
        "queue spot-g5 is declared on_demand, but its compute environments are SPOT" in wrong.detail
    )
    wrong = failed(
        "aws-queues", **batch({"name": "light", "market": "on_demand", "multi_node": True})
    )
    assert "is declared multi_node, but only managed EC2 environments run it" in wrong.detail
    wrong = failed("aws-queues", **batch({**SPOT, "instance_types": ["g5.xlarge", "g6"]}))
    assert "is declared to have g6, but has g5" in wrong.detail
    assert (
        "for the steps around training"
        in failed("aws-queues", **batch(SPOT, light_queue="dark")).detail
    )
    aws.disable("gang-p4d")
    assert "queue gang-p4d is DISABLED" in failed("aws-queues", **batch(SPOT, GANG)).detail
    # As discovered, what is left takes one node only
    no_gang = failed("aws-queues", **batch(nodes=2))
    assert (
        "cluster.nodes is 2, and no queue takes several nodes" in no_gang.detail
        and "spot-g5: SPOT" in no_gang.detail
    )


def test_a_queue_of_both_markets_has_no_price(aws: Account) -> None:
    arns = [aws.add_environment(f"mixed-{kind}", kind, ["g5"]) for kind in ("SPOT", "EC2")]
    aws.add_queue("mixed", arns)
    assert (
        "mixes markets" in failed("aws-queues", **batch({"name": "mixed", "market": "spot"})).detail
    )


def test_metaflow(aws: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    found = failed("aws-metaflow", **batch(SPOT))
    assert "datastore is local" in found.detail and f"SYSROOT_S3={STORE}/metaflow" in str(found.fix)
    (tmp_path / "config.json").write_text(
        f'{{"METAFLOW_DATASTORE_SYSROOT_S3": "s3://{BUCKET}/metaflow"}}'
    )
    monkeypatch.setenv("METAFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("METAFLOW_DEFAULT_DATASTORE", "s3")
    assert "no role is named" in failed("aws-metaflow", **batch(SPOT)).detail
    assert "metadata local" in passed("aws-metaflow", **batch(SPOT, job_role=JOB_ROLE)).detail
    monkeypatch.setenv("METAFLOW_DEFAULT_METADATA", "service")
    assert "no address is given" in failed("aws-metaflow", **batch(SPOT, job_role=JOB_ROLE)).detail


def test_role_and_rights(aws: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no role is named" in skipped("aws-role", **batch(SPOT)).detail
    passed("aws-role", **batch(SPOT, job_role=JOB_ROLE))
    nobody = f"arn:aws:iam::{ACCOUNT}:role/nobody"
    assert f"there is no role {nobody}" in failed("aws-role", **batch(SPOT, job_role=nobody)).detail
    nodes = f"arn:aws:iam::{ACCOUNT}:role/nodes"
    assert "trusts ec2.amazonaws.com" in failed("aws-role", **batch(SPOT, job_role=nodes)).detail
    asked: list[dict[str, Any]] = []

    def simulate(self: Any) -> str:
        """IAM's answer, which moto does not know: objects may be read and written, and that is all."""
        asked.append(dict(self.querystring))
        names = [
            value[0]
            for key, value in self.querystring.items()
            if key.startswith("ActionNames.member")
        ]
        members = "".join(
            f"<member><EvalActionName>{name}</EvalActionName><EvalResourceName>*</EvalResourceName><EvalDecision>"
            f"{'implicitDeny' if 'Delete' in name else 'allowed'}</EvalDecision></member>"
            for name in names
        )
        result = f"<SimulatePrincipalPolicyResult><EvaluationResults>{members}</EvaluationResults>"
        whole = f"{result}</SimulatePrincipalPolicyResult>"
        return f"<SimulatePrincipalPolicyResponse>{whole}</SimulatePrincipalPolicyResponse>"

    monkeypatch.setattr(IamResponse, "simulate_principal_policy", simulate, raising=False)
    found = failed("aws-rights", **batch(SPOT, job_role=JOB_ROLE))
    assert f"is denied s3:DeleteObject on {STORE}" in found.detail and len(asked) == 2


def test_bucket(aws: Account) -> None:
    found = failed("aws-bucket", **batch(SPOT))
    assert (
        "public access is not blocked" in found.detail and "unfinished uploads stay" in found.detail
    )
    aws.tidy_bucket()
    assert "deleted after 2 days" in passed("aws-bucket", **batch(SPOT)).detail
    far = failed("aws-bucket", **batch(SPOT, region="eu-west-1"))
    assert "it is in us-east-1, the queues in eu-west-1" in far.detail
    assert (
        "NoSuchBucket"
        in skipped("aws-bucket", **{**batch(SPOT), "store": "s3://not-there/x"}).detail
    )


def test_image(aws: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no image is named" in skipped("aws-image", **batch(SPOT)).detail
    assert (
        "is not in ECR" in skipped("aws-image", **batch(SPOT, image="pytorch/pytorch:2.13")).detail
    )
    assert f"there is no image {IMAGE}" in failed("aws-image", **batch(SPOT, image=IMAGE)).detail
    aws.push_image()
    passed("aws-image", **batch(SPOT, image=IMAGE))
    monkeypatch.setenv("METAFLOW_BATCH_CONTAINER_REGISTRY", IMAGE.partition("/")[0])
    monkeypatch.setenv("METAFLOW_BATCH_CONTAINER_IMAGE", "ebbflow:v2")
    assert "ebbflow:v2" in failed("aws-image", **batch(SPOT)).detail


def test_capacity_and_quota(aws: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {**batch(SPOT, nodes=1), "cost": {"budget_usd": 5}}
    assert "spot-g5: 1 × g5" in passed("aws-capacity", **job).detail
    dear = {**batch(SPOT, GANG, nodes=1), "cost": {"budget_usd": 0.5, "deadline_hours": 5}}
    refused = failed("aws-capacity", **dear)
    assert refused.detail.startswith(
        "with the queues that AWS Batch lists: no on-demand pool can take over"
    )
    cpu = failed("aws-capacity", **batch({"name": "cpu-spot", "market": "spot"}, nodes=1))
    assert "cpu-spot: has c6i" in cpu.detail
    aws.add_queue("small", [aws.add_environment("small", "SPOT", ["g5"], vcpus=2)])
    small = failed("aws-capacity", **batch({"name": "small", "market": "spot"}, nodes=1))
    assert "may have 2 vCPUs" in small.detail
    # Moto knows none of EC2's
    assert "servicequotas:GetServiceQuota" in skipped("aws-quota", **job).detail
    quotas = {"L-3819A6DF": 3.0}

    def quota(self: Any, service_code: str, quota_code: str) -> dict[str, Any]:
        return {
            "ServiceCode": service_code,
            "QuotaCode": quota_code,
            "QuotaName": "All G",
            "Value": quotas[quota_code],
        }

    monkeypatch.setattr(ServiceQuotasBackend, "get_service_quota", quota)
    few = failed("aws-quota", **job)
    assert (
        "All G (L-3819A6DF): 3 vCPUs in us-east-1, too few for 1 × g5" in few.detail
        and "L-3819A6DF" in str(few.fix)
    )
    quotas["L-3819A6DF"] = 64.0
    assert "64 vCPUs in us-east-1, enough for 1 × g5" in passed("aws-quota", **job).detail


def test_quotas_are_those_of_the_regions_of_the_queues(
    aws: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = aws.in_region("us-west-2")
    prices = tmp_path / "prices.csv"
    there.add_queue("far-spot", [there.add_environment("far-spot", "SPOT", ["g5"])])
    rows = [
        f"2026-11-01T00:00:00Z,g5.xlarge,{region}a,0.5" for region in ("us-east-1", "us-west-2")
    ]
    prices.write_text("\n".join(["Timestamp,InstanceType,AvailabilityZone,SpotPrice", *rows]))
    quotas = {"us-east-1": 3.0, "us-west-2": 64.0}

    def quota(self: Any, service_code: str, quota_code: str) -> dict[str, Any]:
        return {"QuotaCode": quota_code, "QuotaName": "All G", "Value": quotas[self.region_name]}

    monkeypatch.setattr(ServiceQuotasBackend, "get_service_quota", quota)
    job = batch(
        SPOT,
        {"name": "far-spot", "market": "spot", "region": "us-west-2"},
        nodes=1,
        region="us-east-1",
    )
    job |= {"cost": {"prices": str(prices), "store_region": "us-east-1", "budget_usd": 5}}
    found = passed("aws-quota", **job).detail
    assert (
        "3 vCPUs in us-east-1, too few for" in found
        and "64 vCPUs in us-west-2, enough for" in found
    )
    quotas["us-west-2"] = 2.0
    assert "L-3819A6DF in us-east-1, L-3819A6DF in us-west-2" in str(failed("aws-quota", **job).fix)


def test_a_clock_that_is_off_and_a_batch_that_is_not_amazons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with local_batch(
        tmp_path, queues={"spot-g5": {"market": "spot"}}, clock_ahead_seconds=400.0
    ) as local:
        settings = {
            "AWS_ENDPOINT_URL_BATCH": local.endpoint,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        found = failed("aws-clock", **batch(SPOT))
        assert (
            "s behind" in found.detail
            and "(300 s allowed); signed requests are refused" in found.detail
        )
        assert "the credentials are not accepted" in failed("aws-queues", **batch(SPOT)).detail
        local.change(clock_ahead_seconds=0)
        passed("aws-clock", **batch(SPOT))
        passed("aws-queues", **batch(SPOT))
        local.change(rules=[{"operation": "DescribeJobQueues", "kind": "forbid", "times": 2}])
        assert "allow batch:DescribeJobQueues" in str(failed("aws-queues", **batch(SPOT)).fix)
        monkeypatch.setenv("AWS_BATCH_JOB_ID", "a-container")  # its role need not have the right
        assert (
            "the launching machine has checked the queues"
            in skipped("aws-queues", **batch(SPOT)).detail
        )
        monkeypatch.delenv("AWS_BATCH_JOB_ID")
        assert main(["adopt"]) == 0
        # Amazon has no account that would say anything of this Batch, and is not asked.
        assert "is Amazon" in skipped("aws-role", **batch(SPOT, job_role=JOB_ROLE)).detail
        assert "is Amazon" in skipped("aws-quota", **batch(SPOT, nodes=1)).detail
        # Who leads all of AWS to one stand-in, which is Batch and nothing else, is not refused for
        # what it lacks.
        monkeypatch.setenv("AWS_ENDPOINT_URL", local.endpoint)
        assert "is not this service" in skipped("aws-role", **batch(SPOT, job_role=JOB_ROLE)).detail
        skipped("aws-rights", **batch(SPOT, job_role=JOB_ROLE))
        skipped("aws-bucket", **batch(SPOT))
        skipped("aws-image", **batch(SPOT, image=IMAGE))


def test_account_checks_skip_what_a_local_service_lacks(
    aws: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbflow.infra.checks.batch.is_amazons", lambda client: False)
    nobody = f"arn:aws:iam::{ACCOUNT}:role/nobody"
    assert f"has no role {nobody}" in skipped("aws-role", **batch(SPOT, job_role=nobody)).detail
    assert f"has no image {IMAGE}" in skipped("aws-image", **batch(SPOT, image=IMAGE)).detail


@pytest.mark.parametrize(
    ("service", "call", "check", "told"),
    [
        ("iam", "GetRole", "aws-role", "iam:GetRole in aws-global: the answer lacks Role"),
        (
            "iam",
            "SimulatePrincipalPolicy",
            "aws-rights",
            "iam:SimulatePrincipalPolicy in aws-global: the answer lacks",
        ),
        (
            "s3",
            "GetPublicAccessBlock",
            "aws-bucket",
            "the answer lacks PublicAccessBlockConfiguration",
        ),
        ("s3", "GetBucketLifecycleConfiguration", "aws-bucket", "the answer lacks Rules"),
        (
            "ecr",
            "DescribeImages",
            "aws-image",
            "ecr:DescribeImages in us-east-1: the answer lacks imageDetails",
        ),
        (
            "service-quotas",
            "GetServiceQuota",
            "aws-quota",
            "GetServiceQuota in us-east-1: the answer lacks Quota",
        ),
    ],
)
def test_an_answer_with_nothing_in_it_names_the_call_and_passes_nothing(
    aws: Account, monkeypatch: pytest.MonkeyPatch, service: str, call: str, check: str, told: str
) -> None:
    """200 and `{}`, as stand-ins and proxies answer: neither a pass nor a KeyError."""
    aws.tidy_bucket()
    aws.push_image()

    def empty(self: BaseClient, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        if (self.meta.service_model.service_name, operation) == (service, call):
            return {}
        return asked(self, operation, request)

    asked = BaseClient._make_api_call
    monkeypatch.setattr(BaseClient, "_make_api_call", empty)
    found = skipped(check, **batch(SPOT, nodes=1, job_role=JOB_ROLE, image=IMAGE))
    assert told in found.detail


def test_a_declared_family_means_those_of_its_types_that_the_queue_has(aws: Account) -> None:
    """A job for another one would wait in RUNNABLE for ever."""
    aws.add_queue(
        "some-g5", [aws.add_environment("some-g5", "SPOT", ["g5.xlarge", "g5.2xlarge", "g6"])]
    )
    for declared, meant in (
        (["g5"], ("g5.xlarge", "g5.2xlarge")),
        (["g6.xlarge", "g5.2xlarge"], ("g6.xlarge", "g5.2xlarge")),
        (["g6"], ("g6",)),
        ([], ("g5.xlarge", "g5.2xlarge", "g6")),
    ):
        section = BatchConfig.model_validate(
            {"queues": [{"name": "some-g5", "market": "spot", "instance_types": declared}]}
        )
        [queue] = training_queues(section, batch_client(REGION)).values()
        assert queue.usable and set(queue.instance_types) == set(meant)


def test_instance_types_of_a_local_batch_are_unknown(
    aws: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At Amazon "optimal" has no GPUs; elsewhere nothing is known of it."""
    aws.add_queue("any", [aws.add_environment("any", "SPOT", ["optimal"])])
    for amazons, types in ((True, ("optimal",)), (False, ())):
        monkeypatch.setattr(
            "ebbflow.infra.batch.queues.is_amazons", lambda client, amazons=amazons: amazons
        )
        assert describe_queues(["any"], batch_client(REGION))["any"].instance_types == types
