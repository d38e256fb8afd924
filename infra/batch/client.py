"""The client of AWS Batch."""

from __future__ import annotations

from typing import Any

from ebbflow.infra.aws.calls import aws_client


def batch_client(region: str | None = None) -> Any:
    """A client with short time-outs and no retries of its own. region: None: as every AWS tool finds it.

    AWS_ENDPOINT_URL_BATCH or AWS_ENDPOINT_URL lead to a Batch that is not Amazon's. Raises CloudRefused for settings
    that no client can be made with. Imports botocore, which takes part of a second.
    """
    return aws_client("batch", region)
