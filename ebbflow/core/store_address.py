"""Addresses of stores: which are understood, and what to write instead of the others."""

import os
import re

from ebbflow.core.errors import StoreMisconfigured

# Matches s3://bucket, and also s3:/bucket, because a folder is hardly ever called "s3:".
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_BUCKET = r"(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]+)"
_PREFIX = r"(?:/(?P<prefix>[^?#]*))?"
# Spellings of a place in S3 by other tools, with the scheme https:// or without
_IN_S3 = (
    re.compile(rf"arn:aws[\w-]*:s3:::{_BUCKET}{_PREFIX}"),
    re.compile(rf"(?:s3a|s3n|s3):/+{_BUCKET}{_PREFIX}", re.IGNORECASE),
    re.compile(rf"(?:https?://)?{_BUCKET}\.s3[.-](?:[a-z0-9-]+\.)*amazonaws\.com[.\w]*{_PREFIX}"),
    re.compile(rf"(?:https?://)?s3[.-](?:[a-z0-9-]+\.)*amazonaws\.com[.\w]*/{_BUCKET}{_PREFIX}"),
    re.compile(
        rf"(?:https?://)?(?:[a-z0-9-]+\.)?console\.aws\.amazon\.com/s3/(?:buckets|object)/{_BUCKET}"
        r"(?:\?(?:.*&)?prefix=(?P<prefix>[^&#]*))?.*"
    ),
)
_EXAMPLE = "a folder, or s3://bucket/prefix"
# Other addresses that are no folders, the first that matches
_REFUSED = (
    (
        re.compile(r"arn:aws[\w-]*:s3:[\w-]*:\d*:accesspoint[/:]"),
        (
            "is an access point",
            "s3://ALIAS/prefix with its alias, which ends with -s3alias (aws s3control "
            "get-access-point)",
        ),
    ),
    (
        re.compile(r"https?://"),
        ("is a web address", "s3://bucket/prefix, and the server's address in AWS_ENDPOINT_URL"),
    ),
    (
        re.compile(r"(?:gs|gcs|az|abfss?|wasbs?|azure)://"),
        (
            "is of Google Cloud Storage or Azure, which do not return the CRC64NVME checksum by which "
            "each upload of a commit is verified",
            _EXAMPLE,
        ),
    ),
    (
        re.compile(rf"arn:|{ADDRESS.pattern}"),
        ("is of an unknown kind", _EXAMPLE),
    ),
)


def find_address_problem(address: str) -> tuple[str, str] | None:
    """Return (what is wrong with a store's address, what to write instead), or None.

    Without this check, an address in another tool's spelling would become a local folder of that
    name, and the job would look safe.
    """
    if address.startswith("s3://"):
        return _find_bucket_problem(address)
    if address.startswith("file://"):
        return None
    for spelling in _IN_S3:
        match = spelling.fullmatch(address)
        if match is not None:
            place = "/".join(filter(None, [match["bucket"], (match["prefix"] or "").strip("/")]))
            return "is a place in S3", f"s3://{place}"
    for spelling, problem in _REFUSED:
        if spelling.match(address):
            return problem
    return None


def resolve_address(address: str) -> str:
    """Return the address with environment variables expanded.

    Raises StoreMisconfigured if it cannot be the address of a store.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match[1].strip("{}")
        value = os.environ.get(name)
        if not value:
            raise StoreMisconfigured(
                f"store {address!r}: the environment variable {name} is not set; fix: set it, or "
                f"write the path without ${name}"
            )
        return value

    expanded = _VARIABLE.sub(value_of, address)
    problem = find_address_problem(expanded)
    if problem is not None:
        (wrong, fix) = problem
        raise StoreMisconfigured(f"store {expanded!r} {wrong}; fix: {fix}")
    return expanded


def _find_bucket_problem(address: str) -> tuple[str, str] | None:
    (bucket, _, prefix) = address.removeprefix("s3://").partition("/")
    if not bucket:
        return "names no bucket", _EXAMPLE
    parts = prefix.strip("/").split("/")
    usable = [part for part in parts if part not in ("", ".", "..")]
    if prefix.strip("/") and usable != parts:
        return "has an empty part, '.' or '..'", "/".join([f"s3://{bucket}", *usable])
    return None
