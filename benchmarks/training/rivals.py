"""DCP into a bucket, by the two ways that its users have: s3torchconnector's writer, and fsspec
with s3fs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import Optimizer

RIVALS = {"dcp_s3torchconnector": "s3torchconnector", "dcp_s3fs": "s3fs"}


def installed() -> dict[str, str]:
    """Of each rival, why it cannot be measured; "" when it can."""
    return {
        name: "" if importlib.util.find_spec(module) else f"not installed: pip install {module}"
        for name, module in RIVALS.items()
    }


class BucketSaver:
    """`dcp.save`, which returns when all is written, through one of the writers."""

    def __init__(self, name: str, uri: str, model: nn.Module, optimizer: Optimizer) -> None:
        self._make: Callable[[str], Any] = {
            "dcp_s3torchconnector": _torch_connector,
            "dcp_s3fs": _fsspec,
        }[name]
        self._uri = f"{uri}/{name}"
        self._model = model
        self._optimizer = optimizer
        self._group = dist.new_group(backend="gloo")

    def save(self, step: int) -> None:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        writer = self._make(f"{self._uri}/step-{step}/")
        dcp.save(
            {"model": model, "optimizer": optimizer},
            storage_writer=writer,
            process_group=self._group,
        )

    def finish(self) -> None:
        return None

    def close(self) -> None:
        return None


def _torch_connector(uri: str) -> Any:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp import S3StorageWriter
    from s3torchconnector.dcp.s3_file_system import S3FileSystem

    region = os.environ["AWS_REGION"]
    config = S3ClientConfig(force_path_style=True)
    writer = S3StorageWriter(region, uri, s3client_config=config)
    # The writer takes no endpoint, the client does.
    client = S3Client(region, endpoint=os.environ.get("AWS_ENDPOINT_URL"), s3client_config=config)
    writer.fs = S3FileSystem(region, s3_client=client)
    return writer


def _fsspec(uri: str) -> Any:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(uri, client_kwargs={"endpoint_url": os.environ.get("AWS_ENDPOINT_URL")})
