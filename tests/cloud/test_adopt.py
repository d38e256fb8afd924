"""`ebbflow adopt` on accounts made up in moto: what it writes, what it leaves open, what it never
does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.core.responses import BaseResponse

from ebbflow.core.config import load_config
from ebbflow.infra.__main__ import main
from tests.support.aws_account import BUCKET, IMAGE, JOB_ROLE, Account, account

ROOT = Path(__file__).resolve().parents[2]
METAFLOWS_STACK = {
    "MetaflowDataStoreS3Url": "s3://acme-data/metaflow",
    "BatchJobQueueArn": "arn:aws:batch:us-east-1:123456789012:job-queue/light",
    "ECSJobRoleForBatchJobs": JOB_ROLE,
    "ServiceUrl": "https://metadata.example/api",
    "InternalServiceUrl": "http://metadata.internal/",
}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    with account(monkeypatch) as made:
        yield made


def adopted(tmp_path: Path, *options: str) -> tuple[Any, dict[str, str]]:
    """The configuration, read as a run would, and the settings of the file beside it."""
    out = tmp_path / "adopted.yaml"
    assert main(["adopt", "--out", str(out), *options]) == 0
    config = load_config(out, project_root=tmp_path, environment={}).config
    lines = [
        line.removeprefix("export ").split("=", 1)
        for line in (tmp_path / "adopted.env").read_text().splitlines()[1:]
    ]
    return config, dict(lines)


def test_an_account_without_hints_is_read_by_its_names(aws: Account, tmp_path: Path) -> None:
    aws.push_image()
    aws.disable("gang-p4d")
    config, settings = adopted(tmp_path)
    assert config.store == f"s3://{BUCKET}/ebbflow" and config.cluster.plan_for == "batch"
    assert [(queue.name, queue.market, queue.instance_types) for queue in config.batch.queues] == [
        ("spot-g5", "spot", ["g5"])
    ]
    assert (config.batch.light_queue, config.batch.image, config.batch.job_role) == (
        "light",
        IMAGE,
        JOB_ROLE,
    )
    assert (config.batch.region, config.cost.regions) == ("us-east-1", ["us-east-1"])
    assert settings["METAFLOW_DATASTORE_SYSROOT_S3"] == f"s3://{BUCKET}/metaflow"
    assert (
        settings["METAFLOW_DEFAULT_DATASTORE"] == "s3"
        and settings["METAFLOW_BATCH_JOB_QUEUE"] == "light"
    )
    assert "METAFLOW_DEFAULT_METADATA" not in settings
    text = (tmp_path / "adopted.yaml").read_text()
    assert "left out: queue gang-p4d is DISABLED" in text and "no metadata service found" in text
    assert "left out: queue cpu-spot is Spot and has no GPUs known here (c6i)" in text
    assert "light is Fargate: set METAFLOW_ECS_FARGATE_EXECUTION_ROLE" in text
    aws.add_queue("small-machines", [aws.add_environment("small-machines", "EC2", ["m7i"])])
    config, _ = adopted(tmp_path, "--force")
    assert config.batch.light_queue == "small-machines", "which needs no such role"


def test_metaflows_stack_and_the_users_own_settings_come_first(
    aws: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.add_stack("metaflow", METAFLOWS_STACK)
    aws.add_stack("other", {"ServiceUrl": "https://not.metaflow.example"})
    monkeypatch.setenv("METAFLOW_BATCH_CONTAINER_IMAGE", "own/image:3")
    monkeypatch.setenv("METAFLOW_SERVICE_AUTH_KEY", "planted-secret")
    config, settings = adopted(tmp_path)
    assert config.store == "s3://acme-data/ebbflow" and config.batch.image == "own/image:3"
    assert next(queue for queue in config.batch.queues if queue.name == "gang-p4d").multi_node
    assert settings["METAFLOW_DATASTORE_SYSROOT_S3"] == "s3://acme-data/metaflow"
    assert (settings["METAFLOW_DEFAULT_METADATA"], settings["METAFLOW_SERVICE_URL"]) == (
        "service",
        "https://metadata.example/api",
    )
    for file in ("adopted.yaml", "adopted.env"):
        assert "planted-secret" not in (tmp_path / file).read_text()
    assert "METAFLOW_SERVICE_AUTH_KEY is a secret" in (tmp_path / "adopted.yaml").read_text()


# What moto does not make is not read here
@pytest.mark.filterwarnings("ignore:Tried to parse:UserWarning")
def test_adopt_reproduces_the_example_configuration_from_the_templates_account(
    aws: Account, tmp_path: Path
) -> None:
    assert main(["deploy", "--apply", "--stack", "ebbflow"]) == 0
    config, settings = adopted(tmp_path, "--stack", "ebbflow")
    example = load_config(
        ROOT / "ebbflow/configs" / "aws.yaml", project_root=ROOT, environment={}
    ).config.batch
    own = {queue.name: queue for queue in config.batch.queues if queue.name.startswith("ebbflow-")}
    assert own == {queue.name: queue for queue in example.queues}
    assert config.batch.light_queue == example.light_queue == settings["METAFLOW_BATCH_JOB_QUEUE"]
    assert config.store.startswith("s3://ebbflow-bucket") and config.store.endswith("/ebbflow")
    assert str(config.batch.image).endswith("/ebbflow:v1") and ":role/ebbflow-" in str(
        config.batch.job_role
    )


def test_adopt_leaves_ambiguous_settings_open_until_they_are_given(
    aws: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.add_stack("production", METAFLOWS_STACK)
    aws.add_stack(
        "trial", {**METAFLOWS_STACK, "MetaflowDataStoreS3Url": "s3://trial-data/metaflow"}
    )
    aws.s3.create_bucket(Bucket="metaflow-too")
    config, _ = adopted(tmp_path)
    said = capsys.readouterr().err
    assert "choose one with --stack" in said and "choose one with --store" in said
    assert not config.store.startswith("s3://")
    config, _ = adopted(tmp_path, "--force", "--stack", "trial")
    assert config.store == "s3://trial-data/ebbflow"
    config, _ = adopted(tmp_path, "--force", "--store", "s3://mine/jobs")
    assert config.store == "s3://mine/jobs"


def test_buckets_of_other_names_are_offered_and_a_single_one_is_taken(
    aws: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.s3.delete_bucket(Bucket=BUCKET)
    aws.s3.create_bucket(Bucket="acme-models")
    config, _ = adopted(tmp_path)
    assert config.store == "s3://acme-models/ebbflow"
    assert "using acme-models, the region's only bucket" in capsys.readouterr().err
    aws.s3.create_bucket(Bucket="acme-logs")
    config, _ = adopted(tmp_path, "--force")
    said = capsys.readouterr().err
    assert "several buckets are possible: acme-models, acme-logs; choose one" in said, said
    assert not config.store.startswith("s3://")


def test_a_file_is_never_overwritten_unasked(
    aws: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.env").write_text("mine")
    assert main(["adopt", "--out", str(tmp_path / "a.yaml")]) == 2
    assert "exists; fix: choose another --out, or --force" in capsys.readouterr().err
    assert (tmp_path / "a.env").read_text() == "mine" and not (tmp_path / "a.yaml").exists()
    assert main(["adopt", "--store", "/tmp/x"]) == 2


def test_adopt_reports_what_it_may_not_read_and_writes_the_rest(
    aws: Account, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is changed either: each request is one that reads."""
    asked: list[str] = []
    answer = BaseResponse.call_action

    def guarded(self: BaseResponse) -> Any:
        asked.append(self._get_action())
        if self.service_name != "iam":
            return answer(self)
        denied = "<Error><Code>AccessDenied</Code><Message>not you</Message></Error>"
        return 403, {}, f"<ErrorResponse>{denied}</ErrorResponse>"

    monkeypatch.setattr(BaseResponse, "call_action", guarded)
    assert main(["adopt"]) == 0
    said = capsys.readouterr()
    assert "name: spot-g5" in said.out and "job_role" not in said.out
    assert (
        "could not be read: iam:ListRoles in aws-global: denied (AccessDenied); fix: allow "
        "iam:ListRoles" in said.err
    )
    reading = ("describe", "list", "get")
    assert len(asked) > 3 and not [
        action for action in asked if not action.lower().startswith(reading)
    ], asked


def test_adopt_without_queues_prints_what_to_do(
    aws: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adopt", "--region", "eu-west-1", "--out", str(tmp_path / "a.yaml")]) == 1
    assert "eu-west-1 has no queue for training; fix: create queues with ebbflow deploy" in (
        capsys.readouterr().err
    )
