"""The calls to AWS that source files make, found by the names that botocore gives to operations."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import botocore.session
from botocore import xform_name

_SERVICES = (
    "batch",
    "cloudformation",
    "ec2",
    "ecr",
    "iam",
    "logs",
    "pricing",
    "s3",
    "scheduler",
    "service-quotas",
    "sts",
)
# Where the right is called otherwise than the operation: docs.aws.amazon.com/service-authorization.
_RIGHTS = {
    "s3:HeadObject": "s3:GetObject",
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:CreateMultipartUpload": "s3:PutObject",
    "s3:ListBuckets": "s3:ListAllMyBuckets",
    "s3:GetPublicAccessBlock": "s3:GetBucketPublicAccessBlock",
    "s3:GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
}


def calls(root: Path, folders: Iterable[str]) -> dict[str, set[str]]:
    """By file, relative to `root`: the rights that its calls need. A call is an attribute or a text
    with the name of an operation: `client.submit_job`, `ask(client, "submit_job")`."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            names = _names(path)
            rights = set().union(*(_operations()[name] for name in names if name in _operations()))
            if rights:
                found[str(path.relative_to(root))] = rights
    return found


def longest_match(path: str, prefixes: Sequence[str]) -> str | None:
    """The most particular of the folders and files that `path` belongs to."""
    return max(
        (prefix for prefix in prefixes if path == prefix or path.startswith(f"{prefix}/")),
        key=len,
        default=None,
    )


@cache
def _operations() -> dict[str, set[str]]:
    """describe_jobs → {batch:DescribeJobs}.

    A name that several services have stands for all of them.
    """
    session = botocore.session.get_session()
    found: dict[str, set[str]] = {}
    for service in _SERVICES:
        model = session.get_service_model(service)
        for operation in model.operation_names:
            action = f"{model.signing_name}:{operation}"
            found.setdefault(xform_name(operation), set()).add(_RIGHTS.get(action, action))
    return found


def _names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not _lists_exports(node)]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


def _lists_exports(node: ast.stmt) -> bool:
    """`__all__ = […]` names functions of ours, which may be called like an operation."""
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
    )
